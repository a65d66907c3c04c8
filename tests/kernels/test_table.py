"""The table of kernels covers every call that the kernels take."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from tercet.attention import kernels
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import table
from tercet.attention.kernels.launch import describable
from tercet.attention.kernels.ops import flat


@pytest.mark.parametrize("major", [0, 8, 9, 10, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [8, 16, 64, 96, 128, 192, 256])
def test_every_stage_has_a_triton_kernel(major: int, dtype: torch.dtype, size: int, monkeypatch) -> None:
    monkeypatch.setattr(table, "generation", lambda x: major)
    x = torch.empty(1, 4, 2, size, dtype=dtype)
    for stage in table.ALL:
        launch = table.triton_launch(stage, x, x)
        assert not launch.tma or major in (9, 10)


@pytest.mark.parametrize(
    ("stage", "size", "call", "taken"),
    [
        ("compressed_forward", 64, {"packed": True}, True),
        ("compressed_forward", 64, {"query_range": True}, False),
        ("query_gradient", 128, {}, True),
        ("query_gradient", 128, {"packed": True}, False),
        ("window_key_gradients", 128, {"packed": True, "query_range": True}, True),
        ("selected_key_gradients", 64, {}, True),
        ("selected_key_gradients", 256, {}, False),
        ("selected_partials", 128, {"packed": True}, True),
        ("score", 64, {}, True),
        ("score", 128, {"query_range": True}, False),
        ("selected_key_gradients", 96, {}, True),
        ("window_forward", 80, {}, False),
    ],
)
def test_gluon_kernels_take_their_calls_on_hopper_alone(stage, size, call, taken, monkeypatch) -> None:
    x = torch.empty(1, 4, 2, size, dtype=torch.bfloat16)
    for major in (8, 9, 10):
        monkeypatch.setattr(table, "generation", lambda x, major=major: major)
        assert (table.gluon_launch(stage, x, x, **call) is not None) == (taken and major == 9)
        assert table.gluon_launch(stage, x.float(), x.float(), **call) is None
        assert table.gluon_launch(stage, x, x[..., : size // 2], **call) is None  # Dk ≠ Dv
        assert table.gluon_launch(stage, x, x.transpose(1, 2), **call) is None  # not a layout that TMA loads


def test_settings_of_the_selected_branch_follow_from_dtype_and_sizes() -> None:
    def found(*call) -> str:
        return next(name for name, settings in table.SELECTED if settings is table.selected_settings(*call))

    assert found(64, 64, torch.float32, 64) == "float32"
    assert found(64, 64, torch.bfloat16, 64) == "head ≤ 64"
    assert found(192, 128, torch.bfloat16, 64) == "head > 128"
    assert found(96, 128, torch.bfloat16, 64) == "head ≤ 128"


A6000, A100, H200 = 99 * 1024, 163 * 1024, 227 * 1024


@pytest.mark.parametrize(
    ("sizes", "dtype", "block", "rows"),
    [
        # rows per tile with 99, 163 and 227 KiB of shared memory, and with dQ; 0: not even the smallest tiles fit
        ((64, 64), torch.bfloat16, 64, ((64, 64), (64, 64), (64, 64))),
        ((128, 128), torch.bfloat16, 64, ((64, 32), (64, 64), (64, 64))),
        ((192, 128), torch.bfloat16, 64, ((32, 16), (64, 32), (64, 64))),
        ((256, 256), torch.float16, 64, ((16, 0), (64, 32), (64, 64))),
        ((128, 128), torch.float32, 64, ((16, 16), (32, 32), (32, 32))),
        ((192, 128), torch.float32, 64, ((0, 0), (32, 16), (32, 32))),
        ((256, 256), torch.float32, 64, ((0, 0), (0, 0), (32, 16))),
    ],
)
def test_tiles_of_the_selected_branch_fit_the_gpu_or_are_refused(sizes, dtype, block, rows) -> None:
    for shared, (most, with_dq) in zip((A6000, A100, H200), rows, strict=True):
        reason = table.too_large(shared, dtype, *sizes, block)
        assert (reason is None) == (most > 0)
        if reason is not None:
            assert f"select_block={block} with Dk={sizes[0]}" in reason
            assert f"has {shared // 1024}" in reason
            continue
        settings = table.selected_settings(*sizes, dtype, block, shared)
        assert (settings.tile_rows, settings.dkv_rows, settings.kv_forward_rows) == (most,) * 3
        assert table.selected_bytes(most, *sizes, dtype, block) <= shared
        # without room for dQ, the KV-major design, which computes it with dK and dV, is never chosen
        assert math.isinf(settings.backward_limit) == math.isinf(settings.forward_limit) == (with_dq == 0)
        assert settings.dkv_dq_rows == (with_dq or table.FEWEST_ROWS)


def test_a_call_too_large_for_the_gpu_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr("tercet.attention.kernels.shared_memory", lambda device: A6000)
    monkeypatch.setattr("tercet.attention.kernels.interpreting", lambda: True)
    q, k = torch.empty(1, 4, 2, 192, dtype=torch.float32), torch.empty(1, 4, 1, 192, dtype=torch.float32)
    v = torch.empty(1, 4, 1, 128)
    assert "in float32 takes 124 KiB" in kernels.unsupported(q, k, v, k, v, k, v, config=NSAConfig())
    assert (
        kernels.unsupported(q, k, v, None, None, k, v, config=NSAConfig()) is None
    )  # only the selected branch needs it
    assert kernels.unsupported(*(x.half() for x in (q, k, v, k, v, k, v)), config=NSAConfig()) is None


def test_expanded_tokens_are_copied_before_tma_reads_them() -> None:
    x = torch.randn(1, 1, 2, 64, dtype=torch.float16).expand(1, 8, 2, 64)
    assert describable(flat(x))
    assert flat(x).stride(1) == 128
    assert torch.equal(flat(x), x)

"""The rotation kernel against PyTorch; fp32 and fp16, interpreted."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.conftest import INTERPRETING
from kernels.offline import compiling
from tercet.attention.config import NSAConfig
from tercet.attention.kernels.qkv_split import rotate
from tercet.model import decode, rope
from tercet.model.layers import BlockSparseAttention, NativeSparseAttention

interpreted = pytest.mark.interpreter


@interpreted
@pytest.mark.parametrize(("size", "rotated"), [(16, 16), (24, 24), (32, 16), (20, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_rotates_the_first_channels_and_copies_the_others(size: int, rotated: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 29, 3, size).to(dtype)
    cos_sin = rope.Rotary(rotated).cos_sin(torch.arange(29))
    wanted = rope.rotate_first(x.requires_grad_(), cos_sin)  # with a gradient: in PyTorch
    assert torch.equal(rotate(x, *cos_sin), wanted)


@interpreted
def test_it_reads_parts_of_a_projection_and_rows_at_their_own_positions() -> None:
    torch.manual_seed(0)
    y = torch.randn(2, 13, 100)
    x = y[..., 20:68].unflatten(-1, (3, 16))
    assert not x.is_contiguous()
    positions = torch.stack((torch.arange(13), 500 + torch.arange(13)))
    cos_sin = rope.Rotary(16).cos_sin(positions)
    wanted = rope.rotate(x.clone().requires_grad_(), cos_sin)
    torch.testing.assert_close(rotate(x, *cos_sin), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotate(x[:, ::2], *(part[:, ::2] for part in cos_sin)), wanted[:, ::2])


@interpreted
def test_it_runs_where_no_gradient_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("tercet.attention.kernels.qkv_split.rotate", lambda x, *_: calls.append(x) or x)
    x, cos_sin = torch.randn(1, 4, 2, 16), rope.Rotary(16).cos_sin(torch.arange(4))
    rope.rotate(x, cos_sin)
    assert not calls
    with torch.no_grad():
        rope.rotate(x, cos_sin)
        assert len(calls) == 1
        for layer in (NativeSparseAttention, BlockSparseAttention):  # the reference is PyTorch alone
            layer(32, 4, 2, 16, backend="reference", selector="learned")(torch.randn(1, 40, 32))
    assert len(calls) == 1


@interpreted
def test_angles_for_other_tokens_are_an_error() -> None:
    x, cos_sin = torch.randn(2, 10, 2, 16), rope.Rotary(16).cos_sin(torch.arange(5))
    with pytest.raises(ValueError, match="needs 10 per sequence"):
        rotate(x, *cos_sin)


@interpreted
def test_it_leaves_vmap_to_pytorch() -> None:
    x, cos_sin = torch.randn(3, 1, 7, 2, 16), rope.Rotary(16).cos_sin(torch.arange(7))
    with torch.no_grad():
        rotated = torch.func.vmap(lambda one: rope.rotate(one, cos_sin))(x)
        assert torch.equal(rotated[1], rope.rotate(x[1], cos_sin))


@interpreted
def test_the_outputs_of_a_prompts_projections_are_freed_before_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    products, alive = [], []

    def project_together(*args: Any) -> torch.Tensor | None:
        y = together(*args)
        products.append(weakref.ref(y))
        return y

    def attend(*args: Any, **options: Any) -> Any:
        alive.extend(ref() is not None for ref in products)
        return run(*args, **options)

    together, run = decode.project_together, decode.attend
    monkeypatch.setattr(decode, "project_together", project_together)
    monkeypatch.setattr(decode, "attend", attend)
    layer = NativeSparseAttention(32, 4, 2, 16, config=NSAConfig(compress_block=16), selector="learned")
    with torch.no_grad():
        layer(torch.randn(1, 64, 32), cache=layer.make_cache(1))
    assert alive == [False]


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("capability", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 100))])
def test_it_compiles_without_spills(capability: int) -> None:
    x, angles = torch.empty(1, 100, 4, 32, dtype=torch.bfloat16), [torch.empty(100, 1, 8)] * 2
    with compiling(capability) as found:
        rotate(x, *angles)
    assert [(c.name, c.stack) for c in found] == [("rotate_kernel", 0)]
    assert not found[0].fused  # rounds as PyTorch does

"""The learned selector's kernels compile for every architecture; Hopper's keep all values in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.offline import SHARED_KIB, Compiled, compiling
from tercet.attention.config import NSAConfig
from tercet.attention.kernels import block_lse
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.varlen import Documents


def compiled(capability: int, size: int, block: int, *, part: bool = False, dtype=torch.bfloat16) -> list[Compiled]:
    """`part`: packed documents and a query range."""
    q, k = torch.empty(1, 4096 if part else 8192, 2, size, dtype=dtype), torch.empty(1, 8192, 2, size, dtype=dtype)
    bounds = (torch.zeros(5, dtype=torch.int32), None, 2048, 4096) if part else (None, None)
    with compiling(capability) as found:
        select_by_tokens(q, k, NSAConfig(16, 16, block), Documents(1, 8192, 0, *bounds))
    assert [c.name for c in found] == ["token_scores_kernel", "select_kernel"]
    return found


@pytest.mark.parametrize(
    ("size", "block"),
    [
        (32, 64),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((32, 16), (32, 32), (32, 128), (48, 64), (64, 64))),
    ],
)
@pytest.mark.parametrize("part", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hopper_keeps_scores_in_registers_and_several_programs_fit(size: int, block: int, part: bool) -> None:
    scores, choice = compiled(90, size, block, part=part)
    assert (scores.stack, choice.stack) == (0, 0)
    # programs overlap each other's products and exponentials; a multiprocessor has 65,536 registers
    programs = 3 if block > 16 else 2  # the sums of more blocks need more registers
    assert programs * 32 * scores.warps * scores.registers <= 65536
    assert programs * (scores.shared + 1024) <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_every_architecture_has_room(capability: int, dtype: torch.dtype) -> None:
    for size, block in ((32, 64), (16, 128), (256, 64)):
        for c in compiled(capability, size, block, part=True, dtype=dtype):
            assert c.shared <= SHARED_KIB[capability] * 1024


@pytest.mark.parametrize(
    ("capability", "size", "block", "dtype"),
    [
        (90, 32, 64, torch.bfloat16),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (90, 32, 64, torch.float32),
                (90, 64, 128, torch.bfloat16),
                (90, 48, 16, torch.bfloat16),
                (80, 32, 64, torch.float16),
                (100, 32, 64, torch.bfloat16),
            )
        ),
    ],
)
def test_log_sum_exps_and_their_backward_compile_without_spills(
    capability: int, size: int, block: int, dtype: torch.dtype
) -> None:
    q, k = torch.empty(512, 2, size, dtype=dtype), torch.empty(65536, 2, size, dtype=dtype)
    queries = [torch.empty(512, dtype=torch.int64)] * 2
    with compiling(capability) as found:
        lse = block_lse.nsa_block_lse(q, k, *queries, block, 65536 // block)
        block_lse.nsa_block_lse_backward(lse, lse, q, k, *queries, block)
    names = ["block_lse_kernel", "block_lse_dq_kernel", "block_lse_dk_kernel"]
    assert [(c.name, c.stack) for c in found] == [(name, 0) for name in names]

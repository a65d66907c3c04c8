"""The learned selector's block scores compile for every architecture; Hopper's keep all values in registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.offline import SHARED_KIB, Compiled, compiling
from tercet.attention.config import NSAConfig
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
def test_hopper_keeps_scores_in_registers_and_three_programs_fit(size: int, block: int, part: bool) -> None:
    scores, choice = compiled(90, size, block, part=part)
    assert (scores.stack, choice.stack) == (0, 0)
    # programs overlap each other's products and maxima; a multiprocessor has 65,536 registers
    assert 3 * 32 * scores.warps * scores.registers <= 65536
    assert 3 * (scores.shared + 1024) <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_every_architecture_has_room(capability: int, dtype: torch.dtype) -> None:
    for size, block in ((32, 64), (16, 128), (256, 64)):
        for c in compiled(capability, size, block, part=True, dtype=dtype):
            assert c.shared <= SHARED_KIB[capability] * 1024

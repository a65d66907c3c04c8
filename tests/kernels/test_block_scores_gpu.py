"""The learned selector's choice by its keys on a GPU: that of fp64 except for near-ties."""

from __future__ import annotations

import pytest
import torch

from kernels.test_block_scores import chosen
from tercet.attention.config import NSAConfig
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.varlen import Documents

pytestmark = pytest.mark.gpu

LENGTHS = (700, 1, 16, 0, 5000, 2475)


def other(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of other blocks."""
    return float((found != wanted).float().mean())


@pytest.mark.parametrize(
    ("dtype", "block", "size"),
    [(torch.bfloat16, 64, 32), (torch.bfloat16, 16, 48), (torch.float16, 128, 64), (torch.float32, 64, 32)],
)
def test_sequences_packed_documents_and_query_ranges_choose_as_fp64_does(dtype, block: int, size: int) -> None:
    config = NSAConfig(16, 16, block)
    q, k = (torch.randn(1, 8192, 2, size, device="cuda").to(dtype) for _ in range(2))
    whole = select_by_tokens(q, k, config, Documents(1, 8192, 0, None, None))
    assert other(whole[0], chosen(q[0].double(), k[0].double(), config)) < 5e-4
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    packed = select_by_tokens(q, k, config, Documents(1, 8192, 0, bounds, None))
    pairs = zip(q[0].double().split(LENGTHS), k[0].double().split(LENGTHS), strict=True)
    assert other(packed[0], torch.cat([chosen(*x, config) for x in pairs if len(x[0])])) < 5e-4
    part = Documents(1, 8192, 0, bounds, None, 3000, 4000)
    assert torch.equal(select_by_tokens(q[:, 3000:7000], k, config, part), packed[:, 3000:7000])

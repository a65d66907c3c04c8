"""The learned selector's choice by its keys on a GPU: exactly that of plain PyTorch where products are exact."""

from __future__ import annotations

import pytest
import torch

from kernels.test_block_scores import chosen
from tercet.attention.config import NSAConfig
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.varlen import Documents

pytestmark = pytest.mark.gpu

LENGTHS = (700, 1, 16, 0, 5000, 2475)


def small_integers(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-3, 4, (1, 8192, 2, size), device="cuda").to(dtype)


@pytest.mark.parametrize(
    ("dtype", "block", "size"),
    [(torch.bfloat16, 64, 32), (torch.bfloat16, 16, 48), (torch.float16, 128, 64), (torch.float32, 64, 32)],
)
def test_the_choice_is_exact_for_sequences_and_packed_documents(dtype: torch.dtype, block: int, size: int) -> None:
    config = NSAConfig(16, 16, block)
    q, k = small_integers(size, dtype), small_integers(size, dtype)
    whole = select_by_tokens(q, k, config, Documents(1, 8192, 0, None, None))
    assert torch.equal(whole[0], chosen(q[0].double(), k[0].double(), config))
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    packed = select_by_tokens(q, k, config, Documents(1, 8192, 0, bounds, None))
    pairs = zip(q[0].double().split(LENGTHS), k[0].double().split(LENGTHS), strict=True)
    assert torch.equal(packed[0], torch.cat([chosen(*x, config) for x in pairs if len(x[0])]))
    part = Documents(1, 8192, 0, bounds, None, 3000, 4000)
    assert torch.equal(select_by_tokens(q[:, 3000:7000], k, config, part), packed[:, 3000:7000])


def test_random_products_differ_from_fp32_in_near_ties_only() -> None:
    q, k = (torch.randn(1, 8192, 2, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found = select_by_tokens(q, k, NSAConfig(), Documents(1, 8192, 0, None, None))
    assert (found[0] != chosen(q[0].double(), k[0].double(), NSAConfig())).float().mean() < 5e-4

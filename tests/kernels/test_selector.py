"""Learned selectors and own queries on the kernels, interpreted: the teacher's log-sum-exps, and layers against the
reference."""

from __future__ import annotations

import pytest
import torch

import tercet
from tercet.attention import reference
from tercet.attention.kernels.block_lse import nsa_block_lse
from tercet.model.selector import sample_queries

pytestmark = pytest.mark.interpreter

NSA = tercet.NSAConfig(compress_block=8, compress_stride=4, select_block=16, select_count=4, window=8)


@pytest.mark.parametrize(("heads", "size", "block"), [(3, 16, 16), (1, 24, 32)])
def test_log_sum_exps_of_blocks(heads: int, size: int, block: int) -> None:
    q, k = torch.randn(3, 2 * heads, size), torch.randn(130, 2, size)
    rows, position = torch.tensor([5, 99, 129]), torch.tensor([5, 99, 40])
    lse = nsa_block_lse(q, k, rows, position, block, 8)
    torch.testing.assert_close(lse, reference.block_lse(q, k, rows, position, 8, block))


@pytest.mark.parametrize(
    "bounds",
    [pytest.param(None, marks=pytest.mark.slow), torch.tensor([0, 7, 90], dtype=torch.int32)],
    ids=["whole", "packed"],
)
def test_a_layer_chooses_and_learns_like_the_reference(bounds: torch.Tensor | None) -> None:
    layer = tercet.NativeSparseAttention(
        32, 2, 1, 16, config=NSA, selector="learned", selector_dim=16, selector_rotary=8
    )
    layer.init_weights(0.3, 0.1)
    x = torch.randn(1, 90, 32)
    sampled = sample_queries(torch.arange(90)[None], 16)
    found = {}
    for backend in ("reference", "triton"):
        layer.backend = backend
        layer.zero_grad()
        y = layer(x, cu_seqlens=bounds, sampled=sampled)
        y.sum().backward()
        found[backend] = y.detach(), [p.grad.clone() for p in layer.selector.parameters()]
    torch.testing.assert_close(found["triton"][0], found["reference"][0], rtol=1e-4, atol=1e-5)
    for a, b in zip(found["triton"][1], found["reference"][1], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_a_layer_whose_own_queries_choose_equals_the_reference() -> None:
    layer = tercet.NativeSparseAttention(32, 4, 2, 16, config=NSA, selector="own")
    layer.init_weights(0.3, 0.1)
    x, found = torch.randn(1, 110, 32), {}
    for backend in ("reference", "triton"):
        layer.backend = backend
        layer.zero_grad()
        y = layer(x)
        y.sum().backward()
        found[backend] = [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    for a, b in zip(found["triton"], found["reference"], strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()

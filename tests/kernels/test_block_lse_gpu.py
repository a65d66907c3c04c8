"""Log-sum-exps of blocks for sampled queries on a GPU: against the reference, at the length they are used at."""

from __future__ import annotations

import pytest
import torch

from tercet.attention import reference
from tercet.attention.kernels.block_lse import block_lse

pytestmark = pytest.mark.gpu

ROWS, BLOCK = 65536, 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bounds", [[0, ROWS], [0, 30, 9000, 9001, 40123, ROWS]], ids=["whole", "packed"])
def test_values_and_gradients_are_the_references_and_repeat(bounds: list[int], dtype: torch.dtype) -> None:
    cu, row = torch.tensor(bounds, device="cuda"), torch.arange(100, ROWS, 128, device="cuda")
    position = row - cu[torch.searchsorted(cu, row, right=True) - 1]
    q = torch.randn(len(row), 2, 32, device="cuda").to(dtype).requires_grad_()
    k = torch.randn(ROWS, 2, 32, device="cuda").to(dtype).requires_grad_()
    exact_q, exact_k = q.detach().float().requires_grad_(), k.detach().float().requires_grad_()
    lse = block_lse(q, k, row, position, BLOCK, ROWS // BLOCK)
    expected = reference.block_lse(exact_q, exact_k, row, position, ROWS // BLOCK, BLOCK)
    assert torch.equal(lse.isinf(), expected.isinf())
    torch.testing.assert_close(lse, expected, atol=1e-4, rtol=0)
    grad = torch.randn_like(lse) * 1e-6  # as of a mean over queries: below what fp16 holds
    grads = torch.autograd.grad(lse, (q, k), grad, retain_graph=True)
    for x, again in zip(grads, torch.autograd.grad(lse, (q, k), grad), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, again)
    for x, right in zip(grads, torch.autograd.grad(expected, (exact_q, exact_k), grad), strict=True):
        assert (x.float() - right).norm() <= (3e-3 if dtype == torch.bfloat16 else 1e-4) * right.norm()

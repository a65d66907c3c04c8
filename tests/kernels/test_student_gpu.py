"""Block scores of sampled queries on a GPU: against the reference, at the length they are used at; same bits."""

from __future__ import annotations

import pytest
import torch

from tercet.attention import reference
from tercet.attention.kernels.student import block_scores, nsa_block_maximum

pytestmark = pytest.mark.gpu

ROWS, BLOCK = 65536, 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bounds", [[0, ROWS], [0, 30, 9000, 9001, 40123, ROWS]], ids=["whole", "packed"])
def test_scores_and_gradients_are_the_references(bounds: list[int], dtype: torch.dtype) -> None:
    cu, row = torch.tensor(bounds, device="cuda"), torch.arange(100, ROWS, 128, device="cuda")
    first_row = cu[torch.searchsorted(cu, row, right=True) - 1]
    arguments = (first_row, row - first_row, ROWS // BLOCK, BLOCK)
    q = torch.randn(len(row), 2, 32, device="cuda").to(dtype).requires_grad_()
    k = torch.randn(ROWS, 2, 32, device="cuda").to(dtype).requires_grad_()
    exact_q, exact_k = q.detach().float().requires_grad_(), k.detach().float().requires_grad_()
    scores, expected = block_scores(q, k, *arguments), reference.block_scores(exact_q, exact_k, *arguments)
    assert torch.equal(scores.isinf(), expected.isinf())
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)

    # that token has that score, whichever of nearly equal ones
    with torch.no_grad():
        places = nsa_block_maximum(q, k, *arguments[:2], BLOCK, ROWS // BLOCK)[1]
    won = first_row[:, None, None] + torch.arange(ROWS // BLOCK, device="cuda") * BLOCK + places
    keys = exact_k.detach()[won.clamp(max=ROWS - 1), torch.arange(2, device="cuda")[:, None]]
    found = torch.einsum("sgd,sgjd->sgj", exact_q.detach(), keys)
    torch.testing.assert_close(found[~scores.isinf()], scores[~scores.isinf()], atol=1e-4, rtol=0)

    grad = torch.randn_like(scores) * 1e-6
    grads = torch.autograd.grad(scores, (q, k), grad, retain_graph=True)
    for x, again in zip(grads, torch.autograd.grad(scores, (q, k), grad), strict=True):
        assert x.dtype == dtype
        assert torch.equal(x, again)
    for x, right in zip(grads, torch.autograd.grad(expected, (exact_q, exact_k), grad), strict=True):
        # bf16 rounds by 1.1e-3; few of half a million winners may differ
        assert (x.float() - right).norm() <= 5e-3 * right.norm()

"""Block scores of sampled queries on the kernels, interpreted: against the reference, with gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tercet.attention import reference
from tercet.attention.kernels import student
from tercet.attention.kernels.student import block_scores, nsa_block_maximum, nsa_block_maximum_backward

pytestmark = pytest.mark.interpreter

# documents of 130 rows: shorter than a block, of whole blocks and not, one without queries, one token
PACKED = [0, 7, 39, 41, 112, 113, 130]


def sampled(bounds: list[int], every: int = 3) -> tuple[Tensor, Tensor]:
    """(first_row, position) of one query in `every` and of last tokens, but of no document of two tokens."""
    found = [
        (first, row - first)
        for first, end in pairwise(bounds)
        for row in range(first, end)
        if (row % every == 0 or row == end - 1) and end - first != 2
    ]
    first_row, position = torch.tensor(found).T.contiguous()
    return first_row, position


def one_by_one(q: Tensor, k: Tensor, first_row: Tensor, position: Tensor, blocks: int, block: int) -> list[Tensor]:
    """Scores and places by the definition."""
    scores = torch.full((q.shape[0], q.shape[1], blocks), -torch.inf, dtype=torch.float64)
    places = torch.zeros(scores.shape, dtype=torch.int16)
    for s, (first, t) in enumerate(zip(first_row.tolist(), position.tolist(), strict=True)):
        for j in range((t + 1) // block):
            keys = k[first + j * block : first + (j + 1) * block].double()
            scores[s, :, j], places[s, :, j] = torch.einsum("gd,tgd->gt", q[s].double(), keys).max(-1)
    return [scores, places]


def gradients(function, q: Tensor, k: Tensor, arguments: tuple, grad: Tensor) -> tuple[Tensor, ...]:
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    scores = function(q, k, *arguments)
    return scores.detach(), *torch.autograd.grad(scores, (q, k), grad.to(scores.dtype))


@pytest.mark.parametrize(
    ("bounds", "block", "size", "dtype"),
    [
        ([0, 400], 16, 32, torch.float32),
        (PACKED, 16, 48, torch.float32),
        (PACKED, 16, 32, torch.float16),
        ([0, 100, 421], 64, 64, torch.float32),
        ([0, 7, 300], 128, 16, torch.float32),
        pytest.param([0, 9, 200, 700], 64, 32, torch.float16, marks=pytest.mark.slow),
        pytest.param([0, 9, 200, 700], 128, 64, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_scores_and_gradients_are_the_references(
    bounds: list[int], block: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student, "_GATHERED", 256)  # several rounds of the loop over a query's blocks
    first_row, position = sampled(bounds, every=3 if bounds is PACKED else 11)
    blocks = max(-(-(b - a) // block) for a, b in pairwise(bounds)) + 1
    q, k = torch.randn(len(first_row), 2, size).to(dtype), torch.randn(bounds[-1], 2, size).to(dtype)
    grad = torch.randn(len(first_row), 2, blocks)
    grad[:, :, 0] = 0  # as of a forced block
    arguments = (first_row, position, blocks, block)
    scores, dq, dk = gradients(block_scores, q, k, arguments, grad)
    expected = gradients(reference.block_scores, q.double(), k.double(), arguments, grad)
    assert (scores.dtype, dq.dtype, dk.dtype) == (torch.float32, dtype, dtype)
    assert (scores == -torch.inf).any()
    torch.testing.assert_close(scores.double(), expected[0], atol=1e-5, rtol=1e-5)
    for found, exactly in zip((dq, dk), expected[1:], strict=True):
        assert exactly.any()
        torch.testing.assert_close(found, exactly.to(dtype), atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-3)
    exact_scores, exact_places = one_by_one(q, k, *arguments)
    torch.testing.assert_close(expected[0], exact_scores)
    assert torch.equal(nsa_block_maximum(q, k, first_row, position, block, blocks)[1], exact_places)


def test_bfloat16_gradients_are_summed_in_fp32() -> None:
    first_row, position = sampled(PACKED)
    q, k = torch.randn(len(first_row), 2, 32).bfloat16(), torch.randn(130, 2, 32).bfloat16()
    arguments = (first_row, position, 5, 16)
    # gradients smaller than what half precision can hold
    grad = torch.randn(len(first_row), 2, 5) * 1e-9
    # products of bfloat16 are wrong in Triton's interpreter: only the backward pass runs in it
    _, places = one_by_one(q, k, *arguments)
    found = nsa_block_maximum_backward(grad, q, k, places, first_row, position, 16)
    expected = gradients(reference.block_scores, q.double(), k.double(), arguments, grad)[1:]
    for x, exactly in zip(found, expected, strict=True):
        torch.testing.assert_close(x, exactly.bfloat16(), atol=0, rtol=2**-7)


def test_the_first_of_equal_tokens_wins_and_has_the_gradient() -> None:
    q, k = torch.ones(1, 1, 16), torch.zeros(32, 1, 16)
    k[[3, 9, 12]] = 1.0
    first_row, position = torch.tensor([0]), torch.tensor([31])
    scores, places = nsa_block_maximum(q, k, first_row, position, 16, 2)
    assert scores.tolist() == [[[16.0, 0.0]]]
    assert places.tolist() == [[[3, 0]]]
    for function in (block_scores, reference.block_scores):
        _, _, dk = gradients(function, q, k, (first_row, position, 2, 16), torch.ones(1, 1, 2))
        assert dk.sum((1, 2)).nonzero().flatten().tolist() == [3, 16]


def test_gradients_of_incomplete_blocks_are_not_read() -> None:
    first_row, position = sampled(PACKED)
    q, k = torch.randn(len(first_row), 2, 16), torch.randn(130, 2, 16)
    arguments = (first_row, position, 6, 16)
    scores = block_scores(q, k, *arguments)
    none = scores[:, 0].isinf().all(-1)
    assert 0 < none.sum() < len(none)
    grad = torch.where(scores.isinf(), torch.nan, 1.0)
    for function in (block_scores, reference.block_scores):
        _, dq, dk = gradients(function, q, k, arguments, grad)
        assert dq.isfinite().all()
        assert dk.isfinite().all()
        assert not dq[none].any()
        assert not dk[:7].any()  # a document shorter than a block


def test_strides_and_the_order_of_queries_do_not_matter() -> None:
    first_row, position = sampled(PACKED)
    q, k = torch.randn(len(first_row), 2, 32), torch.randn(130, 2, 32)
    grad = torch.randn(len(first_row), 2, 5)
    wanted = gradients(block_scores, q, k, (first_row, position, 5, 16), grad)
    strided = torch.randn(len(first_row), 3, 64)[:, :2, ::2].copy_(q), torch.randn(32, 2, 130).permute(2, 1, 0).copy_(k)
    queries = torch.stack([first_row, position], -1).unbind(-1)
    arguments = (*strided, nsa_block_maximum(*strided, *queries, 16, 5)[1], *queries, 16)
    for found, right in zip(nsa_block_maximum_backward(grad, *arguments), wanted[1:], strict=True):
        assert torch.equal(found, right)
    order = torch.randperm(len(first_row))
    scores, dq, dk = gradients(block_scores, q[order], k, (first_row[order], position[order], 5, 16), grad[order])
    assert torch.equal(scores, wanted[0][order])
    assert torch.equal(dq, wanted[1][order])
    torch.testing.assert_close(dk, wanted[2])


def test_compiling_to_one_graph_changes_no_bit() -> None:
    first_row, position = sampled(PACKED)
    q, k = torch.randn(len(first_row), 2, 16), torch.randn(130, 2, 16)
    grad, arguments = torch.randn(len(first_row), 2, 5), (first_row, position, 5, 16)
    compiled = torch.compile(block_scores, fullgraph=True, backend="aot_eager")
    for found, right in zip(
        gradients(compiled, q, k, arguments, grad), gradients(block_scores, q, k, arguments, grad), strict=True
    ):
        assert torch.equal(found, right)


def test_operators_match_their_schemas_and_fake_implementations() -> None:
    first_row, position = sampled(PACKED)
    q, k = torch.randn(len(first_row), 2, 16), torch.randn(130, 2, 16)
    scores, places = nsa_block_maximum(q, k, first_row, position, 16, 5)
    grad, checks = torch.ones_like(scores), ("test_schema", "test_faketensor")
    for name, arguments in (
        ("nsa_block_maximum", (q, k, first_row, position, 16, 5)),
        ("nsa_block_maximum_backward", (grad, q, k, places, first_row, position, 16)),
    ):
        torch.library.opcheck(getattr(torch.ops.tercet, name).default, arguments, test_utils=checks)


def test_second_derivatives_are_refused() -> None:
    q, k = torch.randn(1, 1, 16, requires_grad=True), torch.randn(32, 1, 16)
    scores = block_scores(q, k, torch.tensor([0]), torch.tensor([31]), 2, 16)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives"):
        torch.autograd.grad(scores.sum(), q, create_graph=True)

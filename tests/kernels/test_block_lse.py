"""Log-sum-exps of blocks for sampled queries on the kernels, interpreted: against the reference, with gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tercet.attention import reference
from tercet.attention.kernels import block_lse as kernels

pytestmark = pytest.mark.interpreter

# documents of 130 rows: shorter than a block, of whole blocks and not, one without queries, one token
PACKED = [0, 7, 39, 41, 112, 113, 130]


def sampled(bounds: list[int], every: int = 3) -> tuple[Tensor, Tensor]:
    """(row, position) of one query in `every` and of last tokens, but of no document of two tokens."""
    found = [
        (row, row - first)
        for first, end in pairwise(bounds)
        for row in range(first, end)
        if (row % every == 0 or row == end - 1) and end - first != 2
    ]
    row, position = torch.tensor(found).T.contiguous()
    return row, position


def on_kernels(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
    return kernels.block_lse(q, k, row, position, block, blocks)


def gradients(function, q: Tensor, k: Tensor, arguments: tuple, grad: Tensor) -> tuple[Tensor, ...]:
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    lse = function(q, k, *arguments)
    return lse.detach(), *torch.autograd.grad(lse, (q, k), grad.to(lse.dtype))


@pytest.mark.parametrize(
    ("bounds", "block", "size", "dtype"),
    [
        ([0, 400], 16, 32, torch.float32),
        (PACKED, 16, 48, torch.float32),
        (PACKED, 16, 32, torch.float16),
        ([0, 100, 421], 64, 64, torch.float32),
        ([0, 7, 300], 128, 16, torch.float32),
        pytest.param([0, 9, 200, 700], 64, 32, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_values_and_gradients_are_the_references(
    bounds: list[int], block: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCKS", 2)  # several ranges of blocks
    row, position = sampled(bounds, every=3 if bounds is PACKED else 11)
    blocks = max(-(-(b - a) // block) for a, b in pairwise(bounds)) + 1
    q, k = torch.randn(len(row), 2, size).to(dtype), torch.randn(bounds[-1], 2, size).to(dtype)
    grad = torch.randn(len(row), 2, 1, blocks)
    grad[..., 0] = 0  # as of a forced block
    arguments = (row, position, blocks, block)
    found = gradients(on_kernels, q, k, arguments, grad)
    expected = gradients(reference.block_lse, q.double(), k.double(), arguments, grad)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    torch.testing.assert_close(found[0].double(), expected[0], atol=1e-5, rtol=1e-5)
    for x, exactly in zip(found[1:], expected[1:], strict=True):
        assert exactly.any()
        torch.testing.assert_close(x, exactly.to(dtype), atol=1e-5, rtol=1e-4 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize(("heads", "size", "block"), [(3, 16, 16), (1, 24, 32)])
def test_several_heads_share_a_groups_keys(heads: int, size: int, block: int) -> None:
    q, k = torch.randn(3, 2 * heads, size), torch.randn(130, 2, size)
    rows, position = torch.tensor([5, 99, 129]), torch.tensor([5, 99, 40])
    lse = kernels.nsa_block_lse(q, k, rows, position, block, 8)
    torch.testing.assert_close(lse, reference.block_lse(q, k, rows, position, 8, block))


def test_gradients_of_blocks_after_the_query_are_not_read() -> None:
    row, position = sampled(PACKED)
    q, k = torch.randn(len(row), 2, 16), torch.randn(130, 2, 16)
    arguments = (row, position, 6, 16)
    grad = torch.where(on_kernels(q, k, *arguments).isinf(), torch.nan, 1.0)
    _, dq, dk = gradients(on_kernels, q, k, arguments, grad)
    assert dq.isfinite().all()
    assert dk.isfinite().all()
    assert not dk[39:41].any()  # the document without queries


def test_documents_longer_than_the_bound_write_no_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on a device is trusted; a wrong one must not corrupt memory."""
    monkeypatch.setattr(kernels, "_BLOCKS", 2)
    row, position = sampled([0, 130], every=20)
    q, k = torch.randn(len(row), 2, 16), torch.randn(130, 2, 16)
    grad = torch.randn(len(row), 2, 1, 3)
    whole = gradients(on_kernels, q, k, (row, position, 9, 16), torch.nn.functional.pad(grad, (0, 6)))
    found = gradients(on_kernels, q, k, (row, position, 3, 16), grad)
    assert torch.equal(found[0], whole[0][..., :3])
    for x, right in zip(found[1:], whole[1:], strict=True):
        torch.testing.assert_close(x, right)


def test_strides_and_the_order_of_queries_do_not_matter() -> None:
    row, position = sampled(PACKED)
    q, k, grad = torch.randn(len(row), 2, 32), torch.randn(130, 2, 32), torch.randn(len(row), 2, 1, 5)
    wanted = gradients(on_kernels, q, k, (row, position, 5, 16), grad)
    strided = torch.randn(len(row), 3, 64)[:, :2, ::2].copy_(q), torch.randn(32, 2, 130).permute(2, 1, 0).copy_(k)
    found = kernels.nsa_block_lse_backward(grad, wanted[0], *strided, row, position, 16)
    assert all(torch.equal(x, right) for x, right in zip(found, wanted[1:], strict=True))
    order = torch.randperm(len(row))
    lse, dq, dk = gradients(on_kernels, q[order], k, (row[order], position[order], 5, 16), grad[order])
    torch.testing.assert_close(lse, wanted[0][order])
    torch.testing.assert_close(dq, wanted[1][order])
    torch.testing.assert_close(dk, wanted[2])


def test_operators_match_their_schemas_and_fake_implementations() -> None:
    row, position = sampled(PACKED)
    q, k = torch.randn(len(row), 2, 16), torch.randn(130, 2, 16)
    lse = kernels.nsa_block_lse(q, k, row, position, 16, 5)
    checks = ("test_schema", "test_faketensor")
    for name, arguments in (
        ("nsa_block_lse", (q, k, row, position, 16, 5)),
        ("nsa_block_lse_backward", (torch.ones_like(lse), lse, q, k, row, position, 16)),
    ):
        torch.library.opcheck(getattr(torch.ops.tercet, name).default, arguments, test_utils=checks)


def test_second_derivatives_are_refused() -> None:
    q, k = torch.randn(1, 1, 16, requires_grad=True), torch.randn(32, 1, 16)
    lse = on_kernels(q, k, torch.tensor([31]), torch.tensor([31]), 2, 16)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives"):
        torch.autograd.grad(lse.sum(), q, create_graph=True)

"""Scores of a learned selector for sampled queries: each block's best token, with gradients.

The score of a block is the largest product of the selector's query with the keys of the block's tokens. The forward
pass also keeps which token that was (its place in the block), so the backward pass computes no products again: a
query's gradient is a weighted sum of the winning keys, and a key's gradient of the queries that it won for.

q: [S, G, size]   k: [rows, G, size]   scores, places: [S, G, blocks]   first_row, position: int64 [S]
Blocks are counted from first_row, the row of a query's first token among the keys. Only blocks that are complete at
its position are scored, so no token needs a causal mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.attention.kernels.custom_op import operator
from tercet.attention.kernels.launch import call, padded

_BLOCKS = 16  # per program: one program for a whole document would take as long as all the others together
_TILE = 64  # queries per program
_STAGED = 16 * 1024  # bytes of a block's keys that may wait in shared memory three times
_GATHERED = 4096  # numbers of keys that a program for dq holds at once
_ROWS, _QUERIES = 64, 32  # of a product for dk


@triton.jit(do_not_specialize=["queries", "blocks"])
def block_maximum_kernel(
    Q, K, FIRST, POSITIONS, SCORES, PLACES, queries, blocks, q_s, q_g, k_t, k_g,
    DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr, QT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    begin = tl.program_id(2) * BLOCKS
    s = tl.program_id(0).to(tl.int64) * QT + tl.arange(0, QT)
    inside = s < queries
    first = tl.load(FIRST + s, mask=inside, other=0)
    complete = _complete(POSITIONS, s, inside, blocks, BLOCK)
    d, t = tl.arange(0, DKP), tl.arange(0, BP)
    q = tl.load(Q + (s * q_s + g * q_g)[:, None] + d[None, :], mask=inside[:, None] & (d < DK)[None, :], other=0.0)
    K += g.to(tl.int64) * k_g
    at = (s * tl.num_programs(1) + g) * blocks
    # one document after another: the queries of a tile usually belong to one
    NONE: tl.constexpr = 1 << 60
    start = tl.min(tl.where(inside, first, NONE), 0)
    while start < NONE:
        mine = inside & (first == start)
        end = tl.minimum(tl.max(tl.where(mine, complete, 0), 0), begin + BLOCKS)
        for j in tl.range(begin, end):
            row = start + j * BLOCK + t
            k = tl.load(K + (row * k_t)[:, None] + d[None, :], mask=(t < BLOCK)[:, None] & (d < DK)[None, :], other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            x = tl.where((t < BLOCK)[None, :], x, float("-inf"))
            score, place = tl.max(x, 1, return_indices=True)
            tl.store(SCORES + at + j, score, mask=mine & (j < complete))
            tl.store(PLACES + at + j, place.to(tl.int16), mask=mine & (j < complete))
        start = tl.min(tl.where(inside & (first > start), first, NONE), 0)


@triton.jit
def _complete(POSITIONS, s, inside, blocks, BLOCK: tl.constexpr):
    """How many blocks are scored for these queries."""
    position = tl.load(POSITIONS + s, mask=inside, other=-1)
    return tl.minimum(((position + 1) // BLOCK).to(tl.int32), blocks)


@triton.jit(do_not_specialize=["blocks"])
def block_maximum_dq_kernel(
    GRAD, K, PLACES, FIRST, POSITIONS, DQ, blocks, k_t, k_g,
    DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One query and group: the sum of its winning keys, each times the gradient of its block's score."""
    s, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(FIRST + s)
    complete = _complete(POSITIONS, s, s >= 0, blocks, BLOCK)
    d = tl.arange(0, DKP)
    K += g.to(tl.int64) * k_g
    at = (s * tl.num_programs(1) + g) * blocks
    total = tl.zeros([AT_ONCE, DKP], tl.float32)
    for begin in tl.range(0, complete, AT_ONCE):
        j = begin + tl.arange(0, AT_ONCE)
        grad = tl.load(GRAD + at + j, mask=j < complete, other=0.0)
        row = first + j * BLOCK + tl.load(PLACES + at + j, mask=j < complete, other=0)
        # blocks that are not free have no gradient
        k = tl.load(K + (row * k_t)[:, None] + d[None, :], mask=(grad != 0)[:, None] & (d < DK)[None, :], other=0.0)
        total += grad[:, None] * k.to(tl.float32)
    at = (s * tl.num_programs(1) + g) * DK
    tl.store(DQ + at + d, tl.sum(total, 0).to(DQ.dtype.element_ty), mask=d < DK)


@triton.jit(do_not_specialize=["queries", "rows", "blocks"])
def block_maximum_dk_kernel(
    GRAD, Q, PLACES, FIRST, POSITIONS, DK_, queries, rows, blocks, q_s, q_g,
    DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, RP: tl.constexpr, QT: tl.constexpr,
):  # fmt: skip
    """ROWS rows of keys and one group: for each row the sum of the queries that it won for, each times the gradient of
    the score. A product with a matrix that has at most two numbers per query."""
    begin, g = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1)
    r, d = tl.arange(0, RP), tl.arange(0, DKP)
    total = tl.zeros([RP, DKP], tl.float32)
    for tile in tl.range(0, queries, QT):
        s = tile + tl.arange(0, QT).to(tl.int64)
        inside = s < queries
        first = tl.load(FIRST + s, mask=inside, other=0)
        complete = _complete(POSITIONS, s, inside, blocks, BLOCK)
        at = (s * tl.num_programs(1) + g) * blocks
        # the block of a query's document that holds the first row, and the next one, which may begin within the rows
        j = (begin - first + BLOCK) // BLOCK - 1
        offset = first + j * BLOCK - begin
        one, at_one = _won(GRAD, PLACES, at, j, complete, offset, ROWS)
        two, at_two = _won(GRAD, PLACES, at, j + 1, complete, offset + BLOCK, ROWS)
        used = (one != 0) | (two != 0)
        if tl.max(used.to(tl.int32), 0) > 0:
            q = tl.load(
                Q + (s * q_s + g * q_g)[:, None] + d[None, :], mask=used[:, None] & (d < DK)[None, :], other=0.0
            )
            won = tl.where(r[:, None] == at_one[None, :], one[None, :], 0.0)
            won = tl.where(r[:, None] == at_two[None, :], two[None, :], won)
            # gradients are too small for fp16, and bf16 would round them; tf32x3 is nearly fp32
            total = tl.dot(won, q.to(tl.float32), total, input_precision="tf32x3")
    row = begin + r
    tl.store(
        DK_ + ((row * tl.num_programs(1) + g) * DK)[:, None] + d[None, :], total.to(DK_.dtype.element_ty),
        mask=((r < ROWS) & (row < rows))[:, None] & (d < DK)[None, :],
    )  # fmt: skip


@triton.jit
def _won(GRAD, PLACES, at, j, complete, offset, ROWS: tl.constexpr):
    """The gradients of the scores of blocks j, one per query, and where their winning tokens are among a program's
    rows; 0 and -1 if the block is not scored or begins after the rows. offset: where the blocks begin."""
    met = (j >= 0) & (j < complete) & (offset < ROWS)
    grad = tl.load(GRAD + at + j, mask=met, other=0.0)
    place = tl.load(PLACES + at + j, mask=met, other=0)
    return grad, tl.where(met, offset + place, -1)


# ------------------------------------------------------------ ops; `block_scores` has their gradient


def _scores_like(
    q: Tensor, k: Tensor, first_row: Tensor, position: Tensor, block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], k.shape[1], blocks)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int16)


@operator(_scores_like)
def nsa_block_maximum(
    q: Tensor, k: Tensor, first_row: Tensor, position: Tensor, block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """(scores fp32, places int16) [S, G, blocks]: the largest q·k over the tokens of each block, and which token has
    it, the first among equals; -inf and 0 for blocks that are not complete at `position`."""
    S, G, DK = q.shape
    q, k, first_row, position = _rows(q), _rows(k), first_row.contiguous(), position.contiguous()
    scores = torch.full((S, G, blocks), -math.inf, dtype=torch.float32, device=q.device)
    places = torch.zeros(S, G, blocks, dtype=torch.int16, device=q.device)
    tile = _TILE if q.element_size() == 2 else _TILE // 2  # products in fp32 need more registers
    staged = padded(block) * padded(DK) * k.element_size() <= _STAGED
    call(
        block_maximum_kernel, (-(-S // tile), G, -(-blocks // _BLOCKS)), (q, k, first_row, position, scores, places),
        (S, blocks),
        (q.stride(0), q.stride(1), k.stride(0), k.stride(1), DK, padded(DK), block, padded(block), tile, _BLOCKS),
        num_warps=4, num_stages=3 if staged else 1,
    )  # fmt: skip
    return scores, places


@operator(lambda grad, q, k, *others: (q.new_empty(q.shape), k.new_empty(k.shape)))
def nsa_block_maximum_backward(
    grad: Tensor, q: Tensor, k: Tensor, places: Tensor, first_row: Tensor, position: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """(dq, dk) from the gradient of the scores, which is not read in blocks that are not complete."""
    S, G, DK = q.shape
    rows, blocks = k.shape[0], places.shape[-1]
    q, k, grad = _rows(q), _rows(k), grad.contiguous()
    first_row, position = first_row.contiguous(), position.contiguous()
    dq, dk = q.new_empty(S, G, DK), k.new_empty(rows, G, DK)
    owned = min(block, _ROWS)  # so that a program's rows meet at most two blocks of a document
    call(
        block_maximum_dq_kernel, (S, G), (grad, k, places, first_row, position, dq), (blocks,),
        (k.stride(0), k.stride(1), DK, padded(DK), block, max(16, _GATHERED // padded(DK))),
        num_warps=4,
    )  # fmt: skip
    call(
        block_maximum_dk_kernel, (-(-rows // owned), G), (grad, q, places, first_row, position, dk), (S, rows, blocks),
        (q.stride(0), q.stride(1), DK, padded(DK), block, owned, padded(owned), _QUERIES),
        num_warps=4,
    )  # fmt: skip
    return dq, dk


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _BlockScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, first_row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
        scores, places = torch.ops.tercet.nsa_block_maximum(q, k, first_row, position, block, blocks)
        ctx.block = block
        ctx.save_for_backward(q, k, places, first_row, position)
        return scores

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = torch.ops.tercet.nsa_block_maximum_backward(grads[0], *ctx.saved_tensors, ctx.block)
        return dq, dk, None, None, None, None


def block_scores(q: Tensor, k: Tensor, first_row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
    """`reference.block_scores` on the kernels: fp32 [S, G, blocks]. q and k share a dtype."""
    scores: Tensor = _BlockScores.apply(q, k, first_row, position, blocks, block)
    return scores

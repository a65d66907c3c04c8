"""Log-sum-exp of the logits of sampled queries in every block: how much attention each block receives.

Trains learned selectors (model/selector.py): the teacher is the attention of the selected branch, whose log-sum-exps
need no gradient; the student is the selector's own, and learns through them.

Forward: one program per few sampled queries, KV head and range of blocks reads the keys of its blocks once for all of
them. Backward: the same programs add up dq of their blocks, and a second launch has one program per range of keys, for
dk. The backward pass computes the logits again.

q: [S, H, Dk]   k: [rows, G, Dk]   lse: [S, G, h, blocks]   rows, position: int64 [S], where the queries are among the
keys' rows and in their documents. Blocks are counted from a document's first row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.attention.kernels.launch import LOG2E, call, operator, padded, power_of_2

_BLOCKS, _RANGES = 16, 32  # most blocks per program, and how many programs share a document if they can have fewer
_TILE = 64  # rows per program: queries times heads of a group
_QUERIES, _ROWS = 16, 64  # queries of a product of the backward pass, and keys of one for dk


@triton.jit(do_not_specialize=["queries", "blocks"])
def block_lse_kernel(
    Q, K, ROWS, POSITIONS, OUT, queries, blocks, q_s, q_h, k_t, k_h, scale,
    HEADS: tl.constexpr, TILE: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr,
    BP: tl.constexpr, BLOCKS: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    begin = tl.program_id(2) * BLOCKS
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    s = (row // HEADS).to(tl.int64)
    h = row % HEADS
    inside = s < queries
    position = tl.load(POSITIONS + s, mask=inside, other=-1)
    first = tl.load(ROWS + s, mask=inside, other=0) - position
    position = position.to(tl.int32)
    d, t, c = tl.arange(0, DKP), tl.arange(0, BP), tl.arange(0, BLOCKS)
    q = tl.load(
        Q + (s * q_s + (g * HEADS + h) * q_h)[:, None] + d[None, :],
        mask=inside[:, None] & (d < DK)[None, :], other=0.0,
    )  # fmt: skip
    K += g.to(tl.int64) * k_h
    # of every block: the highest logit, and the sum of exponentials relative to it
    highs = tl.zeros([TILE, BLOCKS], tl.float32)
    sums = tl.zeros([TILE, BLOCKS], tl.float32)
    # one document after another: the queries of a tile usually belong to one
    NONE: tl.constexpr = 1 << 60
    start = tl.min(tl.where(inside, first, NONE), 0)
    while start < NONE:
        mine = tl.where(inside & (first == start), position, -1)
        last = tl.max(mine, 0)
        # `blocks` are fewer if a packed document is longer than the caller's upper bound
        end = tl.minimum(tl.minimum(last // BLOCK + 1, begin + BLOCKS), blocks)
        for j in tl.range(begin, end):
            k = tl.load(
                K + (start + j * BLOCK) * k_t + (t * k_t)[:, None] + d[None, :],
                mask=(t <= tl.minimum(last - j * BLOCK, BLOCK - 1))[:, None] & (d < DK)[None, :], other=0.0,
            )  # fmt: skip
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            newest = tl.minimum(mine - j * BLOCK, BLOCK - 1)
            x = tl.where(t[None, :] <= newest[:, None], x, float("-inf"))
            highest = tl.max(x, 1) * scale
            total = tl.sum(tl.exp2(x * scale - highest[:, None]), 1)
            here = (c == j - begin)[None, :] & (newest >= 0)[:, None]
            highs = tl.where(here, highest[:, None], highs)
            sums = tl.where(here, total[:, None], sums)
        start = tl.min(tl.where(inside & (first > start), first, NONE), 0)
    out = OUT + ((s * tl.num_programs(1) + g) * HEADS + h) * blocks + begin
    lse = (highs + tl.log2(sums)) * LN2  # -inf for blocks after the query: their sum is 0
    tl.store(out[:, None] + c[None, :], lse, mask=inside[:, None] & (begin + c < blocks)[None, :])


@triton.jit(do_not_specialize=["queries", "blocks"])
def block_lse_dq_kernel(
    GRAD, LSE, Q, K, ROWS, POSITIONS, DQ, queries, blocks, q_s, q_g, k_t, k_g, scale, dq_scale,
    DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr, QT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dq of one head per group, of a range of blocks; DQ: [ranges, S, G, Dk]."""
    g = tl.program_id(1)
    part = tl.program_id(2)
    begin = part * BLOCKS
    s = tl.program_id(0).to(tl.int64) * QT + tl.arange(0, QT)
    inside = s < queries
    position = tl.load(POSITIONS + s, mask=inside, other=-1)
    first = tl.load(ROWS + s, mask=inside, other=0) - position
    position = position.to(tl.int32)
    d, t = tl.arange(0, DKP), tl.arange(0, BP)
    q = tl.load(Q + (s * q_s + g * q_g)[:, None] + d[None, :], mask=inside[:, None] & (d < DK)[None, :], other=0.0)
    K += g.to(tl.int64) * k_g
    at = (s * tl.num_programs(1) + g) * blocks
    total = tl.zeros([QT, DKP], tl.float32)
    NONE: tl.constexpr = 1 << 60
    start = tl.min(tl.where(inside, first, NONE), 0)
    while start < NONE:
        mine = tl.where(inside & (first == start), position, -1)
        last = tl.max(mine, 0)
        # `blocks` are fewer if a packed document is longer than the caller's upper bound
        end = tl.minimum(tl.minimum(last // BLOCK + 1, begin + BLOCKS), blocks)
        for j in tl.range(begin, end):
            newest = tl.minimum(mine - j * BLOCK, BLOCK - 1)
            grad = tl.load(GRAD + at + j, mask=newest >= 0, other=0.0)
            lse = tl.load(LSE + at + j, mask=newest >= 0, other=0.0)
            k = tl.load(
                K + (start + j * BLOCK) * k_t + (t * k_t)[:, None] + d[None, :],
                mask=(t <= tl.minimum(last - j * BLOCK, BLOCK - 1))[:, None] & (d < DK)[None, :], other=0.0,
            )  # fmt: skip
            x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            w = _weights(x, grad[:, None], (lse * 1.4426950408889634)[:, None], t[None, :] <= newest[:, None])
            total = _product(w, k, total)
        start = tl.min(tl.where(inside & (first > start), first, NONE), 0)
    to = DQ + (((part * queries + s) * tl.num_programs(1) + g) * DK)[:, None] + d[None, :]
    tl.store(to, total * dq_scale, mask=inside[:, None] & (d < DK)[None, :])


@triton.jit
def _weights(x, grad, lse, seen):
    """Gradients of logits x from those of the log-sum-exps of their blocks; x and lse in base 2."""
    return grad * tl.exp2(tl.where(seen, x - lse, float("-inf")))


@triton.jit
def _product(w, x, total):
    """total + w·x, w rounded to bf16 if x is; fp16 could not hold such small numbers, hence tf32x3, nearly fp32."""
    if x.dtype == tl.bfloat16:
        return tl.dot(w.to(tl.bfloat16), x, total)
    return tl.dot(w, x.to(tl.float32), total, input_precision="tf32x3")


@triton.jit(do_not_specialize=["queries", "rows", "blocks"])
def block_lse_dk_kernel(
    GRAD, LSE, Q, K, ROWS, POSITIONS, DK_, queries, rows, blocks, q_s, q_g, k_t, k_g, scale, dk_scale,
    DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, KP: tl.constexpr, QT: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """dk of KEYS rows, at most a block's, and one group."""
    begin, g = tl.program_id(0).to(tl.int64) * KEYS, tl.program_id(1)
    r, d = tl.arange(0, KP), tl.arange(0, DKP)
    row = begin + r
    there = ((r < KEYS) & (row < rows))[:, None] & (d < DK)[None, :]
    k = tl.load(K + (row * k_t + g * k_g)[:, None] + d[None, :], mask=there, other=0.0)
    total = tl.zeros([KP, DKP], tl.float32)
    # queries that may see a row: usually neighbours, as they are sampled in order
    lowest, highest = queries, 0
    for some in tl.range(0, queries, SCAN):
        s = some + tl.arange(0, SCAN)
        at = tl.load(ROWS + s, mask=s < queries, other=-1)
        first = at - tl.load(POSITIONS + s, mask=s < queries, other=0)
        near = (at >= begin) & (first < begin + KEYS)
        lowest = tl.minimum(lowest, tl.min(tl.where(near, s, queries), 0))
        highest = tl.maximum(highest, tl.max(tl.where(near, s + 1, 0), 0))
    for tile in tl.range(lowest, highest, QT):
        s = tile + tl.arange(0, QT)
        inside = s < queries
        q = tl.load(
            Q + (s.to(tl.int64) * q_s + g * q_g)[:, None] + d[None, :],
            mask=inside[:, None] & (d < DK)[None, :], other=0.0,
        )  # fmt: skip
        position = tl.load(POSITIONS + s, mask=inside, other=-1).to(tl.int32)
        own = (tl.load(ROWS + s, mask=inside, other=0) - begin).to(tl.int32)  # counted from `begin`, as r
        # the block of a query's document that holds the first row, and the next one, which may begin within the rows
        j = (position - own + BLOCK) // BLOCK - 1
        at = (s.to(tl.int64) * tl.num_programs(1) + g) * blocks
        one, lse_one = _load_block(GRAD, LSE, at, j, position, inside, blocks, BLOCK)
        two, lse_two = _load_block(GRAD, LSE, at, j + 1, position, inside, blocks, BLOCK)
        second = r[None, :] >= (own - position + (j + 1) * BLOCK)[:, None]
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        grad = tl.where(second, two[:, None], one[:, None])
        lse = tl.where(second, lse_two[:, None], lse_one[:, None])
        w = _weights(x, grad, lse, r[None, :] <= own[:, None])
        total = _product(tl.trans(w), q, total)
    to = DK_ + ((row * tl.num_programs(1) + g) * DK)[:, None] + d[None, :]
    tl.store(to, (total * dk_scale).to(DK_.dtype.element_ty), mask=there)


@triton.jit
def _load_block(GRAD, LSE, at, j, position, inside, blocks, BLOCK: tl.constexpr):
    """Gradients and log-sum-exps, in base 2, of blocks j, one per query; such that unseen blocks have weights 0."""
    met = inside & (j >= 0) & (j < blocks) & (j * BLOCK <= position)
    grad, lse = tl.load(GRAD + at + j, mask=met, other=0.0), tl.load(LSE + at + j, mask=met, other=float("inf"))
    return grad, lse * 1.4426950408889634


# ------------------------------------------------------------ ops; `block_lse` has their gradient


@operator(
    lambda q, k, rows, position, block, blocks: q.new_empty(
        q.shape[0], k.shape[1], q.shape[1] // k.shape[1], blocks, dtype=torch.float32
    )
)
def nsa_block_lse(q: Tensor, k: Tensor, rows: Tensor, position: Tensor, block: int, blocks: int) -> Tensor:
    """fp32 [S, G, h, blocks]; -inf for blocks after the query."""
    S, H, DK = q.shape
    G = k.shape[1]
    q, k = _rows(q), _rows(k)
    out = torch.empty(S, G, H // G, blocks, dtype=torch.float32, device=q.device)
    heads, span = H // G, _span(blocks)
    tile = _TILE if q.dtype.itemsize == 2 else _TILE // 4  # fp32: as many registers
    call(
        block_lse_kernel, (-(-S * heads // tile), G, -(-blocks // span)), (q, k, rows, position, out), (S, blocks),
        (q.stride(0), q.stride(1), k.stride(0), k.stride(1), DK**-0.5 * LOG2E, heads, tile, DK, padded(DK),
         block, padded(block), span, math.log(2.0)),
        num_warps=4, num_stages=_stages(k, block),
    )  # fmt: skip
    return out


@operator(lambda grad, lse, q, k, rows, position, block: (q.new_empty(q.shape), k.new_empty(k.shape)))
def nsa_block_lse_backward(
    grad: Tensor, lse: Tensor, q: Tensor, k: Tensor, rows: Tensor, position: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """(dq, dk) from the gradient of lse [S, G, 1, blocks]; one head per group. Not read in blocks after the query."""
    S, G, DK = q.shape
    blocks = lse.shape[-1]
    q, k, grad = _rows(q), _rows(k), grad.contiguous()
    scale, span = DK**-0.5, _span(blocks)
    ranges = -(-blocks // span)
    dq = torch.empty(ranges, S, G, DK, dtype=torch.float32, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    owned = min(block, _ROWS)  # more than a block could meet more than two of a document
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1)
    call(
        block_lse_dq_kernel, (-(-S // _QUERIES), G, ranges), (grad, lse, q, k, rows, position, dq), (S, blocks),
        (*strides, scale * LOG2E, scale, DK, padded(DK), block, padded(block), _QUERIES, span),
        num_warps=4, num_stages=_stages(k, block),
    )  # fmt: skip
    call(
        block_lse_dk_kernel, (-(-k.shape[0] // owned), G), (grad, lse, q, k, rows, position, dk),
        (S, k.shape[0], blocks),
        (*strides, scale * LOG2E, scale, DK, padded(DK), block, owned, padded(owned), _QUERIES,
         min(512, power_of_2(S))),
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return dq.sum(0).to(q.dtype), dk


def _span(blocks: int) -> int:
    """Blocks per program."""
    return min(_BLOCKS, max(4, power_of_2(blocks) // _RANGES))


def _stages(k: Tensor, block: int) -> int:
    """Buffers for a block's keys, by their bytes."""
    return 3 if block * k.shape[-1] * k.element_size() <= 16384 else 2


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _BlockLse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, rows: Tensor, position: Tensor, block: int, blocks: int) -> Tensor:
        lse: Tensor = torch.ops.tercet.nsa_block_lse(q, k, rows, position, block, blocks)
        ctx.block = block
        ctx.save_for_backward(lse, q, k, rows, position)
        return lse

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = torch.ops.tercet.nsa_block_lse_backward(grads[0], *ctx.saved_tensors, ctx.block)
        return dq, dk, None, None, None, None


def block_lse(q: Tensor, k: Tensor, rows: Tensor, position: Tensor, block: int, blocks: int) -> Tensor:
    """`reference.block_lse` on the kernels, with gradients for one head per group. q and k share a dtype."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        lse: Tensor = _BlockLse.apply(q, k, rows, position, block, blocks)
        return lse
    found: Tensor = torch.ops.tercet.nsa_block_lse(q, k, rows, position, block, blocks)
    return found

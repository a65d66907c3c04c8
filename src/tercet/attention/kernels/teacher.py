"""Attention mass per block for sampled queries: what teaches a learned selector (model/selector.py). No gradients.

One program per few sampled queries, KV head and range of blocks reads the keys of its blocks once for all of them, and
writes the log-sum-exp of every block. That is all the teacher needs: a block's mass is the softmax of these numbers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.custom_op import operator
from tercet.attention.kernels.launch import LOG2E, call, padded, power_of_2

_BLOCKS = 16  # per program: one program for a whole document would take as long as all the others together
_TILE = 64  # rows per program: heads of a group, times queries


@triton.jit(do_not_specialize=["queries", "blocks"])
def block_lse_kernel(
    Q, K, ROWS, POSITIONS, OUT, queries, blocks, q_s, q_h, k_t, k_h, scale,
    HEADS: tl.constexpr, HP: tl.constexpr, QT: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr,
    BP: tl.constexpr, BLOCKS: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(1)
    begin = tl.program_id(2) * BLOCKS
    row = tl.arange(0, QT * HP)
    s = (tl.program_id(0) * QT + row // HP).to(tl.int64)
    h = row % HP
    inside = (s < queries) & (h < HEADS)
    position = tl.load(POSITIONS + s, mask=inside, other=-1)
    first = tl.load(ROWS + s, mask=inside, other=0) - position
    d = tl.arange(0, DKP)
    q = tl.load(
        Q + (s * q_s + (g * HEADS + h) * q_h)[:, None] + d[None, :],
        mask=inside[:, None] & (d < DK)[None, :], other=0.0,
    )  # fmt: skip
    K += g.to(tl.int64) * k_h
    out = OUT + ((s * tl.num_programs(1) + g) * HEADS + h) * blocks
    t = tl.arange(0, BP)
    # one document after another: the queries of a tile usually belong to one
    NONE: tl.constexpr = 1 << 60
    start = tl.min(tl.where(inside, first, NONE), 0)
    while start < NONE:
        mine = inside & (first == start)
        last = tl.max(tl.where(mine, position, -1), 0)
        end = tl.minimum((last // BLOCK).to(tl.int32) + 1, begin + BLOCKS)
        for j in tl.range(begin, end):
            token = j * BLOCK + t
            there = (t < BLOCK) & (token <= last)
            k = tl.load(
                K + ((start + token) * k_t)[:, None] + d[None, :], mask=there[:, None] & (d < DK)[None, :], other=0.0
            )
            x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            x = tl.where((t < BLOCK)[None, :] & (token[None, :] <= position[:, None]), x, float("-inf"))
            highest = tl.max(x, 1)
            lse = (highest + tl.log2(tl.sum(tl.exp2(x - highest[:, None]), 1))) * LN2
            tl.store(out + j, lse, mask=mine & (j * BLOCK <= position))
        start = tl.min(tl.where(inside & (first > start), first, NONE), 0)


@operator(
    lambda q, k, rows, position, block, blocks: q.new_empty(
        q.shape[0], k.shape[1], q.shape[1] // k.shape[1], blocks, dtype=torch.float32
    )
)
def nsa_block_lse(q: Tensor, k: Tensor, rows: Tensor, position: Tensor, block: int, blocks: int) -> Tensor:
    """`model.selector.block_lse`: q [S, H, Dk], k [tokens, G, Dk] -> fp32 [S, G, h, blocks]."""
    S, H, DK = q.shape
    G = k.shape[1]
    q = q if q.stride(-1) == 1 else q.contiguous()
    k = k if k.stride(-1) == 1 else k.contiguous()
    out = torch.full((S, G, H // G, blocks), -math.inf, dtype=torch.float32, device=q.device)
    heads = power_of_2(H // G)
    per_tile = max(_TILE, heads) // heads
    call(
        block_lse_kernel, (-(-S // per_tile), G, -(-blocks // _BLOCKS)), (q, k, rows, position, out), (S, blocks),
        (q.stride(0), q.stride(1), k.stride(0), k.stride(1), DK**-0.5 * LOG2E, H // G, heads, per_tile, DK, padded(DK),
         block, max(16, power_of_2(block)), _BLOCKS, math.log(2.0)),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out

"""Attention mass per block for sampled queries: what teaches a learned selector (model/selector.py). No gradients.

One program per sampled query, KV head and range of blocks reads the keys of its blocks up to the query, and writes the
log-sum-exp of every block. That is all the teacher needs: the mass of a block is the softmax of these numbers.
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


@triton.jit(do_not_specialize=["blocks"])
def block_lse_kernel(
    Q, K, ROWS, POSITIONS, OUT, blocks, q_s, q_h, k_t, k_h, scale,
    HEADS: tl.constexpr, HP: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, BLOCK: tl.constexpr, BP: tl.constexpr,
    BLOCKS: tl.constexpr, LN2: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    begin = tl.program_id(2) * BLOCKS
    position = tl.load(POSITIONS + s)
    end = tl.minimum((position // BLOCK).to(tl.int32) + 1, begin + BLOCKS)
    first = tl.load(ROWS + s) - position
    h = tl.arange(0, HP)
    d = tl.arange(0, DKP)
    q = tl.load(
        Q + s * q_s + ((g * HEADS + h) * q_h)[:, None] + d[None, :],
        mask=(h < HEADS)[:, None] & (d < DK)[None, :], other=0.0,
    )  # fmt: skip
    K += g.to(tl.int64) * k_h
    out = OUT + ((s * tl.num_programs(1) + g) * HEADS + h) * blocks
    t = tl.arange(0, BP)
    for j in tl.range(begin, end):
        inside = (t < BLOCK) & (j * BLOCK + t <= position)
        row = first + j * BLOCK + t
        k = tl.load(K + (row * k_t)[:, None] + d[None, :], mask=inside[:, None] & (d < DK)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        x = tl.where(inside[None, :], x, float("-inf"))
        highest = tl.max(x, 1)
        lse = (highest + tl.log2(tl.sum(tl.exp2(x - highest[:, None]), 1))) * LN2
        tl.store(out + j, lse, mask=h < HEADS)


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
    call(
        block_lse_kernel, (S, G, -(-blocks // _BLOCKS)), (q, k, rows, position, out), (blocks,),
        (q.stride(0), q.stride(1), k.stride(0), k.stride(1), DK**-0.5 * LOG2E, H // G,
         max(16, power_of_2(H // G)), DK, padded(DK), block, max(16, power_of_2(block)), _BLOCKS, math.log(2.0)),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out

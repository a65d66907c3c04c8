"""Importance of blocks for one query per row, from the scores that compressed attention left (Eq. 9, 10), and the
choice of the best (Eq. 11).

Scores are normalised with the log-sum-exp over all parts here, not part by part there: equal keys then give equal
numbers to the last bit wherever they stand, and ties are decided by index.

logits: fp32 [B, H, room], in powers of two   scores: fp32 [B, G, blocks]   arrived: int32 [B·G], 0 between steps
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.decode_overlap import goes_on, overlaps, wait_for_the_launch_before
from tercet.attention.kernels.launching import call
from tercet.attention.kernels.score import _choose_range
from tercet.attention.kernels.settings import power_of_2
from tercet.attention.spec import NSAConfig


@triton.jit
def _scores(LOGITS, i, mask, room, HEADS: tl.constexpr, RP: tl.constexpr):
    """[RP, …]: of compressed tokens i with each head of a group."""
    r = tl.arange(0, RP)
    return tl.load(LOGITS + r[:, None] * room + i[None, :], mask=(r < HEADS)[:, None] & mask[None, :],
                   other=float("-inf"))  # fmt: skip


@triton.jit(do_not_specialize=["room", "blocks", "splits", "parts"])
def _score(
    LOGITS, LSE, SCORES, INDICES, LENGTHS, COUNTS, ARRIVED, room, blocks, splits, parts,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, NB: tl.constexpr, MASKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * NB
    g = tl.program_id(1)
    b = tl.program_id(2)
    after = (tl.load(LENGTHS + b) + 1).to(tl.int32)
    real = goes_on(COUNTS, b, MASKED)
    wait_for_the_launch_before(OVERLAP)
    if real:
        current = (after - 1) // BLOCK
        WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
        pair_of = b.to(tl.int64) * G + g
        if first == 0:
            # the list but for those that are chosen by score: all blocks, or the forced ones at both ends
            slot = tl.arange(0, CP)
            forced = tl.where(slot < INITIAL, slot, current - COUNT + 1 + slot)
            known = tl.where(current >= COUNT, forced, tl.where(slot <= current, slot, -1))
            free = (current >= COUNT) & (slot >= INITIAL) & (slot < COUNT - LOCAL)
            tl.store(INDICES + pair_of * COUNT + slot, known, mask=(slot < COUNT) & (free == 0))
        # a query with no more than COUNT blocks selects them all, and the last LOCAL are forced
        if (WANTED > 0) & (current >= COUNT) & (first <= current - LOCAL):
            seen = tl.where(after < L, 0, (after - L) // S + 1)
            pair = (b.to(tl.int64) * G + g) * HEADS
            # In units of S tokens: a compressed token covers A of them, a block has U.
            A: tl.constexpr = L // S
            U: tl.constexpr = BLOCK // S
            x = tl.arange(0, NB * U)
            u = x % U
            i = first * U + x
            # all loads first: the log-sum-exp's would hold up those behind it
            own = _scores(LOGITS + pair * room, i, i < seen, room, HEADS, RP)
            if A > 1:
                # what reaches over from the block before
                over = tl.maximum(u + A - U, 0)
                mask = (over > 0) & (i >= U) & (i - U < seen)
                other = _scores(LOGITS + pair * room, i - U, mask, room, HEADS, RP)
            r = tl.arange(0, RP)
            p = tl.arange(0, SP)
            lse = tl.load(LSE + (pair + r)[:, None] * parts + p[None, :],
                          mask=(r < HEADS)[:, None] & (p < splits)[None, :], other=float("-inf"))  # fmt: skip
            top = tl.max(lse, 1)
            top = tl.where(top > float("-inf"), top, 0.0)
            lse = top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))
            lse = tl.where(r < HEADS, lse, 0.0)
            lse = lse[:, None]
            weight = (tl.minimum(u + A, U) - u).to(tl.float32) / A
            score = tl.sum((tl.sum(tl.exp2(own - lse), 0) * weight).reshape(NB, U), 1)
            if A > 1:
                score += tl.sum((tl.sum(tl.exp2(other - lse), 0) * (over.to(tl.float32) / A)).reshape(NB, U), 1)
            j = first + tl.arange(0, NB)
            tl.store(SCORES + pair_of * blocks + j, score, mask=j < blocks)
            tl.debug_barrier()  # all threads have written before one of them says so
            if tl.atomic_add(ARRIVED + pair_of, 1, sem="acq_rel") == (current - LOCAL) // NB:
                tl.store(ARRIVED + pair_of, 0)
                if WANTED > 0:
                    _choose_range(SCORES + pair_of * blocks, INDICES + pair_of * COUNT + INITIAL, current - LOCAL + 1,
                                  INITIAL, WANTED, NP)  # fmt: skip


def score(
    logits: Tensor, lse: Tensor, indices: Tensor, lengths: Tensor, counts: Tensor | None, arrived: Tensor, splits: int,
    blocks: int, config: NSAConfig,
) -> None:  # fmt: skip
    """Fills indices, int32 [B, G, n]: ascending, -1 at the end. The last program of a pair to have its scores
    chooses."""
    batch, groups, count = indices.shape
    scores = torch.empty(batch, groups, blocks, dtype=torch.float32, device=logits.device)
    heads = logits.shape[1] // groups
    l, d, block = config.compress_block, config.compress_stride, config.select_block
    # as many compressed tokens to a program as registers hold the scores of
    per = max(1, min(256, 4096 // power_of_2(heads)) * d // block)
    # sizes a factor of four apart: a handful of variants for all lengths
    listed = next(n for n in (256, 1024, 4096, 16384) if n >= blocks)
    call(
        _score, (-(-blocks // per), groups, batch), (logits, lse, scores, indices, lengths, counts, arrived),
        (logits.shape[2], blocks, splits, lse.shape[2]),
        (l, d, block, count, config.select_initial, config.select_local, power_of_2(count), listed, groups, heads,
         power_of_2(heads),
         max(16, power_of_2(splits)), per, counts is not None, overlaps(logits)),
        num_warps=8 if listed > 4096 else 4, launch_pdl=overlaps(logits),
    )  # fmt: skip

"""Importance of blocks for one query per row, from the scores that compressed attention left (Eq. 9, 10), and the
choice of the best by whoever reads them (Eq. 11).

Scores are normalised with the log-sum-exp over all parts here, not part by part there: equal keys then give equal
numbers to the last bit wherever they stand, and ties are decided by index.

logits: fp32 [B, H, room], in powers of two   scores: fp32 [B, G, blocks]
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.launching import call
from tercet.attention.kernels.score import _best, _load_keys
from tercet.attention.kernels.settings import power_of_2
from tercet.attention.spec import NSAConfig


@triton.jit
def _probabilities(LOGITS, i, mask, lse, room, HEADS: tl.constexpr, RP: tl.constexpr):
    """p of compressed tokens i, summed over the heads of a group."""
    r = tl.arange(0, RP)
    s = tl.load(LOGITS + r[:, None] * room + i[None, :], mask=(r < HEADS)[:, None] & mask[None, :],
                other=float("-inf"))  # fmt: skip
    return tl.sum(tl.exp2(s - lse[:, None]), 0)


@triton.jit(do_not_specialize=["room", "blocks", "splits", "parts"])
def _score(
    LOGITS, LSE, SCORES, LENGTHS, COUNTS, room, blocks, splits, parts,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, LOCAL: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, NB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * NB
    g = tl.program_id(1)
    b = tl.program_id(2)
    real = True
    if MASKED:
        real = tl.load(COUNTS + b) > 0
    if real:
        after = (tl.load(LENGTHS + b) + 1).to(tl.int32)
        current = (after - 1) // BLOCK
        # a query with no more than COUNT blocks selects them all, and the last LOCAL are forced
        if (current >= COUNT) & (first <= current - LOCAL):
            seen = tl.where(after < L, 0, (after - L) // S + 1)
            pair = (b.to(tl.int64) * G + g) * HEADS
            r = tl.arange(0, RP)
            p = tl.arange(0, SP)
            lse = tl.load(LSE + (pair + r)[:, None] * parts + p[None, :],
                          mask=(r < HEADS)[:, None] & (p < splits)[None, :], other=float("-inf"))  # fmt: skip
            top = tl.max(lse, 1)
            top = tl.where(top > float("-inf"), top, 0.0)
            lse = top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))
            lse = tl.where(r < HEADS, lse, 0.0)
            # In units of S tokens: a compressed token covers A of them, a block has U.
            A: tl.constexpr = L // S
            U: tl.constexpr = BLOCK // S
            x = tl.arange(0, NB * U)
            u = x % U
            i = first * U + x
            own = _probabilities(LOGITS + pair * room, i, i < seen, lse, room, HEADS, RP)
            weight = (tl.minimum(u + A, U) - u).to(tl.float32) / A
            score = tl.sum((own * weight).reshape(NB, U), 1)
            if A > 1:
                # what reaches over from the block before
                over = tl.maximum(u + A - U, 0)
                mask = (over > 0) & (i >= U) & (i - U < seen)
                other = _probabilities(LOGITS + pair * room, i - U, mask, lse, room, HEADS, RP)
                score += tl.sum((other * (over.to(tl.float32) / A)).reshape(NB, U), 1)
            j = first + tl.arange(0, NB)
            tl.store(SCORES + (b.to(tl.int64) * G + g) * blocks + j, score, mask=j < blocks)


@triton.jit
def chosen_places(SCORES, wanted, current, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
                  NP: tl.constexpr):  # fmt: skip
    """For every block its place among those that are chosen by score, -1 for the others; all -1 unless `wanted`."""
    WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
    place = tl.full([NP], -1, tl.int32)
    if WANTED > 0:
        if wanted & (current >= COUNT):
            taken = _best(_load_keys(SCORES, tl.arange(0, NP), current - LOCAL + 1, INITIAL), WANTED)
            place = tl.where(taken, tl.cumsum(taken.to(tl.int32), 0) - 1, -1)
    return place


@triton.jit
def block_at(place, slot, current, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, NP: tl.constexpr):
    """The block in this slot of the ascending list; -1 where there are fewer blocks than slots."""
    free = tl.sum(tl.where(place == slot - INITIAL, tl.arange(0, NP), 0), 0)
    forced = tl.where(slot < INITIAL, slot, current - COUNT + 1 + slot)
    chosen = tl.where((slot >= INITIAL) & (slot < COUNT - LOCAL), free, forced)
    return tl.where(current >= COUNT, chosen, tl.where(slot <= current, slot, -1))


def score(
    logits: Tensor, lse: Tensor, scores: Tensor, lengths: Tensor, counts: Tensor | None, splits: int, config: NSAConfig
) -> None:
    batch, groups, blocks = scores.shape
    heads = logits.shape[1] // groups
    l, d, block = config.compress_block, config.compress_stride, config.select_block
    per = max(1, 256 * d // block)
    call(
        _score, (-(-blocks // per), groups, batch), (logits, lse, scores, lengths, counts),
        (logits.shape[2], blocks, splits, lse.shape[2]),
        (l, d, block, config.select_count, config.select_local, groups, heads, power_of_2(heads),
         max(16, power_of_2(splits)), per, counts is not None),
        num_warps=4,
    )  # fmt: skip

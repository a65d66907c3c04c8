"""Block importance for one query per row (Eq. 9, 10), and the selection of the best blocks (Eq. 11), also by scores
from single tokens (attend.py).

Scores are normalised here, with the log-sum-exp over all parts, not part by part: equal keys then have equal importance
to the last bit wherever they are, and ties are broken by index.

The last program of a (row, KV head) pair to finish its scores selects. If that leaves few candidates, or saves a long
binary search, programs first pick the best of their own blocks by comparing all pairs; at 1,024 blocks that took 2 µs
more than it saved.

logits: fp32 [B, H, room], base 2; or scores of blocks by single tokens [B, G, room]
keys, places: int32 [B, G, programs · kept]: candidate blocks in order, -1 for none
arrived: int32 [B·G], 0 between steps
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.decode.common import Scores, row_is_active, wait_for_previous_launch
from tercet.attention.kernels.launch import call, power_of_2
from tercet.attention.kernels.scores import largest, scaled_exp2
from tercet.attention.kernels.table import overlap_launches


@triton.jit
def _probabilities(LOGITS, i, mask, lse, room, HEADS: tl.constexpr, RP: tl.constexpr):
    """p · 2^100 of compressed tokens i, summed over the heads of a group."""
    r = tl.arange(0, RP)
    s = tl.load(LOGITS + r[:, None] * room + i[None, :], mask=(r < HEADS)[:, None] & mask[None, :],
                other=float("-inf"))  # fmt: skip
    return tl.sum(scaled_exp2(s - lse[:, None]), 0)


@triton.jit
def _importance(
    LOGITS, LSE, pair_of, first, after, room, splits, parts, L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Importance of blocks first … first+NB-1, times 2^100."""
    seen = tl.where(after < L, 0, (after - L) // S + 1)
    pair = pair_of * HEADS
    r = tl.arange(0, RP)
    p = tl.arange(0, SP)
    lse = tl.load(LSE + (pair + r)[:, None] * parts + p[None, :],
                  mask=(r < HEADS)[:, None] & (p < splits)[None, :], other=float("-inf"))  # fmt: skip
    top = tl.max(lse, 1)
    top = tl.where(top > float("-inf"), top, 0.0)
    lse = top + tl.log2(tl.sum(tl.exp2(lse - top[:, None]), 1))
    lse = tl.where(r < HEADS, lse, 0.0)
    # in units of S tokens: a compressed token covers A, a block U
    A: tl.constexpr = L // S
    U: tl.constexpr = BLOCK // S
    x = tl.arange(0, NB * U)
    u = x % U
    i = first * U + x
    own = _probabilities(LOGITS + pair * room, i, i < seen, lse, room, HEADS, RP)
    weight = (tl.minimum(u + A, U) - u).to(tl.float32) / A
    score = tl.sum((own * weight).reshape(NB, U), 1)
    if A > 1:
        # what reaches over from the previous block
        over = tl.maximum(u + A - U, 0)
        mask = (over > 0) & (i >= U) & (i - U < seen)
        other = _probabilities(LOGITS + pair * room, i - U, mask, lse, room, HEADS, RP)
        score += tl.sum((other * (over.to(tl.float32) / A)).reshape(NB, U), 1)
    return score


@triton.jit
def _best_of_few(key, WANTED: tl.constexpr, N: tl.constexpr):
    """Mask of the WANTED largest of N keys, lowest index first among equals: those with fewer better ones. Unlike a
    binary search, it has no dependent rounds."""
    i = tl.arange(0, N)
    mine = key[:, None]
    other = key[None, :]
    better = (other > mine) | ((other == mine) & (i[None, :] < i[:, None]))
    return (tl.sum(better.to(tl.int32), 1) < WANTED) & (key >= 0)


@triton.jit(do_not_specialize=["room", "listed", "splits", "parts"])
def decode_scores_kernel(
    LOGITS, LSE, KEYS, PLACES, INDICES, LENGTHS, COUNTS, ARRIVED, room, listed, splits, parts,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, NB: tl.constexpr, KEPT: tl.constexpr,
    BY_TOKENS: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program * NB
    g = tl.program_id(1)
    b = tl.program_id(2)
    after = (tl.load(LENGTHS + b) + 1).to(tl.int32)
    real = row_is_active(COUNTS, b, MASKED)
    wait_for_previous_launch(OVERLAP)
    if real:
        current = (after - 1) // BLOCK
        WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
        pair_of = b.to(tl.int64) * G + g
        INDICES += pair_of * COUNT
        if first == 0:
            # slots not filled by score: all blocks if there are few, else the forced ones at both ends
            slot = tl.arange(0, CP)
            forced = tl.where(slot < INITIAL, slot, current - COUNT + 1 + slot)
            known = tl.where(current >= COUNT, forced, tl.where(slot <= current, slot, -1))
            free = (current >= COUNT) & (slot >= INITIAL) & (slot < COUNT - LOCAL)
            tl.store(INDICES + slot, known, mask=(slot < COUNT) & (free == 0))
        # a query with at most COUNT blocks selects them all; the last LOCAL are forced
        if (WANTED > 0) & (current >= COUNT) & (first <= current - LOCAL):
            block = first + tl.arange(0, NB)
            free = (block >= INITIAL) & (block <= current - LOCAL)
            if BY_TOKENS:
                score = tl.load(LOGITS + pair_of * room + block, mask=free, other=0.0)
            else:
                score = _importance(LOGITS, LSE, pair_of, first, after, room, splits, parts, L, S, BLOCK, HEADS, RP, SP,
                                    NB)  # fmt: skip
            score = tl.where(score >= 0, score, 0.0)  # NaN counts as 0, so that indices are always valid
            key = score.to(tl.int32, bitcast=True)  # of the same order
            key = tl.where(free, key, -1)  # -1 for forced and absent blocks
            # where programs pick their best, a single program picks the answer
            NAMED: tl.constexpr = KEPT < NB
            alone = False
            if NAMED:
                alone = current - LOCAL < NB
                taken = _best_of_few(key, WANTED, NB)
                to = tl.cumsum(taken.to(tl.int32), 0) - 1
                if alone:
                    tl.store(INDICES + INITIAL + to, block, mask=taken)
            if not alone:
                KEYS += pair_of * listed
                PLACES += pair_of * listed
                if NAMED:
                    slot = tl.arange(0, KEPT)
                    tl.store(KEYS + program * KEPT + slot, -1, mask=slot >= tl.sum(taken.to(tl.int32), 0))
                    tl.store(KEYS + program * KEPT + to, key, mask=taken)
                    tl.store(PLACES + program * KEPT + to, block, mask=taken)
                else:
                    tl.store(KEYS + block, key)
                tl.debug_barrier()  # all threads have written before the counter is incremented
                last = (current - LOCAL) // NB
                if tl.atomic_add(ARRIVED + pair_of, 1, sem="acq_rel") == last:
                    tl.store(ARRIVED + pair_of, 0)
                    place = tl.arange(0, NP)
                    keys = tl.load(KEYS + place, mask=place < (last + 1) * KEPT, other=-1)
                    if NP <= 64:
                        best = _best_of_few(keys, WANTED, NP)
                    else:
                        # one row alone: the time is that of its counts, one after another
                        best = largest(keys[None, :], WANTED, FEW_FIRST=False).reshape(NP)
                    if NAMED:
                        place = tl.load(PLACES + place, mask=best, other=0)
                    tl.store(INDICES + INITIAL + tl.cumsum(best.to(tl.int32), 0) - 1, place, mask=best)


def select_blocks(
    scores: Scores, indices: Tensor, lengths: Tensor, counts: Tensor | None, arrived: Tensor, splits: int,
    blocks: int, config: NSAConfig,
) -> None:  # fmt: skip
    """Fill indices, int32 [B, G, n]: ascending, -1 at the end."""
    logits, lse = scores.logits, scores.lse
    batch, groups, count = indices.shape
    by_tokens = lse is None
    splits = 1 if by_tokens else splits
    heads = logits.shape[1] // groups
    l, d, block = config.compress_block, config.compress_stride, config.select_block
    per = 64 if by_tokens else max(1, min(64, 256 * d // block))
    programs = -(-blocks // per)
    kept = min(per, power_of_2(max(1, count - config.select_initial - config.select_local)))
    if programs * kept > 64 and blocks <= 1024:
        kept = per
    named = torch.empty(2, batch, groups, programs * kept, dtype=torch.int32, device=logits.device)
    # a factor of four apart: a handful of compiled variants for all lengths
    listed = next(n for n in (64, 256, 1024, 4096, 16384) if n >= programs * kept)
    early = overlap_launches(logits, batch * groups)
    call(
        decode_scores_kernel, (programs, groups, batch), (logits, lse, *named, indices, lengths, counts, arrived),
        (logits.shape[2], programs * kept, splits, 0 if lse is None else lse.shape[2]),
        (l, d, block, count, config.select_initial, config.select_local, power_of_2(count), listed, groups, heads,
         power_of_2(heads),
         max(16, power_of_2(splits)), per, kept, by_tokens, counts is not None, early),
        num_warps=8 if listed > 4096 else 4, launch_pdl=early,
    )  # fmt: skip

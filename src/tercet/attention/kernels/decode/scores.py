"""Block importance for one query per row (Eq. 9, 10), and the selection of the best blocks (Eq. 11), also by a learned
selector's scores.

Scores are normalised here, with the log-sum-exp over all parts, not part by part: equal keys then have equal importance
to the last bit wherever they are, and ties are broken by index.

The last program of a (row, KV head) pair to finish its scores selects. If that leaves few candidates, or saves a long
binary search, programs first pick the best of their own blocks by comparing all pairs; at 1,024 blocks that took 2 µs
more than it saved.

logits: fp32 [B, H, room], base 2; or a learned selector's scores of blocks [B, G, room]
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
def _best_of_few(key, WANTED: tl.constexpr):
    """Mask of each row's WANTED largest keys, lowest index first among equals: those with fewer better ones. Unlike a
    binary search, it has no dependent rounds."""
    i = tl.arange(0, key.shape[1])
    mine = key[:, :, None]
    other = key[:, None, :]
    better = (other > mine) | ((other == mine) & (i[None, None, :] < i[None, :, None]))
    return (tl.sum(better.to(tl.int32), 2) < WANTED) & (key >= 0)


@triton.jit
def _best(key, WANTED: tl.constexpr):
    """Mask of each row's WANTED largest keys."""
    if key.shape[1] <= 64:
        return _best_of_few(key, WANTED)
    else:  # few rows: the time is that of the counts, one after another
        return largest(key, WANTED, FEW_FIRST=False)


@triton.jit
def _sort_key(score, free):
    """Scores as integers of the same order; -1 for forced and absent blocks. NaN counts as 0, so that indices are
    always valid."""
    return tl.where(free, tl.where(score >= 0, score, 0.0).to(tl.int32, bitcast=True), -1)


@triton.jit
def _known_blocks(INDICES, mask, current, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
                  CP: tl.constexpr):  # fmt: skip
    """Fill the slots that do not depend on scores: all blocks if there are few, else the forced ones at both ends.
    INDICES, mask: [rows, 1]."""
    slot = tl.arange(0, CP)[None, :]
    forced = tl.where(slot < INITIAL, slot, current - COUNT + 1 + slot)
    known = tl.where(current >= COUNT, forced, tl.where(slot <= current, slot, -1))
    free = (current >= COUNT) & (slot >= INITIAL) & (slot < COUNT - LOCAL)
    tl.store(INDICES + slot, known, mask=mask & (slot < COUNT) & (free == 0))


@triton.jit
def choose_by_selector(
    SCORES, INDICES, ARRIVED, b, g0, program, programs, current, room, COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, CP: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, HP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Called by each of the `programs` that write a learned selector's scores of KV heads g0 … g0+HEADS-1, afterwards;
    the last one selects for these heads. ARRIVED: their counter, 0 between steps."""
    h = tl.arange(0, HP)[:, None]
    own = (h < HEADS) & (g0 + h < G)
    pair = b.to(tl.int64) * G + g0 + h
    INDICES += pair * COUNT
    if program == 0:
        _known_blocks(INDICES, own, current, COUNT, INITIAL, LOCAL, CP)
    WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
    if (WANTED > 0) & (current >= COUNT):
        tl.debug_barrier()  # all threads have written before the counter is incremented
        if tl.atomic_add(ARRIVED, 1, sem="acq_rel") == programs - 1:
            tl.store(ARRIVED, 0)
            block = tl.arange(0, NP)[None, :]
            free = own & (block >= INITIAL) & (block <= current - LOCAL)
            key = _sort_key(tl.load(SCORES + pair * room + block, mask=free, other=0.0), free)
            best = _best(key, WANTED)
            to = INDICES + INITIAL + tl.cumsum(best.to(tl.int32), 1) - 1
            tl.store(to, tl.broadcast_to(block, best.shape), mask=best)


@triton.jit(do_not_specialize=["room", "listed", "splits", "parts"])
def decode_scores_kernel(
    LOGITS, LSE, KEYS, PLACES, INDICES, LENGTHS, COUNTS, ARRIVED, room, listed, splits, parts,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, SP: tl.constexpr, NB: tl.constexpr, KEPT: tl.constexpr,
    LEARNED: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr,
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
            row = tl.zeros([1, 1], tl.int32)
            _known_blocks(INDICES + row, row == 0, current, COUNT, INITIAL, LOCAL, CP)
        # a query with at most COUNT blocks selects them all; the last LOCAL are forced
        if (WANTED > 0) & (current >= COUNT) & (first <= current - LOCAL):
            block = first + tl.arange(0, NB)
            free = (block >= INITIAL) & (block <= current - LOCAL)
            if LEARNED:
                score = tl.load(LOGITS + pair_of * room + block, mask=free, other=0.0)
            else:
                score = _importance(LOGITS, LSE, pair_of, first, after, room, splits, parts, L, S, BLOCK, HEADS, RP, SP,
                                    NB)  # fmt: skip
            key = _sort_key(score, free)
            # where programs pick their best, a single program picks the answer
            NAMED: tl.constexpr = KEPT < NB
            alone = False
            if NAMED:
                alone = current - LOCAL < NB
                taken = _best_of_few(key[None, :], WANTED).reshape(NB)
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
                    best = _best(keys[None, :], WANTED).reshape(NP)
                    if NAMED:
                        place = tl.load(PLACES + place, mask=best, other=0)
                    tl.store(INDICES + INITIAL + tl.cumsum(best.to(tl.int32), 0) - 1, place, mask=best)


# Scores, KV heads times blocks, among which `choose_by_selector` selects: more take longer than another launch.
_MOST_SCORES = 4096


def listed_blocks(blocks: int) -> int:
    """A length of lists, at least this; a factor of four apart: a handful of compiled variants for all lengths."""
    return next(n for n in (64, 256, 1024, 4096, 16384) if n >= blocks)


def chosen_with_scores(heads: int, blocks: int) -> bool:
    """Whether the programs that write a learned selector's scores of these KV heads also select by them."""
    return power_of_2(heads) * listed_blocks(blocks) <= _MOST_SCORES


def select_blocks(
    scores: Scores, indices: Tensor, lengths: Tensor, counts: Tensor | None, arrived: Tensor, splits: int,
    blocks: int, config: NSAConfig,
) -> None:  # fmt: skip
    """Fill indices, int32 [B, G, n]: ascending, -1 at the end."""
    logits, lse = scores.logits, scores.lse
    batch, groups, count = indices.shape
    learned = lse is None
    splits = 1 if learned else splits
    heads = logits.shape[1] // groups
    l, d, block = config.compress_block, config.compress_stride, config.select_block
    per = 64 if learned else max(1, min(64, 256 * d // block))
    programs = -(-blocks // per)
    kept = min(per, power_of_2(max(1, count - config.select_initial - config.select_local)))
    if programs * kept > 64 and blocks <= 1024:
        kept = per
    named = torch.empty(2, batch, groups, programs * kept, dtype=torch.int32, device=logits.device)
    listed = listed_blocks(programs * kept)
    early = overlap_launches(logits, batch * groups)
    call(
        decode_scores_kernel, (programs, groups, batch), (logits, lse, *named, indices, lengths, counts, arrived),
        (logits.shape[2], programs * kept, splits, 0 if lse is None else lse.shape[2]),
        (l, d, block, count, config.select_initial, config.select_local, power_of_2(count), listed, groups, heads,
         power_of_2(heads),
         max(16, power_of_2(splits)), per, kept, learned, counts is not None, early),
        num_warps=8 if listed > 4096 else 4, launch_pdl=early,
    )  # fmt: skip

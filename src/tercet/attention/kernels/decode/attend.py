"""Attention of one query per row, split over many programs; each writes one part (common.Parts) for the merge.

A tile's rows are the h heads of a group, padded to what a matrix product takes. How many keys a program reads follows
from the row's length on the device: the grid is the same for every length, as a CUDA graph requires.

q: [B, H, Dk]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels import table
from tercet.attention.kernels.block_scores import positive, weight, weight_scale
from tercet.attention.kernels.decode.common import Heads, Parts, Scores, row_is_active, wait_for_previous_launch
from tercet.attention.kernels.launch import LOG2E, call, padded, power_of_2
from tercet.attention.kernels.table import overlap_launches


@triton.jit
def _queries(Q, b, g, HEADS: tl.constexpr, G: tl.constexpr, RP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The queries of a group."""
    r = tl.arange(0, RP)
    d = tl.arange(0, DP)
    at = ((b.to(tl.int64) * G + g) * HEADS + r) * D
    return tl.load(Q + at[:, None] + d[None, :], mask=(r < HEADS)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _vectors(X, slot, some, stride, D: tl.constexpr, DP: tl.constexpr):
    """[slots, DP]; X points at the row's head."""
    d = tl.arange(0, DP)
    if D == DP:
        mask = some[:, None]
    else:
        mask = some[:, None] & (d < D)[None, :]
    return tl.load(X + slot[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _step(s, v, some, m, l, acc):
    """One step of the online softmax; s: scores in base 2."""
    s = tl.where(some[None, :], s, float("-inf"))
    # finite even if a whole tile is masked: -inf - -inf is NaN
    top = tl.maximum(tl.maximum(m, tl.max(s, 1)), -1e30)
    fade = tl.exp2(m - top)
    p = tl.exp2(s - top[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return top, l * fade + tl.sum(p, 1), acc


@triton.jit
def _write_part(
    O, LSE, READ, b, g, part, parts, m, l, acc, read, HEADS: tl.constexpr, G: tl.constexpr, RP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)
    d = tl.arange(0, DVP)
    at = ((b.to(tl.int64) * G + g) * HEADS + r) * parts + part
    share = tl.where(l > 0, l, 1.0)
    tl.store(LSE + at, tl.where(l > 0, m + tl.log2(share), float("-inf")), mask=r < HEADS)
    tl.store(READ + (b.to(tl.int64) * G + g) * parts + part, read)
    # a part that read nothing writes no o; the merge ignores it
    tl.store(O + at[:, None] * DV + d[None, :], acc / share[:, None],
             mask=((r < HEADS) & (l > 0))[:, None] & (d < DV)[None, :])  # fmt: skip


@triton.jit
def _attend_split(
    Q, K, V, LOGITS, b, g, first, end, slots, room, scale,
    G: tl.constexpr, HEADS: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, N: tl.constexpr, SCORES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys first … end-1 of a cache tensor: highest score, sum and weighted values."""
    q = _queries(Q, b, g, HEADS, G, RP, DK, DKP)
    r = tl.arange(0, RP)
    i = tl.arange(0, N)
    at = (b.to(tl.int64) * slots + first) * G + g
    K += at * DK
    V += at * DV
    m = tl.full([RP], float("-inf"), tl.float32)
    l = tl.zeros([RP], tl.float32)
    acc = tl.zeros([RP, DVP], tl.float32)
    logits = LOGITS
    if SCORES:
        logits = LOGITS + ((b.to(tl.int64) * G + g) * HEADS + r)[:, None] * room + i[None, :]
    for j in tl.range(first, end, N):
        some = j + i < end
        k = _vectors(K, i, some, G * DK, DK, DKP)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SCORES:
            tl.store(logits + j, s, mask=(r < HEADS)[:, None] & some[None, :])
        if OUT:
            v = _vectors(V, i, some, G * DV, DV, DVP)
            m, l, acc = _step(s, v, some, m, l, acc)
        else:
            s = tl.where(some[None, :], s, float("-inf"))
            top = tl.maximum(m, tl.max(s, 1))
            l = l * tl.exp2(m - top) + tl.sum(tl.exp2(s - top[:, None]), 1)
            m = top
        K += N * G * DK
        V += N * G * DV
    return m, l, acc


@triton.jit
def _score_blocks(
    Q, K, SCORES, b, g0, row, first, end, slots, room, scale,
    BLOCK: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DQ: tl.constexpr, D: tl.constexpr, AT_ONCE: tl.constexpr,
    HP: tl.constexpr, RP: tl.constexpr, WP: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Scores of the blocks first … end-1, all complete, for the KV heads g0 … g0+AT_ONCE-1 (block_scores.py).
    row: numbers from one row of Q to the next. HEADS: queries per KV head, HP a power of two of rows for them. D:
    channels of a key, the last D/2 of each half of a query's DQ.

    Keys of these KV heads are read together, in long contiguous rows. The queries are the rows of a block-diagonal
    matrix, each in its KV head's channels, so that one product gives the logits of all heads. A NaN in one head's key
    is a NaN for all of them (0 · NaN), and counts as the lowest logit."""
    i = tl.arange(0, N)
    r = tl.arange(0, RP)
    c = tl.arange(0, WP)
    NB: tl.constexpr = N // BLOCK
    SETS: tl.constexpr = RP // HP
    here = (c < AT_ONCE * D) & (g0 * D + c < G * D)
    channel = tl.where(c % D < D // 2, DQ // 2 - D // 2, DQ - D) + c % D
    real = (r % HP < HEADS) & (r // HP < AT_ONCE)
    at = ((g0 + r // HP) * HEADS + r % HP) * DQ
    q = tl.load(Q + b.to(tl.int64) * row + at[:, None] + channel[None, :],
                mask=real[:, None] & here[None, :] & (c[None, :] // D == r[:, None] // HP),
                other=0.0).to(K.dtype.element_ty)  # fmt: skip
    K += (b.to(tl.int64) * slots + first * BLOCK) * (G * D) + g0 * D
    g = tl.arange(0, SETS)
    SCORES += (b.to(tl.int64) * G + g0 + g[:, None]) * room
    some = (g < AT_ONCE) & (g0 + g < G)
    for j in tl.range(first, end, NB, num_stages=STAGES):
        k = tl.load(K + i[:, None] * (G * D) + c[None, :], mask=(i < (end - j) * BLOCK)[:, None] & here[None, :],
                    other=0.0)  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if OWN:
            best = tl.where(real[:, None], tl.max(s.reshape(RP, NB, BLOCK), 2), float("-inf"))
            score = positive(tl.max(best.reshape(SETS, HP, NB), 1))
        else:
            score = tl.sum(weight(s, scale).reshape(RP, NB, BLOCK), 2)
        block = j + tl.arange(0, NB)[None, :]
        tl.store(SCORES + block, score, mask=some[:, None] & (block < end))
        K += N * G * D


@triton.jit(do_not_specialize=["slots", "room", "splits", "parts", "selector_row", "selector_slots", "scoring"])
def decode_prefix_kernel(
    Q, K, V, SQ, SK, LENGTHS, COUNTS, O, LSE, READ, LOGITS,
    slots, room, splits, parts, selector_row, selector_slots, scoring, scale, selector_scale,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr,
    DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, N: tl.constexpr,
    SHEADS: tl.constexpr, SDQ: tl.constexpr, SD: tl.constexpr, SG: tl.constexpr, SHP: tl.constexpr, SRP: tl.constexpr,
    SWP: tl.constexpr, SN: tl.constexpr, SSTAGES: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr,
    ATTEND: tl.constexpr, SCORES: tl.constexpr, OUT: tl.constexpr, SELECTOR: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`splits` programs of a pair attend to keys 0, 1, … of a cache tensor: all tokens up to the query (L = S = 1), or
    the compressed tokens that it sees. SCORES: they write the scores, for the selection. Without OUT they read no
    values.

    SELECTOR: before them, `scoring` programs for every SG KV heads write scores by single tokens of the blocks that are
    free."""
    program = tl.program_id(0)
    b = tl.program_id(1)
    SETS: tl.constexpr = (G + SG - 1) // SG if SELECTOR else 0
    after = (tl.load(LENGTHS + b) + 1).to(tl.int32)
    real = row_is_active(COUNTS, b, MASKED)
    wait_for_previous_launch(OVERLAP)
    if SELECTOR:
        current = (after - 1) // BLOCK
        if (program < scoring * SETS) & real & (current >= COUNT):
            free = current - LOCAL - INITIAL + 1
            NB: tl.constexpr = SN // BLOCK
            span = tl.cdiv(tl.cdiv(free, NB), scoring) * NB
            start = INITIAL + program % scoring * span
            stop = tl.minimum(start + span, INITIAL + free)
            _score_blocks(SQ, SK, LOGITS, b, program // scoring * SG, selector_row, start, stop, selector_slots, room,
                          selector_scale, BLOCK, G, SHEADS, SDQ, SD, SG, SHP, SRP, SWP, SN, SSTAGES, OWN)  # fmt: skip
    if ATTEND:
        if program >= scoring * SETS:
            g = (program - scoring * SETS) // splits
            split = (program - scoring * SETS) % splits
            if real:
                seen = tl.where(after < L, 0, (after - L) // S + 1)
                share = tl.cdiv(tl.cdiv(seen, N), splits) * N
                first = split * share
                end = tl.minimum(first + share, seen)
                m, l, acc = _attend_split(Q, K, V, LOGITS, b, g, first, end, slots, room, scale,
                                          G, HEADS, RP, DK, DKP, DV, DVP, N, SCORES, OUT)  # fmt: skip
                read = tl.maximum(end - first, 0)
                _write_part(O, LSE, READ, b, g, split, parts, m, l, acc, read, HEADS, G, RP, DV, DVP)
            else:
                tl.store(READ + (b.to(tl.int64) * G + g) * parts + split, 0)


@triton.jit(do_not_specialize=["slots", "window_slots", "after", "selected_parts", "parts"])
def decode_selected_window_kernel(
    Q, KS, VS, KW, VW, INDICES, LENGTHS, COUNTS, O, LSE, READ,
    slots, window_slots, after, selected_parts, parts, scale,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, DENSE: tl.constexpr, WINDOW: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, N: tl.constexpr, PER: tl.constexpr,
    SELECTED: tl.constexpr, WINDOWED: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The selected blocks (for a query before DENSE: every block), PER of them per program, and the window, PER·N keys
    per program. AHEAD: the previous launch was not the one that wrote q and the tokens."""
    part = tl.program_id(0)
    g = tl.program_id(1)
    b = tl.program_id(2)
    t = tl.load(LENGTHS + b).to(tl.int32)
    real = row_is_active(COUNTS, b, MASKED)
    # the first launch wrote q and the window's keys: if another came in between, they are complete without waiting
    wait_for_previous_launch(OVERLAP and not AHEAD)
    if real:
        q = _queries(Q, b, g, HEADS, G, RP, DK, DKP)
        m = tl.full([RP], float("-inf"), tl.float32)
        l = tl.zeros([RP], tl.float32)
        acc = tl.zeros([RP, DVP], tl.float32)
        read = 0
        if SELECTED:
            if part < selected_parts:
                wait_for_previous_launch(OVERLAP and AHEAD)
                i = tl.arange(0, BLOCK)
                pair = b.to(tl.int64) * G + g
                at = b.to(tl.int64) * slots * G + g
                end = tl.minimum(tl.minimum(part * PER + PER, COUNT), t // BLOCK + 1)
                if DENSE > 0:
                    end = tl.where(t < DENSE, tl.minimum(part * PER + PER, t // BLOCK + 1), end)
                for slot in tl.range(part * PER, end):
                    if DENSE > 0:
                        block = tl.load(INDICES + pair * COUNT + slot, mask=t >= DENSE, other=0)
                        block = tl.where(t >= DENSE, block, slot)
                    else:
                        block = tl.load(INDICES + pair * COUNT + slot)
                    some = block * BLOCK + i <= t
                    row = block.to(tl.int64) * (BLOCK * G)
                    k = _vectors(KS + (at + row) * DK, i, some, G * DK, DK, DKP)
                    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                    v = _vectors(VS + (at + row) * DV, i, some, G * DV, DV, DVP)
                    m, l, acc = _step(s, v, some, m, l, acc)
                    read += tl.sum(some.to(tl.int32), 0)
        if WINDOWED:
            if part >= selected_parts:
                i = tl.arange(0, N)
                held = tl.minimum(t + 1, WINDOW)
                at = b.to(tl.int64) * window_slots * G + g
                if not RING:  # the window is the end of the selected branch's keys
                    at += (t + 1 - held).to(tl.int64) * G
                # softmax does not depend on the order of keys: read the ring as it is
                first = (part - selected_parts) * (PER * N)
                for j in tl.range(first, tl.minimum(first + PER * N, held), N):
                    some = j + i < held
                    k = _vectors(KW + at * DK, j + i, some, G * DK, DK, DKP)
                    v = _vectors(VW + at * DV, j + i, some, G * DV, DV, DVP)
                    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                    m, l, acc = _step(s, v, some, m, l, acc)
                    read += tl.sum(some.to(tl.int32), 0)
        wait_for_previous_launch(OVERLAP and AHEAD)
        _write_part(O, LSE, READ, b, g, after + part, parts, m, l, acc, read, HEADS, G, RP, DV, DVP)
    else:
        wait_for_previous_launch(OVERLAP and AHEAD)
        tl.store(READ + (b.to(tl.int64) * G + g) * parts + after + part, 0)


def tile_keys(q: Tensor, value_size: int) -> int:
    """Keys per tile: fewer for fp32 and long vectors."""
    bytes_ = max(padded(q.shape[-1]), padded(value_size)) * q.element_size()
    return 64 if bytes_ <= 256 else 32 if bytes_ <= 512 else 16


class ScoreTile(NamedTuple):
    """What a program of `_score_blocks` reads at once."""

    groups: int  # KV heads: up to 256 bytes a token in half precision
    rows_per_group: int  # a power of two, for its queries
    rows: int
    channels: int
    tokens: int  # whole blocks: 16 KiB in half precision
    stages: int  # one if a tile is large already

    def bytes(self, dtype: torch.dtype) -> int:
        """Upper bound on shared memory: tiles of keys, the queries, and the logits, which pass through it to change
        layout."""
        vectors = max(1, self.stages - 1) * self.tokens + self.rows
        return vectors * self.channels * dtype.itemsize + self.rows * self.tokens * 4


def score_tile(heads: Heads, block: int, dtype: torch.dtype) -> ScoreTile:
    per_group = power_of_2(heads.heads // heads.groups) if heads.own else 1
    groups = max(1, min(heads.groups, 128 // heads.selector_size, 64 // per_group))
    channels = padded(groups * heads.selector_size)
    tokens = max(block, 8192 // channels)
    stages = 3 if tokens * channels * dtype.itemsize <= 32768 else 1
    return ScoreTile(groups, per_group, padded(power_of_2(groups) * per_group), channels, tokens, stages)


def attend_prefix(
    q: Tensor, held: tuple[Tensor, Tensor] | None, lengths: Tensor, counts: Tensor | None, parts: Parts, splits: int,
    config: NSAConfig | None, scores: Scores | None, *, out: bool = True,
    selector: tuple[Tensor, Tensor] | None = None, scoring: int = 0, sizes: Heads | None = None,
) -> None:  # fmt: skip
    """Every key of a cache tensor (config None), or the compressed tokens, as the first `splits` parts; held: keys and
    values, None to skip them. scores: filled with the scores of these keys or, with a selector, of blocks.

    selector: queries of the new tokens (a learned selector's [B, G·size], or the rotated ones), and the keys that they
    score, of these `sizes`; `scoring` programs per row and `ScoreTile.groups` read them."""
    batch, heads, size = q.shape
    groups = parts.read.shape[1]
    keys, values = held or (None, None)
    value_size = size if values is None else parts.o.shape[3]
    l, d = (1, 1) if config is None else (config.compress_block, config.compress_stride)
    early = overlap_launches(q, batch * groups)
    logits = None if scores is None else scores.logits
    selector_q, selector_k = selector or (None, None)
    row = selector_slots = programs = 0
    choice, tile = (0,) * 4, (1,) * 9  # what blocks there are to choose from, and what scores them
    own, score_scale = False, 0.0
    if config is not None and selector_q is not None and selector_k is not None:
        assert sizes is not None
        row, selector_slots, own = selector_q.stride(0), selector_k.shape[1], sizes.own
        choice = config.select_block, config.select_count, config.select_initial, config.select_local
        scored = score_tile(sizes, config.select_block, selector_k.dtype)
        queries = (heads // groups, size) if own else (1, sizes.selector_size)
        tile, score_scale = (*queries, sizes.selector_size, *scored), weight_scale(sizes.selector_size)
        programs = scoring * -(-groups // scored.groups)
    call(
        decode_prefix_kernel, (programs + (0 if held is None else splits * groups), batch),
        (q, keys, values, selector_q, selector_k, lengths, counts, parts.o, parts.lse, parts.read, logits),
        (0 if keys is None else keys.shape[1], 0 if logits is None else logits.shape[2], splits, parts.count, row,
         selector_slots, scoring),
        (size**-0.5 * LOG2E, score_scale, l, d, *choice, groups, heads // groups, padded(heads // groups),
         size, padded(size), value_size, padded(value_size), tile_keys(q, value_size), *tile, own, counts is not None,
         held is not None, logits is not None and selector is None, out, selector is not None, early),
        num_warps=4, num_stages=3, launch_pdl=early,
    )  # fmt: skip


def attend_selected_window(
    q: Tensor, selected: tuple[Tensor, Tensor] | None, window: tuple[Tensor, Tensor] | None, ring: bool,
    indices: Tensor | None, lengths: Tensor, counts: Tensor | None, parts: Parts,
    after: int, selected_parts: int, window_parts: int, per: int, config: NSAConfig, dense_below: int = 0,
) -> None:  # fmt: skip
    """Selected blocks and window, as the parts from `after` on. indices: int32 [B, G, n]. Rows that hold fewer than
    dense_below tokens read every block."""
    batch, heads, size = q.shape
    keys, values = selected or window  # type: ignore[misc]
    ks, vs = selected or (None, None)
    kw, vw = window or (None, None)
    groups, value_size = keys.shape[2], values.shape[3]
    stages = read_stages(q.device, q.dtype, heads // groups, size, value_size, config)
    assert stages is not None  # step.unsupported has rejected it
    early = overlap_launches(q, batch * groups)
    call(
        decode_selected_window_kernel, (selected_parts + window_parts, groups, batch),
        (q, ks, vs, kw, vw, indices, lengths, counts, parts.o, parts.lse, parts.read),
        (0 if ks is None else ks.shape[1], 0 if kw is None else kw.shape[1], after, selected_parts, parts.count),
        (size**-0.5 * LOG2E, config.select_block, config.select_count, dense_below, config.window, groups,
         heads // groups, padded(heads // groups), size, padded(size), value_size, padded(value_size),
         window_tile(config), per, ks is not None, kw is not None, ring,
         counts is not None, early, after > 0),
        num_warps=8 if _wide(q.dtype, size, value_size) else 4, num_stages=stages, launch_pdl=early,
    )  # fmt: skip


def read_stages(
    device: torch.device, dtype: torch.dtype, heads: int, size: int, value_size: int, config: NSAConfig
) -> int | None:
    """Pipeline stages of `attend_selected_window`: as many as fit shared memory; None if not even one tile fits.

    heads: per group."""
    most = 2 if _wide(dtype, size, value_size) else 3
    limit = table.shared_memory(device)
    return next((n for n in range(most, 1, -1) if read_bytes(dtype, heads, size, value_size, config, n) <= limit), None)


def read_bytes(dtype: torch.dtype, heads: int, size: int, value_size: int, config: NSAConfig, stages: int = 2) -> int:
    """Upper bound on its shared memory: stages - 1 tiles of keys and values; the queries; and the larger of
    probabilities and accumulator, which pass through it to change layout."""
    n, dk, dv = window_tile(config), padded(size), padded(value_size)
    tiles = n * (dk + dv) * dtype.itemsize * (stages - 1)
    return tiles + padded(heads) * (dk * dtype.itemsize + max(n, dv) * 4)


def _wide(dtype: torch.dtype, size: int, value_size: int) -> bool:
    return dtype.itemsize * max(padded(size), padded(value_size)) > 512


def window_tile(config: NSAConfig) -> int:
    """Keys per tile of the window: a selected block's, so that all parts are alike."""
    return max(16, config.select_block)


def empty_parts(q: Tensor, groups: int, value_size: int, count: int) -> Parts:
    batch, heads, _ = q.shape
    return Parts(
        torch.empty(batch, heads, count, value_size, dtype=torch.float32, device=q.device),
        torch.empty(batch, heads, count, dtype=torch.float32, device=q.device),
        torch.empty(batch, groups, count, dtype=torch.int32, device=q.device),
    )

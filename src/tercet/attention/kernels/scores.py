"""Block importance (Eq. 9, 10) and the exact selection of the best blocks (Eq. 11). No gradients.

A second pass over q and kc with the log-sum-exp of the first: p comes out normalised, the heads of a group are added in
registers, and only scores of [queries, G, blocks] are written, for as many queries at a time as the scratch holds. A
program holds all heads of its queries in a few row tiles and loops over the keys; re-reading the queries for every key
tile would miss the cache where heads are many. Pooling p over blocks is a product with a constant matrix on the tensor
cores. For it, p is cut to 17 bits, which two bf16 numbers hold exactly: a single fp16 number loses the order of
near-ties in up to 5 slots of 10,000, and fp16 numbers are 0 far below the row's largest p. Sums of a few such numbers
are exact, so that equal blocks have equal scores wherever key tiles begin.

Scores are scaled by 2^100, here and in decode/scores.py, so that their order holds down to 2^-218 of the largest p
(logits 150 apart); below 2^-226 they are 0.

scores: fp32 [queries, G, blocks]   block_indices: int32 [B, T, G, n], ascending, -1 at the end
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.hardware import interpreting
from tercet.attention.kernels.launch import LOG2E, call, descriptors, padded, power_of_2
from tercet.attention.kernels.table import Launch, gluon_launch, triton_launch
from tercet.attention.kernels.tiles import load_tile
from tercet.attention.kernels.varlen import Documents, locate_queries, visible

# One range of queries at 64k tokens and two KV heads, also packed: at the end of each range few programs run.
SCRATCH_BYTES = 576 << 20
_SIDE_BY_SIDE = 4  # most rows that one program selects for at once
WIDEST = 1024  # most scores that one program selects from; longer rows take two rounds
_PER_BATCH = [
    "docs", "length", "per_sequence", "first_query", "queries", "tile0", "blocks", "compressed_length", "rows",
]  # fmt: skip


@triton.jit
def scaled_exp2(x):
    """2^(x + 100) for x up to 0, as accurate as 2^x: near 0, adding 100 to x would round it."""
    low = x < -100.0
    return tl.exp2(tl.where(low, x + 100.0, x)) * tl.where(low, 1.0, 1.2676506002282294e30)


@triton.jit
def _pool(p, weights, carry, NBP: tl.constexpr, SPLIT: tl.constexpr):
    """Pool p over blocks. `carry`: what the previous tile adds to the first block."""
    high = p.to(weights.dtype)
    pool = tl.dot(high, weights, input_precision="ieee")
    if SPLIT:
        pool = tl.dot((p - high.to(tl.float32)).to(weights.dtype), weights, pool)
    return pool + tl.where(tl.arange(0, NBP)[None, :] == 0, carry[:, None], 0.0)


@triton.jit
def _probabilities(q, kt, lse, scale, SPLIT: tl.constexpr):
    """p · 2^100. SPLIT: lse is given less 100, which is accurate enough for half-precision inputs."""
    x = tl.dot(q, kt, input_precision="ieee") * scale - lse[:, None]
    return tl.exp2(x) if SPLIT else scaled_exp2(x)


@triton.jit
def _heads_tile(
    Q, LSE, row0, first, size, g, tile, rows, q_t, q_h,
    HEADS: tl.constexpr, HT: tl.constexpr, QT: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A row tile, QT queries of each of HT heads, and its lse, less 100 if SPLIT; idle rows get +inf, hence p = 0."""
    r = tl.arange(0, HT * QT)
    h = tile * HT + r // QT
    t = r % QT
    head = (g * HEADS + h).to(tl.int64)
    inside = (h < HEADS) & (first + t < size)
    d = tl.arange(0, DKP)
    row = (row0 + first + t).to(tl.int64)
    mask = inside[:, None]
    if DK != DKP:
        mask = mask & (d < DK)[None, :]
    q = tl.load(Q + (row * q_t + head * q_h)[:, None] + d[None, :], mask=mask, other=0.0)
    lse = tl.load(LSE + head * rows + row, mask=inside, other=float("inf"))
    if SPLIT:
        lse -= 100.0
    return q, lse


@triton.jit
def _score_step(
    K, KD, qs, lses, c0, j, end, g, k_t, seen, weights, spill, carry, out, store, blocks, scale,
    DK: tl.constexpr, DKP: tl.constexpr, N: tl.constexpr, NB: tl.constexpr, NBP: tl.constexpr, HT: tl.constexpr,
    QT: tl.constexpr, TILES: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    k = load_tile(K, KD, c0 + j, end - j, g, k_t, DK, DKP, N, TMA, not MASK)
    kt = tl.trans(k)
    p = _probabilities(qs[0], kt, lses[0], scale, SPLIT)
    for x in tl.static_range(1, TILES):
        p += _probabilities(qs[x], kt, lses[x], scale, SPLIT)
    if MASK:
        p = tl.where(tl.arange(0, N)[None, :] < (seen - j)[:, None], p, 0.0)
    if SPLIT:
        p = (p.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    score = _pool(p, weights, carry, NBP, SPLIT)
    carry = tl.sum(p * spill[None, :], 1)
    score = tl.sum(tl.reshape(score, [HT, QT, NBP]), 0)
    b = tl.arange(0, NBP)
    tl.store(out + j // N * NB, score, mask=store & (j // N * NB + b < blocks)[None, :])
    return carry


@triton.jit(do_not_specialize=_PER_BATCH)
def scores_kernel(
    Q, K, KD, LSE, SCORES, CU, CCU, docs, length, per_sequence, first_query, queries, tile0, blocks, compressed_length,
    rows, q_t, q_h, k_t, k_h, scale,
    L: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, LOCAL: tl.constexpr,
    G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, HT: tl.constexpr, QT: tl.constexpr,
    TILES: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    local_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    doc, _, row0, size, first = locate_queries(
        CU, docs, tile0 + local_tile, length, per_sequence, first_query, queries, QT, PACKED, QUERY_RANGE
    )
    last = tl.minimum(first + QT, size) - 1
    # a query with at most COUNT blocks selects them all and needs no scores
    if (first < size) & (last // BLOCK >= COUNT):
        if PACKED:
            c0 = tl.load(CCU + doc)
        else:
            c0 = doc * compressed_length
        qs = ()
        lses = ()
        for x in tl.static_range(0, TILES):
            q, lse = _heads_tile(Q, LSE, row0, first, size, g, x, rows, q_t, q_h, HEADS, HT, QT, DK, DKP, SPLIT)
            qs = qs + (q,)
            lses = lses + (lse,)
        # blocks that are forced for every query of the tile need no scores
        end = tl.minimum(visible(last, L, S), (last // BLOCK - LOCAL + 1) * (BLOCK // S))
        seen = tl.minimum(visible(first + tl.arange(0, HT * QT) % QT, L, S), end)
        whole = tl.minimum(visible(first, L, S), end) // N * N
        K += g.to(tl.int64) * k_h
        NB: tl.constexpr = N * S // BLOCK
        NBP: tl.constexpr = NB if NB > 16 else 16
        i = tl.arange(0, N)
        b = tl.arange(0, NBP)
        overlap = tl.minimum((i * S + L)[:, None], (b * BLOCK + BLOCK)[None, :]) - tl.maximum(
            (i * S)[:, None], (b * BLOCK)[None, :]
        )
        overlap = tl.where((b < NB)[None, :], tl.maximum(overlap, 0), 0)
        weights = (overlap.to(tl.float32) / L).to(tl.bfloat16 if SPLIT else tl.float32)
        spill = tl.maximum(i * S + L - N * S, 0).to(tl.float32) / L  # what reaches into the next tile's first block
        carry = tl.zeros([HT * QT], tl.float32)
        blocks = tl.multiple_of(blocks, 4)
        t = tl.arange(0, QT)
        out = SCORES + ((local_tile * QT + t).to(tl.int64) * G + g)[:, None] * blocks + b[None, :]
        store = (first + t < size)[:, None] & (b < NB)[None, :]
        for j in tl.range(0, whole, N):
            carry = _score_step(
                K, KD, qs, lses, c0, j, end, g, k_t, seen, weights, spill, carry, out, store, blocks, scale,
                DK, DKP, N, NB, NBP, HT, QT, TILES, TMA, SPLIT, False)  # fmt: skip
        for j in tl.range(whole, end, N):
            carry = _score_step(
                K, KD, qs, lses, c0, j, end, g, k_t, seen, weights, spill, carry, out, store, blocks, scale,
                DK, DKP, N, NB, NBP, HT, QT, TILES, TMA, SPLIT, True)  # fmt: skip


@triton.jit
def _at_least(key, bound):
    """How many keys of each row are at least as large as `bound`, which is 0 or more.

    The sign of a difference takes two instructions per key, one of them a shift and an addition; comparing takes
    three."""
    return -tl.sum((bound[:, None] - 1 - key) >> 31, 1)


@triton.jit
def _bits(x):
    """The number of bits set. The compiler makes one instruction of this."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) & 0xFFFFFFFF) >> 24


@triton.jit
def _store_places(OUT, taken):
    """Stores the places of each row's taken elements in ascending order. Each 32 elements are the bits of a number, so
    that a row has only a few numbers to add up and to take apart."""
    R: tl.constexpr = taken.shape[0]
    N: tl.constexpr = taken.shape[1]
    lane = tl.arange(0, 32)[None, None, :].to(tl.uint32)
    word = tl.sum(tl.reshape(taken, [R, N // 32, 32]).to(tl.uint32) << lane, 2)
    number = tl.broadcast_to(tl.arange(0, N // 32)[None, :], [R, N // 32])
    word = tl.gather(word, number, 1)
    count = _bits(word).to(tl.int32)
    to = OUT[:, None] + tl.cumsum(count, 1) - count
    while tl.max(tl.max(count, 1), 0) > 0:
        below = _bits((word & (0 - word)) - 1).to(tl.int32)
        tl.store(to, number * 32 + below, mask=count > 0)
        to += 1
        count -= 1
        word = word & (word - 1)


@triton.jit
def _threshold(key, wanted, low, high, middle):
    """`low` raised as far as `wanted` keys of each row are at least as large; at most to `high`, the largest key. And
    how many keys are: a number over `wanted` if that is not known.

    One count per step, the first at `middle`; the rows of a tile overlap the latency of each other's counts."""
    many = tl.where(high < 0, 0, key.shape[1] + 1)
    while tl.max(high - low, 0) > 0:
        count = _at_least(key, middle)
        going = low < high
        enough = going & (count >= wanted)
        high = tl.where(going & (count < wanted), middle - 1, tl.where(enough & (count == wanted), middle, high))
        low = tl.where(enough, middle, low)
        many = tl.where(enough, count, many)
        middle = low + (high - low + 1) // 2
    return low, many


@triton.jit
def largest(key, wanted, FEW_FIRST: tl.constexpr = True):
    """Mask of each row's `wanted` largest keys, lowest index first among equals. key: int32, -1 for none.

    Binary search for the value of the smallest key taken: a few counts, whatever the number wanted. Taking the maximum
    `wanted` times costs as much at 13 and grows with it. It begins at a 16th of the largest score. FEW_FIRST: long rows
    begin with a search among the largest of each N / 128 keys. It is cheap, and its result is a lower bound: at least
    `wanted` keys reach it, often exactly `wanted`; then one count over all keys remains. (With more than 128 wanted it
    finds nothing.)"""
    R: tl.constexpr = key.shape[0]
    N: tl.constexpr = key.shape[1]
    high = tl.max(key, 1)
    low = tl.minimum(high, 0)
    middle = tl.maximum(low + (high - low + 1) // 2, high - (4 << 23))
    if FEW_FIRST and N >= 256:
        low, _ = _threshold(tl.max(tl.reshape(key, [R, N // 128, 128]), 1), wanted, low, high, middle)
        middle = low
    low, many = _threshold(key, wanted, low, high, middle)
    if tl.max(many, 0) > wanted:
        # several keys equal the smallest one taken: search for the place of the last of them that is taken
        place = tl.arange(0, N)[None, :]
        missing = wanted - tl.sum((key > low[:, None]).to(tl.int32), 1)
        first = tl.zeros([R], tl.int32)
        last = tl.full([R], N - 1, tl.int32)
        while tl.max(last - first, 0) > 0:
            middle = (first + last) // 2
            enough = tl.sum(((key == low[:, None]) & (place <= middle[:, None])).to(tl.int32), 1) >= missing
            first = tl.where(enough | (first == last), first, middle + 1)
            last = tl.where(enough, middle, last)
        key = tl.where((key == low[:, None]) & (place > last[:, None]), -1, key)
    return key >= tl.maximum(low, 0)[:, None]


@triton.jit
def _load_keys(SCORES, block, end, blocks, INITIAL: tl.constexpr, PACKED: tl.constexpr):
    """Scores as integers of the same order, at least 0; -1 for forced and absent blocks.

    NaN counts as lowest: indices are always valid.

    A row has `blocks` scores. That suffices unless a packed document is longer than the caller's upper bound; then
    blocks beyond count as lowest, which selects worse but reads no other row's memory."""
    if PACKED:
        there = tl.minimum(end, blocks)
    else:  # the host knows the length; a bound would cost registers
        there = end
    aligned = (there + 3) // 4 * 4  # rows have a multiple of 4 scores: load 4 at once
    score = tl.load(SCORES[:, None] + block, mask=block < aligned[:, None], other=0.0)
    key = tl.where(score > 0, score, 0.0).to(tl.int32, bitcast=True)  # 0 for NaN
    return tl.where((block >= INITIAL) & (block < end[:, None]), key, -1)


@triton.jit
def _choose_range(
    SCORES, OUT, end, blocks, INITIAL: tl.constexpr, WANTED: tl.constexpr, NP: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    block = tl.arange(0, NP)[None, :]
    _store_places(OUT, largest(_load_keys(SCORES, block, end, blocks, INITIAL, PACKED), WANTED))


@triton.jit(do_not_specialize=_PER_BATCH[:7])
def select_kernel(
    SCORES, INDICES, CU, docs, length, per_sequence, first_query, queries, tile0, blocks,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, CP: tl.constexpr,
    G: tl.constexpr, QT: tl.constexpr, R: tl.constexpr, NP: tl.constexpr, PACKED: tl.constexpr,
    QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    # R queries of one tile
    row = tl.program_id(0) * R
    g = tl.program_id(1)
    _, _, rows, size, first = locate_queries(
        CU, docs, tile0 + row // QT, length, per_sequence, first_query, queries, QT, PACKED, QUERY_RANGE
    )
    first += row % QT
    if first < size:
        position = first + tl.arange(0, R)
        inside = position < size
        current = position // BLOCK
        few = current < COUNT
        out = INDICES + ((rows + position).to(tl.int64) * G + g) * COUNT
        slot = tl.arange(0, CP)[None, :]
        WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
        all_there = tl.where(slot <= current[:, None], slot, -1)
        forced = tl.where(slot < INITIAL, slot, current[:, None] - COUNT + 1 + slot)
        known = few[:, None] | (slot < INITIAL) | (slot >= COUNT - LOCAL)
        tl.store(
            out[:, None] + slot, tl.where(few[:, None], all_there, forced),
            mask=inside[:, None] & (slot < COUNT) & known,
        )  # fmt: skip
        last = (tl.minimum(first + R, size) - 1) // BLOCK
        if (WANTED > 0) & (last >= COUNT):
            scores = SCORES + ((row + tl.arange(0, R)).to(tl.int64) * G + g) * (blocks // 4 * 4)
            end = tl.where(inside & (current >= COUNT), current - LOCAL + 1, 0)
            last -= LOCAL - 1
            HALF: tl.constexpr = NP // 2 if NP >= 128 else NP
            QUARTER: tl.constexpr = NP // 4 if NP >= 128 else NP
            out += INITIAL
            if (NP >= 128) & (last <= QUARTER):
                _choose_range(scores, out, end, blocks, INITIAL, WANTED, QUARTER, PACKED)
            elif (NP >= 128) & (last <= HALF):
                _choose_range(scores, out, end, blocks, INITIAL, WANTED, HALF, PACKED)
            else:
                _choose_range(scores, out, end, blocks, INITIAL, WANTED, NP, PACKED)


@triton.jit(do_not_specialize=_PER_BATCH[:7])
def shortlist_kernel(
    SCORES, KEYS, PLACES, CU, docs, length, per_sequence, first_query, queries, tile0, blocks,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    G: tl.constexpr, QT: tl.constexpr, NP: tl.constexpr, CHUNKS: tl.constexpr, WP: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    # first round of long rows: the best of each NP scores, in ascending order, with their scores
    row = tl.program_id(0)
    g = tl.program_id(1)
    chunk = tl.program_id(2)
    _, _, _, size, first = locate_queries(
        CU, docs, tile0 + row // QT, length, per_sequence, first_query, queries, QT, PACKED, QUERY_RANGE
    )
    position = first + row % QT
    WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
    end = position // BLOCK - LOCAL + 1
    if (position < size) & (position // BLOCK >= COUNT):
        slot = tl.arange(0, WP)
        out = ((row.to(tl.int64) * G + g) * CHUNKS + chunk) * WANTED
        block = (chunk * NP + tl.arange(0, NP))[None, :]
        alone = tl.arange(0, 1)
        scores = SCORES + (row.to(tl.int64) * G + g) * tl.multiple_of(blocks, 4) + alone
        key = _load_keys(scores, block, end + alone, blocks, INITIAL, PACKED)
        taken = largest(key, WANTED)
        place = tl.cumsum(taken.to(tl.int32), 1) - 1
        number = tl.sum(tl.sum(taken.to(tl.int32), 1), 0)
        tl.store(KEYS + out + slot, -1, mask=(slot >= number) & (slot < WANTED))
        tl.store(KEYS + out + place, key, mask=taken)
        tl.store(PLACES + out + place, block, mask=taken)


@triton.jit(do_not_specialize=_PER_BATCH[:6])
def select_shortlisted_kernel(
    KEYS, PLACES, INDICES, CU, docs, length, per_sequence, first_query, queries, tile0,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, CP: tl.constexpr,
    G: tl.constexpr, QT: tl.constexpr, LISTED: tl.constexpr, NP: tl.constexpr, PACKED: tl.constexpr,
    QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    g = tl.program_id(1)
    _, _, rows, size, first = locate_queries(
        CU, docs, tile0 + row // QT, length, per_sequence, first_query, queries, QT, PACKED, QUERY_RANGE
    )
    position = first + row % QT
    if position < size:
        current = position // BLOCK
        out = INDICES + ((rows + position).to(tl.int64) * G + g) * COUNT
        slot = tl.arange(0, CP)
        WANTED: tl.constexpr = COUNT - INITIAL - LOCAL
        if current < COUNT:
            tl.store(out + slot, tl.where(slot <= current, slot, -1), mask=slot < COUNT)
        else:
            forced = tl.where(slot < INITIAL, slot, current - COUNT + 1 + slot)
            tl.store(out + slot, forced, mask=(slot < COUNT) & ((slot < INITIAL) | (slot >= COUNT - LOCAL)))
            i = tl.arange(0, NP)[None, :]
            listed = (row.to(tl.int64) * G + g) * LISTED + i
            key = tl.load(KEYS + listed, mask=i < LISTED, other=-1)
            taken = largest(key, WANTED)
            block = tl.load(PLACES + listed, mask=taken, other=0)
            tl.store(out + INITIAL + tl.cumsum(taken.to(tl.int32), 1) - 1, block, mask=taken)


def choose(
    q: Tensor, groups: int, config: NSAConfig, documents: Documents, queries: int,
    score: Callable[[Tensor, int, int, int], None], scratch_bytes: int, widest: int,
) -> Tensor:  # fmt: skip
    """block_indices of every query: forced blocks, and the best others by their scores.

    `score(scores, blocks, tile0, tiles)` writes the scores of `tiles` tiles of `queries` queries each, from tile0 on,
    to the scratch, fp32 [queries, groups, blocks], at least 0."""
    B, T = q.shape[:2]
    count, initial, local, block = config.select_count, config.select_initial, config.select_local, config.select_block
    wanted = count - initial - local
    indices = torch.empty(B, T, groups, count, dtype=torch.int32, device=q.device)
    blocks = config.num_blocks(min(documents.first_query + documents.queries, documents.longest))
    tiles = documents.query_tiles(queries)
    chunks = -(-(blocks - local) // widest) if blocks > count and wanted else 1
    per_tile = queries * groups * (blocks * 4 + (chunks > 1) * chunks * wanted * 8)
    step = max(1, min(tiles, scratch_bytes // per_tile))
    scored = wanted > 0 and blocks > count
    blocks = -(-blocks // 4) * 4  # rows of scores start at multiples of 16 bytes
    scores = torch.empty(step * queries * groups * blocks if scored else 0, dtype=torch.float32, device=q.device)
    listed = chunks * wanted
    if chunks > 1:
        shortlist = torch.empty(2, step * queries * groups * listed, dtype=torch.int32, device=q.device)
    cu, *bounds = documents.query_tokens(queries)
    sizes = (block, count, initial, local)
    packing = (documents.packed, documents.query_range)
    slots = power_of_2(count)
    for tile0 in range(0, tiles, step):
        here = min(step, tiles - tile0)
        if scored:
            score(scores, blocks, tile0, here)
        if chunks > 1:
            call(
                shortlist_kernel, (here * queries, groups, chunks), (scores, shortlist[0], shortlist[1], cu),
                (*bounds, tile0, blocks),
                (*sizes, groups, queries, widest, chunks, power_of_2(wanted), *packing), num_warps=1,
            )  # fmt: skip
            call(
                select_shortlisted_kernel, (here * queries, groups), (shortlist[0], shortlist[1], indices, cu),
                (*bounds, tile0),
                (*sizes, slots, groups, queries, listed, power_of_2(listed), *packing), num_warps=1,
            )  # fmt: skip
        else:
            # at least as many as wanted, also if documents are longer than the upper bound
            wide = power_of_2(max(32, wanted + initial, blocks - local))
            side = min(_SIDE_BY_SIDE, queries, max(1, 512 // wide))
            call(
                select_kernel, (here * queries // side, groups), (scores, indices, cu),
                (*bounds, tile0, blocks if scored else 0),
                (*sizes, slots, groups, queries, side, wide, *packing), num_warps=1,
            )  # fmt: skip
    return indices


def _tile(launch: Launch, heads: int, config: NSAConfig) -> tuple[int, int]:
    """Keys of a tile, at most those of 32 blocks, whose scores fit the registers; and heads that share a row tile, so
    that at most launch.held row tiles hold the heads of a group."""
    per_block = config.select_block // config.compress_stride
    return max(min(launch.keys, 32 * per_block), per_block), min(launch.rows, power_of_2(-(-heads // launch.held)))


def select(
    q: Tensor, k: Tensor, lse: Tensor, config: NSAConfig, documents: Documents, launch: Launch | None = None,
    scratch_bytes: int = SCRATCH_BYTES, widest: int = WIDEST,
) -> Tensor:  # fmt: skip
    """block_indices of every query, from the compressed keys and the log-sum-exp of compressed attention."""
    B, T, H, DK = q.shape
    G = k.shape[2]
    heads, block = H // G, config.select_block
    if launch is None and (
        fast := gluon_launch("score", q, k, packed=documents.packed, query_range=documents.query_range)
    ):
        keys, together = _tile(fast, heads, config)
        if keys == fast.keys:
            from tercet.attention.kernels.hopper.scores import launch_scores

            def fast_score(scores: Tensor, blocks: int, tile0: int, tiles: int) -> None:
                launch_scores(q, k, lse, scores, config, documents, blocks, tile0, tiles, together, fast)

            return choose(q, G, config, documents, fast.rows // together, fast_score, scratch_bytes, widest)
    launch = launch or triton_launch("score", q, k)
    keys, together = _tile(launch, heads, config)
    held, queries = -(-heads // together), launch.rows // together
    (kd,) = descriptors(launch.tma, keys, k)
    split = q.dtype != torch.float32 and not interpreting()  # the interpreter multiplies no bf16
    cu, *bounds = documents.query_tokens(queries)

    def score(scores: Tensor, blocks: int, tile0: int, tiles: int) -> None:
        call(
            scores_kernel, (tiles, G), (q, k, kd, lse, scores, cu, documents.ccu),
            (*bounds, tile0, blocks, documents.compressed_length, B * T),
            (q.stride(1), q.stride(2), k.stride(1), k.stride(2), DK**-0.5 * LOG2E,
            config.compress_block, config.compress_stride, block, config.select_count, config.select_local, G, heads,
            DK, padded(DK), together, queries, held, keys, documents.packed, documents.query_range, kd is not None,
            split), **launch.options,
        )  # fmt: skip

    return choose(q, G, config, documents, queries, score, scratch_bytes, widest)

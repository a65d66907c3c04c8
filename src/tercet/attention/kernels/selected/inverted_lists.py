"""Inverted lists of a selection: for each block, the (token, slot) entries that selected it, in token order.

Entries are split into *ranges* of queries, so that the KV-major design's scratch stays small and the queries of a range
stay in L2. The entries of a range are contiguous. Padding is sorted along, so that every range begins at a position
known without reading anything back. Within a range the order is (KV head, block, forced, token): a stable sort by

    key = ((range · G + KV head) · L + block) · 2 + forced

The sort returns flat positions in block_indices, hence token and slot. Blocks are numbered over all documents: first
token // BS + document for packed ones (a document adds at most one to the plain count), sequence · blocks per sequence
+ block for plain batches. Number L - 1 stands for padding, and for given blocks after the query's own, which are not
attended.

Lists are split into *pieces* of at most SEGMENT entries, one per program. Piece i of a list has slot (list's position
in the range) // SEGMENT + list + i of the range: unique, since it grows with every segment of entries and with every
list.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.selected.query_major import document_start, token_of


@triton.jit(do_not_specialize=["documents", "steps", "L", "queries", "first_query"])
def make_sort_keys(
    IDX, CU, KEYS, SPAN, N, T, queries, first_query, documents, steps, blocks_per_sequence, L, range_tokens,
    G: tl.constexpr, n: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """IDX: int32 [N, G, n]. KEYS: int32, or int16 if they fit, [N, G, n]. SPAN, int32 [N, G]: first free slot, past the
    last free slot << 10, past the last slot << 20."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, NP)
    query = tl.minimum(row // G, N - 1)
    t = token_of(query, T, queries, first_query, QUERY_RANGE)
    g = row % G
    ok = (row < N * G)[:, None] & (i < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + i[None, :]
    block = tl.load(IDX + at, mask=ok, other=-1)
    document, start = document_start(t, CU, documents, steps, T, PACKED)
    if PACKED:
        base = start // BS + document
    else:
        base = document * blocks_per_sequence
    own = (t - start) // BS
    last_free = own - LOCAL
    # A block after the query's own counts as padding. As a forced entry it would precede the block's own queries, where
    # hopper/selected_dkv.py expects those, and might be in an earlier range than the one that starts the block's sum.
    real = (block >= 0) & (block <= own[:, None])
    forced = real & ((block < INITIAL) | (block > last_free[:, None]))
    number = tl.where(real, base[:, None] + block, L - 1)
    key = (((query // range_tokens * G + g) * L)[:, None] + number) * 2 + forced.to(tl.int32)
    tl.store(KEYS + at, key.to(KEYS.dtype.element_ty), mask=ok)
    lo = tl.sum((real & (block < INITIAL)).to(tl.int32), 1)
    hi = tl.sum((real & (block <= last_free[:, None])).to(tl.int32), 1)
    past = tl.sum(real.to(tl.int32), 1)
    tl.store(SPAN + row, lo | (hi << 10) | (past << 20), mask=row < N * G)


@triton.jit
def halve(KEYS, key, begin, end):
    """One step of the binary search for the first sorted position in begin..end whose key is at least `key`."""
    middle = (begin + end) // 2
    less = (begin < end) & (tl.load(KEYS + middle, mask=begin < end, other=0).to(tl.int32) < key)
    return tl.where(less, middle + 1, begin), tl.where(less, end, middle)


@triton.jit(do_not_specialize=["documents", "steps", "lists", "slots", "L", "queries", "first_query"])
def cut_lists(
    IDX, CU, KEYS, ORDER, LISTS, PIECE, lists, slots, N, T, queries, first_query, range_tokens, documents, steps,
    range_steps, L,
    G: tl.constexpr, n: tl.constexpr, BS: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """Find each list's entries and assign slots to its pieces.

    KEYS: sorted. ORDER, int64: flat positions in IDX, in the order of KEYS. LISTS, int32 [4, ranges·G·L]: first entry,
    past the last, first token of the block, first forced entry. PIECE, int32 [2, ranges, slots], zeros on entry:
    1 + first entry of the piece (0: no piece), and its list.
    """
    lst = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = lst < lists
    r = tl.minimum(lst, lists - 1) // (G * L)
    base = r * range_tokens * (G * n)
    past = tl.minimum((r + 1) * range_tokens, N) * (G * n)
    # three searches at once, since each step waits for memory
    lo, lo_end = base, past
    forced, forced_end = base, past
    hi, hi_end = base, past
    for _ in range(range_steps):
        lo, lo_end = halve(KEYS, lst * 2, lo, lo_end)
        forced, forced_end = halve(KEYS, lst * 2 + 1, forced, forced_end)
        hi, hi_end = halve(KEYS, lst * 2 + 2, hi, hi_end)
    tl.store(LISTS + lst, lo, mask=ok)
    tl.store(LISTS + lists + lst, hi, mask=ok)
    tl.store(LISTS + 3 * lists + lst, forced, mask=ok)
    some = ok & (lo < hi)
    e = tl.load(ORDER + lo, mask=some, other=0).to(tl.int32)
    block = tl.load(IDX + e, mask=some, other=0)
    t = token_of(e // (G * n), T, queries, first_query, QUERY_RANGE)
    _, start = document_start(t, CU, documents, steps, T, PACKED)
    tl.store(LISTS + 2 * lists + lst, start + block * BS, mask=some)
    slot = r.to(tl.int64) * slots + (lo - base) // SEGMENT + lst % (G * L)
    # padding gets no pieces: nobody reads it, and it may be the longest list by far
    pieces = tl.where(ok & (lst % L < L - 1), tl.cdiv(hi - lo, SEGMENT), 0)
    for i in range(tl.max(pieces)):
        tl.store(PIECE + slot + i, lo + i * SEGMENT + 1, mask=i < pieces)
        tl.store(PIECE + (lists // (G * L)).to(tl.int64) * slots + slot + i, lst, mask=i < pieces)


@triton.jit
def choose_design(
    COUNTS, DECISION, tiles, range_tiles, limit_forward, limit_backward,
    G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """COUNTS, int32 [G, tiles]: lengths of the tile lists. DECISION, int32 [2, ranges]: 1 where the mean length in the
    range exceeds the limit and KV-major runs, forward and backward."""
    r = tl.program_id(0)
    begin = r * range_tiles
    end = tl.minimum(begin + range_tiles, tiles)
    total = tl.zeros([BLOCK], tl.float32)
    for g in range(G):
        for i in tl.range(begin, end, BLOCK):
            tile = i + tl.arange(0, BLOCK)
            total += tl.load(COUNTS + g * tiles + tile, mask=tile < end, other=0).to(tl.float32)
    mean = tl.sum(total) / ((end - begin) * G)
    tl.store(DECISION + r, (mean > limit_forward).to(tl.int32))
    tl.store(DECISION + tl.num_programs(0) + r, (mean > limit_backward).to(tl.int32))

"""The inverted index of a selection: for each block, the (token, slot) pairs that selected it, in token order.

Entries are cut into *slabs* (a chunk of KV heads and a range of tokens) so that what the KV-major design keeps per
entry stays small; a slab's entries stand together, and since padding is sorted along, every slab begins at a place
known without reading anything back. Within a slab the order is (KV head, block, forced, token): a stable sort of

    key = ((slab * GL + head in the slab) * L + block) * 2 + forced

whose positions are the flat positions in block_indices, hence token and slot. Blocks are numbered over all
documents: first token // BS + document for packed ones (a document adds at most one to the plain count), and
sequence * blocks per sequence + block for plain batches. Block number L - 1 is the padding's.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.union import document_start


@triton.jit(do_not_specialize=["documents", "steps"])
def make_keys(
    IDX,  # int32 [N, G, n]
    CU,
    KEYS,  # int32 [N, G, n]
    SPAN,  # int32 [N, G]: first free slot | past the last free slot << 10 | past the last slot << 20
    N,
    T,
    documents,
    steps,
    blocks_per_sequence,
    L,
    ranges,
    slab_tokens,
    G: tl.constexpr,
    GL: tl.constexpr,
    n: tl.constexpr,
    NP: tl.constexpr,
    ROWS: tl.constexpr,
    BS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    PACKED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, NP)
    t = tl.minimum(row // G, N - 1)
    g = row % G
    ok = (row < N * G)[:, None] & (i < n)[None, :]
    at = row.to(tl.int64)[:, None] * n + i[None, :]
    block = tl.load(IDX + at, mask=ok, other=-1)
    document, start = document_start(t, CU, documents, steps, T, PACKED)
    if PACKED:
        base = start // BS + document
    else:
        base = document * blocks_per_sequence
    last_free = (t - start) // BS - LOCAL
    real = block >= 0
    forced = real & ((block < INITIAL) | (block > last_free[:, None]))
    slab = g // GL * ranges + t // slab_tokens
    number = tl.where(real, base[:, None] + block, L - 1)
    key = (((slab * GL + g % GL) * L)[:, None] + number) * 2 + forced.to(tl.int32)
    tl.store(KEYS + at, key, mask=ok)
    lo = tl.sum((real & (block < INITIAL)).to(tl.int32), 1)
    hi = tl.sum((real & (block <= last_free[:, None])).to(tl.int32), 1)
    past = tl.sum(real.to(tl.int32), 1)
    tl.store(SPAN + row, lo | (hi << 10) | (past << 20), mask=row < N * G)


@triton.jit(do_not_specialize=["documents", "steps"])
def find_lists(
    IDX,
    CU,
    KEYS,  # sorted
    ORDER,  # int64: flat positions in IDX, in the order of KEYS
    ENTRIES,  # the same in int32
    LISTS,  # int32 [3, slabs * GL * L]: position of the list's first entry, past its last, first token of its block
    entries,
    lists,
    T,
    documents,
    steps,
    G: tl.constexpr,
    n: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = p < entries
    here = tl.load(KEYS + p, mask=ok, other=0) >> 1
    before = tl.load(KEYS + p - 1, mask=ok & (p > 0), other=-2) >> 1
    after = tl.load(KEYS + p + 1, mask=p + 1 < entries, other=-2) >> 1
    head = ok & (here != before)
    tl.store(LISTS + here, p, mask=head)
    tl.store(LISTS + lists + here, p + 1, mask=ok & (here != after))
    e = tl.load(ORDER + p, mask=ok, other=0).to(tl.int32)
    tl.store(ENTRIES + p, e, mask=ok)
    block = tl.load(IDX + e, mask=head, other=0)
    _, start = document_start(e // (G * n), CU, documents, steps, T, PACKED)
    tl.store(LISTS + 2 * lists + here, start + block * BS, mask=head)


@triton.jit
def decide(
    COUNT,  # int32 [G, tiles]: blocks in each tile's union
    DECISION,  # int32 [2, slabs]: 1 where the KV-major design runs, forward and backward
    tiles,
    slab_tiles,
    ranges,
    limit_forward,
    limit_backward,
    GL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slab = tl.program_id(0)
    begin = slab % ranges * slab_tiles
    end = tl.minimum(begin + slab_tiles, tiles)
    total = tl.zeros([BLOCK], tl.float32)
    for gl in range(GL):
        row = COUNT + (slab // ranges * GL + gl) * tiles
        for i in tl.range(begin, end, BLOCK):
            tile = i + tl.arange(0, BLOCK)
            total += tl.load(row + tile, mask=tile < end, other=0).to(tl.float32)
    mean = tl.sum(total) / ((end - begin) * GL)
    tl.store(DECISION + slab, (mean > limit_forward).to(tl.int32))
    tl.store(DECISION + tl.num_programs(0) + slab, (mean > limit_backward).to(tl.int32))

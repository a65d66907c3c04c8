"""The query-major design of the selected branch: each query tile loops over its tile list.

A tile of QT queries has two lists: all blocks that its queries selected, and the *forced* ones among them (initial and
local blocks, which neighbouring queries share). An entry is the absolute first token of a block and one bit per query
of the tile that selected it; rows whose bit is 0 are masked. Since tokens are absolute, tiles need not align with
documents: in a tile that straddles two documents, each document's blocks carry the bits of its own queries only.

Tokens are flat over the batch: t in [0, B·T). Rows of a tile are (query, head of the group). Batch strides are given as
the excess over T token strides (0 when contiguous). With a query range (varlen.py), query i is token `token_of(i)`;
whatever belongs to queries, lists and tiles included, is addressed by i.

A product mixes all queries of a tile with all keys of a block, and 0 · NaN is NaN: a non-finite key or value reaches
queries that do not see it, even of another document. Masking K and V in the loop would cost time, so a tile with a
non-finite result is recomputed query by query, each from the keys that it sees.
"""

import triton
import triton.language as tl


@triton.jit
def in_columns(rows, d, D: tl.constexpr, DP: tl.constexpr):
    """Mask of a tile with D real columns of DP; without a column mask if D = DP."""
    mask = rows[:, None]
    if D != DP:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def load_block(
    X, XD, first, end, T, g, batch, token, head, BS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TMA: tl.constexpr,
    CLEAN: tl.constexpr = False,
):  # fmt: skip
    """K or V of one block, zeros from token `end` on. TMA reads on, which no query sees; CLEAN zeroes it."""
    key = tl.arange(0, BS)
    if TMA:
        x = XD.load([first, g * D])
        if CLEAN:
            x = tl.where((first + key < end)[:, None], x, 0.0)
    else:
        d = tl.arange(0, DP)
        b = first // T
        base = first.to(tl.int64) * token + b.to(tl.int64) * batch + g.to(tl.int64) * head
        inside = first + key < end
        x = tl.load(X + base + (key * token)[:, None] + d[None, :], mask=in_columns(inside, d, D, DP), other=0.0)
    return x


@triton.jit
def sequence_end(first, T):
    return (first // T + 1) * T


@triton.jit
def all_finite(x):
    # a difference of NaN or infinities is NaN; flattened, because Triton's passes for Blackwell crash otherwise
    return tl.sum(tl.ravel(x - x), 0) == 0


@triton.jit
def document_start(t, CU, documents, steps, T, PACKED: tl.constexpr):
    """(number, first token) of the document (packed) or sequence (plain) of token t."""
    if PACKED:
        # the last d with CU[d] <= t: of documents with the same start, all but the last are empty
        lo = t * 0
        hi = lo + documents
        for _ in range(steps):
            mid = (lo + hi) // 2
            below = tl.load(CU + mid) <= t
            lo = tl.where(below, mid, lo)
            hi = tl.where(below, hi, mid)
        start = tl.load(CU + lo)
    else:
        lo = t // T
        start = lo * T
    return lo, start


@triton.jit
def token_of(i, T, queries, first_query, QUERY_RANGE: tl.constexpr):
    """The token of query i: i itself, unless q holds a query range that starts at first_query of each sequence."""
    if QUERY_RANGE:
        i += i // queries * (T - queries) + first_query
    return i


@triton.jit(do_not_specialize=["documents", "steps", "queries", "first_query"])
def build_tile_lists(
    IDX, CU, LISTS, COUNTS, N, T, queries, first_query, documents, steps, tiles,
    G: tl.constexpr, n: tl.constexpr, QT: tl.constexpr, QP: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, F: tl.constexpr, PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """Merge the ascending block lists of a tile's QT queries; TILES tiles advance together.

    IDX: int32 [N, G, n]. LISTS: int32 [G, tiles, LENGTH]: first tokens and bits (QT·n each) of all blocks, then of the
    forced ones (QT·F each; F = 0: none). COUNTS: int32 [2, G, tiles].
    """
    LENGTH: tl.constexpr = 2 * QT * (n + F)
    END: tl.constexpr = 2147483647
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    g = tl.program_id(1)
    qi = tl.arange(0, QP)
    i = tile[:, None] * QT + qi[None, :]
    ok = (tile < tiles)[:, None] & (qi < QT)[None, :] & (i < N)
    t = token_of(tl.minimum(i, N - 1), T, queries, first_query, QUERY_RANGE)
    _, start = document_start(t, CU, documents, steps, T, PACKED)
    own = (t - start) // BS  # blocks after this one are not attended; they are last in the ascending list
    last_free = own - LOCAL  # blocks after this one are local, hence forced
    row = (i.to(tl.int64) * G + g) * n
    position = tl.zeros([TILES, QP], tl.int32)
    block = tl.load(IDX + row, mask=ok, other=-1)
    first = tl.where((block >= 0) & (block <= own), start + block * BS, END)
    lowest = tl.min(first, 1)
    count = tl.zeros([TILES], tl.int32)
    forced_count = tl.zeros([TILES], tl.int32)
    slot = g * tiles + tile
    out = LISTS + slot.to(tl.int64) * LENGTH
    while tl.min(lowest) < END:
        hit = (first == lowest[:, None]) & ok
        live = (lowest < END) & (tile < tiles)
        bits = tl.sum(tl.where(hit, 1 << qi[None, :], 0), 1)
        tl.store(out + count, lowest, mask=live)
        tl.store(out + QT * n + count, bits, mask=live)
        count += live.to(tl.int32)
        if F > 0:
            bits = tl.sum(tl.where(hit & ((block < INITIAL) | (block > last_free)), 1 << qi[None, :], 0), 1)
            live = live & (bits != 0)
            tl.store(out + 2 * QT * n + forced_count, lowest, mask=live)
            tl.store(out + QT * (2 * n + F) + forced_count, bits, mask=live)
            forced_count += live.to(tl.int32)
        position += hit.to(tl.int32)
        block = tl.load(IDX + row + position, mask=ok & (position < n), other=-1)
        first = tl.where((block >= 0) & (block <= own), start + block * BS, END)
        lowest = tl.min(first, 1)
    tl.store(COUNTS + slot, count, mask=tile < tiles)
    if F > 0:
        tl.store(COUNTS + G * tiles + slot, forced_count, mask=tile < tiles)


@triton.jit
def _store_output(O, LSE, row, ok, m, l, acc, DV: tl.constexpr, DVP: tl.constexpr):
    dv = tl.arange(0, DVP)
    some = l > 0
    l = tl.where(some, l, 1.0)
    tl.store(
        O + row[:, None] * DV + dv[None, :], (acc / l[:, None]).to(O.dtype.element_ty), mask=in_columns(ok, dv, DV, DVP)
    )
    tl.store(LSE + row, tl.where(some, m + tl.log2(l), float("inf")), mask=ok)


@triton.jit
def _forward_of_query(
    q, K, V, KD, VD, entry, length, count, x, t, T, scale, g, kb, kt, kg, vb, vt, vg, M: tl.constexpr,
    BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of query x of the tile, token t; meaningless in other rows. The same bits as the tile's loop."""
    key = tl.arange(0, BS)
    m = tl.full([M], -1e20, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for j in tl.range(0, count, num_stages=1):
        first = tl.load(entry + j)
        selected = (tl.load(entry + length + j) >> x) & 1 == 1
        end = tl.where(selected, t + 1, first)
        k = load_block(K, KD, first, end, T, g, kb, kt, kg, BS, DK, DKP, TMA, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = tl.where((first + key < end)[None, :], s, -1e30)
        new = tl.maximum(m, tl.max(s, 1) * scale)
        a = tl.exp2(m - new)
        p = tl.exp2(s * scale - new[:, None])
        l = l * a + tl.sum(p, 1)
        v = load_block(V, VD, first, end, T, g, vb, vt, vg, BS, DV, DVP, TMA, True)
        acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")
        m = new
    return m, l, acc


@triton.jit(do_not_specialize=["queries", "first_query"])
def query_major_forward(
    Q, K, V, KD, VD, LISTS, COUNTS, DECISION, O, LSE, N, T, queries, first_query, tiles, range_tokens, scale, qb, qt,
    qh, kb, kt, kg, vb, vt, vg,
    G: tl.constexpr, h: tl.constexpr, HT: tl.constexpr, QT: tl.constexpr, M: tl.constexpr, n: tl.constexpr,
    F: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    TMA: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, head tile). DECISION, int32 [ranges], is 1 where the KV-major design runs: then only the
    forced blocks are attended here. F = 0: it is not read."""
    tile = tl.program_id(0)
    g = tl.program_id(1)
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(2) * HT + r % HT
    i = tile * QT + qi
    ok = (qi < QT) & (hh < h) & (i < N)
    t = token_of(i, T, queries, first_query, QUERY_RANGE)
    earliest = token_of(tile * QT, T, queries, first_query, QUERY_RANGE)
    dk = tl.arange(0, DKP)
    key = tl.arange(0, BS)
    i64 = i.to(tl.int64)
    head = g.to(tl.int64) * h + hh
    q = tl.load(
        Q + (i64 * qt + (t // T).to(tl.int64) * qb + head * qh)[:, None] + dk[None, :],
        mask=in_columns(ok, dk, DK, DKP),
        other=0.0,
    )
    slot = g * tiles + tile
    entry = LISTS + slot.to(tl.int64) * (2 * QT * (n + F))
    length = QT * n
    if F > 0:
        if tl.load(DECISION + tile * QT // range_tokens) == 1:
            entry += 2 * QT * n
            length = QT * F
            slot += G * tiles
    count = tl.load(COUNTS + slot)
    m = tl.full([M], -1e20, tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    for j in tl.range(0, count):
        first = tl.load(entry + j)
        bits = tl.load(entry + length + j)
        k = load_block(K, KD, first, sequence_end(first, T), T, g, kb, kt, kg, BS, DK, DKP, TMA)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        # rows that did not select the block are masked by row; only blocks that end after the tile starts need more
        on = ((bits >> qi) & 1) == 1
        if first + BS - 1 > earliest:
            s = tl.where(key[None, :] <= (t - first)[:, None], s, -1e30)
        new = tl.where(on, tl.maximum(m, tl.max(s, 1) * scale), m)
        a = tl.exp2(m - new)
        p = tl.exp2(s * scale - tl.where(on, new, 1e30)[:, None])
        l = l * a + tl.sum(p, 1)
        v = load_block(V, VD, first, sequence_end(first, T), T, g, vb, vt, vg, BS, DV, DVP, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")
        m = new
    if all_finite(acc + l[:, None]):
        _store_output(O, LSE, i64 * (G * h) + head, ok, m, l, acc, DV, DVP)
    else:
        for x in tl.range(0, QT):
            at = token_of(tile * QT + x, T, queries, first_query, QUERY_RANGE)
            m, l, acc = _forward_of_query(
                q, K, V, KD, VD, entry, length, count, x, at, T, scale, g, kb, kt, kg, vb, vt, vg,
                M, BS, DK, DV, DKP, DVP, TMA,
            )  # fmt: skip
            _store_output(O, LSE, i64 * (G * h) + head, ok & (qi == x), m, l, acc, DV, DVP)


@triton.jit
def _store_dq(DQ, row, ok, acc, factor, DK: tl.constexpr, DKP: tl.constexpr, ADD: tl.constexpr):
    dk = tl.arange(0, DKP)
    acc *= factor[:, None]
    to = DQ + row[:, None] * DK + dk[None, :]
    whole = in_columns(ok, dk, DK, DKP)
    if ADD:
        acc += tl.load(to, mask=whole, other=0.0).to(tl.float32)
    tl.store(to, acc.to(DQ.dtype.element_ty), mask=whole)


@triton.jit
def _dq_of_query(
    q, do, lse, delta, K, V, KD, VD, entry, length, count, x, t, T, scale, g, kb, kt, kg, vb, vt, vg, M: tl.constexpr,
    BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Unscaled dq of query x of the tile, token t; meaningless in other rows. The same bits as the tile's loop."""
    key = tl.arange(0, BS)
    acc = tl.zeros([M, DKP], tl.float32)
    for j in tl.range(0, count, num_stages=1):
        first = tl.load(entry + j)
        selected = (tl.load(entry + length + j) >> x) & 1 == 1
        end = tl.where(selected, t + 1, first)
        k = load_block(K, KD, first, end, T, g, kb, kt, kg, BS, DK, DKP, TMA, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = load_block(V, VD, first, end, T, g, vb, vt, vg, BS, DV, DVP, TMA, True)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        p = tl.exp2(s * scale - lse[:, None])
        p = tl.where((first + key < end)[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        acc = tl.dot(ds, k, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["queries", "first_query"])
def query_major_dq(
    Q, K, V, KD, VD, DOUT, LSE, DELTA, GATE, LISTS, COUNTS, DECISION, DQ, RECORDS, N, T, queries, first_query, tiles,
    range_tokens, scale, softmax_scale, qb, qt, qh, kb, kt, kg, vb, vt, vg, ob, ot, oh, gb, gt, gh,
    G: tl.constexpr, h: tl.constexpr, HT: tl.constexpr, QT: tl.constexpr, M: tl.constexpr, n: tl.constexpr,
    F: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    TMA: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """dq over the tile lists, for the ranges whose dq the KV-major design does not compute. Adds to DQ if ADD.

    RECORDS, fp32 [N, G·h, 4] or None, receives (log-sum-exp, gate, delta, query number) per row for the dK/dV
    kernels."""
    tile = tl.program_id(0)
    g = tl.program_id(1)
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(2) * HT + r % HT
    i = tile * QT + qi
    ok = (qi < QT) & (hh < h) & (i < N)
    t = token_of(i, T, queries, first_query, QUERY_RANGE)
    earliest = token_of(tile * QT, T, queries, first_query, QUERY_RANGE)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    i64 = i.to(tl.int64)
    b64 = (t // T).to(tl.int64)
    head = g.to(tl.int64) * h + hh
    row = i64 * (G * h) + head
    lse = tl.load(LSE + row, mask=ok, other=float("inf"))
    delta = tl.load(DELTA + row, mask=ok, other=0.0)
    if RECORDS is not None:
        # reloaded after the loop, which is short of registers
        gate = tl.full([M], 1.0, tl.float32)
        if GATED:
            gate = tl.load(GATE + i64 * gt + b64 * gb + head * gh, mask=ok, other=0.0).to(tl.float32)
        record = RECORDS + row * 4
        tl.store(record, lse, mask=ok)
        tl.store(record + 1, gate, mask=ok)
        tl.store(record + 2, delta, mask=ok)
        tl.store(record + 3, i.to(tl.float32, bitcast=True), mask=ok)
    run = True
    if F > 0:
        run = tl.load(DECISION + tile * QT // range_tokens) == 0
    if run:
        q = tl.load(
            Q + (i64 * qt + b64 * qb + head * qh)[:, None] + dk[None, :], mask=in_columns(ok, dk, DK, DKP), other=0.0
        )
        do = tl.load(
            DOUT + (i64 * ot + b64 * ob + head * oh)[:, None] + dv[None, :], mask=in_columns(ok, dv, DV, DVP), other=0.0
        )
        slot = g * tiles + tile
        count = tl.load(COUNTS + slot)
        entry = LISTS + slot.to(tl.int64) * (2 * QT * (n + F))
        acc = tl.zeros([M, DKP], tl.float32)
        for j in tl.range(0, count):
            first = tl.load(entry + j)
            bits = tl.load(entry + QT * n + j)
            k = load_block(K, KD, first, sequence_end(first, T), T, g, kb, kt, kg, BS, DK, DKP, TMA)
            v = load_block(V, VD, first, sequence_end(first, T), T, g, vb, vt, vg, BS, DV, DVP, TMA)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            on = ((bits >> qi) & 1) == 1
            p = tl.exp2(s * scale - tl.where(on, lse, float("inf"))[:, None])
            if first + BS - 1 > earliest:
                p = tl.where(key[None, :] <= (t - first)[:, None], p, 0.0)
            ds = (p * (dp - delta[:, None])).to(k.dtype)
            acc = tl.dot(ds, k, acc, input_precision="ieee")
        factor = tl.full([M], softmax_scale, tl.float32)
        if GATED:
            factor *= tl.load(GATE + i64 * gt + b64 * gb + head * gh, mask=ok, other=0.0).to(tl.float32)
        if all_finite(acc):
            _store_dq(DQ, row, ok, acc, factor, DK, DKP, ADD)
        else:
            for x in tl.range(0, QT):
                at = token_of(tile * QT + x, T, queries, first_query, QUERY_RANGE)
                acc = _dq_of_query(
                    q, do, lse, delta, K, V, KD, VD, entry, QT * n, count, x, at, T, scale, g, kb, kt, kg, vb, vt, vg,
                    M, BS, DK, DV, DKP, DVP, TMA,
                )  # fmt: skip
                _store_dq(DQ, row, ok & (qi == x), acc, factor, DK, DKP, ADD)

"""Selected attention, query tile by query tile: each tile walks a list of blocks, some rows sitting out some blocks.

Two lists exist per tile of QT tokens: the *union* of all blocks that its tokens selected, and the *forced* ones
among them (first and local blocks, which neighbours share). Each entry is the absolute first token of a block and a
bit per token of the tile. Lists of absolute tokens need no document-aligned tiles: where a tile straddles two
documents, each document's blocks carry the bits of its own tokens only.

Tokens are flattened over the batch: t in [0, B*T). Rows of a tile are (token, head of the group). Strides come as
token and head strides and, for the batch, the excess of its stride over T token strides (0 when contiguous).
"""

import triton
import triton.language as tl


@triton.jit
def in_columns(rows, d, D: tl.constexpr, DP: tl.constexpr):
    """Mask of a tile of which D of DP columns are real: none over columns when all are."""
    mask = rows[:, None]
    if D != DP:
        mask = mask & (d < D)[None, :]
    return mask


@triton.jit
def document_start(t, CU, documents, steps, T, PACKED: tl.constexpr):
    """Number and first token of the document (packed) or sequence (plain) that token t belongs to."""
    if PACKED:
        # The last d with CU[d] <= t: of documents that share a start, all but the last are empty.
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


@triton.jit(do_not_specialize=["documents", "steps"])
def build_lists(
    IDX,  # int32 [N, G, n]
    CU,
    UNION,  # int32 [G, tiles, 2, QT * n]: first tokens, then bits
    UNION_COUNT,  # int32 [G, tiles]
    FORCED,  # int32 [G, tiles, 2, QT * F]
    FORCED_COUNT,
    N,
    T,
    documents,
    steps,
    tiles,
    G: tl.constexpr,
    n: tl.constexpr,
    QT: tl.constexpr,
    QP: tl.constexpr,
    TILES: tl.constexpr,
    BS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    F: tl.constexpr,
    PACKED: tl.constexpr,
    WITH_FORCED: tl.constexpr,
):
    # Merges the ascending lists of QT tokens; TILES tiles advance together.
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    g = tl.program_id(1)
    qi = tl.arange(0, QP)
    t = tile[:, None] * QT + qi[None, :]
    ok = (tile < tiles)[:, None] & (qi < QT)[None, :] & (t < N)
    _, start = document_start(tl.minimum(t, N - 1), CU, documents, steps, T, PACKED)
    last_free = (t - start) // BS - LOCAL  # blocks after this one are local to t
    row = (t.to(tl.int64) * G + g) * n
    END: tl.constexpr = 2147483647
    position = tl.zeros([TILES, QP], tl.int32)
    block = tl.load(IDX + row, mask=ok, other=-1)
    first = tl.where(block >= 0, start + block * BS, END)
    lowest = tl.min(first, 1)
    count = tl.zeros([TILES], tl.int32)
    forced_count = tl.zeros([TILES], tl.int32)
    slot = (g * tiles + tile).to(tl.int64)
    while tl.min(lowest) < END:
        hit = (first == lowest[:, None]) & ok
        live = (lowest < END) & (tile < tiles)
        tl.store(UNION + slot * (2 * QT * n) + count, lowest, mask=live)
        bits = tl.sum(tl.where(hit, 1 << qi[None, :], 0), 1)
        tl.store(UNION + slot * (2 * QT * n) + QT * n + count, bits, mask=live)
        count += live.to(tl.int32)
        if WITH_FORCED:
            is_forced = hit & ((block < INITIAL) | (block > last_free))
            bits = tl.sum(tl.where(is_forced, 1 << qi[None, :], 0), 1)
            live = live & (bits != 0)
            tl.store(FORCED + slot * (2 * QT * F) + forced_count, lowest, mask=live)
            tl.store(FORCED + slot * (2 * QT * F) + QT * F + forced_count, bits, mask=live)
            forced_count += live.to(tl.int32)
        position += hit.to(tl.int32)
        block = tl.load(IDX + row + position, mask=ok & (position < n), other=-1)
        first = tl.where(block >= 0, start + block * BS, END)
        lowest = tl.min(first, 1)
    tl.store(UNION_COUNT + slot, count, mask=tile < tiles)
    if WITH_FORCED:
        tl.store(FORCED_COUNT + slot, forced_count, mask=tile < tiles)


@triton.jit(do_not_specialize=["slab", "group", "begin", "end"])
def tile_forward(
    Q,
    K,
    V,
    LIST,
    COUNT,
    DECISION,  # int32 [slabs]: 1 where the KV-major design runs
    PARTIAL,  # merged when MERGE: [tokens of the slab, GL, n, h, Dv] and its base-2 log-sum-exp
    PARTIAL_LSE,
    SPAN,  # int32 [N, G]: first free slot | past the last free slot << 10 | past the last slot << 20
    O,
    LSE,
    slab,
    group,
    begin,
    end,
    ranges,
    slab_tokens,
    T,
    tiles,
    scale,
    qb,
    qt,
    qh,
    kb,
    kt,
    kg,
    vb,
    vt,
    vg,
    G: tl.constexpr,
    h: tl.constexpr,
    HT: tl.constexpr,
    QT: tl.constexpr,
    M: tl.constexpr,
    n: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    GL: tl.constexpr,
    LENGTH: tl.constexpr,
    DECIDE: tl.constexpr,
    MERGE: tl.constexpr,
):
    # Program (tile, group of this launch, head tile). Tokens begin..end and groups from `group` on are this launch's.
    tile = begin // QT + tl.program_id(0)
    gl = tl.program_id(1)
    g = group + gl
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(2) * HT + r % HT
    t = tile * QT + qi
    ok = (qi < QT) & (hh < h) & (t < end)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    run = True
    if DECIDE:
        if not MERGE:
            slab = g // GL * ranges + tile * QT // slab_tokens
        run = tl.load(DECISION + slab) == (1 if MERGE else 0)
    if run:
        t64 = t.to(tl.int64)
        head = g * h + hh
        q = tl.load(
            Q + (t64 * qt + (t // T).to(tl.int64) * qb + head.to(tl.int64) * qh)[:, None] + dk[None, :],
            mask=in_columns(ok, dk, DK, DKP),
            other=0.0,
        )
        count = tl.load(COUNT + g * tiles + tile)
        entry = LIST + (g * tiles + tile).to(tl.int64) * (2 * LENGTH)
        m = tl.full([M], -1e20, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        for i in tl.range(0, count):
            first = tl.load(entry + i)
            bits = tl.load(entry + LENGTH + i)
            b = first // T
            inside = first + key < (b + 1) * T
            k = tl.load(
                K
                + (first.to(tl.int64) * kt + b.to(tl.int64) * kb + g.to(tl.int64) * kg)
                + key[:, None] * kt
                + dk[None, :],
                mask=in_columns(inside, dk, DK, DKP),
                other=0.0,
            )
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            last = tl.where(((bits >> qi) & 1) == 1, t - first, -1)
            s = tl.where(key[None, :] <= last[:, None], s, -1e30)
            new = tl.maximum(m, tl.max(s, 1) * scale)
            a = tl.exp2(m - new)
            p = tl.exp2(s * scale - new[:, None])
            l = l * a + tl.sum(p, 1)
            v = tl.load(
                V
                + (first.to(tl.int64) * vt + b.to(tl.int64) * vb + g.to(tl.int64) * vg)
                + key[:, None] * vt
                + dv[None, :],
                mask=in_columns(inside, dv, DV, DVP),
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")
            m = new
        if MERGE:
            span = tl.load(SPAN + t64 * G + g, mask=ok, other=0)
            lo = span & 1023
            hi = (span >> 10) & 1023
            part = ((t - begin).to(tl.int64) * GL + gl) * (n * h) + hh
            first_slot = tl.min(tl.where(ok & (lo < hi), lo, n))
            past_slot = tl.max(tl.where(lo < hi, hi, 0))
            # The greatest exponent first, over the small array, so that the large one is only scaled and added.
            top = m
            for i in tl.range(first_slot, past_slot):
                live = ok & (i >= lo) & (i < hi)
                top = tl.maximum(top, tl.load(PARTIAL_LSE + part + i * h, mask=live, other=-1e30))
            a = tl.exp2(m - top)
            l = l * a
            acc = acc * a[:, None]
            for i in tl.range(first_slot, past_slot, loop_unroll_factor=4):
                live = ok & (i >= lo) & (i < hi)
                w = tl.exp2(tl.load(PARTIAL_LSE + part + i * h, mask=live, other=-1e30) - top)
                x = tl.load(
                    PARTIAL + (part + i * h)[:, None] * DV + dv[None, :],
                    mask=in_columns(live, dv, DV, DVP),
                    other=0.0,
                )
                l += w
                acc += x.to(tl.float32) * w[:, None]
            m = top
        some = l > 0
        l = tl.where(some, l, 1.0)
        row = t64 * (G * h) + head
        tl.store(
            O + row[:, None] * DV + dv[None, :],
            (acc / l[:, None]).to(O.dtype.element_ty),
            mask=in_columns(ok, dv, DV, DVP),
        )
        tl.store(LSE + row, tl.where(some, m + tl.log2(l), 1e30), mask=ok)


@triton.jit
def tile_dq(
    Q,
    K,
    V,
    DOUT,
    LSE,
    ROW_SUM,
    GATE,
    LIST,
    COUNT,
    DECISION,
    DQ,
    ranges,
    slab_tokens,
    N,
    T,
    tiles,
    scale,
    softmax_scale,
    qb,
    qt,
    qh,
    kb,
    kt,
    kg,
    vb,
    vt,
    vg,
    ob,
    ot,
    oh,
    gb,
    gt,
    gh,
    G: tl.constexpr,
    h: tl.constexpr,
    HT: tl.constexpr,
    QT: tl.constexpr,
    M: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    GL: tl.constexpr,
    LENGTH: tl.constexpr,
    DECIDE: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    tile = tl.program_id(0)
    g = tl.program_id(1)
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(2) * HT + r % HT
    t = tile * QT + qi
    ok = (qi < QT) & (hh < h) & (t < N)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    run = True
    if DECIDE:
        run = tl.load(DECISION + g // GL * ranges + tile * QT // slab_tokens) == 0
    if run:
        t64 = t.to(tl.int64)
        b64 = (t // T).to(tl.int64)
        head = g * h + hh
        row = t64 * (G * h) + head
        q = tl.load(
            Q + (t64 * qt + b64 * qb + head.to(tl.int64) * qh)[:, None] + dk[None, :],
            mask=in_columns(ok, dk, DK, DKP),
            other=0.0,
        )
        do = tl.load(
            DOUT + (t64 * ot + b64 * ob + head.to(tl.int64) * oh)[:, None] + dv[None, :],
            mask=in_columns(ok, dv, DV, DVP),
            other=0.0,
        )
        lse = tl.load(LSE + row, mask=ok, other=1e30)
        row_sum = tl.load(ROW_SUM + row, mask=ok, other=0.0)
        count = tl.load(COUNT + g * tiles + tile)
        entry = LIST + (g * tiles + tile).to(tl.int64) * (2 * LENGTH)
        acc = tl.zeros([M, DKP], tl.float32)
        for i in tl.range(0, count):
            first = tl.load(entry + i)
            bits = tl.load(entry + LENGTH + i)
            b = first // T
            inside = first + key < (b + 1) * T
            k = tl.load(
                K
                + (first.to(tl.int64) * kt + b.to(tl.int64) * kb + g.to(tl.int64) * kg)
                + key[:, None] * kt
                + dk[None, :],
                mask=in_columns(inside, dk, DK, DKP),
                other=0.0,
            )
            v = tl.load(
                V
                + (first.to(tl.int64) * vt + b.to(tl.int64) * vb + g.to(tl.int64) * vg)
                + key[:, None] * vt
                + dv[None, :],
                mask=in_columns(inside, dv, DV, DVP),
                other=0.0,
            )
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            last = tl.where(((bits >> qi) & 1) == 1, t - first, -1)
            p = tl.where(key[None, :] <= last[:, None], tl.exp2(s * scale - lse[:, None]), 0.0)
            ds = (p * (dp - row_sum[:, None])).to(k.dtype)
            acc = tl.dot(ds, k, acc, input_precision="ieee")
        factor = tl.full([M], softmax_scale, tl.float32)
        if GATED:
            gate = tl.load(GATE + t64 * gt + b64 * gb + head.to(tl.int64) * gh, mask=ok, other=0.0)
            factor = factor * gate.to(tl.float32)
        acc *= factor[:, None]
        to = DQ + row[:, None] * DK + dk[None, :]
        whole = in_columns(ok, dk, DK, DKP)
        if ADD:
            acc += tl.load(to, mask=whole, other=0.0).to(tl.float32)
        tl.store(to, acc.to(DQ.dtype.element_ty), mask=whole)

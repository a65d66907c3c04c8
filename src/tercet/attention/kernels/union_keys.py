"""dk and dv of the union design: one block's K and V against the stretches of queries that chose it.

Queries are taken as they stand, in *steps* of QS neighbours (a union tile, or an even part of one) with a bit per
query that chose the block: no gather, keys down the rows (Sᵀ feeds both products without a transpose), and an index of
steps that is an order shorter than one of queries. It is found by inverting the union lists, without sorting:

    count_steps   how many steps each block's list gets, and a bitmap of (tile, block within its document)
    cumsum        where lists begin
    invert        walks each block's column of the bitmap, finds its bits in the tiles' lists, writes steps in order

Lists are cut into pieces of at most SEGMENT steps, as in index.py; uncut ones write dk and dv at once where nothing
else adds to them (DIRECT), the others leave sums to kv_sums.sum_dkv. Ranges that are KV-major's are left out.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.union import document_start, in_columns, load_block


@triton.jit
def of_part(bits, part, QT: tl.constexpr, QS: tl.constexpr):
    """Bits of the queries of one step, out of the bits of its tile."""
    if QT != QS:
        bits = (bits >> (part * QS)) & ((1 << QS) - 1)
    return bits


@triton.jit(do_not_specialize=["documents", "steps", "L"])
def count_steps(
    CU,
    LISTS,
    COUNTS,
    DECISION,
    SIZES,  # int32 [G, L], zeros
    BITMAP,  # int32 [G, words, tiles], zeros
    T,
    documents,
    steps,
    blocks_per_sequence,
    L,
    tiles,
    words,
    range_tiles,
    n: tl.constexpr,
    QT: tl.constexpr,
    QS: tl.constexpr,
    F: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    DECIDE: tl.constexpr,
):
    # Integer atomics only: their order changes nothing.
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.program_id(1)
    ok = tile < tiles
    count = tl.load(COUNTS + g * tiles + tile, mask=ok, other=0)
    if DECIDE:
        count = tl.where(tl.load(DECISION + tile // range_tiles, mask=ok, other=1) == 0, count, 0)
    entry = LISTS + (g * tiles + tile).to(tl.int64) * (2 * QT * (n + F))
    for i in range(tl.max(count)):
        live = i < count
        first = tl.load(entry + i, mask=live, other=0)
        bits = tl.load(entry + QT * n + i, mask=live, other=0)
        document, start = document_start(first, CU, documents, steps, T, PACKED)
        block = (first - start) // BS
        if PACKED:
            number = start // BS + document + block
        else:
            number = document * blocks_per_sequence + block
        some = tl.zeros([BLOCK], tl.int32)
        for part in tl.static_range(QT // QS):
            some += (of_part(bits, part, QT, QS) != 0).to(tl.int32)
        tl.atomic_add(SIZES + g * L + number, some, mask=live)
        tl.atomic_or(BITMAP + (g * words + block // 32).to(tl.int64) * tiles + tile, 1 << (block % 32), mask=live)


@triton.jit(do_not_specialize=["documents", "steps", "L", "slots", "queries", "first_query"])
def invert(
    CU,
    LISTS,
    COUNTS,
    BITMAP,
    ENDS,  # int32 [G, L]: sums of SIZES
    TABLE,  # int32 [4, G, L]: list's first step, past its last, first token of its block, past its last
    STEP,  # int32: first query // QS, of each step of each list
    BITS,
    PIECE,  # int32 [2, slots]: 1 + position of the piece's first step, 0 where there is no piece; its list
    T,
    queries,
    first_query,
    documents,
    steps,
    blocks_per_sequence,
    L,
    tiles,
    words,
    slots,
    search,
    n: tl.constexpr,
    QT: tl.constexpr,
    QS: tl.constexpr,
    F: tl.constexpr,
    BS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    STRETCH: tl.constexpr,
):
    PARTS: tl.constexpr = QT // QS
    number = tl.program_id(0)
    g = tl.program_id(1)
    if PACKED:
        document = number * 0
        above = document + documents
        for _ in range(steps):
            middle = (document + above) // 2
            below = tl.load(CU + middle) // BS + middle <= number
            document = tl.where(below, middle, document)
            above = tl.where(below, above, middle)
        start = tl.load(CU + document)
        block = number - start // BS - document
        last = tl.load(CU + document + 1)
    else:
        document = number // blocks_per_sequence
        block = number % blocks_per_sequence
        start = document * T
        last = start + T
    first = start + block * BS
    # The queries that may have chosen it: its document's from its first token on. (L - 1 is no block's number.)
    begin = first
    end = tl.where(number < L - 1, last, first)
    if STRETCH:
        sequence = first // T
        shift = sequence * (T - queries) + first_query
        begin = tl.minimum(tl.maximum(begin - shift, sequence * queries), (sequence + 1) * queries)
        end = tl.minimum(tl.maximum(end - shift, sequence * queries), (sequence + 1) * queries)
    lst = g * L + number
    lo = tl.load(ENDS + lst - 1, mask=lst > 0, other=0)
    room = tl.load(ENDS + lst)
    at = lo
    column = BITMAP + (g * words + block // 32).to(tl.int64) * tiles
    past = tl.where(begin < end, (end - 1) // QT + 1, 0) * PARTS
    for x in range(begin // QT * PARTS, past, BLOCK):
        step = x + tl.arange(0, BLOCK)
        tile = step // PARTS
        ok = step < past
        ok = ok & (((tl.load(column + tile, mask=ok, other=0) >> (block % 32)) & 1) == 1)
        entry = LISTS + (g * tiles + tile).to(tl.int64) * (2 * QT * (n + F))
        below = tl.zeros([BLOCK], tl.int32)
        above = tl.load(COUNTS + g * tiles + tile, mask=ok, other=0)
        for _ in range(search):
            middle = (below + above) // 2
            open_ = ok & (below < above)
            less = open_ & (tl.load(entry + middle, mask=open_, other=0) < first)
            above = tl.where(less, above, middle)
            below = tl.where(less, middle + 1, below)
        # A tile that straddles two documents may have the block of that number in the other one only.
        ok = ok & (tl.load(entry + below, mask=ok & (below < QT * n), other=-1) == first)
        bits = of_part(tl.load(entry + QT * n + below, mask=ok, other=0), step % PARTS, QT, QS)
        hit = (bits != 0).to(tl.int32)
        to = at + tl.cumsum(hit, 0) - hit
        tl.store(STEP + to, step, mask=hit == 1)
        tl.store(BITS + to, bits, mask=hit == 1)
        at += tl.sum(hit)
    tl.store(TABLE + lst, lo)
    tl.store(TABLE + tl.num_programs(1) * L + lst, at)
    tl.store(TABLE + 2 * tl.num_programs(1) * L + lst, first)
    tl.store(TABLE + 3 * tl.num_programs(1) * L + lst, tl.minimum(first + BS, last))
    slot = lo // SEGMENT + lst
    for i in range(room // SEGMENT - lo // SEGMENT + 1):
        from_ = lo + i * SEGMENT
        tl.store(PIECE + slot + i, tl.where(from_ < at, from_ + 1, 0))
        tl.store(PIECE + slots + slot + i, lst)


@triton.jit(do_not_specialize=["slots", "L", "queries", "first_query"])
def step_dkv(
    Q,
    K,
    V,
    KD,
    VD,
    DOUT,
    LSE,
    ROW_SUM,
    GATE,
    TABLE,
    STEP,
    BITS,
    PIECE,
    SUMS,  # fp32 [slots + G * L, head tiles, BS, Dk + Dv]
    DKEY,
    DVALUE,
    N,
    T,
    queries,
    first_query,
    slots,
    L,
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
    QS: tl.constexpr,
    M: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TMA: tl.constexpr,
    GATED: tl.constexpr,
    DIRECT: tl.constexpr,
    STRETCH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # Program (piece, head tile). The last list is the padding's and empty: no slot after its own is ever written.
    used = tl.program_id(0) < tl.load(TABLE + G * L - 1) // SEGMENT + G * L
    start = tl.load(PIECE + tl.program_id(0), mask=used, other=0) - 1
    if start >= 0:
        lst = tl.load(PIECE + slots + tl.program_id(0))
        end = tl.minimum(start + SEGMENT, tl.load(TABLE + G * L + lst))
        first = tl.load(TABLE + 2 * G * L + lst)
        g = lst // L
        k = load_block(K, KD, first, T, g, kb, kt, kg, BS, DK, DKP, TMA)
        v = load_block(V, VD, first, T, g, vb, vt, vg, BS, DV, DVP, TMA)
        r = tl.arange(0, M)
        qi = r // HT
        hh = tl.program_id(1) * HT + r % HT
        fits = (qi < QS) & (hh < h)
        if WHOLE:
            # Idle rows read the first one again, and go by a bit that is never set.
            hh = tl.where(fits, hh, 0)
            from_ = tl.where(fits, qi, 0)
            qi = tl.where(fits, qi, 31)
        else:
            from_ = qi
        dk_ = tl.arange(0, DKP)
        dv_ = tl.arange(0, DVP)
        key = tl.arange(0, BS)
        # Offsets within a step are 32 bits wide and the same in every step.
        sequence = (first // T).to(tl.int64)
        head = g.to(tl.int64) * h
        Q += sequence * qb + head * qh
        DOUT += sequence * ob + head * oh
        GATE += sequence * gb + head * gh
        q_at = (from_ * qt + hh * qh)[:, None] + dk_[None, :]
        do_at = (from_ * ot + hh * oh)[:, None] + dv_[None, :]
        row_at = from_ * (G * h) + hh
        gate_at = from_ * gt + hh * gh
        ahead = -first
        if STRETCH:
            ahead += first // T * (T - queries) + first_query
        dk = tl.zeros([BS, DKP], tl.float32)
        dv = tl.zeros([BS, DVP], tl.float32)
        for i in tl.range(start, end):
            query = tl.load(STEP + i) * QS
            bits = tl.load(BITS + i)
            if WHOLE:
                # The last step moves back until all its queries exist.
                back = tl.maximum(query + QS - N, 0)
                query -= back
                bits = bits << back
            i64 = query.to(tl.int64)
            q_from = Q + i64 * qt
            do_from = DOUT + i64 * ot
            row_from = i64 * (G * h) + head
            gate_from = GATE + i64 * gt
            if WHOLE:
                q = tl.load(q_from + q_at)
                do = tl.load(do_from + do_at)
                lse = tl.load(LSE + row_from + row_at)
                row_sum = tl.load(ROW_SUM + row_from + row_at)
                if GATED:
                    gate = tl.load(gate_from + gate_at)
            else:
                ok = fits & (qi < N - query)
                q = tl.load(q_from + q_at, mask=in_columns(ok, dk_, DK, DKP), other=0.0)
                do = tl.load(do_from + do_at, mask=in_columns(ok, dv_, DV, DVP), other=0.0)
                lse = tl.load(LSE + row_from + row_at, mask=ok, other=1e30)
                row_sum = tl.load(ROW_SUM + row_from + row_at, mask=ok, other=0.0)
                if GATED:
                    gate = tl.load(gate_from + gate_at, mask=ok, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            lse = tl.where(((bits >> qi) & 1) == 1, lse, 1e30)
            p = tl.exp2(s * scale - lse[None, :])
            if query + ahead < BS - 1:
                p = tl.where(key[:, None] <= (query + ahead + qi)[None, :], p, 0.0)
            if GATED:
                p *= gate.to(tl.float32)[None, :]
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = p * (dp - row_sum[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        whole = tl.load(TABLE + G * L + lst) - tl.load(TABLE + lst) <= SEGMENT
        if DIRECT & whole:
            at = (first + key).to(tl.int64) * G + g
            mine = first + key < tl.load(TABLE + 3 * G * L + lst)
            tl.store(
                DKEY + (at * DK)[:, None] + dk_[None, :],
                (dk * softmax_scale).to(DKEY.dtype.element_ty),
                mask=in_columns(mine, dk_, DK, DKP),
            )
            tl.store(
                DVALUE + (at * DV)[:, None] + dv_[None, :],
                dv.to(DVALUE.dtype.element_ty),
                mask=in_columns(mine, dv_, DV, DVP),
            )
        else:
            slot = tl.where(whole, slots + lst, tl.program_id(0))
            out = SUMS + (slot.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (BS * (DK + DV))
            out = out + (key * (DK + DV))[:, None]
            tl.store(out + dk_[None, :], dk, mask=in_columns(key < BS, dk_, DK, DKP))
            tl.store(out + DK + dv_[None, :], dv, mask=in_columns(key < BS, dv_, DV, DVP))

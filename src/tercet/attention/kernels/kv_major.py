"""Selected attention, block by block: each program holds one block's K and V and gathers the queries that chose it.

A program takes one *piece* (index.py): a stretch of one block's list, never longer than a segment, so that hot blocks
(the first one stands in every list) are shared out. What it yields per entry (a partial output with its log-sum-exp, or
a partial dq) is written at the entry's own place, and what it yields per block (dk, dv) at the piece's. Sums are then
taken in a fixed order: no atomics, the same bits every time. (One program walking all runs of a segment in a loop kept
some forty registers of loop-invariant addresses alive and spilled.)
"""

import triton
import triton.language as tl

from tercet.attention.kernels.union import in_columns, load_block


@triton.jit
def this_piece(PIECE, KEYS, LISTS, lists, slots, r, wanted, SEGMENT: tl.constexpr):
    """First and past the last entry of this program's piece, and its list. No entries: none there, or not wanted."""
    start = tl.load(PIECE + r.to(tl.int64) * slots + tl.program_id(0)) * wanted - 1
    lst = tl.load(KEYS + tl.maximum(start, 0)) >> 1
    past = tl.load(LISTS + lists + lst)
    return start, tl.where(start < 0, start, tl.minimum(start + SEGMENT, past)), lst


@triton.jit
def offsets(t, hh, token_stride, head_stride, WIDE: tl.constexpr):
    """Rows' offsets from a range's first token and head: 32 bits, since registers are short, unless strides need 64."""
    if WIDE:
        t = t.to(tl.int64)
        hh = hh.to(tl.int64)
    return t * token_stride + hh * head_stride


@triton.jit(do_not_specialize=["r", "begin", "lists", "slots", "L"])
def attend(
    Q,
    K,
    V,
    KD,
    VD,
    KEYS,
    ORDER,
    PIECE,
    LISTS,
    DECISION,
    PARTIAL,  # [tokens of the range, G, n, h, Dv]
    PARTIAL_LSE,
    r,
    begin,
    lists,
    slots,
    L,
    T,
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
    BQ: tl.constexpr,
    M: tl.constexpr,
    n: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    SEGMENT: tl.constexpr,
    SP: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
):
    # Program (piece, head tile). Forced entries are left to tile_forward; the others see the whole of their block.
    row = tl.arange(0, M)
    qi = row // HT
    hh = tl.program_id(1) * HT + row % HT
    fits = (qi < BQ) & (hh < h)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    start, end, lst = this_piece(PIECE, KEYS, LISTS, lists, slots, r, tl.load(DECISION + r), SEGMENT)
    # Free entries stand before forced ones.
    within = tl.arange(0, SP)
    names = tl.load(KEYS + start + within, mask=start + within < end, other=1)
    end = start + tl.sum(((names & 1) == 0).to(tl.int32))
    if (start < end) & (lst % L < L - 1):
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        k = load_block(K, KD, first, T, g, kb, kt, kg, BS, DK, DKP, TMA)
        v = load_block(V, VD, first, T, g, vb, vt, vg, BS, DV, DVP, TMA)
        b64 = (first // T).to(tl.int64)
        q_base = Q + (begin.to(tl.int64) * qt + b64 * qb + g.to(tl.int64) * h * qh)
        for i in tl.range(start, end, BQ):
            ok = fits & (i + qi < end)
            e = tl.load(ORDER + i + qi, mask=ok, other=begin * (G * n)).to(tl.int32)
            t = e // (G * n) - begin
            q = tl.load(
                q_base + offsets(t, hh, qt, qh, WIDE)[:, None] + dk[None, :],
                mask=in_columns(ok, dk, DK, DKP),
                other=0.0,
            )
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            m = tl.max(s, 1) * scale
            p = tl.exp2(s * scale - m[:, None])
            l = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision="ieee") * (1.0 / l)[:, None]
            to = (e - begin * (G * n)) * h + hh
            tl.store(
                PARTIAL + (to * DV)[:, None] + dv[None, :],
                o.to(PARTIAL.dtype.element_ty),
                mask=in_columns(ok, dv, DV, DVP),
            )
            tl.store(PARTIAL_LSE + to, m + tl.log2(l), mask=ok)


@triton.jit(do_not_specialize=["r", "begin", "pairs"])
def merge(
    PARTIAL,
    PARTIAL_LSE,
    SPAN,
    DECISION,
    O,  # in: the forced blocks' output; out: all blocks'
    LSE,
    r,
    begin,
    pairs,
    G: tl.constexpr,
    h: tl.constexpr,
    n: tl.constexpr,
    DV: tl.constexpr,
    DVP: tl.constexpr,
    HP: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    # Rows are (token of the range, KV head) pairs by heads of the group.
    if tl.load(DECISION + r) == 1:
        row = tl.arange(0, ROWS * HP)
        pair = tl.program_id(0) * ROWS + row // HP
        hh = tl.program_id(1) * HP + row % HP
        ok = (pair < pairs) & (hh < h)
        d = tl.arange(0, DVP)
        whole = in_columns(ok, d, DV, DVP)
        at = begin.to(tl.int64) * G + pair
        span = tl.load(SPAN + at, mask=ok, other=0)
        lo = span & 1023
        hi = (span >> 10) & 1023
        at = at * h + hh
        part = pair * (n * h) + hh
        forced = tl.load(LSE + at, mask=ok, other=1e30)
        forced = tl.where(forced < 1e29, forced, -1e20)
        # The greatest exponent first, over the small array, so that the large one is only scaled and added.
        top = forced
        for i in tl.range(0, n, loop_unroll_factor=UNROLL):
            live = ok & (i >= lo) & (i < hi)
            top = tl.maximum(top, tl.load(PARTIAL_LSE + part + i * h, mask=live, other=-1e30))
        l = tl.exp2(forced - top)
        l = tl.where(forced > -1e19, l, 0.0)
        acc = tl.load(O + at[:, None] * DV + d[None, :], mask=whole, other=0.0).to(tl.float32) * l[:, None]
        for i in tl.range(0, n, loop_unroll_factor=UNROLL):
            live = ok & (i >= lo) & (i < hi)
            w = tl.exp2(tl.load(PARTIAL_LSE + part + i * h, mask=live, other=-1e30) - top)
            x = tl.load(
                PARTIAL + ((part + i * h) * DV)[:, None] + d[None, :], mask=in_columns(live, d, DV, DVP), other=0.0
            )
            w = tl.where(live, w, 0.0)
            l += w
            acc += x.to(tl.float32) * w[:, None]
        some = l > 0
        l = tl.where(some, l, 1.0)
        tl.store(O + at[:, None] * DV + d[None, :], (acc / l[:, None]).to(O.dtype.element_ty), mask=whole)
        tl.store(LSE + at, tl.where(some, top + tl.log2(l), 1e30), mask=ok)


@triton.jit
def backward_step(
    Q, DOUT, GATE, LSE, ROW_SUM, ORDER, PARTIAL_DQ, k, v, dk, dv,
    i, end, first, begin, qi, hh, fits, scale, qt, qh, ot, oh, gt, gh,
    G: tl.constexpr, h: tl.constexpr, n: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, WIDE: tl.constexpr, WITH_DQ: tl.constexpr, GATED: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Entries i.. of a piece. MASK: they may not see all of the block."""
    d = tl.arange(0, DKP)
    c = tl.arange(0, DVP)
    ok = fits & (i + qi < end)
    e = tl.load(ORDER + i + qi, mask=ok, other=begin * (G * n)).to(tl.int32)
    t = e // (G * n) - begin
    q = tl.load(
        Q + offsets(t, hh, qt, qh, WIDE)[:, None] + d[None, :], mask=in_columns(ok, d, DK, DKP), other=0.0
    )
    do = tl.load(
        DOUT + offsets(t, hh, ot, oh, WIDE)[:, None] + c[None, :], mask=in_columns(ok, c, DV, DVP), other=0.0
    )
    lse = tl.load(LSE + t * (G * h) + hh, mask=ok, other=1e30)
    row_sum = tl.load(ROW_SUM + t * (G * h) + hh, mask=ok, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(s * scale - lse[:, None])
    if MASK:
        p = tl.where((t + (begin - first))[:, None] >= tl.arange(0, BS)[None, :], p, 0.0)
    if GATED:
        # In fp32 it is fetched ahead like the rest; Triton's pipeline takes no loads of two bytes.
        p = p * tl.load(GATE + offsets(t, hh, gt, gh, WIDE), mask=ok, other=0.0).to(tl.float32)[:, None]
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
    ds = (p * (dp - row_sum[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    if WITH_DQ:
        dq = tl.dot(ds, k, input_precision="ieee")
        to = (e - begin * (G * n)) * h + hh
        tl.store(
            PARTIAL_DQ + (to * DK)[:, None] + d[None, :],
            dq.to(PARTIAL_DQ.dtype.element_ty),
            mask=in_columns(ok, d, DK, DKP),
        )
    return dk, dv


@triton.jit(do_not_specialize=["r", "begin", "lists", "slots", "L"])
def backward(
    Q,
    K,
    V,
    KD,
    VD,
    DOUT,
    LSE,
    ROW_SUM,
    GATE,
    KEYS,
    ORDER,
    PIECE,
    LISTS,
    DECISION,
    PARTIAL_DQ,  # [tokens of the range, G, n, h, Dk]
    SUMS,  # fp32 [slots + G * L, head tiles, BS, Dk + Dv]: pieces of the cut lists, then every list's sum over ranges
    r,
    begin,
    lists,
    slots,
    L,
    T,
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
    ob,
    ot,
    oh,
    gb,
    gt,
    gh,
    G: tl.constexpr,
    h: tl.constexpr,
    HT: tl.constexpr,
    BQ: tl.constexpr,
    M: tl.constexpr,
    n: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DKP: tl.constexpr,
    DVP: tl.constexpr,
    SEGMENT: tl.constexpr,
    SP: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
    TMA: tl.constexpr,
    DECIDE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    GATED: tl.constexpr,
):
    # dk and dv of every entry, and its partial dq where the range's decision asks for it (WITH_DQ).
    row = tl.arange(0, M)
    qi = row // HT
    hh = tl.program_id(1) * HT + row % HT
    fits = (qi < BQ) & (hh < h)
    dk_ = tl.arange(0, DKP)
    dv_ = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    wanted = 1
    if DECIDE:
        wanted = tl.load(DECISION + r)
        if not WITH_DQ:
            wanted = 1 - wanted
    start, end, lst = this_piece(PIECE, KEYS, LISTS, lists, slots, r, wanted, SEGMENT)
    if (start < end) & (lst % L < L - 1):
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        k = load_block(K, KD, first, T, g, kb, kt, kg, BS, DK, DKP, TMA)
        v = load_block(V, VD, first, T, g, vb, vt, vg, BS, DV, DVP, TMA)
        dk = tl.zeros([BS, DKP], tl.float32)
        dv = tl.zeros([BS, DVP], tl.float32)
        # Everything is addressed from the range's first token: 64 bits once per piece, 32 per row.
        b64 = (first // T).to(tl.int64)
        head = g.to(tl.int64) * h
        at = begin.to(tl.int64)
        q_base = Q + (at * qt + b64 * qb + head * qh)
        do_base = DOUT + (at * ot + b64 * ob + head * oh)
        gate_base = GATE + (at * gt + b64 * gb + head * gh)
        row_base = at * (G * h) + head
        free = start
        if SPLIT:
            # Free entries stand before forced ones and see the whole block.
            within = tl.arange(0, SP)
            names = tl.load(KEYS + start + within, mask=start + within < end, other=1)
            free = start + tl.sum(((names & 1) == 0).to(tl.int32))
            for i in tl.range(start, free, BQ):
                dk, dv = backward_step(
                    q_base, do_base, gate_base, LSE + row_base, ROW_SUM + row_base, ORDER, PARTIAL_DQ, k, v, dk, dv,
                    i, free, first, begin, qi, hh, fits, scale, qt, qh, ot, oh, gt, gh, G, h, n, BS, DK, DV, DKP, DVP,
                    WIDE, WITH_DQ, GATED, False,
                )  # fmt: skip
        for i in tl.range(free, end, BQ):
            dk, dv = backward_step(
                q_base, do_base, gate_base, LSE + row_base, ROW_SUM + row_base, ORDER, PARTIAL_DQ, k, v, dk, dv,
                i, end, first, begin, qi, hh, fits, scale, qt, qh, ot, oh, gt, gh, G, h, n, BS, DK, DV, DKP, DVP,
                WIDE, WITH_DQ, GATED, True,
            )  # fmt: skip
        # An uncut list adds to its sum at once: earlier ranges were earlier launches.
        whole = tl.load(LISTS + lists + lst) - tl.load(LISTS + lst) <= SEGMENT
        slot = tl.where(whole, slots + lst % (G * L), tl.program_id(0))
        out = SUMS + (slot.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (BS * (DK + DV))
        out = out + (key * (DK + DV))[:, None]
        before = (key < BS) & whole & (first < begin)
        dk += tl.load(out + dk_[None, :], mask=in_columns(before, dk_, DK, DKP), other=0.0)
        tl.store(out + dk_[None, :], dk, mask=in_columns(key < BS, dk_, DK, DKP))
        dv += tl.load(out + DK + dv_[None, :], mask=in_columns(before, dv_, DV, DVP), other=0.0)
        tl.store(out + DK + dv_[None, :], dv, mask=in_columns(key < BS, dv_, DV, DVP))


@triton.jit(do_not_specialize=["r", "begin", "pairs"])
def sum_dq(
    PARTIAL_DQ,
    SPAN,
    DECISION,
    DQ,
    r,
    begin,
    pairs,
    softmax_scale,
    G: tl.constexpr,
    h: tl.constexpr,
    n: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    HP: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    ADD: tl.constexpr,
):
    # Rows are (token of the range, KV head) pairs by heads of the group.
    if tl.load(DECISION + r) == 1:
        row = tl.arange(0, ROWS * HP)
        pair = tl.program_id(0) * ROWS + row // HP
        hh = tl.program_id(1) * HP + row % HP
        ok = (pair < pairs) & (hh < h)
        d = tl.arange(0, DKP)
        at = begin.to(tl.int64) * G + pair
        past = tl.load(SPAN + at, mask=ok, other=0) >> 20
        part = (pair * (n * h) + hh) * DK
        acc = tl.zeros([ROWS * HP, DKP], tl.float32)
        for i in tl.range(0, n, loop_unroll_factor=UNROLL):
            acc += tl.load(
                PARTIAL_DQ + (part + i * (h * DK))[:, None] + d[None, :],
                mask=in_columns(ok & (i < past), d, DK, DKP),
                other=0.0,
            ).to(tl.float32)
        acc *= softmax_scale
        to = DQ + (at * h + hh)[:, None] * DK + d[None, :]
        whole = in_columns(ok, d, DK, DKP)
        if ADD:
            acc += tl.load(to, mask=whole, other=0.0).to(tl.float32)
        tl.store(to, acc.to(DQ.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["r", "begin", "end", "base", "lists", "slots", "L", "documents", "steps"])
def sum_dkv(
    SUMS,
    LISTS,
    CU,
    DKEY,
    DVALUE,
    r,
    begin,
    end,
    base,
    lists,
    slots,
    L,
    T,
    documents,
    steps,
    blocks_per_sequence,
    softmax_scale,
    G: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPTH: tl.constexpr,
    PACKED: tl.constexpr,
    LAST: tl.constexpr,
):
    # Program (block number, KV head, part of the block): adds what was cut; after the last range writes dk and dv.
    number = tl.program_id(0)
    g = tl.program_id(1)
    x = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    SIZE: tl.constexpr = BS * (DK + DV)
    if PACKED:
        lo = number * 0
        hi = lo + documents
        for _ in range(steps):
            mid = (lo + hi) // 2
            below = tl.load(CU + mid) // BS + mid <= number
            lo = tl.where(below, mid, lo)
            hi = tl.where(below, hi, mid)
        start = tl.load(CU + lo)
        first = start + (number - start // BS - lo) * BS
        past = tl.minimum(first + BS, tl.load(CU + lo + 1))
    else:
        sequence = number // blocks_per_sequence
        first = sequence * T + number % blocks_per_sequence * BS
        past = tl.minimum(first + BS, (sequence + 1) * T)
    lst = (r * G + g) * L + number
    p0 = tl.load(LISTS + lst)
    entries = tl.load(LISTS + lists + lst) - p0
    cut = entries > SEGMENT
    # A list that is new in this range and empty has no sum yet.
    new = (entries == 0) & (first >= begin)
    if (first < past) & (first < end) & (cut | new | LAST):
        total = tl.zeros([CHUNK], tl.float32)
        for tile in tl.static_range(HEAD_TILES):
            sums = SUMS + ((slots + g * L + number).to(tl.int64) * HEAD_TILES + tile) * SIZE + x
            defined = (x < SIZE) & ((first < begin) | ((entries > 0) & (entries <= SEGMENT)))
            acc = tl.load(sums, mask=defined, other=0.0)
            pieces = tl.where(cut, tl.cdiv(entries, SEGMENT), 0)
            piece = (p0 - base) // SEGMENT + g * L + number
            for i in tl.range(0, pieces, DEPTH):
                some = i + tl.arange(0, DEPTH)
                at = ((piece + some).to(tl.int64) * HEAD_TILES + tile) * SIZE
                part = tl.load(
                    SUMS + at[:, None] + x[None, :], mask=(some < pieces)[:, None] & (x < SIZE)[None, :], other=0.0
                )
                acc += tl.sum(part, 0)
            if LAST:
                total += acc
            else:
                tl.store(sums, acc, mask=x < SIZE)
        if LAST:
            key = x // (DK + DV)
            column = x % (DK + DV)
            mine = (x < SIZE) & (first + key < past)
            at = (first + key).to(tl.int64) * G + g
            tl.store(
                DKEY + at * DK + column,
                (total * softmax_scale).to(DKEY.dtype.element_ty),
                mask=mine & (column < DK),
            )
            tl.store(
                DVALUE + at * DV + (column - DK), total.to(DVALUE.dtype.element_ty), mask=mine & (column >= DK)
            )

"""Selected attention, block by block: each program holds one block's K and V and gathers the queries that chose it.

A program takes one *piece* (index.py): a stretch of one block's list, never longer than a segment, so that hot blocks
(the first one stands in every list) are shared out. What it yields per entry (a partial output with its log-sum-exp, or
a partial dq) is written at the entry's own place, and what it yields per block (dk, dv) at the piece's. Sums are then
taken in a fixed order: no atomics, the same bits every time. At small heads dk and dv alone are kv_keys.py's.
(One program walking all runs of a segment in a loop kept some forty registers of loop-invariant addresses alive, and
spilled.)

K and V are loaded once per piece, and plainly: the copy engine gains nothing there, and its descriptors cost the host
more than the launch.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.union import in_columns, load_block


@triton.jit
def this_piece(PIECE, LISTS, lists, slots, L, r, wanted, G: tl.constexpr, SEGMENT: tl.constexpr):
    """First and past the last entry of this program's piece, and its list. No entries: none there, or not wanted."""
    at = r.to(tl.int64) * slots + tl.program_id(0)
    start = tl.load(PIECE + at) * wanted - 1
    lst = tl.load(PIECE + (lists // (G * L)).to(tl.int64) * slots + at)
    past = tl.load(LISTS + lists + lst)
    return start, tl.where(start < 0, start, tl.minimum(start + SEGMENT, past)), lst


@triton.jit
def offsets(t, hh, token_stride, head_stride, WIDE: tl.constexpr):
    """Rows' offsets from a range's first token and head: 32 bits, since registers are short, unless strides need 64."""
    if WIDE:
        t = t.to(tl.int64)
        hh = hh.to(tl.int64)
    return t * token_stride + hh * head_stride


@triton.jit
def keep_sums(
    SUMS, LISTS, dk, dv, lst, lists, slots, known, L, G: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Keeps a piece's dk and dv. An uncut list adds to its sum at once (`known`: it has one already, from an earlier
    range, which was an earlier launch)."""
    key = tl.arange(0, BS)
    dk_ = tl.arange(0, DKP)
    dv_ = tl.arange(0, DVP)
    whole = tl.load(LISTS + lists + lst) - tl.load(LISTS + lst) <= SEGMENT
    slot = tl.where(whole, slots + lst % (G * L), tl.program_id(0))
    out = SUMS + (slot.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (BS * (DK + DV))
    out = out + (key * (DK + DV))[:, None]
    before = (key < BS) & whole & known
    dk += tl.load(out + dk_[None, :], mask=in_columns(before, dk_, DK, DKP), other=0.0)
    tl.store(out + dk_[None, :], dk, mask=in_columns(key < BS, dk_, DK, DKP))
    dv += tl.load(out + DK + dv_[None, :], mask=in_columns(before, dv_, DV, DVP), other=0.0)
    tl.store(out + DK + dv_[None, :], dv, mask=in_columns(key < BS, dv_, DV, DVP))


@triton.jit(do_not_specialize=["r", "begin", "lists", "slots", "L"])
def attend(
    Q,
    K,
    V,
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
    WIDE: tl.constexpr,
):
    # Program (piece, head tile). Forced entries are left to tile_forward; the others see the whole of their block.
    row = tl.arange(0, M)
    qi = row // HT
    hh = tl.program_id(1) * HT + row % HT
    fits = (qi < BQ) & (hh < h)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    start, end, lst = this_piece(PIECE, LISTS, lists, slots, L, r, tl.load(DECISION + r), G, SEGMENT)
    end = tl.minimum(end, tl.load(LISTS + 3 * lists + lst))  # free entries stand before forced ones
    if start < end:
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        k = load_block(K, None, first, T, g, kb, kt, kg, BS, DK, DKP, False)
        v = load_block(V, None, first, T, g, vb, vt, vg, BS, DV, DVP, False)
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


@triton.jit(do_not_specialize=["r", "begin", "seen", "lists", "slots", "L", "queries", "first_query"])
def backward(
    Q,
    K,
    V,
    DOUT,
    LSE,
    ROW_SUM,
    GATE,
    ORDER,
    PIECE,
    LISTS,
    DECISION,
    PARTIAL_DQ,  # [tokens of the range, G, n, h, Dk]
    SUMS,  # fp32 [slots + G * L, head tiles, BS, Dk + Dv]: pieces of the cut lists, then every list's sum over ranges
    r,
    begin,
    seen,  # blocks that begin before this token have a sum from earlier ranges
    lists,
    slots,
    L,
    T,
    queries,
    first_query,
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
    WIDE: tl.constexpr,
    DECIDE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    GATED: tl.constexpr,
    STRETCH: tl.constexpr,
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
    start, end, lst = this_piece(PIECE, LISTS, lists, slots, L, r, wanted, G, SEGMENT)
    if start < end:
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        forced = tl.load(LISTS + 3 * lists + lst)
        k = load_block(K, None, first, T, g, kb, kt, kg, BS, DK, DKP, False)
        v = load_block(V, None, first, T, g, vb, vt, vg, BS, DV, DVP, False)
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
        # what the range's first query is past the block's first token; the same for every query of the block's sequence
        ahead = begin - first
        if STRETCH:
            ahead += first // T * (T - queries) + first_query
        for i in tl.range(start, end, BQ):
            ok = fits & (i + qi < end)
            e = tl.load(ORDER + i + qi, mask=ok, other=begin * (G * n)).to(tl.int32)
            t = e // (G * n) - begin
            q = tl.load(
                q_base + offsets(t, hh, qt, qh, WIDE)[:, None] + dk_[None, :],
                mask=in_columns(ok, dk_, DK, DKP),
                other=0.0,
            )
            do = tl.load(
                do_base + offsets(t, hh, ot, oh, WIDE)[:, None] + dv_[None, :],
                mask=in_columns(ok, dv_, DV, DVP),
                other=0.0,
            )
            lse = tl.load(LSE + row_base + t * (G * h) + hh, mask=ok, other=1e30)
            row_sum = tl.load(ROW_SUM + row_base + t * (G * h) + hh, mask=ok, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # before the exponentials, which then run beside it
            p = tl.exp2(s * scale - lse[:, None])
            # Free entries stand first. (A loop of their own for them gained 8% on some shapes and lost 13% on others.)
            if i + BQ > forced:
                p = tl.where((t + ahead)[:, None] >= key[None, :], p, 0.0)
            if GATED:
                # Best in fp32: Triton's pipeline fetches no two-byte rows ahead.
                gate = tl.load(gate_base + offsets(t, hh, gt, gh, WIDE), mask=ok, other=0.0)
                p = p * gate.to(tl.float32)[:, None]
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            ds = (p * (dp - row_sum[:, None])).to(q.dtype)
            dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
            if WITH_DQ:
                dq = tl.dot(ds, k, input_precision="ieee")
                to = (e - begin * (G * n)) * h + hh
                tl.store(
                    PARTIAL_DQ + (to * DK)[:, None] + dk_[None, :],
                    dq.to(PARTIAL_DQ.dtype.element_ty),
                    mask=in_columns(ok, dk_, DK, DKP),
                )
        keep_sums(SUMS, LISTS, dk, dv, lst, lists, slots, first < seen, L, G, BS, DK, DV, DKP, DVP, SEGMENT)

"""The KV-major design of the selected branch: one block's K and V against the queries that chose it.

A program takes one *piece* of a block's list (inverted_lists.py), at most a segment long, so that popular blocks (every
query selects the first one) are shared among programs. Partial results per entry (an output with its log-sum-exp, or
dq) are written at the entry's place, dk and dv at the piece's. reduce.py adds them up in a fixed order, without
atomics, so that results are bitwise reproducible.

Two kernels compute dK/dV without dQ: `kv_major_dkv_transposed` at small heads, `kv_major_dkv` elsewhere; the latter
also computes dQ where the KV-major design runs. (A program that loops over several lists kept forty registers of
loop-invariant addresses alive, and spilled.)

K and V are loaded once per piece, without TMA: it gains nothing here, and its descriptors cost the host more than the
launch.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.selected.query_major import in_columns, load_block, sequence_end


@triton.jit
def this_piece(PIECE, LISTS, lists, slots, L, r, wanted, G: tl.constexpr, SEGMENT: tl.constexpr):
    """(first entry, past the last entry, list) of this program's piece. Empty if there is none, or it is not wanted."""
    at = r.to(tl.int64) * slots + tl.program_id(0)
    start = tl.load(PIECE + at) * wanted - 1
    lst = tl.load(PIECE + (lists // (G * L)).to(tl.int64) * slots + at)
    past = tl.load(LISTS + lists + lst)
    return start, tl.where(start < 0, start, tl.minimum(start + SEGMENT, past)), lst


@triton.jit
def offsets(t, hh, token_stride, head_stride, WIDE: tl.constexpr):
    """Offsets of rows from a range's first token and head: 32 bits to save registers, 64 if strides need it."""
    if WIDE:
        t = t.to(tl.int64)
        hh = hh.to(tl.int64)
    return t * token_stride + hh * head_stride


@triton.jit
def keep_sums(
    SUMS, LISTS, dk, dv, lst, lists, slots, known, L, G: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write a piece's dk and dv. A list of one piece adds to its sum directly; `known`: the sum has been started by an
    earlier range, that is by an earlier launch."""
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
def kv_major_forward(
    Q, K, V, ORDER, PIECE, LISTS, DECISION, PARTIAL, PARTIAL_LSE, r, begin, lists, slots, L, T, scale, qb, qt, qh, kb,
    kt, kg, vb, vt, vg,
    G: tl.constexpr, h: tl.constexpr, HT: tl.constexpr, BQ: tl.constexpr, M: tl.constexpr, n: tl.constexpr,
    BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SEGMENT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program (piece, head tile). PARTIAL: [tokens of the range, G, n, h, Dv]. query_major_forward attends the forced
    entries; the others see their whole block."""
    row = tl.arange(0, M)
    qi = row // HT
    hh = tl.program_id(1) * HT + row % HT
    fits = (qi < BQ) & (hh < h)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    start, end, lst = this_piece(PIECE, LISTS, lists, slots, L, r, tl.load(DECISION + r), G, SEGMENT)
    end = tl.minimum(end, tl.load(LISTS + 3 * lists + lst))  # free entries come before forced ones
    if start < end:
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        k = load_block(K, None, first, sequence_end(first, T), T, g, kb, kt, kg, BS, DK, DKP, False)
        v = load_block(V, None, first, sequence_end(first, T), T, g, vb, vt, vg, BS, DV, DVP, False)
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
def kv_major_dkv(
    Q, K, V, DOUT, LSE, DELTA, GATE, ORDER, PIECE, LISTS, DECISION, PARTIAL_DQ, SUMS, r, begin, seen, lists, slots, L,
    T, queries, first_query, scale, qb, qt, qh, kb, kt, kg, vb, vt, vg, ob, ot, oh, gb, gt, gh,
    G: tl.constexpr, h: tl.constexpr, HT: tl.constexpr, BQ: tl.constexpr, M: tl.constexpr, n: tl.constexpr,
    BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SEGMENT: tl.constexpr,
    WIDE: tl.constexpr, DECIDE: tl.constexpr, WITH_DQ: tl.constexpr, GATED: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """dk and dv of a piece and, WITH_DQ, the partial dq of its entries. DECIDE: run only if the range's decision is
    WITH_DQ.

    PARTIAL_DQ: [tokens of the range, G, n, h, Dk]. SUMS: fp32 [slots + G·L, head tiles, BS, Dk + Dv]: pieces of the
    split lists, then each list's sum over ranges. Blocks that begin before token `seen` have a sum from earlier ranges.
    """
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
        # what the range's first query is past the block's first token; the same for every query of the block's sequence
        ahead = begin - first
        if QUERY_RANGE:
            ahead += first // T * (T - queries) + first_query
        # Free entries see the whole block; of forced ones, the last sees most. Keys that no entry sees may belong to
        # another document: zeros keep what is not finite there out of dq.
        last = (tl.load(ORDER + end - 1).to(tl.int32) // (G * n) - begin) + ahead
        past = first + tl.where(start < forced, BS, tl.minimum(last + 1, BS))
        k = load_block(K, None, first, past, T, g, kb, kt, kg, BS, DK, DKP, False)
        v = load_block(V, None, first, past, T, g, vb, vt, vg, BS, DV, DVP, False)
        dk = tl.zeros([BS, DKP], tl.float32)
        dv = tl.zeros([BS, DVP], tl.float32)
        # addresses relative to the range's first token: 64 bits once per piece, 32 bits per row
        b64 = (first // T).to(tl.int64)
        head = g.to(tl.int64) * h
        at = begin.to(tl.int64)
        q_base = Q + (at * qt + b64 * qb + head * qh)
        do_base = DOUT + (at * ot + b64 * ob + head * oh)
        gate_base = GATE + (at * gt + b64 * gb + head * gh)
        row_base = at * (G * h) + head
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
            lse = tl.load(LSE + row_base + t * (G * h) + hh, mask=ok, other=float("inf"))
            delta = tl.load(DELTA + row_base + t * (G * h) + hh, mask=ok, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # before the exponentials, to overlap with them
            p = tl.exp2(s * scale - lse[:, None])
            # free entries come first (a separate loop for them gained 8% on some shapes and lost 13% on others)
            if i + BQ > forced:
                p = tl.where((t + ahead)[:, None] >= key[None, :], p, 0.0)
            if GATED:
                # gates are best given in fp32: Triton does not prefetch two-byte rows
                gate = tl.load(gate_base + offsets(t, hh, gt, gh, WIDE), mask=ok, other=0.0)
                p = p * gate.to(tl.float32)[:, None]
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
            ds = (p * (dp - delta[:, None])).to(q.dtype)
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


@triton.jit(do_not_specialize=["r", "begin", "seen", "lists", "slots", "L", "queries", "first_query"])
def kv_major_dkv_transposed(
    Q, K, V, DOUT, RECORDS, ORDER, PIECE, LISTS, DECISION, SUMS, r, begin, seen, lists, slots, L, T, queries,
    first_query, scale, qb, qt, qh, kb, kt, kg, vb, vt, vg, ob, ot, oh,
    G: tl.constexpr, h: tl.constexpr, HT: tl.constexpr, M: tl.constexpr, n: tl.constexpr, BS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SEGMENT: tl.constexpr, WIDE: tl.constexpr,
    DECIDE: tl.constexpr, QUERY_RANGE: tl.constexpr,
):  # fmt: skip
    """dk and dv of a piece, for the ranges whose dq is query-major. Like kv_major_dkv without dq, but computes Sᵀ.

    Pᵀ and dSᵀ then feed their products from registers; P and dS would be transposed through shared memory, which limits
    products this small. Each row comes with one record of four numbers (query_major_dq writes them), since Triton would
    have every thread load separate vectors of so few numbers for each of its columns.
    """
    row = tl.arange(0, M)
    dk_ = tl.arange(0, DKP)
    dv_ = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    wanted = 1
    if DECIDE:
        wanted = 1 - tl.load(DECISION + r)
    start, end, lst = this_piece(PIECE, LISTS, lists, slots, L, r, wanted, G, SEGMENT)
    if start < end:
        g = lst // L % G
        first = tl.load(LISTS + 2 * lists + lst)
        forced = tl.load(LISTS + 3 * lists + lst)
        k = load_block(K, None, first, sequence_end(first, T), T, g, kb, kt, kg, BS, DK, DKP, False)
        v = load_block(V, None, first, sequence_end(first, T), T, g, vb, vt, vg, BS, DV, DVP, False)
        dk = tl.zeros([BS, DKP], tl.float32)
        dv = tl.zeros([BS, DVP], tl.float32)
        # addresses relative to the range's first token: 64 bits once per piece, 32 bits per row
        b64 = (first // T).to(tl.int64)
        head = g.to(tl.int64) * h
        at = begin.to(tl.int64)
        q_base = Q + (at * qt + b64 * qb + head * qh)
        do_base = DOUT + (at * ot + b64 * ob + head * oh)
        record_base = RECORDS + (at * (G * h) + head) * 4
        # position of query 0 relative to the block's first token, for all queries of the block's sequence
        ahead = -first
        if QUERY_RANGE:
            ahead += first // T * (T - queries) + first_query
        # rows are numbered through (entry, head of the tile): only the last step has idle ones
        for x in tl.range(0, (end - start) * HT, M):
            i = start + (x + row) // HT
            hh = tl.program_id(1) * HT + (x + row) % HT
            ok = (i < end) & (hh < h)
            e = tl.load(ORDER + i, mask=ok, other=begin * (G * n)).to(tl.int32)
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
            # rows past the end have gate 0
            record = tl.load(
                record_base + offsets(t, hh, G * h * 4, 4, WIDE)[:, None] + tl.arange(0, 4)[None, :],
                mask=ok[:, None],
                other=0.0,
            )
            even, odd = tl.split(tl.reshape(record, [M, 2, 2]))
            lse, delta = tl.split(even)
            gate, query = tl.split(odd)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # before the exponentials, to overlap with them
            p = tl.exp2(s * scale - lse[None, :])
            # free entries come first (a separate loop for them gained 8% on some shapes and lost 13% on others)
            if start + (x + M - 1) // HT >= forced:
                p = tl.where((query.to(tl.int32, bitcast=True) + ahead)[None, :] >= key[:, None], p, 0.0)
            p = p * gate[None, :]
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
        keep_sums(SUMS, LISTS, dk, dv, lst, lists, slots, first < seen, L, G, BS, DK, DV, DKP, DVP, SEGMENT)

"""dk and dv of the selected branch, block by block: a block's K and V against the queries that chose it (kv_major.py).

Keys stand down the rows: Pᵀ and dSᵀ then feed their products from registers, where P and dS would have to be transposed
through shared memory, which is what such small products wait for. All that a query row brings besides q and dout comes
as one *record* of four numbers (`tile_dq` writes them: log-sum-exp, gate, row sum, the query's number): vectors of so
few numbers, "cheap" to Triton, would be loaded by every thread for each of its columns.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.kv_major import keep_sums, offsets, this_piece
from tercet.attention.kernels.union import in_columns, load_block


@triton.jit(do_not_specialize=["r", "begin", "seen", "lists", "slots", "L", "queries", "first_query"])
def key_gradients(
    Q,
    K,
    V,
    DOUT,
    RECORDS,  # fp32 [N, G * h, 4]
    ORDER,
    PIECE,
    LISTS,
    DECISION,
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
    G: tl.constexpr,
    h: tl.constexpr,
    HT: tl.constexpr,
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
    STRETCH: tl.constexpr,
):
    # Program (piece, head tile), of the ranges whose dq comes from union tiles.
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
        record_base = RECORDS + (at * (G * h) + head) * 4
        # what query 0 would be past the block's first token; the same for every query of the block's sequence
        ahead = -first
        if STRETCH:
            ahead += first // T * (T - queries) + first_query
        # Rows are (entry, head of the tile), counted through: no row idle but in the last step.
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
            # A row that is not there has gate 0.
            record = tl.load(
                record_base + offsets(t, hh, G * h * 4, 4, WIDE)[:, None] + tl.arange(0, 4)[None, :],
                mask=ok[:, None],
                other=0.0,
            )
            even, odd = tl.split(tl.reshape(record, [M, 2, 2]))
            lse, row_sum = tl.split(even)
            gate, query = tl.split(odd)
            s = tl.dot(k, tl.trans(q), input_precision="ieee")
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # before the exponentials, which then run beside it
            p = tl.exp2(s * scale - lse[None, :])
            # Free entries stand first. (A loop of their own for them gained 8% on some shapes and lost 13% on others.)
            if start + (x + M - 1) // HT >= forced:
                p = tl.where((query.to(tl.int32, bitcast=True) + ahead)[None, :] >= key[:, None], p, 0.0)
            p = p * gate[None, :]
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            ds = (p * (dp - row_sum[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
        keep_sums(SUMS, LISTS, dk, dv, lst, lists, slots, first < seen, L, G, BS, DK, DV, DKP, DVP, SEGMENT)

"""Selected attention, block by block: each program holds one block's K and V and gathers the queries that chose it.

A slab's sorted entries (index.py) are cut into segments of equal length; a program walks the runs of equal block in
its segment. Equal segments balance hot blocks (the first one stands in every list) without a table of chunks. What a
run yields per entry (a partial output with its log-sum-exp, or a partial dq) is written at the entry's own place, and
what it yields per block (dk, dv) at piece = segment + list: unique, since each step along the segments or the lists
moves it on by one. Sums are then taken in that order: no atomics, the same bits every time.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.union import in_columns


@triton.jit
def offsets(t, hh, token_stride, head_stride, WIDE: tl.constexpr):
    """Rows' offsets from a slab's first token and head: 32 bits, since registers are short, unless strides need 64."""
    if WIDE:
        t = t.to(tl.int64)
        hh = hh.to(tl.int64)
    return t * token_stride + hh * head_stride


@triton.jit(do_not_specialize=["slab", "group", "begin", "base", "count"])
def attend(
    Q,
    K,
    V,
    KEYS,
    ENTRIES,
    FIRST,  # int32: first token of each list's block
    DECISION,
    PARTIAL,  # [tokens of the slab, GL, n, h, Dv]
    PARTIAL_LSE,
    slab,
    group,
    begin,
    base,
    count,
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
    GL: tl.constexpr,
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
):
    # Forced entries are left to the merge. The others see the whole of their block: no mask.
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(1) * HT + r % HT
    fits = (qi < BQ) & (hh < h)
    dk = tl.arange(0, DKP)
    dv = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    within = tl.arange(0, SP)
    p0 = tl.program_id(0) * SEGMENT
    past = tl.minimum(p0 + SEGMENT, count) * tl.load(DECISION + slab)
    while p0 < past:
        name = tl.load(KEYS + base + p0)
        names = tl.load(KEYS + base + p0 + within, mask=p0 + within < past, other=-1)
        run = p0 + tl.sum((names == name).to(tl.int32))
        lst = name >> 1
        if ((name & 1) == 0) & (lst % L < L - 1):
            gl = lst // L % GL
            g = (group + gl).to(tl.int64)
            first = tl.load(FIRST + lst)
            b = (first // T).to(tl.int64)
            k = tl.load(
                K + (first.to(tl.int64) * kt + b * kb + g * kg) + key[:, None] * kt + dk[None, :],
                mask=in_columns(key < BS, dk, DK, DKP),
                other=0.0,
            )
            v = tl.load(
                V + (first.to(tl.int64) * vt + b * vb + g * vg) + key[:, None] * vt + dv[None, :],
                mask=in_columns(key < BS, dv, DV, DVP),
                other=0.0,
            )
            q_base = Q + (begin.to(tl.int64) * qt + b * qb + g * h * qh)
            for i in tl.range(p0, run, BQ):
                ok = fits & (i + qi < run)
                e = tl.load(ENTRIES + base + i + qi, mask=ok, other=begin * (G * n))
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
                to = ((t * GL + gl) * n + e % n) * h + hh
                tl.store(
                    PARTIAL + (to * DV)[:, None] + dv[None, :],
                    o.to(PARTIAL.dtype.element_ty),
                    mask=in_columns(ok, dv, DV, DVP),
                )
                tl.store(PARTIAL_LSE + to, m + tl.log2(l), mask=ok)
        p0 = run


@triton.jit(do_not_specialize=["slab", "group", "begin", "base", "count", "slab_list"])
def backward(
    Q,
    K,
    V,
    DOUT,
    LSE,
    ROW_SUM,
    GATE,
    KEYS,
    ENTRIES,
    FIRST,
    DECISION,
    PARTIAL_DQ,  # [tokens of the slab, GL, n, h, Dk]
    PIECES,  # fp32 [pieces, head tiles, BS, Dk + Dv]
    slab,
    group,
    begin,
    base,
    count,
    slab_list,
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
    GL: tl.constexpr,
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
    DECIDE: tl.constexpr,
    WITH_DQ: tl.constexpr,
    GATED: tl.constexpr,
):
    # dk and dv of every entry, and its partial dq where the slab's decision asks for it (WITH_DQ).
    r = tl.arange(0, M)
    qi = r // HT
    hh = tl.program_id(1) * HT + r % HT
    fits = (qi < BQ) & (hh < h)
    dk_ = tl.arange(0, DKP)
    dv_ = tl.arange(0, DVP)
    key = tl.arange(0, BS)
    within = tl.arange(0, SP)
    segment = tl.program_id(0)
    p0 = segment * SEGMENT
    past = tl.minimum(p0 + SEGMENT, count)
    if DECIDE:
        chosen = tl.load(DECISION + slab)
        past = past * (chosen if WITH_DQ else 1 - chosen)
    while p0 < past:
        lst = tl.load(KEYS + base + p0) >> 1
        lists = tl.load(KEYS + base + p0 + within, mask=p0 + within < past, other=-1) >> 1
        run = p0 + tl.sum((lists == lst).to(tl.int32))
        if lst % L < L - 1:
            gl = lst // L % GL
            g = (group + gl).to(tl.int64)
            first = tl.load(FIRST + lst)
            b = first // T
            inside = first + key < (b + 1) * T
            b64 = b.to(tl.int64)
            k = tl.load(
                K + (first.to(tl.int64) * kt + b64 * kb + g * kg) + key[:, None] * kt + dk_[None, :],
                mask=in_columns(inside, dk_, DK, DKP),
                other=0.0,
            )
            v = tl.load(
                V + (first.to(tl.int64) * vt + b64 * vb + g * vg) + key[:, None] * vt + dv_[None, :],
                mask=in_columns(inside, dv_, DV, DVP),
                other=0.0,
            )
            dk = tl.zeros([BS, DKP], tl.float32)
            dv = tl.zeros([BS, DVP], tl.float32)
            # Everything is addressed from the slab's first token: 64 bits once per run, 32 per row.
            at = begin.to(tl.int64)
            q_base = Q + (at * qt + b64 * qb + g * h * qh)
            do_base = DOUT + (at * ot + b64 * ob + g * h * oh)
            gate_base = GATE + (at * gt + b64 * gb + g * h * gh)
            row_base = at * (G * h) + g * h
            for i in tl.range(p0, run, BQ):
                ok = fits & (i + qi < run)
                e = tl.load(ENTRIES + base + i + qi, mask=ok, other=begin * (G * n))
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
                row = t * (G * h) + hh
                lse = tl.load(LSE + row_base + row, mask=ok, other=1e30)
                row_sum = tl.load(ROW_SUM + row_base + row, mask=ok, other=0.0)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                p = tl.exp2(s * scale - lse[:, None])
                p = tl.where((t + (begin - first))[:, None] >= key[None, :], p, 0.0)
                if GATED:
                    gate = tl.load(gate_base + offsets(t, hh, gt, gh, WIDE), mask=ok, other=0.0)
                    p = p * gate.to(tl.float32)[:, None]
                dp = tl.dot(do, tl.trans(v), input_precision="ieee")
                dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
                ds = (p * (dp - row_sum[:, None])).to(q.dtype)
                dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
                if WITH_DQ:
                    dq = tl.dot(ds, k, input_precision="ieee")
                    to = ((t * GL + gl) * n + e % n) * h + hh
                    tl.store(
                        PARTIAL_DQ + (to * DK)[:, None] + dk_[None, :],
                        dq.to(PARTIAL_DQ.dtype.element_ty),
                        mask=in_columns(ok, dk_, DK, DKP),
                    )
            piece = (segment + lst - slab_list).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            to = PIECES + piece * (BS * (DK + DV)) + key[:, None] * (DK + DV)
            tl.store(to + dk_[None, :], dk, mask=(dk_ < DK)[None, :])
            tl.store(to + DK + dv_[None, :], dv, mask=(dv_ < DV)[None, :])
        p0 = run


@triton.jit(do_not_specialize=["slab", "group", "begin", "rows"])
def sum_dq(
    PARTIAL_DQ,
    SPAN,
    DECISION,
    DQ,
    slab,
    group,
    begin,
    rows,
    softmax_scale,
    G: tl.constexpr,
    GL: tl.constexpr,
    h: tl.constexpr,
    n: tl.constexpr,
    DK: tl.constexpr,
    DKP: tl.constexpr,
    HP: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    # Rows are (token of the slab, KV head of the slab, head of the group).
    r = tl.arange(0, ROWS * HP)
    pair = tl.program_id(0) * ROWS + r // HP
    hh = tl.program_id(1) * HP + r % HP
    ok = (pair < rows) & (hh < h)
    d = tl.arange(0, DKP)
    if tl.load(DECISION + slab) == 1:
        t = (begin + pair // GL).to(tl.int64)
        g = group + pair % GL
        past = tl.load(SPAN + t * G + g, mask=ok, other=0) >> 20
        part = pair.to(tl.int64) * (n * h) + hh
        acc = tl.zeros([ROWS * HP, DKP], tl.float32)
        for i in tl.range(0, n, loop_unroll_factor=4):
            acc += tl.load(
                PARTIAL_DQ + (part + i * h)[:, None] * DK + d[None, :],
                mask=in_columns(ok & (i < past), d, DK, DKP),
                other=0.0,
            ).to(tl.float32)
        acc *= softmax_scale
        to = DQ + (t * (G * h) + g * h + hh)[:, None] * DK + d[None, :]
        whole = in_columns(ok, d, DK, DKP)
        if ADD:
            acc += tl.load(to, mask=whole, other=0.0).to(tl.float32)
        tl.store(to, acc.to(DQ.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["slab_list", "group", "base", "range_begin", "range_end", "documents", "steps"])
def sum_dkv(
    PIECES,
    LISTS,
    CU,
    SUMS,  # fp32 [GL, blocks, BS, Dk + Dv]: carried from range to range
    DKEY,
    DVALUE,
    slab_list,
    group,
    base,
    range_begin,
    range_end,
    lists,
    L,
    T,
    documents,
    steps,
    blocks_per_sequence,
    softmax_scale,
    G: tl.constexpr,
    GL: tl.constexpr,
    BS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    SEGMENT: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKED: tl.constexpr,
    CARRY: tl.constexpr,
    LAST: tl.constexpr,
):
    # Program (block number, KV head of the slab, part of the block's keys).
    number = tl.program_id(0)
    gl = tl.program_id(1)
    key = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    used = (column < DK + DV)[None, :]
    if PACKED:
        lo = number * 0
        hi = lo + documents
        for _ in range(steps):
            mid = (lo + hi) // 2
            if tl.load(CU + mid) // BS + mid <= number:
                lo = mid
            else:
                hi = mid
        start = tl.load(CU + lo)
        first = start + (number - start // BS - lo) * BS
        past = tl.minimum(first + BS, tl.load(CU + lo + 1))
    else:
        sequence = number // blocks_per_sequence
        first = sequence * T + number % blocks_per_sequence * BS
        past = tl.minimum(first + BS, (sequence + 1) * T)
    lst = slab_list + gl * L + number
    p0 = tl.load(LISTS + lst)
    p1 = tl.load(LISTS + lists + lst)
    if (first < past) & (first < range_end):
        acc = tl.zeros([KEYS, COLUMNS], tl.float32)
        at = key[:, None] * (DK + DV) + column[None, :]
        sums = SUMS + (gl * tl.num_programs(0) + number).to(tl.int64) * (BS * (DK + DV))
        if CARRY:
            if first < range_begin:
                acc = tl.load(sums + at, mask=used, other=0.0)
        if p0 < p1:
            piece = ((p0 - base) // SEGMENT + gl * L + number) * HEAD_TILES
            pieces = ((p1 - 1 - base) // SEGMENT - (p0 - base) // SEGMENT + 1) * HEAD_TILES
            for i in tl.range(0, pieces):
                acc += tl.load(PIECES + (piece + i).to(tl.int64) * (BS * (DK + DV)) + at, mask=used, other=0.0)
        if LAST:
            row = ((first + key).to(tl.int64) * G + group + gl)[:, None]
            mine = (first + key < past)[:, None]
            tl.store(
                DKEY + row * DK + column[None, :],
                (acc * softmax_scale).to(DKEY.dtype.element_ty),
                mask=mine & (column < DK)[None, :],
            )
            tl.store(
                DVALUE + row * DV + column[None, :] - DK,
                acc.to(DVALUE.dtype.element_ty),
                mask=mine & (column >= DK)[None, :] & used,
            )
        else:
            tl.store(sums + at, acc, mask=used)

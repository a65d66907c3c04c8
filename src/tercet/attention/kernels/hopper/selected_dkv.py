"""dK/dV of the selected branch, and the partial dQ of scattered selections. Glossary: selected/__init__.py.

Without dQ, results are bitwise identical to kv_major.kv_major_dkv_transposed. With dQ it replaces
kv_major.kv_major_dkv.

A program holds a block's K and V and loops over the (entry, head) rows of its piece. Rows past the end repeat the last
entry and get weight 0. Rows are scattered in memory, so that TMA cannot fetch them: four warps only gather, step by
step as slots become free, and four others multiply and exponentiate. dP runs during the exponentials; dV and dK
overlap with the next step's S.

At head 64 the multiplying warps compute S, with 64 rows per step (`_multiply_rows`). A thread then needs the
log-sum-exps, gates and deltas of two rows; with Sᵀ it would need those of all rows, which took a fifth of what shared
memory delivered. At head 128, where dK and dV take twice the registers, they compute Sᵀ with 32 rows per step
(`_multiply_keys`), because a product has at least 64 rows.

Each slot has two barriers: every gathering thread arrives at `full` when its copies have landed; one thread arrives at
`empty` when all multiplying warps are done with the slot.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tercet.attention.kernels.hopper.common import barrier, copy_rows, entries_of, real_columns


@gluon.constexpr_function
def _bases(M):
    """A thread's columns in a score tile of M columns: two adjacent ones of every eight; two numbers for each."""
    return [[0, 1], [1, 0]] + [[8 << i, 0] for i in range((M // 8).bit_length() - 1)]


@gluon.jit
def _gather(
    ORDER, q_base, do_base, record_base, q_s, do_s, first_s, second_s, full, empty, start, last, steps,
    QT: gl.constexpr, QH: gl.constexpr, OT: gl.constexpr, OH: gl.constexpr, G: gl.constexpr, h: gl.constexpr,
    M: gl.constexpr, n: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gathering warps: q, dout, and the records in two halves."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    by_record: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])
    SLOTS: gl.constexpr = G * n
    H: gl.constexpr = G * h
    d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, by_record))
    x = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
    y = gl.arange(0, M, layout=gl.SliceLayout(1, by_record))
    # load the entries of a step while the copies of the previous step run
    e = entries_of(ORDER, x, start, last, h)
    f = entries_of(ORDER, y, start, last, h)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for _ in range(steps):
        t = (e.to(gl.uint32) // SLOTS).to(gl.int32)
        own = (f.to(gl.uint32) // SLOTS).to(gl.int32)
        hh = x % h
        record = record_base + ((own * H + y % h) * 4)[:, None] + c[None, :]
        mbarrier.wait(empty.index(slot), phase)
        at = (t * QT + hh * QH)[:, None] + d[None, :]
        copy_rows(q_s.index(slot), q_base + at, d, SIZE, D)
        if QT != OT or QH != OH:
            at = (t * OT + hh * OH)[:, None] + d[None, :]
        copy_rows(do_s.index(slot), do_base + at, d, SIZE, D)
        async_copy.async_copy_global_to_shared(first_s.index(slot), record)
        async_copy.async_copy_global_to_shared(second_s.index(slot), record + 2)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        x += M
        y += M
        e = entries_of(ORDER, x, start, last, h)
        f = entries_of(ORDER, y, start, last, h)
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _multiply_rows(
    k_s, v_s, q_s, do_s, first_s, second_s, ds_s, p_s, full, empty, ORDER, PARTIAL_DQ, start, last, steps, partly,
    wholly, count, ahead, begin, scale,
    SLOTS: gl.constexpr, h: gl.constexpr, BS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr,
):  # fmt: skip
    """S, with 64 rows of queries; dKᵀ and dVᵀ, since a product has at least 64 rows, and a block may have 32 keys.
    D = 64."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BS, 16])
    queries: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=queries, k_width=2)
    own: gl.constexpr = gl.SliceLayout(1, scores)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # two numbers for each of the two rows of a thread
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 2],
    )  # fmt: skip
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([64, BS], gl.float32, layout=scores)
    none = gl.zeros([64, D], gl.float32, layout=queries)
    row = gl.arange(0, 64, layout=own)
    stored = gl.arange(0, 64, layout=gl.SliceLayout(1, by_row))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    key = gl.arange(0, BS, layout=gl.SliceLayout(0, scores))
    dk = warpgroup_mma_init(zeros)
    dv = warpgroup_mma_init(zeros)
    slot = gl.to_tensor(0)
    before = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for j in range(steps):
        mbarrier.wait(full.index(slot), phase)
        s = warpgroup_mma(q_s.index(slot), k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(do_s.index(slot), v_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse, gate = gl.split(first_s.index(slot).load(pairs))
        delta, query = gl.split(second_s.index(slot).load(pairs))
        score, dv_, dk_ = warpgroup_mma_wait(1, deps=(s, dv, dk))
        # the previous step is done with its slot, and with p and ds
        barrier()
        mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
        p = gl.exp2(score * scale - gl.convert_layout(lse, own, assert_trivial=True)[:, None])
        p = p * gl.convert_layout(gate, own, assert_trivial=True)[:, None]
        if ((j >= partly) & (j < wholly)) | (j == steps - 1):
            number = gl.convert_layout(query.to(gl.int32, bitcast=True), own, assert_trivial=True)
            past = gl.where(j * 64 + row < count, number + ahead, -1)
            p = gl.where(past[:, None] >= key[None, :], p, 0.0)
        p_s.store(p.to(dtype))
        dp_, p = warpgroup_mma_wait(0, deps=(dp, p))
        ds = (p * (dp_ - gl.convert_layout(delta, own, assert_trivial=True)[:, None])).to(dtype)
        ds_s.store(ds)
        fence_async_shared()
        barrier()
        if WITH_DQ:
            # not loaded earlier: the fence would wait for it
            x = j * 64 + stored
            e = entries_of(ORDER, x, start, last, h)
            dq = warpgroup_mma(gl.convert_layout(ds, operand), k_s, none, use_acc=False, is_async=True)
        dv = warpgroup_mma(do_s.index(slot).permute((1, 0)), p_s, dv_, is_async=True)
        dk = warpgroup_mma(q_s.index(slot).permute((1, 0)), ds_s, dk_, is_async=True)
        if WITH_DQ:
            dq_ = warpgroup_mma_wait(2, deps=(dq,))
            to = (((e - begin * SLOTS) * h + x % h) * D)[:, None] + column[None, :]
            partial = gl.convert_layout(dq_.to(dtype), by_row)
            gl.store(PARTIAL_DQ + to, partial, mask=(x < count)[:, None], eviction_policy="evict_first")
        before = slot
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    dv_, dk_ = warpgroup_mma_wait(0, deps=(dv, dk))
    return dk_, dv_


@gluon.jit
def _multiply_keys(
    k_s, v_s, q_s, do_s, first_s, second_s, ds_s, dq_s, full, empty, ORDER, PARTIAL_DQ, start, last, steps, partly,
    wholly, count, ahead, begin, scale,
    SLOTS: gl.constexpr, h: gl.constexpr, M: gl.constexpr, BS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Sᵀ, with rows of keys and M columns, fewer than 64."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    column: gl.constexpr = gl.SliceLayout(0, scores)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    # two numbers for each of the columns that a thread holds
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=_bases(M), lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], warp_bases=[[0, 0], [0, 0]],
        block_bases=[], shape=[M, 2],
    )  # fmt: skip
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([BS, M], gl.float32, layout=scores)
    none = gl.zeros([BS, D], gl.float32, layout=sums)
    nothing = gl.zeros([D, M], gl.float32, layout=scores)
    key = gl.arange(0, BS, layout=gl.SliceLayout(1, scores))
    m = gl.arange(0, M, layout=column)
    dk = warpgroup_mma_init(none)
    dv = warpgroup_mma_init(none)
    slot = gl.to_tensor(0)
    before = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for j in range(steps):
        mbarrier.wait(full.index(slot), phase)
        s = warpgroup_mma(k_s, q_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma(v_s, do_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse, gate = gl.split(first_s.index(slot).load(pairs))
        score, dv_, dk_ = warpgroup_mma_wait(1, deps=(s, dv, dk))
        # the previous step is done with its slot
        barrier()
        mbarrier.arrive(empty.index(before), count=1, pred=j > 0)
        p = gl.exp2(score * scale - gl.convert_layout(lse, column, assert_trivial=True)[None, :])
        p = p * gl.convert_layout(gate, column, assert_trivial=True)[None, :]
        delta, query = gl.split(second_s.index(slot).load(pairs))
        if ((j >= partly) & (j < wholly)) | (j == steps - 1):
            number = gl.convert_layout(query.to(gl.int32, bitcast=True), column, assert_trivial=True)
            past = gl.where(j * M + m < count, number + ahead, -1)
            p = gl.where(past[None, :] >= key[:, None], p, 0.0)
        delta = gl.convert_layout(delta, column, assert_trivial=True)
        # registers that feed a product must be written while none runs
        dp_, p = warpgroup_mma_wait(0, deps=(dp, p))
        weights = gl.convert_layout(p.to(dtype), operand)
        gradient = (p * (dp_ - delta[None, :])).to(dtype)
        if WITH_DQ:
            # dSᵀ passes through shared memory to be transposed; since the barrier above, no product reads it
            ds_s.store(gradient)
            fence_async_shared()
            barrier()
            # a product has at least 64 rows: dQᵀ
            dq = warpgroup_mma(k_s.permute((1, 0)), ds_s, nothing, use_acc=False, is_async=True)
        ds = gl.convert_layout(gradient, operand)
        dv = warpgroup_mma(weights, do_s.index(slot), dv_, is_async=True)
        dk = warpgroup_mma(ds, q_s.index(slot), dk_, is_async=True)
        if WITH_DQ:
            x = j * M + gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
            e = entries_of(ORDER, x, start, last, h)
            to = ((e - begin * SLOTS) * h + x % h) * SIZE
            dq_ = warpgroup_mma_wait(2, deps=(dq,))
            dq_s.permute((1, 0)).store(dq_.to(dtype))
            barrier()
            partial = dq_s.load(by_row)
            gl.store(PARTIAL_DQ + to[:, None] + d[None, :], partial, mask=real_columns(x < count, d, SIZE, D))
        before = slot
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    dv_, dk_ = warpgroup_mma_wait(0, deps=(dv, dk))
    return dk_, dv_


@gluon.jit
def _multiply(
    k_s, v_s, q_s, do_s, first_s, second_s, ds_s, other_s, full, empty, ORDER, PARTIAL_DQ, start, last, steps, partly,
    wholly, count, ahead, begin, scale,
    SLOTS: gl.constexpr, h: gl.constexpr, M: gl.constexpr, BS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: dk and dv of the piece and, WITH_DQ, the dq of its rows from this block."""
    if M == 64:
        dk, dv = _multiply_rows(
            k_s, v_s, q_s, do_s, first_s, second_s, ds_s, other_s, full, empty, ORDER, PARTIAL_DQ, start, last, steps,
            partly, wholly, count, ahead, begin, scale, SLOTS, h, BS, D, STAGES, WITH_DQ,
        )  # fmt: skip
    else:
        dk, dv = _multiply_keys(
            k_s, v_s, q_s, do_s, first_s, second_s, ds_s, other_s, full, empty, ORDER, PARTIAL_DQ, start, last, steps,
            partly, wholly, count, ahead, begin, scale, SLOTS, h, M, BS, SIZE, D, STAGES, WITH_DQ,
        )  # fmt: skip
    return dk, dv


@gluon.jit(do_not_specialize=["r", "begin", "seen", "lists", "slots", "L", "queries", "first_query"])
def hopper_selected_dkv(
    Q, K, V, DOUT, RECORDS, ORDER, PIECE, LISTS, DECISION, PARTIAL_DQ, SUMS,
    r, begin, seen, lists, slots, L, T, queries, first_query, scale, qb, ob, kb, kt, kg, vb, vt, vg,
    QT: gl.constexpr, QH: gl.constexpr, OT: gl.constexpr, OH: gl.constexpr,
    G: gl.constexpr, h: gl.constexpr, M: gl.constexpr, n: gl.constexpr, BS: gl.constexpr, SIZE: gl.constexpr,
    D: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr, GATHERING: gl.constexpr,
    DECIDE: gl.constexpr, WITH_DQ: gl.constexpr, QUERY_RANGE: gl.constexpr,
):  # fmt: skip
    """DECIDE: run only if the range's decision is WITH_DQ. PARTIAL_DQ: [tokens of the range, G, n, h, SIZE]."""
    # _multiply_rows returns dKᵀ and dVᵀ
    transposed: gl.constexpr = M == 64
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BS if transposed else D, 16]
    )
    by_key: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = Q.dtype.element_ty
    at = r.to(gl.int64) * slots + gl.program_id(0)
    start = gl.load(PIECE + at) - 1
    if DECIDE:
        start = gl.where((gl.load(DECISION + r) == 1) == WITH_DQ, start, -1)
    if start >= 0:
        lst = gl.load(PIECE + (lists // (G * L)).to(gl.int64) * slots + at)
        list_end = gl.load(LISTS + lists + lst)
        last = gl.minimum(start + SEGMENT, list_end) - 1
        first = gl.load(LISTS + 2 * lists + lst)
        forced = gl.load(LISTS + 3 * lists + lst)
        g = lst // L % G
        b = first // T
        b64 = b.to(gl.int64)
        count = (last - start + 1) * h
        steps = (count + M - 1) // M
        # Only the block's own queries see it in part. They are the first of the forced entries, which come last: steps
        # from `partly` to before `wholly` need the causal mask.
        partly = gl.maximum(forced - start, 0) * h // M
        wholly = (gl.maximum(forced - start + BS, 0) * h + M - 1) // M
        rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, M, D], rows)
        do_s = gl.allocate_shared_memory(dtype, [STAGES, M, D], rows)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        # log-sum-exp and gate; delta and query number
        first_s = gl.allocate_shared_memory(gl.float32, [STAGES, M, 2], plain)
        second_s = gl.allocate_shared_memory(gl.float32, [STAGES, M, 2], plain)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=128)
            mbarrier.init(empty.index(i), count=1)
        # 64 bits once per piece, 32 per row
        head = g.to(gl.int64) * h
        q_base = Q + (b64 * qb + head * QH)
        do_base = DOUT + (b64 * ob + head * OH)
        record_base = RECORDS + head * 4
        # position of query 0 relative to the block's first token, for all queries of the block's sequence
        ahead = -first
        if QUERY_RANGE:
            ahead += b * (T - queries) + first_query
        # the block's K and V stay in shared memory
        i = gl.arange(0, BS, layout=gl.SliceLayout(1, by_key))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_key))
        inside = first + i < (b + 1) * T
        if WITH_DQ:
            # As in kv_major_dkv: keys that no entry sees may belong to another document; zeros keep what is not finite
            # there out of dq.
            seen_last = (gl.load(ORDER + last) // (G * n)).to(gl.int32) + ahead
            inside = inside & (i <= gl.where(start < forced, BS, seen_last))
        inside = real_columns(inside, d, SIZE, D)
        at_k = K + (first.to(gl.int64) * kt + b64 * kb + g.to(gl.int64) * kg)
        at_v = V + (first.to(gl.int64) * vt + b64 * vb + g.to(gl.int64) * vg)
        k = gl.load(at_k + (i * kt)[:, None] + d[None, :], mask=inside, other=0.0)
        v = gl.load(at_v + (i * vt)[:, None] + d[None, :], mask=inside, other=0.0)
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BS, D], dtype)
        k_s = gl.allocate_shared_memory(dtype, [BS, D], tile, k)
        v_s = gl.allocate_shared_memory(dtype, [BS, D], tile, v)
        # ds, and p or dq, on their way between threads and products
        if transposed:
            square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, BS], dtype)
            ds_s = gl.allocate_shared_memory(dtype, [M, BS], square)
            other_s = gl.allocate_shared_memory(dtype, [M, BS], square)
        else:
            ds_s = gl.allocate_shared_memory(dtype, [BS, M], gl.NVMMASharedLayout.get_default_for([BS, M], dtype))
            other_s = gl.allocate_shared_memory(dtype, [M, D], rows)
        fence_async_shared()
        barrier()
        dk, dv = gl.warp_specialize(
            [
                (_multiply, (k_s, v_s, q_s, do_s, first_s, second_s, ds_s, other_s, full, empty, ORDER, PARTIAL_DQ,
                             start, last, steps, partly, wholly, count, ahead, begin, scale, G * n, h, M, BS, SIZE, D,
                             STAGES, WITH_DQ)),
                (_gather, (ORDER, q_base, do_base, record_base, q_s, do_s, first_s, second_s, full, empty, start, last,
                           steps, QT, QH, OT, OH, G, h, M, n, SIZE, D, STAGES)),
            ],
            [4], [GATHERING],
        )  # fmt: skip
        # a list of one piece adds to its sum directly: earlier ranges were earlier launches
        whole = list_end - gl.load(LISTS + lst) <= SEGMENT
        place = gl.where(whole, slots + lst % (G * L), gl.program_id(0))
        out = SUMS + place.to(gl.int64) * (BS * 2 * SIZE)
        if transposed:
            key = gl.arange(0, BS, layout=gl.SliceLayout(0, sums))
            d = gl.arange(0, D, layout=gl.SliceLayout(1, sums))
            out = out + (key * (2 * SIZE))[None, :] + d[:, None]
        else:
            key = gl.arange(0, BS, layout=gl.SliceLayout(1, sums))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
            out = out + (key * (2 * SIZE))[:, None] + d[None, :]
        # only tiles of keys by columns have columns to spare
        real = None if transposed else real_columns(key < BS, d, SIZE, D)
        if whole & (first < seen):
            dk += gl.load(out, mask=real)
            dv += gl.load(out + SIZE, mask=real)
        gl.store(out, dk, mask=real)
        gl.store(out + SIZE, dv, mask=real)

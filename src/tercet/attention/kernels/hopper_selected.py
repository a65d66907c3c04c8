"""dk and dv of the selected branch on Hopper's tensor cores, in Gluon: what kv_keys.py computes.

Products run on while the warps gather and take exponentials: dPᵀ during the exponentials, dV and dK into the next step;
a step's rows are fetched while the step before (or the one before that) is at work. A step's rows are (entry, head),
counted through; rows past the piece's end repeat its last entry and get weight 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tercet.attention.kernels.hopper import meet


@gluon.constexpr_function
def _bases(M):
    """A thread's columns of a score tile with M of them: two neighbours of every eight; two numbers for each."""
    return [[0, 1], [1, 0]] + [[8 << i, 0] for i in range((M // 8).bit_length() - 1)]


@gluon.jit
def _entries(ORDER, x, start, end, HT: gl.constexpr):
    """Entries (flat positions in block_indices) of a piece's rows."""
    return gl.load(ORDER + gl.minimum(start + x // HT, end - 1)).to(gl.int32)


@gluon.jit
def _fetch(
    q_base, do_base, record_base, q_s, do_s, record_s, entry, own, x, y, begin, qt, qh, ot, oh,
    G: gl.constexpr, h: gl.constexpr, n: gl.constexpr, D: gl.constexpr, BY_ROW: gl.constexpr, BY_RECORD: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a step's rows: q, dout, records."""
    d = gl.arange(0, D, layout=gl.SliceLayout(0, BY_ROW))
    t = entry // (G * n) - begin
    hh = x % h
    async_copy.async_copy_global_to_shared(q_s, q_base + (t * qt + hh * qh)[:, None] + d[None, :])
    async_copy.async_copy_global_to_shared(do_s, do_base + (t * ot + hh * oh)[:, None] + d[None, :])
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, BY_RECORD))
    row = (own // (G * n) - begin) * (G * h) + y % h
    async_copy.async_copy_global_to_shared(record_s, record_base + (row * 4)[:, None] + c[None, :])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["r", "begin", "seen", "lists", "slots", "L", "queries", "first_query"])
def key_gradients_kernel(
    Q, K, V, DOUT, RECORDS, ORDER, PIECE, LISTS, DECISION, SUMS,
    r, begin, seen, lists, slots, L, T, queries, first_query, scale,
    qb, qt, qh, kb, kt, kg, vb, vt, vg, ob, ot, oh,
    G: gl.constexpr, h: gl.constexpr, M: gl.constexpr, n: gl.constexpr, BS: gl.constexpr, D: gl.constexpr,
    SEGMENT: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, FENCE: gl.constexpr, DECIDE: gl.constexpr,
    STRETCH: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    by_record: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    column: gl.constexpr = gl.SliceLayout(0, scores)
    # two numbers for each of the columns that a thread holds
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=_bases(M), lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]], warp_bases=[[0, 0], [0, 0]],
        block_bases=[], shape=[M, 2],
    )  # fmt: skip
    dtype: gl.constexpr = Q.dtype.element_ty
    at = r.to(gl.int64) * slots + gl.program_id(0)
    start = gl.load(PIECE + at) - 1
    if DECIDE:
        start = gl.where(gl.load(DECISION + r) == 0, start, -1)
    if start >= 0:
        lst = gl.load(PIECE + (lists // (G * L)).to(gl.int64) * slots + at)
        list_end = gl.load(LISTS + lists + lst)
        end = gl.minimum(start + SEGMENT, list_end)
        first = gl.load(LISTS + 2 * lists + lst)
        forced = gl.load(LISTS + 3 * lists + lst)
        g = lst // L % G
        b = first // T
        b64 = b.to(gl.int64)
        # the block's K and V stay
        i = gl.arange(0, BS, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        inside = (first + i < (b + 1) * T)[:, None]
        at_k = K + (first.to(gl.int64) * kt + b64 * kb + g.to(gl.int64) * kg)
        at_v = V + (first.to(gl.int64) * vt + b64 * vb + g.to(gl.int64) * vg)
        k = gl.load(at_k + (i * kt)[:, None] + d[None, :], mask=inside, other=0.0)
        v = gl.load(at_v + (i * vt)[:, None] + d[None, :], mask=inside, other=0.0)
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BS, D], dtype)
        rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
        k_s = gl.allocate_shared_memory(dtype, [BS, D], tile, k)
        v_s = gl.allocate_shared_memory(dtype, [BS, D], tile, v)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, M, D], rows)
        do_s = gl.allocate_shared_memory(dtype, [STAGES, M, D], rows)
        record_s = gl.allocate_shared_memory(gl.float32, [STAGES, M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        # Everything is addressed from the range's first token: 64 bits once per piece, 32 per row.
        head = g.to(gl.int64) * h
        at = begin.to(gl.int64)
        q_base = Q + (at * qt + b64 * qb + head * qh)
        do_base = DOUT + (at * ot + b64 * ob + head * oh)
        record_base = RECORDS + (at * (G * h) + head) * 4
        # what query 0 would be past the block's first token; the same for every query of the block's sequence
        ahead = -first
        if STRETCH:
            ahead += b * (T - queries) + first_query
        x = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
        y = gl.arange(0, M, layout=gl.SliceLayout(1, by_record))
        count = (end - start) * h
        steps = (count + M - 1) // M
        for j in gl.static_range(STAGES - 2):
            entry = _entries(ORDER, x + j * M, start, end, h)
            own = _entries(ORDER, y + j * M, start, end, h)
            _fetch(q_base, do_base, record_base, q_s.index(j), do_s.index(j), record_s.index(j), entry, own,
                   x + j * M, y + j * M, begin, qt, qh, ot, oh, G, h, n, D, by_row, by_record)  # fmt: skip
        x += (STAGES - 2) * M
        y += (STAGES - 2) * M
        entry = _entries(ORDER, x, start, end, h)
        own = _entries(ORDER, y, start, end, h)
        zeros = gl.zeros([BS, M], gl.float32, layout=scores)
        none = gl.zeros([BS, D], gl.float32, layout=sums)
        key = gl.arange(0, BS, layout=gl.SliceLayout(1, scores))
        m = gl.arange(0, M, layout=column)
        fence_async_shared()
        meet()
        if HELD:
            k_l = k_s.load(left)
            v_l = v_s.load(left)
        else:
            k_l = k_s
            v_l = v_s
        dk = warpgroup_mma_init(none)
        dv = warpgroup_mma_init(none)
        for j in range(steps):
            slot = j % STAGES
            async_copy.wait_group(STAGES - 3)
            if FENCE:
                fence_async_shared()
            # All warps have their part of this step's rows in place, and are done with the step before the last.
            meet()
            record = record_s.index(slot)
            lse, gate = gl.split(record.slice(0, 2, dim=1).load(pairs))
            row_sum, _ = gl.split(record.slice(2, 2, dim=1).load(pairs))
            s = warpgroup_mma(k_l, q_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_l, do_s.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            free = (j + STAGES - 2) % STAGES
            _fetch(q_base, do_base, record_base, q_s.index(free), do_s.index(free), record_s.index(free), entry, own,
                   x, y, begin, qt, qh, ot, oh, G, h, n, D, by_row, by_record)  # fmt: skip
            x += M
            y += M
            entry = _entries(ORDER, x, start, end, h)
            own = _entries(ORDER, y, start, end, h)
            score, dv_, dk_ = warpgroup_mma_wait(1, deps=(s, dv, dk))
            p = gl.exp2(score * scale - gl.convert_layout(lse, column, assert_trivial=True)[None, :])
            p = p * gl.convert_layout(gate, column, assert_trivial=True)[None, :]
            # Free entries stand first.
            if (start + (j * M + M - 1) // h >= forced) | (j == steps - 1):
                _, query = gl.split(record.slice(2, 2, dim=1).load(pairs))
                number = gl.convert_layout(query.to(gl.int32, bitcast=True), column, assert_trivial=True)
                past = gl.where(j * M + m < count, number + ahead, -1)
                p = gl.where(past[None, :] >= key[:, None], p, 0.0)
            row_sum = gl.convert_layout(row_sum, column, assert_trivial=True)
            # registers that a product reads must be written while none runs
            dp_, p = warpgroup_mma_wait(0, deps=(dp, p))
            weights = gl.convert_layout(p.to(dtype), operand)
            ds = gl.convert_layout((p * (dp_ - row_sum[None, :])).to(dtype), operand)
            dv = warpgroup_mma(weights, do_s.index(slot), dv_, is_async=True)
            dk = warpgroup_mma(ds, q_s.index(slot), dk_, is_async=True)
        dv_, dk_ = warpgroup_mma_wait(0, deps=(dv, dk))
        async_copy.wait_group(0)
        # An uncut list adds to its sum at once: earlier ranges were earlier launches.
        whole = list_end - gl.load(LISTS + lst) <= SEGMENT
        slot = gl.where(whole, slots + lst % (G * L), gl.program_id(0))
        key = gl.arange(0, BS, layout=gl.SliceLayout(1, sums))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
        out = SUMS + slot.to(gl.int64) * (BS * 2 * D) + (key * (2 * D))[:, None] + d[None, :]
        if whole & (first < seen):
            dk_ += gl.load(out)
            dv_ += gl.load(out + D)
        gl.store(out, dk_)
        gl.store(out + D, dv_)

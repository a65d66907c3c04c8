"""Partial outputs of scattered selections, in place of kv_major.kv_major_forward. Glossary: selected/__init__.py.

A program holds a block's K and V and loops over the (entry, head) rows of its piece, or of its part of the piece. As in
selected_dkv.py, four warps gather the rows' queries, as slots become free, and four others attend. Rows past the end
repeat the last entry and are not stored. V is kept, and outputs are computed, in parts of 64 columns: at head 128 the
first part is stored while the second is computed. Few enough registers are used that four programs fit, at head 128
three.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.attention.kernels.hopper.common import (
    barrier,
    copy_rows,
    entries_of,
    fast_log2,
    fast_reciprocal,
    real_columns,
    stored_rows,
)


@gluon.jit
def _gather(
    ORDER, q_base, q_s, full, empty, start, last, steps,
    QT: gl.constexpr, QH: gl.constexpr, G: gl.constexpr, h: gl.constexpr, M: gl.constexpr, n: gl.constexpr,
    SIZE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The gathering warps: q."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    x = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
    # load the entries of a step while the copies of the previous step run
    e = entries_of(ORDER, x, start, last, h)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for _ in range(steps):
        t = (e.to(gl.uint32) // (G * n)).to(gl.int32)
        at = (t * QT + x % h * QH)[:, None] + d[None, :]
        mbarrier.wait(empty.index(slot), phase)
        copy_rows(q_s.index(slot), q_base + at, d, SIZE, D)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        x += M
        e = entries_of(ORDER, x, start, last, h)
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _attend(
    k_s, v_s, q_s, full, empty, ORDER, PARTIAL, PARTIAL_LSE, start, last, steps, count, begin, scale,
    SLOTS: gl.constexpr, h: gl.constexpr, M: gl.constexpr, BS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr,
    W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The attending warps: each row's softmax over the block's keys, and its output."""
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BS, 16])
    outputs: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, W, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=outputs, k_width=2)
    stored: gl.constexpr = stored_rows()
    dtype: gl.constexpr = k_s.dtype
    zeros = gl.zeros([M, BS], gl.float32, layout=scores)
    none = gl.zeros([M, W], gl.float32, layout=outputs)
    row = gl.arange(0, M, layout=gl.SliceLayout(1, scores))
    d = gl.arange(0, W, layout=gl.SliceLayout(0, stored))
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for j in range(steps):
        x = j * M + row
        e = entries_of(ORDER, x, start, last, h)
        mbarrier.wait(full.index(slot), phase)
        s = warpgroup_mma(q_s.index(slot), k_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(s,))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        m = gl.max(score, 1) * scale
        p = gl.exp2(score * scale - m[:, None])
        l = gl.sum(p, 1)
        weights = gl.convert_layout(p.to(dtype), operand)
        o = warpgroup_mma(weights, v_s.index(0), none, use_acc=False, is_async=True)
        to = (e - begin * SLOTS) * h + x % h
        gl.store(PARTIAL_LSE + to, m + fast_log2(l), mask=x < count)
        factor = gl.convert_layout(fast_reciprocal(l), gl.SliceLayout(1, outputs), assert_trivial=True)
        at = gl.convert_layout(to * SIZE, gl.SliceLayout(1, stored), assert_trivial=True)
        real = gl.convert_layout(x < count, gl.SliceLayout(1, stored), assert_trivial=True)
        for i in gl.static_range(D // W):
            out = warpgroup_mma_wait(0, deps=(o,))
            if i + 1 < D // W:
                o = warpgroup_mma(weights, v_s.index(i + 1), none, use_acc=False, is_async=True)
            out = gl.convert_layout((out * factor[:, None]).to(dtype), stored)
            part = PARTIAL + (at + i * W)[:, None] + d[None, :]
            gl.store(part, out, mask=real_columns(real, i * W + d, SIZE, D), eviction_policy="evict_first")
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit(do_not_specialize=["r", "begin", "lists", "slots", "L"])
def hopper_selected_forward(
    Q, K, V, ORDER, PIECE, LISTS, DECISION, PARTIAL, PARTIAL_LSE, r, begin, lists, slots, L, T, scale, qb, kb, kt, kg,
    vb, vt, vg, QT: gl.constexpr, QH: gl.constexpr, G: gl.constexpr, h: gl.constexpr, M: gl.constexpr, n: gl.constexpr,
    BS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
    GATHERING: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Program (piece, one of its PARTS parts). PARTIAL: [tokens of the range, G, n, h, SIZE]. Forced entries are
    query_major_forward's."""
    W: gl.constexpr = 64  # columns of a part of V
    by_key: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = Q.dtype.element_ty
    at = r.to(gl.int64) * slots + gl.program_id(0) // PARTS
    share: gl.constexpr = (SEGMENT + PARTS - 1) // PARTS
    start = gl.load(PIECE + at) - 1
    piece_end = start + SEGMENT
    start = gl.where(start < 0, start, start + gl.program_id(0) % PARTS * share)
    lst = gl.load(PIECE + (lists // (G * L)).to(gl.int64) * slots + at)
    # free entries come before forced ones
    end = gl.minimum(gl.minimum(start + share, piece_end), gl.load(LISTS + lists + lst))
    end = gl.minimum(end, gl.load(LISTS + 3 * lists + lst))
    if (start >= 0) & (start < end) & (gl.load(DECISION + r) == 1):
        first = gl.load(LISTS + 2 * lists + lst)
        g = lst // L % G
        b = first // T
        b64 = b.to(gl.int64)
        count = (end - start) * h
        steps = (count + M - 1) // M
        rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, M, D], rows)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=128)
            mbarrier.init(empty.index(i), count=1)
        q_base = Q + (b64 * qb + g.to(gl.int64) * h * QH)
        i = gl.arange(0, BS, layout=gl.SliceLayout(1, by_key))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_key))
        inside = real_columns(first + i < (b + 1) * T, d, SIZE, D)
        at_k = K + (first.to(gl.int64) * kt + b64 * kb + g.to(gl.int64) * kg)
        at_v = V + (first.to(gl.int64) * vt + b64 * vb + g.to(gl.int64) * vg)
        k = gl.load(at_k + (i * kt)[:, None] + d[None, :], mask=inside, other=0.0)
        tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BS, D], dtype)
        k_s = gl.allocate_shared_memory(dtype, [BS, D], tile, k)
        part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BS, W], dtype)
        v_s = gl.allocate_shared_memory(dtype, [D // W, BS, W], part)
        by_part: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
        i = gl.arange(0, BS, layout=gl.SliceLayout(1, by_part))
        d = gl.arange(0, W, layout=gl.SliceLayout(0, by_part))
        for c in gl.static_range(D // W):
            inside = real_columns(first + i < (b + 1) * T, c * W + d, SIZE, D)
            v = gl.load(at_v + (i * vt)[:, None] + (c * W + d)[None, :], mask=inside, other=0.0)
            v_s.index(c).store(v)
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (_attend, (k_s, v_s, q_s, full, empty, ORDER, PARTIAL, PARTIAL_LSE, start, end - 1, steps, count, begin,
                           scale, G * n, h, M, BS, SIZE, D, W, STAGES)),
                (_gather, (ORDER, q_base, q_s, full, empty, start, end - 1, steps, QT, QH, G, h, M, n, SIZE, D,
                           STAGES)),
            ],
            [4], [GATHERING],
        )  # fmt: skip

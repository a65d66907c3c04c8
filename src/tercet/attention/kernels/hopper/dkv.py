"""dK/dV of the compressed and the window branch.

A program holds a tile of keys and loops over the query tiles of its group's heads. dPᵀ runs during the exponentials; dV
and dK overlap with the next step's Sᵀ.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tercet.attention.kernels.hopper.common import barrier, descriptor, locate, queries_of_keys, tile_of
from tercet.attention.kernels.launch import LOG2E, call, power_of_2
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents


@gluon.jit
def _fetch(
    QD, DOD, LSE, DELTA, GATE, q_s, do_s, rows_s, q_bars, do_bars, n, steps, count, begin, head0, base, rows,
    D: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, by_value: gl.constexpr,
):  # fmt: skip
    """Start the copies of step n: q, dout, and the values of their rows."""
    slot = n % STAGES
    there = n < steps
    n = gl.maximum(gl.minimum(n, steps - 1), 0)
    head = head0 + n // count
    t = base + begin + n % count * M
    # separate barriers: the compiler synchronises all warps between two operations on one barrier
    mbarrier.expect(q_bars.index(slot), 2 * M * D, there)
    mbarrier.expect(do_bars.index(slot), 2 * M * D, there)
    tma.async_copy_global_to_shared(QD, [head, t, 0], q_bars.index(slot), q_s.index(slot), there)
    tma.async_copy_global_to_shared(DOD, [head, t, 0], do_bars.index(slot), do_s.index(slot), there)
    # lse, delta and gate in one copy
    i = gl.arange(0, 4 * M, layout=by_value)
    at = head.to(gl.int64) * rows + gl.minimum(t + i % M, rows - 1)
    of = gl.where(i < M, LSE + at, DELTA + at)
    if GATED:
        of = gl.where(i < 2 * M, of, GATE + at)
    async_copy.async_copy_global_to_shared(rows_s.index(slot), of)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["docs", "length", "per_sequence", "first_query", "queries", "rows", "token_length", "span"]
)
def hopper_dkv(
    K, V, LSE, DELTA, GATE, DKEY, DVALUE, QD, DOD, CU, CCU, docs, length, per_sequence, first_query, queries, rows,
    token_length, span, k_t, k_h, v_t, v_h, scale, softmax_scale,
    W: gl.constexpr, L: gl.constexpr, S: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr,
    D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr,
    SETS: gl.constexpr, PACKED: gl.constexpr, QUERY_RANGE: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    by_value: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    dtype: gl.constexpr = QD.dtype
    tile = gl.program_id(0)
    part = gl.program_id(1)
    g = gl.program_id(2)
    if COMPRESSED:
        doc, start, size, first = locate(CCU, docs, tile, length, per_sequence, N, PACKED)
        if PACKED:
            token0 = gl.load(CU + doc)
            tokens = gl.load(CU + doc + 1) - token0
        else:
            token0 = doc * token_length
            tokens = token_length
        row0, origin, last = queries_of_keys(doc, token0, tokens, first_query, queries, PACKED, QUERY_RANGE)
        ahead = first * S + L - 1 - origin
        whole = (gl.maximum(ahead + (N - 1) * S, 0) + M - 1) // M * M
        # a part is a query range and one of SETS head sets
        begin = gl.maximum(part // SETS * span, gl.maximum(ahead, 0) // M * M)
        end = gl.minimum(part // SETS * span + span, last - origin)
        edge = end // M * M
    else:
        doc, start, size, first = locate(CU, docs, tile, length, per_sequence, N, PACKED)
        row0, origin, last = queries_of_keys(doc, start, size, first_query, queries, PACKED, QUERY_RANGE)
        ahead = first - origin
        whole = (gl.maximum(ahead + N - 1, 0) + M - 1) // M * M
        begin = gl.maximum(ahead, 0) // M * M
        end = gl.minimum(ahead + N - 1 + W, last - origin)
        edge = gl.minimum((ahead + W) // M * M, (last - origin) // M * M)
    count = (gl.maximum(end - begin, 0) + M - 1) // M
    steps = gl.where(first < size, count * (HEADS // SETS), 0)
    count = gl.maximum(count, 1)
    zeros = gl.zeros([N, M], gl.float32, layout=scores)
    none = gl.zeros([N, D], gl.float32, layout=sums)
    key = first + gl.arange(0, N, layout=gl.SliceLayout(1, scores))
    if COMPRESSED:
        lower = key * S + L - 1
        upper = gl.full([N], 1 << 30, gl.int32, layout=gl.SliceLayout(1, scores))
    else:
        lower = key
        upper = key + W
    upper = gl.minimum(upper, origin + end)
    if COMPRESSED or first < size:
        # K and V stay in shared memory
        i = gl.arange(0, N, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        inside = (first + i < size)[:, None] & (d < SIZE)[None, :]
        at = (start + first + i).to(gl.int64)[:, None]
        k = gl.load(K + g.to(gl.int64) * k_h + at * k_t + d[None, :], mask=inside, other=0.0)
        v = gl.load(V + g.to(gl.int64) * v_h + at * v_t + d[None, :], mask=inside, other=0.0)
        key_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], dtype)
        k_s = gl.allocate_shared_memory(dtype, [N, D], key_tile, k)
        v_s = gl.allocate_shared_memory(dtype, [N, D], key_tile, v)
        q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, M, D], QD.layout)
        do_s = gl.allocate_shared_memory(dtype, [STAGES, 1, M, D], DOD.layout)
        rows_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        q_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        do_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for b in gl.static_range(STAGES):
            mbarrier.init(q_bars.index(b), count=1)
            mbarrier.init(do_bars.index(b), count=1)
        fence_async_shared()
        barrier()
        base = row0 + origin
        head0 = g * HEADS + part % SETS * (HEADS // SETS)
        for b in gl.static_range(STAGES - 1):
            _fetch(QD, DOD, LSE, DELTA, GATE, q_s, do_s, rows_s, q_bars, do_bars, gl.to_tensor(b), steps, count, begin,
                   head0, base, rows, D, M, STAGES, GATED, by_value)  # fmt: skip
        dk = warpgroup_mma_init(none)
        dv = warpgroup_mma_init(none)
        m = gl.arange(0, M, layout=gl.SliceLayout(0, scores))
        for n in range(steps):
            slot = n % STAGES
            mbarrier.wait(q_bars.index(slot), n // STAGES & 1)
            mbarrier.wait(do_bars.index(slot), n // STAGES & 1)
            s = warpgroup_mma(k_s, tile_of(q_s, slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_s, tile_of(do_s, slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
            score, dv_, dk_ = warpgroup_mma_wait(1, deps=(s, dv, dk))
            # all warps are done with the previous slot: refill it
            async_copy.wait_group(STAGES - 2)
            _fetch(QD, DOD, LSE, DELTA, GATE, q_s, do_s, rows_s, q_bars, do_bars, n + STAGES - 1, steps, count, begin,
                   head0, base, rows, D, M, STAGES, GATED, by_value)  # fmt: skip
            lse = rows_s.index(slot).slice(0, M).load(gl.SliceLayout(0, scores))
            p = gl.exp2(score * scale - lse[None, :])
            if GATED:
                gate = rows_s.index(slot).slice(2 * M, M).load(gl.SliceLayout(0, scores))
                p = p * gate[None, :]
            t = begin + n % count * M
            if (t < whole) | (t >= edge):
                place = origin + t + m
                p = gl.where((place[None, :] >= lower[:, None]) & (place[None, :] < upper[:, None]), p, 0.0)
            delta = rows_s.index(slot).slice(M, M).load(gl.SliceLayout(0, scores))
            # registers that feed a product must be written while none runs
            dp_, p = warpgroup_mma_wait(0, deps=(dp, p))
            weights = gl.convert_layout(p.to(dtype), operand)
            ds = gl.convert_layout((p * (dp_ - delta[None, :])).to(dtype), operand)
            dv = warpgroup_mma(weights, tile_of(do_s, slot), dv_, is_async=True)
            dk = warpgroup_mma(ds, tile_of(q_s, slot), dk_, is_async=True)
        dv_, dk_ = warpgroup_mma_wait(0, deps=(dv, dk))
        j = gl.arange(0, N, layout=gl.SliceLayout(1, sums))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, sums))
        if COMPRESSED:
            place = (part * gl.num_programs(0) + tile).to(gl.int64) * N + j
            to = (place * G + g)[:, None] * SIZE + d[None, :]
            there = (d < SIZE)[None, :]
            gl.store(DKEY + to, dk_ * softmax_scale, mask=there)
            gl.store(DVALUE + to, dv_, mask=there)
        else:
            to = ((start + first + j).to(gl.int64) * G + g)[:, None] * SIZE + d[None, :]
            inside = (first + j < size)[:, None] & (d < SIZE)[None, :]
            gl.store(DKEY + to, (dk_ * softmax_scale).to(dtype), mask=inside)
            gl.store(DVALUE + to, dv_.to(dtype), mask=inside)


def launch_dkv(
    q: Tensor, dout: Tensor, branch: Branch, dk: Tensor, dv: Tensor, grid: tuple[int, int, int], bounds: list[int],
    span: int, sizes: tuple[int, int, int], documents: Documents, launch: Launch, sets: int = 1,
) -> None:  # fmt: skip
    """Writes dk and dv; for compressed tokens the fp32 partial sums of each part.

    grid: (key tiles, query ranges × head sets, groups). sizes: (window, 0, 0) or (0, compress_block,
    compress_stride)."""
    k, v, lse, delta, gate = branch
    B, T, H, D = q.shape
    G = k.shape[2]
    call(
        hopper_dkv, grid,
        (k, v, lse, delta, gate, dk, dv, descriptor(q, launch.rows), descriptor(dout, launch.rows), documents.cu,
         documents.ccu),
        (*bounds, documents.first_query, documents.queries, B * T, documents.length, span),
        (k.stride(1), k.stride(2), v.stride(1), v.stride(2), D**-0.5 * LOG2E, D**-0.5,
         *sizes, G, H // G, D, power_of_2(D), launch.rows, launch.keys, launch.stages, sizes[0] == 0, sets,
         documents.packed, documents.query_range, gate is not None),
        **launch.gluon_options,
    )  # fmt: skip

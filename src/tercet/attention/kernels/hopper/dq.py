"""dQ of the compressed and the window branch in one loop over the key tiles of both. Whole, unpacked sequences only."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.hopper.common import barrier, descriptor, tile_of, visible
from tercet.attention.kernels.launch import LOG2E, call, power_of_2
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents


@gluon.jit
def _fetch(
    KCD, VCD, KWD, VWD, k_s, v_s, k_bars, v_bars, n, count_c, count, row_c, row_w, g,
    D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    slot = n % STAGES
    k_bar = k_bars.index(slot)
    v_bar = v_bars.index(slot)
    there = n < count
    mbarrier.expect(k_bar, 2 * N * D, there)
    mbarrier.expect(v_bar, 2 * N * D, there)
    if COMPRESSED:
        compressed = n < count_c
        tma.async_copy_global_to_shared(KCD, [g, row_c + n * N, 0], k_bar, k_s.index(slot), compressed)
        tma.async_copy_global_to_shared(VCD, [g, row_c + n * N, 0], v_bar, v_s.index(slot), compressed)
    if WINDOW:
        window = there & (n >= count_c)
        row = row_w + (n - count_c) * N
        tma.async_copy_global_to_shared(KWD, [g, row, 0], k_bar, k_s.index(slot), window)
        tma.async_copy_global_to_shared(VWD, [g, row, 0], v_bar, v_s.index(slot), window)


@gluon.jit
def _row_values(DELTA, GATE, at, inside, M: gl.constexpr, GATED: gl.constexpr, scores: gl.constexpr):
    total = gl.load(DELTA + at, mask=inside, other=0.0)
    if GATED:
        gate = gl.load(GATE + at, mask=inside, other=0.0)
    else:
        gate = gl.full([M], 1.0, gl.float32, layout=gl.SliceLayout(1, scores))
    return gate, gate * total


@gluon.jit(do_not_specialize=["length", "per_sequence", "rows", "compressed_length"])
def hopper_dq(
    DQ, QD, DOD, KCD, VCD, LSE_C, DELTA_C, GATE_C, KWD, VWD, LSE_W, DELTA_W, GATE_W,
    length, per_sequence, rows, compressed_length, scale, softmax_scale,
    W: gl.constexpr, L: gl.constexpr, S: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr,
    D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr,
    WINDOW: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    values: gl.constexpr = gl.SliceLayout(1, scores)
    dtype: gl.constexpr = QD.dtype
    H: gl.constexpr = G * HEADS
    tile = gl.num_programs(0) // H - 1 - gl.program_id(0) // H
    head = gl.program_id(0) % H
    g = head // HEADS
    doc = tile // per_sequence
    start = doc * length
    size = length
    first = (tile - doc * per_sequence) * M
    if first < size:
        q_s = gl.allocate_shared_memory(dtype, [1, 1, M, D], QD.layout)
        do_s = gl.allocate_shared_memory(dtype, [1, 1, M, D], DOD.layout)
        k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, N, D], QD.layout)
        v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, N, D], QD.layout)
        q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        do_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_bar, count=1)
        mbarrier.init(do_bar, count=1)
        for b in gl.static_range(STAGES):
            mbarrier.init(k_bars.index(b), count=1)
            mbarrier.init(v_bars.index(b), count=1)
        barrier()
        mbarrier.expect(q_bar, 2 * M * D)
        mbarrier.expect(do_bar, 2 * M * D)
        tma.async_copy_global_to_shared(QD, [head, start + first, 0], q_bar, q_s.index(0))
        tma.async_copy_global_to_shared(DOD, [head, start + first, 0], do_bar, do_s.index(0))
        q_tile = tile_of(q_s, 0)
        do_tile = tile_of(do_s, 0)
        position = first + gl.arange(0, M, layout=values)
        inside = position < size
        last = gl.minimum(first + M, size)
        begin = gl.maximum(first - W + 1, 0) // N * N
        count_c = 0
        row_c = 0
        count = 0
        if COMPRESSED:
            row_c = doc * compressed_length
            count_c = (visible(last - 1, L, S) + N - 1) // N
            count = count_c
        if WINDOW:
            count += (last - begin + N - 1) // N
        row_w = start + begin
        for b in gl.static_range(STAGES - 1):
            _fetch(KCD, VCD, KWD, VWD, k_s, v_s, k_bars, v_bars, gl.to_tensor(b), count_c, count, row_c, row_w, g,
                   D, N, STAGES, COMPRESSED, WINDOW)  # fmt: skip
        at = head.to(gl.int64) * rows + start + position
        if COMPRESSED:
            gate_c, total_c = _row_values(DELTA_C, GATE_C, at, inside, M, GATED, scores)
        if WINDOW:
            gate_w, total_w = _row_values(DELTA_W, GATE_W, at, inside, M, GATED, scores)
        if COMPRESSED:
            lse = gl.load(LSE_C + at, mask=inside, other=float("inf"))
            gate = gate_c
            total = total_c
            upper = visible(position, L, S)
            lower = gl.zeros_like(upper)
            if WINDOW:
                lse_w = gl.load(LSE_W + at, mask=inside, other=float("inf"))
        else:
            lse = gl.load(LSE_W + at, mask=inside, other=float("inf"))
            gate = gate_w
            total = total_w
            upper = position + 1
            lower = upper - W
        none = gl.zeros([M, N], gl.float32, layout=scores)
        acc = warpgroup_mma_init(gl.zeros([M, D], gl.float32, layout=sums))
        mbarrier.wait(q_bar, 0)
        mbarrier.wait(do_bar, 0)
        for n in range(count):
            slot = n % STAGES
            if COMPRESSED and WINDOW:
                if n == count_c:
                    lse = lse_w
                    gate = gate_w
                    total = total_w
                    upper = position + 1
                    lower = upper - W
            mbarrier.wait(k_bars.index(slot), n // STAGES & 1)
            mbarrier.wait(v_bars.index(slot), n // STAGES & 1)
            s_ = warpgroup_mma(q_tile, tile_of(k_s, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            dp_ = warpgroup_mma(do_tile, tile_of(v_s, slot).permute((1, 0)), none, use_acc=False, is_async=True)
            s, dq = warpgroup_mma_wait(1, deps=(s_, acc))
            _fetch(KCD, VCD, KWD, VWD, k_s, v_s, k_bars, v_bars, n + STAGES - 1, count_c, count, row_c, row_w, g,
                   D, N, STAGES, COMPRESSED, WINDOW)  # fmt: skip
            p = gl.exp2(s * scale - lse[:, None])
            # first key of this tile, and whether some row does not see all of it
            if n < count_c:
                i = n * N
                partly = i + N > visible(first, L, S)
            else:
                i = begin + (n - count_c) * N
                partly = (i <= first + M - 1 - W) | (i + N - 1 > first)
            if partly:
                key = i + gl.arange(0, N, layout=gl.SliceLayout(0, scores))
                p = gl.where((key[None, :] >= lower[:, None]) & (key[None, :] < upper[:, None]), p, 0.0)
            dp, p = warpgroup_mma_wait(0, deps=(dp_, p))
            ds = gl.convert_layout((p * (dp * gate[:, None] - total[:, None])).to(dtype), operand)
            acc = warpgroup_mma(ds, tile_of(k_s, slot), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(acc,))
        out = gl.convert_layout((dq * softmax_scale).to(dtype), by_row)
        j = first + gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        to = ((start + j).to(gl.int64) * H + head)[:, None] * SIZE + d[None, :]
        gl.store(DQ + to, out, mask=(j < size)[:, None] & (d < SIZE)[None, :])


def launch_dq(
    q: Tensor, dout: Tensor,
    compressed: Branch | None, window: Branch | None, config: NSAConfig, documents: Documents, launch: Launch,
) -> Tensor:  # fmt: skip
    """dq, summed over the given branches."""
    B, T, H, D = q.shape
    kc, vc, lse_c, delta_c, gate_c = compressed or (None,) * len(Branch._fields)
    kw, vw, lse_w, delta_w, gate_w = window or (None,) * len(Branch._fields)
    G = (kw if kc is None else kc).shape[2]
    kcd, vcd, kwd, vwd = (None if x is None else descriptor(x, launch.keys) for x in (kc, vc, kw, vw))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _, _, *bounds = documents.tokens(launch.rows)
    call(
        hopper_dq, (documents.token_tiles(launch.rows) * H,),
        (dq, descriptor(q, launch.rows), descriptor(dout, launch.rows), kcd, vcd, lse_c, delta_c, gate_c, kwd, vwd,
         lse_w, delta_w, gate_w),
        (*bounds, B * T, documents.compressed_length),
        (D**-0.5 * LOG2E, D**-0.5, config.window, config.compress_block, config.compress_stride, G, H // G, D,
         power_of_2(D), launch.rows, launch.keys, launch.stages, kc is not None, kw is not None,
         (gate_w if kc is None else gate_c) is not None),
        **launch.gluon_options,
    )  # fmt: skip
    return dq

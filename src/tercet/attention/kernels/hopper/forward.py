"""Forward of the compressed and the window branch: P·V of one key tile runs during the exponentials of the next."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.attention.kernels.combine import row_shape
from tercet.attention.kernels.hopper.common import barrier, descriptor, locate, tile_of, visible
from tercet.attention.kernels.launch import LOG2E, call, power_of_2
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.varlen import Documents


@gluon.jit
def _fetch(KD, VD, k_s, v_s, k_bars, v_bars, n, count, begin, start, g, D: gl.constexpr, N: gl.constexpr):
    """Fetch what step n needs: the keys of tile n and the values of tile n - 1. Keys and values have separate barriers:
    the compiler synchronises all warps between two operations on one barrier."""
    key = n < count
    value = (n > 0) & (n <= count)
    mbarrier.expect(k_bars.index(n % 2), 2 * N * D, key)
    mbarrier.expect(v_bars.index((n + 1) % 2), 2 * N * D, value)
    row = start + begin + n * N
    tma.async_copy_global_to_shared(KD, [g, row, 0], k_bars.index(n % 2), k_s.index(n % 2), key)
    tma.async_copy_global_to_shared(VD, [g, row - N, 0], v_bars.index((n + 1) % 2), v_s.index((n + 1) % 2), value)


@gluon.jit
def _softmax(s, m, l, i, lower, upper, partly, scale, N: gl.constexpr, scores: gl.constexpr):
    if partly:
        at = i + gl.arange(0, N, layout=gl.SliceLayout(0, scores))
        s = gl.where((at[None, :] >= lower[:, None]) & (at[None, :] < upper[:, None]), s, -1e30)
    top = gl.maximum(m, gl.max(s, 1) * scale)
    fade = gl.exp2(m - top)
    p = gl.exp2(s * scale - top[:, None])
    return top, l * fade + gl.sum(p, 1), fade, p


@gluon.jit(do_not_specialize=["docs", "length", "per_sequence", "rows", "compressed_length"])
def hopper_forward(
    O, LSE, QD, KD, VD, CU, CCU, docs, length, per_sequence, rows,
    compressed_length, scale,
    W: gl.constexpr, L: gl.constexpr, S: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, SIZE: gl.constexpr,
    D: gl.constexpr, M: gl.constexpr, N: gl.constexpr, COMPRESSED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = QD.dtype
    H: gl.constexpr = G * HEADS
    if COMPRESSED:
        tile = gl.num_programs(0) // H - 1 - gl.program_id(0) // H
    else:
        tile = gl.program_id(0) // H
    head = gl.program_id(0) % H
    g = head // HEADS
    doc, start, size, first = locate(CU, docs, tile, length, per_sequence, M, PACKED)
    row0 = start
    if first < size:
        position = first + gl.arange(0, M, layout=gl.SliceLayout(1, scores))
        if COMPRESSED:
            if PACKED:
                start = gl.load(CCU + doc)
            else:
                start = doc * compressed_length
            upper = visible(position, L, S)
            lower = gl.zeros_like(upper)
            begin = 0
            whole = 0
            edge = visible(first, L, S) // N * N
            end = visible(gl.minimum(first + M, size) - 1, L, S)
            keys = visible(size - 1, L, S)
        else:
            upper = position + 1
            lower = upper - W
            end = gl.minimum(first + M, size)
            begin = gl.maximum(first - W + 1, 0) // N * N
            whole = (gl.maximum(first + M - W, 0) + N - 1) // N * N
            edge = (first + 1) // N * N
            keys = size
        count = (end - begin + N - 1) // N
        q_s = gl.allocate_shared_memory(dtype, [1, 1, M, D], QD.layout)
        k_s = gl.allocate_shared_memory(dtype, [2, 1, N, D], KD.layout)
        v_s = gl.allocate_shared_memory(dtype, [2, 1, N, D], VD.layout)
        q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_bar, count=1)
        for b in gl.static_range(2):
            mbarrier.init(k_bars.index(b), count=1)
            mbarrier.init(v_bars.index(b), count=1)
        barrier()
        mbarrier.expect(q_bar, 2 * M * D)
        tma.async_copy_global_to_shared(QD, [head, row0 + first, 0], q_bar, q_s.index(0))
        q_tile = tile_of(q_s, 0)
        _fetch(KD, VD, k_s, v_s, k_bars, v_bars, gl.to_tensor(0), count, begin, start, g, D, N)
        _fetch(KD, VD, k_s, v_s, k_bars, v_bars, gl.to_tensor(1), count, begin, start, g, D, N)
        m = gl.full([M], -1e20, gl.float32, layout=gl.SliceLayout(1, scores))
        l = gl.zeros([M], gl.float32, layout=gl.SliceLayout(1, scores))
        none = gl.zeros([M, N], gl.float32, layout=scores)
        acc = gl.zeros([M, D], gl.float32, layout=sums)
        mbarrier.wait(q_bar, 0)
        mbarrier.wait(k_bars.index(0), 0, count > 0)
        token = warpgroup_mma(q_tile, tile_of(k_s, 0).permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(token,))
        m, l, _, p = _softmax(s, m, l, begin, lower, upper, (begin < whole) | (begin >= edge), scale, N, scores)
        weights = gl.convert_layout(p.to(dtype), operand)
        _fetch(KD, VD, k_s, v_s, k_bars, v_bars, gl.to_tensor(2), count, begin, start, g, D, N)
        mbarrier.wait(k_bars.index(1), 0, count > 1)
        mbarrier.wait(v_bars.index(0), 0, count > 0)
        for n in range(1, count):
            token = warpgroup_mma(q_tile, tile_of(k_s, n % 2).permute((1, 0)), none, use_acc=False, is_async=True)
            total = warpgroup_mma(weights, tile_of(v_s, (n + 1) % 2), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=(token,))
            i = begin + n * N
            m, l, fade, p = _softmax(s, m, l, i, lower, upper, (i < whole) | (i >= edge), scale, N, scores)
            # wait for the next step's tiles here, so that ptxas does not move the exponentials behind the product's
            # wait
            after = n + 1
            mbarrier.wait(k_bars.index(after % 2), after // 2 & 1, after < count)
            mbarrier.wait(v_bars.index(n % 2), n // 2 & 1)
            acc, p, fade = warpgroup_mma_wait(0, deps=(total, p, fade))
            weights = gl.convert_layout(p.to(dtype), operand)
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, sums))[:, None]
            _fetch(KD, VD, k_s, v_s, k_bars, v_bars, n + 2, count, begin, start, g, D, N)
        if begin + count * N > keys:
            # Values after the document's last have weight 0, but need not be finite: they belong to another document,
            # or are padding. Only the last tile has any; scores of its keys are masked.
            values = tile_of(v_s, (count + 1) % 2)
            row = gl.arange(0, N, layout=gl.SliceLayout(1, by_row)) + begin + (count - 1) * N
            clean = gl.where((row < end)[:, None], values.load(by_row), 0.0)
            barrier()
            values.store(clean)
            fence_async_shared()
            barrier()
        total = warpgroup_mma(weights, tile_of(v_s, (count + 1) % 2), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(total,))
        # a row that saw no key gets exactly 0 and +inf; NaN must not become 0
        some = l != 0
        share = gl.where(some, l, 1.0)
        lse = gl.where(some, m + gl.log2(share), float("inf"))
        gl.store(LSE + head.to(gl.int64) * rows + row0 + position, lse, mask=position < size)
        share = gl.convert_layout(share, gl.SliceLayout(1, sums))[:, None]
        some = gl.convert_layout(l, gl.SliceLayout(1, sums))[:, None] != 0
        out = gl.convert_layout(gl.where(some, acc / share, 0.0).to(dtype), by_row)
        j = first + gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        to = ((row0 + j).to(gl.int64) * H + head)[:, None] * SIZE + d[None, :]
        gl.store(O + to, out, mask=(j < size)[:, None] & (d < SIZE)[None, :])


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int, int], documents: Documents, launch: Launch
) -> tuple[Tensor, Tensor]:
    """(o, lse) of whole sequences. sizes: (window, 0, 0) or (0, compress_block, compress_stride)."""
    B, T, H, D = q.shape
    G = k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(row_shape("window", B, T, H), dtype=torch.float32, device=q.device)
    cu, *bounds = documents.tokens(launch.rows)
    call(
        hopper_forward, (documents.token_tiles(launch.rows) * H,),
        (o, lse, descriptor(q, launch.rows), descriptor(k, launch.keys), descriptor(v, launch.keys), cu, documents.ccu),
        (*bounds, B * T, documents.compressed_length),
        (D**-0.5 * LOG2E, *sizes, G, H // G, D, power_of_2(D), launch.rows, launch.keys, sizes[0] == 0,
         documents.packed),
        **launch.gluon_options,
    )  # fmt: skip
    return o, lse

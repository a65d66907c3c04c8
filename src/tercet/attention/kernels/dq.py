"""dQ of the compressed and the window branch in one kernel: q, dout and the accumulator stay in registers for both.

q, dout: [B, T, H, Dk | Dv]   lse, delta, gate: fp32 [H, B, T]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.launch import LOG2E, call, descriptors, padded
from tercet.attention.kernels.table import Launch, gluon_launch, triton_launch
from tercet.attention.kernels.tiles import Branch, dq_step, in_window, load_tile, store_rows
from tercet.attention.kernels.varlen import Documents, locate_queries, visible
from tercet.attention.kernels.window import window_tiles


@triton.jit
def _row_values(LSE, DELTA, GATE, at, inside, M: tl.constexpr, GATED: tl.constexpr):
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + at, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(GATE + at, mask=inside, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return lse, gate, gate * delta


@triton.jit(do_not_specialize=["docs", "length", "per_sequence", "first_query", "queries", "rows", "compressed_length"])
def compressed_window_dq_kernel(
    Q, DO, QD, DOD, DQ, KC, VC, KCD, VCD, LSE_C, DELTA_C, GATE_C, KW, VW, KWD, VWD, LSE_W, DELTA_W, GATE_W,
    CU, CCU, docs, length, per_sequence, first_query, queries, rows, compressed_length,
    q_t, q_h, do_t, do_h, kc_t, kc_h, vc_t, vc_h, kw_t, kw_h, vw_t, vw_h, scale, softmax_scale,
    L: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr,
    TMAQ: tl.constexpr, TMAC: tl.constexpr, TMAW: tl.constexpr, COMPRESSED: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = G * HEADS
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    g = head // HEADS
    doc, start, row0, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, M, PACKED, QUERY_RANGE
    )
    if first < size:
        position = first + tl.arange(0, M)
        inside = position < size
        wide = head.to(tl.int64)
        q = load_tile(Q + wide * q_h, QD, row0 + first, size - first, head, q_t, DK, DKP, M, TMAQ, False)
        do = load_tile(DO + wide * do_h, DOD, row0 + first, size - first, head, do_t, DV, DVP, M, TMAQ, False)
        at = wide * rows + row0 + position
        acc = tl.zeros([M, DKP], tl.float32)
        if COMPRESSED:
            if PACKED:
                c0 = tl.load(CCU + doc)
            else:
                c0 = doc * compressed_length
            lse, gate, total = _row_values(LSE_C, DELTA_C, GATE_C, at, inside, M, GATED)
            KC += g.to(tl.int64) * kc_h
            VC += g.to(tl.int64) * vc_h
            seen = visible(position, L, S)
            whole = visible(first, L, S) // N * N
            end = visible(tl.minimum(first + M, size) - 1, L, S)
            for i in tl.range(0, whole, N):
                k = load_tile(KC, KCD, c0 + i, N, g, kc_t, DK, DKP, N, TMAC, True)
                v = load_tile(VC, VCD, c0 + i, N, g, vc_t, DV, DVP, N, TMAC, True)
                acc = dq_step(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(whole, end, N):
                k = load_tile(KC, KCD, c0 + i, end - i, g, kc_t, DK, DKP, N, TMAC, False, PACKED)
                v = load_tile(VC, VCD, c0 + i, end - i, g, vc_t, DV, DVP, N, TMAC, False, PACKED)
                mask = tl.arange(0, N)[None, :] < (seen - i)[:, None]
                acc = dq_step(q, do, k, v, mask, lse, gate, total, acc, scale, True)
        if WINDOW:
            lse, gate, total = _row_values(LSE_W, DELTA_W, GATE_W, at, inside, M, GATED)
            KW += g.to(tl.int64) * kw_h
            VW += g.to(tl.int64) * vw_h
            begin, whole, edge, end = window_tiles(first, size, W, M, N)
            for i in tl.range(begin, whole, N):
                k = load_tile(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_tile(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                mask = in_window(position, i, W, M, N, True)
                acc = dq_step(q, do, k, v, mask, lse, gate, total, acc, scale, True)
            for i in tl.range(whole, edge, N):
                k = load_tile(KW, KWD, start + i, N, g, kw_t, DK, DKP, N, TMAW, True)
                v = load_tile(VW, VWD, start + i, N, g, vw_t, DV, DVP, N, TMAW, True)
                acc = dq_step(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(edge, end, N):
                k = load_tile(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_tile(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                mask = in_window(position, i, W, M, N, False)
                acc = dq_step(q, do, k, v, mask, lse, gate, total, acc, scale, True)
        store_rows(DQ + head * DK, row0 + position, H * DK, inside, acc * softmax_scale, DK, DKP)


_NONE = (None,) * len(Branch._fields)


def compressed_window_dq(
    q: Tensor, dout: Tensor, compressed: Branch | None, window: Branch | None, config: NSAConfig,
    documents: Documents, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """dq, summed over the given branches."""
    B, T, H, DK = q.shape
    branches = [b for b in (compressed, window) if b is not None]
    G, DV = branches[0].v.shape[2:]
    keys = [x for b in branches for x in (b.k, b.v)]
    # not packed: padding after the documents' compressed tokens would have to be zeroed, which ends the overlap
    if launch is None and (
        fast := gluon_launch(
            "query_gradient", q, dout, *keys, packed=documents.packed, query_range=documents.query_range
        )
    ):
        from tercet.attention.kernels.hopper.dq import launch_dq

        return launch_dq(q, dout, compressed, window, config, documents, fast)
    launch = launch or triton_launch("query_gradient", q, branches[0].v)
    M = launch.rows
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kc, vc, lse_c, delta_c, gate_c = compressed or _NONE
    kw, vw, lse_w, delta_w, gate_w = window or _NONE
    qd, dod = descriptors(launch.tma, launch.rows, q, dout)
    kcd, vcd = (None, None) if compressed is None else descriptors(launch.tma, launch.keys, kc, vc)
    kwd, vwd = (None, None) if window is None else descriptors(launch.tma, launch.keys, kw, vw)
    gate = gate_c if compressed is not None else gate_w
    cu, *bounds = documents.query_tokens(M)
    call(
        compressed_window_dq_kernel, (documents.query_tiles(M) * H,),
        (q, dout, qd, dod, dq, kc, vc, kcd, vcd, lse_c, delta_c, gate_c, kw, vw, kwd, vwd, lse_w, delta_w, gate_w,
         cu, documents.ccu),
        (*bounds, B * T, documents.compressed_length),
        (q.stride(1), q.stride(2), dout.stride(1), dout.stride(2),
        *_strides(kc), *_strides(vc), *_strides(kw), *_strides(vw), DK**-0.5 * LOG2E, DK**-0.5,
        config.compress_block, config.compress_stride, config.window, G, H // G,
        DK, padded(DK), DV, padded(DV), M, launch.keys, documents.packed, documents.query_range,
        qd is not None, kcd is not None, kwd is not None, compressed is not None, window is not None,
        gate is not None),
        **launch.options,
    )  # fmt: skip
    return dq


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(1), x.stride(2))

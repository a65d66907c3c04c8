"""dQ of the compressed and the window branch in one kernel: q, dout and the sum stay in registers for both.

q, dout: [B, T, H, Dk | Dv]   row sums (dout·o of a branch), lse, gates: fp32 [H, B, T]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.copy_engine import key_descriptors, query_descriptors
from tercet.attention.kernels.documents import Documents, locate_queries, visible
from tercet.attention.kernels.hopper import overlapped
from tercet.attention.kernels.launching import call
from tercet.attention.kernels.settings import LOG2E, Launch, padded, settings
from tercet.attention.kernels.tiles import in_window, load_tile, query_gradient, store_rows
from tercet.attention.kernels.window import window_tiles


@triton.jit
def _row_values(LSE, SUM, GATE, at, inside, M: tl.constexpr, GATED: tl.constexpr):
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    row_sum = tl.load(SUM + at, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(GATE + at, mask=inside, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return lse, gate, gate * row_sum


@triton.jit(do_not_specialize=["docs", "length", "per_sequence", "first_query", "queries", "rows", "compressed_length"])
def _query_gradient(
    Q, DO, QD, DOD, DQ, KC, VC, KCD, VCD, LSEC, SUMC, GATEC, KW, VW, KWD, VWD, LSEW, SUMW, GATEW,
    CU, CCU, docs, length, per_sequence, first_query, queries, rows, compressed_length,
    q_t, q_h, do_t, do_h, kc_t, kc_h, vc_t, vc_h, kw_t, kw_h, vw_t, vw_h, scale, softmax_scale,
    L: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr, STRETCH: tl.constexpr,
    TMAQ: tl.constexpr, TMAC: tl.constexpr, TMAW: tl.constexpr, COMPRESSED: tl.constexpr, WINDOW: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = G * HEADS
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    g = head // HEADS
    doc, start, row0, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, M, PACKED, STRETCH
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
            lse, gate, total = _row_values(LSEC, SUMC, GATEC, at, inside, M, GATED)
            KC += g.to(tl.int64) * kc_h
            VC += g.to(tl.int64) * vc_h
            seen = visible(position, L, S)
            whole = visible(first, L, S) // N * N
            end = visible(tl.minimum(first + M, size) - 1, L, S)
            for i in tl.range(0, whole, N):
                k = load_tile(KC, KCD, c0 + i, N, g, kc_t, DK, DKP, N, TMAC, True)
                v = load_tile(VC, VCD, c0 + i, N, g, vc_t, DV, DVP, N, TMAC, True)
                acc = query_gradient(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(whole, end, N):
                k = load_tile(KC, KCD, c0 + i, end - i, g, kc_t, DK, DKP, N, TMAC, False, PACKED)
                v = load_tile(VC, VCD, c0 + i, end - i, g, vc_t, DV, DVP, N, TMAC, False, PACKED)
                mask = tl.arange(0, N)[None, :] < (seen - i)[:, None]
                acc = query_gradient(q, do, k, v, mask, lse, gate, total, acc, scale, True)
        if WINDOW:
            lse, gate, total = _row_values(LSEW, SUMW, GATEW, at, inside, M, GATED)
            KW += g.to(tl.int64) * kw_h
            VW += g.to(tl.int64) * vw_h
            begin, whole, edge, end = window_tiles(first, size, W, M, N)
            for i in tl.range(begin, whole, N):
                k = load_tile(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_tile(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                mask = in_window(position, i, W, M, N, True)
                acc = query_gradient(q, do, k, v, mask, lse, gate, total, acc, scale, True)
            for i in tl.range(whole, edge, N):
                k = load_tile(KW, KWD, start + i, N, g, kw_t, DK, DKP, N, TMAW, True)
                v = load_tile(VW, VWD, start + i, N, g, vw_t, DV, DVP, N, TMAW, True)
                acc = query_gradient(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(edge, end, N):
                k = load_tile(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_tile(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                mask = in_window(position, i, W, M, N, False)
                acc = query_gradient(q, do, k, v, mask, lse, gate, total, acc, scale, True)
        store_rows(DQ + head * DK, row0 + position, H * DK, inside, acc * softmax_scale, DK, DKP)


def query_gradients(
    q: Tensor, dout: Tensor,
    compressed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None,
    window: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None,
    config: NSAConfig, documents: Documents, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """dq of the given branches, each (k, v, lse, row_sum, gate), under do = gate · dout."""
    B, T, H, DK = q.shape
    branches = [b for b in (compressed, window) if b is not None]
    G, DV = branches[0][1].shape[2:]
    keys = [x for k, v, *_ in branches for x in (k, v)]
    # padding after packed documents' compressed tokens would have to be cleared, and then no product runs on
    plain = not documents.stretch and not documents.packed
    if launch is None and plain and (fast := overlapped("query_gradient", q, dout, *keys)):
        from tercet.attention.kernels.hopper_queries import launch_query_gradients

        return launch_query_gradients(q, dout, compressed, window, config, documents, fast)
    launch = launch or settings("query_gradient", q, branches[0][1])
    M = launch.rows
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kc, vc, lse_c, sum_c, gate_c = compressed or (None,) * 5
    kw, vw, lse_w, sum_w, gate_w = window or (None,) * 5
    qd, dod = query_descriptors(launch, q, dout)
    kcd, vcd = (None, None) if compressed is None else key_descriptors(launch, kc, vc)
    kwd, vwd = (None, None) if window is None else key_descriptors(launch, kw, vw)
    gate = gate_c if compressed is not None else gate_w
    cu, *bounds = documents.query_tokens(M)
    call(
        _query_gradient, (documents.query_tiles(M) * H,),
        (q, dout, qd, dod, dq, kc, vc, kcd, vcd, lse_c, sum_c, gate_c, kw, vw, kwd, vwd, lse_w, sum_w, gate_w,
         cu, documents.ccu),
        (*bounds, B * T, documents.compressed_length),
        (q.stride(1), q.stride(2), dout.stride(1), dout.stride(2),
        *_strides(kc), *_strides(vc), *_strides(kw), *_strides(vw), DK**-0.5 * LOG2E, DK**-0.5,
        config.compress_block, config.compress_stride, config.window, G, H // G,
        DK, padded(DK), DV, padded(DV), M, launch.keys, documents.packed, documents.stretch,
        qd is not None, kcd is not None, kwd is not None, compressed is not None, window is not None,
        gate is not None),
        **launch.options,
    )  # fmt: skip
    return dq


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(1), x.stride(2))

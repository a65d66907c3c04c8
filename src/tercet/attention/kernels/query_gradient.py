"""dQ of the compressed and the window branch in one kernel: q, dout and the sum stay in registers for both.

q, dout: [B, T, H, Dk | Dv]   row sums (dout·o of a branch), lse, gates: fp32 [B, T, H]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.copy_engine import key_descriptors
from tercet.attention.kernels.documents import Documents, locate_queries, visible
from tercet.attention.kernels.launching import call
from tercet.attention.kernels.settings import LOG2E, Launch, padded, query_tile, settings
from tercet.attention.kernels.tiles import load_keys, load_rows, query_gradient, query_rows, store_rows
from tercet.attention.kernels.window import window_tiles
from tercet.attention.spec import NSAConfig


@triton.jit
def _row_values(LSE, SUM, GATE, token, head, inside, H: tl.constexpr, M: tl.constexpr,
                GATED: tl.constexpr):  # fmt: skip
    row = token.to(tl.int64) * H + head
    lse = tl.load(LSE + row, mask=inside, other=float("inf"))
    row_sum = tl.load(SUM + row, mask=inside, other=0.0)
    if GATED:
        gate = tl.load(GATE + row, mask=inside, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return lse, gate, gate * row_sum


@triton.jit(do_not_specialize=["docs", "length", "per_sequence", "first_query", "queries", "compressed_length"])
def _query_gradient(
    Q, DO, DQ, KC, VC, KCD, VCD, LSEC, SUMC, GATEC, KW, VW, KWD, VWD, LSEW, SUMW, GATEW,
    CU, CCU, docs, length, per_sequence, first_query, queries, compressed_length,
    q_t, q_h, do_t, do_h, kc_t, kc_h, vc_t, vc_h, kw_t, kw_h, vw_t, vw_h, scale, softmax_scale,
    L: tl.constexpr, S: tl.constexpr, W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    QT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr, STRETCH: tl.constexpr,
    TMAC: tl.constexpr, TMAW: tl.constexpr, COMPRESSED: tl.constexpr, WINDOW: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    doc, start, rows, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, QT, PACKED, STRETCH
    )
    if first < size:
        position, token, head, inside = query_rows(rows, size, first, g, HEADS, QT, M)
        q = load_rows(Q + head.to(tl.int64)[:, None] * q_h, token, q_t, inside, DK, DKP)
        do = load_rows(DO + head.to(tl.int64)[:, None] * do_h, token, do_t, inside, DV, DVP)
        acc = tl.zeros([M, DKP], tl.float32)
        if COMPRESSED:
            if PACKED:
                c0 = tl.load(CCU + doc)
            else:
                c0 = doc * compressed_length
            lse, gate, total = _row_values(LSEC, SUMC, GATEC, token, head, inside, G * HEADS, M, GATED)
            KC += g.to(tl.int64) * kc_h
            VC += g.to(tl.int64) * vc_h
            seen = visible(position, L, S)
            whole = visible(first, L, S) // N * N
            end = visible(tl.minimum(first + QT, size) - 1, L, S)
            for i in tl.range(0, whole, N):
                k = load_keys(KC, KCD, c0 + i, N, g, kc_t, DK, DKP, N, TMAC, True)
                v = load_keys(VC, VCD, c0 + i, N, g, vc_t, DV, DVP, N, TMAC, True)
                acc = query_gradient(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(whole, end, N):
                k = load_keys(KC, KCD, c0 + i, end - i, g, kc_t, DK, DKP, N, TMAC and not PACKED, False)
                v = load_keys(VC, VCD, c0 + i, end - i, g, vc_t, DV, DVP, N, TMAC and not PACKED, False)
                mask = (i + tl.arange(0, N))[None, :] < seen[:, None]
                acc = query_gradient(q, do, k, v, mask, lse, gate, total, acc, scale, True)
        if WINDOW:
            lse, gate, total = _row_values(LSEW, SUMW, GATEW, token, head, inside, G * HEADS, M, GATED)
            KW += g.to(tl.int64) * kw_h
            VW += g.to(tl.int64) * vw_h
            begin, whole, edge, end = window_tiles(first, size, W, QT, N)
            for i in tl.range(begin, whole, N):
                k = load_keys(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_keys(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                back = position[:, None] - (i + tl.arange(0, N))[None, :]
                acc = query_gradient(q, do, k, v, (back >= 0) & (back < W), lse, gate, total, acc, scale, True)
            for i in tl.range(whole, edge, N):
                k = load_keys(KW, KWD, start + i, N, g, kw_t, DK, DKP, N, TMAW, True)
                v = load_keys(VW, VWD, start + i, N, g, vw_t, DV, DVP, N, TMAW, True)
                acc = query_gradient(q, do, k, v, None, lse, gate, total, acc, scale, False)
            for i in tl.range(edge, end, N):
                k = load_keys(KW, KWD, start + i, size - i, g, kw_t, DK, DKP, N, TMAW, False)
                v = load_keys(VW, VWD, start + i, size - i, g, vw_t, DV, DVP, N, TMAW, False)
                back = position[:, None] - (i + tl.arange(0, N))[None, :]
                acc = query_gradient(q, do, k, v, (back >= 0) & (back < W), lse, gate, total, acc, scale, True)
        row = token.to(tl.int64) * (G * HEADS) + head
        store_rows(DQ, row, DK, inside, acc * softmax_scale, DK, DKP)


def query_gradients(
    q: Tensor, dout: Tensor,
    compressed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None,
    window: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None] | None,
    config: NSAConfig, documents: Documents, launch: Launch | None = None,
) -> Tensor:  # fmt: skip
    """dq of the given branches, each (k, v, lse, row_sum, gate), under do = gate · dout."""
    H, DK = q.shape[2:]
    branches = [b for b in (compressed, window) if b is not None]
    G, DV = branches[0][1].shape[2:]
    launch = launch or settings("query_gradient", q, branches[0][1])
    rows, queries = query_tile(H // G, launch.rows)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kc, vc, lse_c, sum_c, gate_c = compressed or (None,) * 5
    kw, vw, lse_w, sum_w, gate_w = window or (None,) * 5
    kcd, vcd = (None, None) if compressed is None else key_descriptors(launch, kc, vc)
    kwd, vwd = (None, None) if window is None else key_descriptors(launch, kw, vw)
    gate = gate_c if compressed is not None else gate_w
    cu, *bounds = documents.query_tokens(queries)
    call(
        _query_gradient, (documents.query_tiles(queries), G),
        (q, dout, dq, kc, vc, kcd, vcd, lse_c, sum_c, gate_c, kw, vw, kwd, vwd, lse_w, sum_w, gate_w,
         cu, documents.ccu),
        (*bounds, documents.compressed_length),
        (q.stride(1), q.stride(2), dout.stride(1), dout.stride(2),
        *_strides(kc), *_strides(vc), *_strides(kw), *_strides(vw), DK**-0.5 * LOG2E, DK**-0.5,
        config.compress_block, config.compress_stride, config.window, G, H // G,
        DK, padded(DK), DV, padded(DV), queries, rows, launch.keys, documents.packed, documents.stretch,
        kcd is not None, kwd is not None, compressed is not None, window is not None, gate is not None),
        **launch.options,
    )  # fmt: skip
    return dq


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(1), x.stride(2))

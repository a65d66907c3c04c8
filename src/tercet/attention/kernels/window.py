"""Sliding-window attention over tokens max(0, t-w+1) … t of the document: forward, and dK/dV. dQ: dq.py.

q: [B, T, H, Dk]   k, v: [B, T, G, Dk | Dv]   o: [B, T, H, Dv]   lse: fp32 [H, B, T]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.combine import row_shape
from tercet.attention.kernels.launch import LOG2E, call, descriptors, padded
from tercet.attention.kernels.table import Launch, gluon_launch, triton_launch
from tercet.attention.kernels.tiles import (
    Branch,
    dkv_step,
    finish,
    in_window,
    load_queries,
    load_tile,
    softmax_step,
    store_rows,
)
from tercet.attention.kernels.varlen import Documents, locate, locate_queries, queries_of_keys

_PER_BATCH = ["docs", "length", "per_sequence", "first_query", "queries", "rows"]


@triton.jit
def window_tiles(first, size, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Key tiles of a query tile: [begin, whole) seen in part, [whole, edge) seen by all rows, [edge, end) in part."""
    end = tl.minimum(first + M, size)
    begin = tl.maximum(first - W + 1, 0) // N * N
    whole = tl.minimum((tl.maximum(first + M - W, 0) + N - 1) // N * N, end)
    edge = tl.maximum((first + 1) // N * N, whole)
    return begin, whole, edge, end


@triton.jit(do_not_specialize=_PER_BATCH)
def window_forward_kernel(
    Q, K, V, QD, KD, VD, O, LSE, CU, docs, length, per_sequence, first_query, queries, rows,
    q_t, q_h, k_t, k_h, v_t, v_h, scale,
    W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMAQ: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = G * HEADS
    tile = tl.program_id(0) // H
    head = tl.program_id(0) % H
    g = head // HEADS
    _, start, row0, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, M, PACKED, QUERY_RANGE
    )
    if first < size:
        position = first + tl.arange(0, M)
        q = load_tile(Q + head.to(tl.int64) * q_h, QD, row0 + first, size - first, head, q_t, DK, DKP, M, TMAQ, False)
        K += g.to(tl.int64) * k_h
        V += g.to(tl.int64) * v_h
        m = tl.full([M], -1e20, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        begin, whole, edge, end = window_tiles(first, size, W, M, N)
        for i in tl.range(begin, whole, N):
            k = load_tile(K, KD, start + i, size - i, g, k_t, DK, DKP, N, TMA, False)
            v = load_tile(V, VD, start + i, size - i, g, v_t, DV, DVP, N, TMA, False, True)
            seen = in_window(position, i, W, M, N, True)
            m, l, acc = softmax_step(q, k, v, seen, m, l, acc, scale, True)
        for i in tl.range(whole, edge, N):
            k = load_tile(K, KD, start + i, N, g, k_t, DK, DKP, N, TMA, True)
            v = load_tile(V, VD, start + i, N, g, v_t, DV, DVP, N, TMA, True)
            m, l, acc = softmax_step(q, k, v, None, m, l, acc, scale, False)
        for i in tl.range(edge, end, N):
            k = load_tile(K, KD, start + i, size - i, g, k_t, DK, DKP, N, TMA, False)
            v = load_tile(V, VD, start + i, size - i, g, v_t, DV, DVP, N, TMA, False, True)
            seen = in_window(position, i, W, M, N, False)
            m, l, acc = softmax_step(q, k, v, seen, m, l, acc, scale, True)
        finish(O, LSE, row0 + position, position < size, head, m, l, acc, rows, H, DV, DVP)


@triton.jit
def _query_step(
    Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, key, row0, t, end, head, rows, q_t, q_h, do_t, do_h, scale,
    W: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr, BEGIN: tl.constexpr,
):  # fmt: skip
    q, do, lse, delta, gate = load_queries(
        Q, DO, LSE, DELTA, GATE, QD, DOD, row0 + t, end - t, head, rows, q_t, q_h, do_t, do_h,
        DK, DKP, DV, DVP, M, TMA, GATED, WHOLE)  # fmt: skip
    # like in_window, from the side of the keys
    m = tl.arange(0, M)[None, :]
    first = (key - t)[:, None]
    if W < M + N:
        seen = (m >= first) & (m < first + W)
    elif BEGIN:
        seen = m >= first
    else:
        seen = m < first + W
    return dkv_step(q, do, k, v, seen, lse, gate, delta, dk, dv, scale, not WHOLE, GATED)


@triton.jit(do_not_specialize=_PER_BATCH)
def window_dkv_kernel(
    Q, DO, K, V, LSE, DELTA, GATE, DKEY, DVALUE, QD, DOD, CU, docs, length, per_sequence, first_query, queries, rows,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h, scale, softmax_scale,
    W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    doc, start, size, first = locate(CU, docs, tile, length, per_sequence, N, PACKED)
    if first < size:
        k = load_tile(K + g.to(tl.int64) * k_h, None, start + first, size - first, g, k_t, DK, DKP, N, False, False)
        v = load_tile(V + g.to(tl.int64) * v_h, None, start + first, size - first, g, v_t, DV, DVP, N, False, False)
        dk = tl.zeros([N, DKP], tl.float32)
        dv = tl.zeros([N, DVP], tl.float32)
        key = first + tl.arange(0, N)
        row0, origin, last = queries_of_keys(doc, start, size, first_query, queries, PACKED, QUERY_RANGE)
        # query tiles count from the first query in q, which the first key is `ahead` tokens after
        ahead = first - origin
        begin = tl.maximum(ahead, 0) // M * M
        end = tl.maximum(tl.minimum(ahead + N - 1 + W, last - origin), begin)
        # tiles from `whole` to `edge` see every key
        whole = tl.minimum((tl.maximum(ahead + N - 1, 0) + M - 1) // M * M, end)
        edge = tl.maximum(tl.minimum((ahead + W) // M * M, (last - origin) // M * M), whole)
        t = begin
        head = g * HEADS
        for _ in tl.range(0, (tl.maximum(whole - begin, 0) + M - 1) // M * HEADS):
            dk, dv = _query_step(
                Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, key, row0, origin + t, last, head, rows, q_t, q_h,
                do_t, do_h, scale, W, DK, DKP, DV, DVP, M, N, TMA, GATED, False, True)  # fmt: skip
            t += M
            head += (t >= whole).to(tl.int32)
            t = tl.where(t >= whole, begin, t)
        t = whole
        head = g * HEADS
        for _ in tl.range(0, (edge - whole) // M * HEADS):
            dk, dv = _query_step(
                Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, key, row0, origin + t, last, head, rows, q_t, q_h,
                do_t, do_h, scale, W, DK, DKP, DV, DVP, M, N, TMA, GATED, True, True)  # fmt: skip
            t += M
            head += (t == edge).to(tl.int32)
            t = tl.where(t == edge, whole, t)
        t = edge
        head = g * HEADS
        for _ in tl.range(0, (tl.maximum(end - edge, 0) + M - 1) // M * HEADS):
            dk, dv = _query_step(
                Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, key, row0, origin + t, last, head, rows, q_t, q_h,
                do_t, do_h, scale, W, DK, DKP, DV, DVP, M, N, TMA, GATED, False, False)  # fmt: skip
            t += M
            head += (t >= end).to(tl.int32)
            t = tl.where(t >= end, edge, t)
        store_rows(DKEY + g * DK, start + key, G * DK, key < size, dk * softmax_scale, DK, DKP)
        store_rows(DVALUE + g * DV, start + key, G * DV, key < size, dv, DV, DVP)


def forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, documents: Documents, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    B, T, H, DK = q.shape
    G, DV = v.shape[2:]
    if launch is None and (
        fast := gluon_launch("window_forward", q, k, v, packed=documents.packed, query_range=documents.query_range)
    ):
        from tercet.attention.kernels.hopper.forward import launch_forward

        return launch_forward(q, k, v, (window, 0, 0), documents, fast)
    o = torch.empty(B, T, H, DV, dtype=q.dtype, device=q.device)
    lse = torch.empty(row_shape("window", B, T, H), dtype=torch.float32, device=q.device)
    launch = launch or triton_launch("window_forward", q, v)
    (qd,) = descriptors(launch.tma, launch.rows, q)
    kd, vd = descriptors(launch.tma, launch.keys, k, v)
    cu, *bounds = documents.query_tokens(launch.rows)
    call(
        window_forward_kernel, (documents.query_tiles(launch.rows) * H,),
        (q, k, v, qd, kd, vd, o, lse, cu), (*bounds, B * T),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), DK**-0.5 * LOG2E,
        window, G, H // G, DK, padded(DK), DV, padded(DV), launch.rows, launch.keys,
        documents.packed, documents.query_range, qd is not None, kd is not None), **launch.options,
    )  # fmt: skip
    return o, lse


def dkv(
    q: Tensor, dout: Tensor, branch: Branch, window: int, documents: Documents, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(dk, dv)."""
    k, v, lse, delta, gate = branch
    B, T, H, DK = q.shape
    G, DV = v.shape[2:]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if launch is None and (fast := gluon_launch("window_key_gradients", q, dout, v, packed=documents.packed)):
        from tercet.attention.kernels.hopper.dkv import launch_dkv

        _, *bounds = documents.tokens(fast.keys)
        grid = (documents.token_tiles(fast.keys), 1, G)
        launch_dkv(q, dout, branch, dk, dv, grid, bounds, 0, (window, 0, 0), documents, fast)
        return dk, dv
    launch = launch or triton_launch("window_key_gradients", q, v)
    qd, dod = descriptors(launch.tma, launch.rows, q, dout)
    cu, *bounds = documents.tokens(launch.keys)
    call(
        window_dkv_kernel, (documents.token_tiles(launch.keys), G),
        (q, dout, k, v, lse, delta, gate, dk, dv, qd, dod, cu),
        (*bounds, documents.first_query, documents.queries, B * T),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), dout.stride(1), dout.stride(2),
        DK**-0.5 * LOG2E, DK**-0.5,
        window, G, H // G, DK, padded(DK), DV, padded(DV), launch.rows, launch.keys,
        documents.packed, documents.query_range, qd is not None, gate is not None), **launch.options,
    )  # fmt: skip
    return dk, dv

"""Sliding-window attention over tokens max(0, t-w+1) … t of the document, and its key gradients.

q: [B, T, H, Dk]   k, v: [B, T, G, Dk | Dv]   o: [B, T, H, Dv]   lse: [B, T, H], log2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.copy_engine import key_descriptors, query_descriptors
from tercet.attention.kernels.documents import Documents, locate, locate_queries, queries_at_hand
from tercet.attention.kernels.launching import call
from tercet.attention.kernels.settings import LOG2E, Launch, padded, query_tile, settings
from tercet.attention.kernels.tiles import (
    attend,
    finish,
    key_gradient,
    load_keys,
    load_queries,
    load_rows,
    query_rows,
    store_rows,
)

_PER_BATCH = ["docs", "length", "per_sequence", "first_query", "queries"]


@triton.jit
def window_tiles(first, size, W: tl.constexpr, QT: tl.constexpr, N: tl.constexpr):
    """Key tiles of a query tile: [begin, whole) partly seen, [whole, edge) seen by all rows, [edge, end) partly."""
    end = tl.minimum(first + QT, size)
    begin = tl.maximum(first - W + 1, 0) // N * N
    whole = tl.minimum((tl.maximum(first + QT - W, 0) + N - 1) // N * N, end)
    edge = tl.maximum((first + 1) // N * N, whole)
    return begin, whole, edge, end


@triton.jit(do_not_specialize=_PER_BATCH)
def _forward(
    Q, K, V, KD, VD, O, LSE, CU, docs, length, per_sequence, first_query, queries,
    q_t, q_h, k_t, k_h, v_t, v_h, scale,
    W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, QT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, STRETCH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    _, start, rows, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, QT, PACKED, STRETCH
    )
    if first < size:
        position, token, head, inside = query_rows(rows, size, first, g, HEADS, QT, M)
        q = load_rows(Q + head.to(tl.int64)[:, None] * q_h, token, q_t, inside, DK, DKP)
        K += g.to(tl.int64) * k_h
        V += g.to(tl.int64) * v_h
        m = tl.full([M], -1e20, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        begin, whole, edge, end = window_tiles(first, size, W, QT, N)
        for i in tl.range(begin, whole, N):
            k = load_keys(K, KD, start + i, size - i, g, k_t, DK, DKP, N, TMA, False)
            v = load_keys(V, VD, start + i, size - i, g, v_t, DV, DVP, N, TMA, False)
            back = position[:, None] - (i + tl.arange(0, N))[None, :]
            m, l, acc = attend(q, k, v, (back >= 0) & (back < W), m, l, acc, scale, True)
        for i in tl.range(whole, edge, N):
            k = load_keys(K, KD, start + i, N, g, k_t, DK, DKP, N, TMA, True)
            v = load_keys(V, VD, start + i, N, g, v_t, DV, DVP, N, TMA, True)
            m, l, acc = attend(q, k, v, None, m, l, acc, scale, False)
        for i in tl.range(edge, end, N):
            k = load_keys(K, KD, start + i, size - i, g, k_t, DK, DKP, N, TMA, False)
            v = load_keys(V, VD, start + i, size - i, g, v_t, DV, DVP, N, TMA, False)
            back = position[:, None] - (i + tl.arange(0, N))[None, :]
            m, l, acc = attend(q, k, v, (back >= 0) & (back < W), m, l, acc, scale, True)
        finish(O, LSE, token, head, inside, m, l, acc, G * HEADS, DV, DVP)


@triton.jit
def _query_step(
    Q, DO, LSE, SUM, GATE, QD, DOD, k, v, dk, dv, key, start, size, t, g, q_t, q_h, do_t, do_h, scale,
    W: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, QT: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    position, q, do, lse, row_sum, gate = load_queries(
        Q, DO, LSE, SUM, GATE, QD, DOD, start, size, t, g, q_t, q_h, do_t, do_h,
        HEADS, H, DK, DKP, DV, DVP, QT, M, TMA, GATED)  # fmt: skip
    back = position[None, :] - key[:, None]
    return key_gradient(q, do, k, v, (back >= 0) & (back < W), lse, gate, row_sum, dk, dv, scale, MASK, GATED)


@triton.jit(do_not_specialize=_PER_BATCH)
def _key_gradients(
    Q, DO, K, V, LSE, SUM, GATE, DKEY, DVALUE, QD, DOD, CU, docs, length, per_sequence, first_query, queries,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h, scale, softmax_scale,
    W: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, QT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, STRETCH: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    g = tl.program_id(1)
    doc, start, size, first = locate(CU, docs, tile, length, per_sequence, N, PACKED)
    if first < size:
        k = load_keys(K + g.to(tl.int64) * k_h, None, start + first, size - first, g, k_t, DK, DKP, N, False, False)
        v = load_keys(V + g.to(tl.int64) * v_h, None, start + first, size - first, g, v_t, DV, DVP, N, False, False)
        dk = tl.zeros([N, DKP], tl.float32)
        dv = tl.zeros([N, DVP], tl.float32)
        key = first + tl.arange(0, N)
        rows, origin, last = queries_at_hand(doc, start, size, first_query, queries, PACKED, STRETCH)
        # tiles of queries count from the first one at hand, `ahead` tokens before the first key or behind it
        ahead = first - origin
        begin = tl.maximum(ahead, 0) // QT * QT
        end = tl.minimum(ahead + N - 1 + W, last - origin)
        # from here on every query is past every key
        whole = tl.minimum((tl.maximum(ahead + N - 1, 0) + QT - 1) // QT * QT, end)
        edge = tl.maximum(tl.minimum((ahead + W) // QT * QT, end // QT * QT), whole)
        for t in tl.range(origin + begin, origin + whole, QT):
            dk, dv = _query_step(
                Q, DO, LSE, SUM, GATE, QD, DOD, k, v, dk, dv, key, rows, last, t, g, q_t, q_h, do_t, do_h,
                scale, W, HEADS, G * HEADS, DK, DKP, DV, DVP, QT, M, TMA, GATED, True)  # fmt: skip
        for t in tl.range(origin + whole, origin + edge, QT):
            dk, dv = _query_step(
                Q, DO, LSE, SUM, GATE, QD, DOD, k, v, dk, dv, key, rows, last, t, g, q_t, q_h, do_t, do_h,
                scale, W, HEADS, G * HEADS, DK, DKP, DV, DVP, QT, M, TMA, GATED, False)  # fmt: skip
        for t in tl.range(origin + edge, origin + end, QT):
            dk, dv = _query_step(
                Q, DO, LSE, SUM, GATE, QD, DOD, k, v, dk, dv, key, rows, last, t, g, q_t, q_h, do_t, do_h,
                scale, W, HEADS, G * HEADS, DK, DKP, DV, DVP, QT, M, TMA, GATED, True)  # fmt: skip
        store_rows(DKEY + g * DK, start + key, G * DK, key < size, dk * softmax_scale, DK, DKP)
        store_rows(DVALUE + g * DV, start + key, G * DV, key < size, dv, DV, DVP)


def forward(
    q: Tensor, k: Tensor, v: Tensor, window: int, documents: Documents, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    B, T, H, DK = q.shape
    G, DV = v.shape[2:]
    o = torch.empty(B, T, H, DV, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    launch = launch or settings("window_forward", q, v)
    rows, queries = query_tile(H // G, launch.rows)
    kd, vd = key_descriptors(launch, k, v)
    cu, *bounds = documents.query_tokens(queries)
    call(
        _forward, (documents.query_tiles(queries), G), (q, k, v, kd, vd, o, lse, cu), tuple(bounds),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), DK**-0.5 * LOG2E,
        window, G, H // G, DK, padded(DK), DV, padded(DV), queries, rows, launch.keys,
        documents.packed, documents.stretch, kd is not None), **launch.options,
    )  # fmt: skip
    return o, lse


def key_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dout: Tensor, gate: Tensor | None, row_sum: Tensor,
    window: int, documents: Documents, launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk, dv of window attention under do = gate · dout."""
    H, DK = q.shape[2:]
    G, DV = v.shape[2:]
    launch = launch or settings("window_key_gradients", q, v)
    rows, queries = query_tile(H // G, launch.rows)
    qd, dod = query_descriptors(launch, q, dout, H // G, rows)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    cu, *bounds = documents.tokens(launch.keys)
    call(
        _key_gradients, (documents.token_tiles(launch.keys), G),
        (q, dout, k, v, lse, row_sum, gate, dk, dv, qd, dod, cu),
        (*bounds, documents.first_query, documents.queries),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), dout.stride(1), dout.stride(2),
        DK**-0.5 * LOG2E, DK**-0.5,
        window, G, H // G, DK, padded(DK), DV, padded(DV), queries, rows, launch.keys,
        documents.packed, documents.stretch, qd is not None, gate is not None), **launch.options,
    )  # fmt: skip
    return dk, dv

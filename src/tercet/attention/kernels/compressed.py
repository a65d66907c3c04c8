"""Compressed attention (Eq. 7, 8): forward, its log-sum-exp alone, and dK/dV. dQ: dq.py.

q: [B, T, H, Dk]   kc, vc: [B, Tc, G, Dk | Dv]   o: [B, T, H, Dv]   lse: fp32 [H, B, T]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.combine import row_shape
from tercet.attention.kernels.launch import LOG2E, call, descriptors, padded, power_of_2
from tercet.attention.kernels.table import Launch, gluon_launch, triton_launch
from tercet.attention.kernels.tiles import (
    Branch,
    dkv_step,
    finish,
    load_queries,
    load_rows,
    load_tile,
    lse_step,
    softmax_step,
    store_rows,
)
from tercet.attention.kernels.varlen import Documents, locate, locate_queries, queries_of_keys, visible

_PER_BATCH = ["docs", "length", "per_sequence", "first_query", "queries", "rows"]


@triton.jit(do_not_specialize=[*_PER_BATCH, "compressed_length"])
def compressed_forward_kernel(
    Q, K, V, QD, KD, VD, O, LSE, CU, CCU, docs, length, per_sequence, first_query, queries, rows, compressed_length,
    q_t, q_h, k_t, k_h, v_t, v_h, scale,
    L: tl.constexpr, S: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMAQ: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # the heads of a tile are neighbours, since they read the same keys; longest tiles first
    H: tl.constexpr = G * HEADS
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    g = head // HEADS
    doc, _, row0, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, M, PACKED, QUERY_RANGE
    )
    if first < size:
        if PACKED:
            c0 = tl.load(CCU + doc)
        else:
            c0 = doc * compressed_length
        position = first + tl.arange(0, M)
        q = load_tile(Q + head.to(tl.int64) * q_h, QD, row0 + first, size - first, head, q_t, DK, DKP, M, TMAQ, False)
        seen = visible(position, L, S)
        whole = visible(first, L, S) // N * N
        end = visible(tl.minimum(first + M, size) - 1, L, S)
        K += g.to(tl.int64) * k_h
        V += g.to(tl.int64) * v_h
        m = tl.full([M], -1e20, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        for i in tl.range(0, whole, N):
            k = load_tile(K, KD, c0 + i, N, g, k_t, DK, DKP, N, TMA, True)
            v = load_tile(V, VD, c0 + i, N, g, v_t, DV, DVP, N, TMA, True)
            m, l, acc = softmax_step(q, k, v, None, m, l, acc, scale, False)
        for i in tl.range(whole, end, N):
            k = load_tile(K, KD, c0 + i, end - i, g, k_t, DK, DKP, N, TMA, False, True)
            v = load_tile(V, VD, c0 + i, end - i, g, v_t, DV, DVP, N, TMA, False, True)
            mask = tl.arange(0, N)[None, :] < (seen - i)[:, None]
            m, l, acc = softmax_step(q, k, v, mask, m, l, acc, scale, True)
        finish(O, LSE, row0 + position, position < size, head, m, l, acc, rows, H, DV, DVP)


@triton.jit(do_not_specialize=[*_PER_BATCH, "compressed_length"])
def compressed_lse_kernel(
    Q, K, QD, KD, LSE, CU, CCU, docs, length, per_sequence, first_query, queries, rows, compressed_length,
    q_t, q_h, k_t, k_h, scale,
    L: tl.constexpr, S: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMAQ: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # as compressed_forward_kernel, without values; queries that select every block need no scores, hence no lse
    H: tl.constexpr = G * HEADS
    tile = tl.num_programs(0) // H - 1 - tl.program_id(0) // H
    head = tl.program_id(0) % H
    g = head // HEADS
    doc, _, row0, size, first = locate_queries(
        CU, docs, tile, length, per_sequence, first_query, queries, M, PACKED, QUERY_RANGE
    )
    last = tl.minimum(first + M, size) - 1
    if (first < size) & (last // BLOCK >= COUNT):
        if PACKED:
            c0 = tl.load(CCU + doc)
        else:
            c0 = doc * compressed_length
        position = first + tl.arange(0, M)
        q = load_tile(Q + head.to(tl.int64) * q_h, QD, row0 + first, size - first, head, q_t, DK, DKP, M, TMAQ, False)
        seen = visible(position, L, S)
        whole = visible(first, L, S) // N * N
        end = visible(last, L, S)
        K += g.to(tl.int64) * k_h
        m = tl.full([M], -1e20, tl.float32)
        l = tl.zeros([M], tl.float32)
        for i in tl.range(0, whole, N):
            k = load_tile(K, KD, c0 + i, N, g, k_t, DK, DKP, N, TMA, True)
            m, l = lse_step(q, k, None, m, l, scale, False)
        for i in tl.range(whole, end, N):
            k = load_tile(K, KD, c0 + i, end - i, g, k_t, DK, DKP, N, TMA, False, True)
            m, l = lse_step(q, k, tl.arange(0, N)[None, :] < (seen - i)[:, None], m, l, scale, True)
        some = l != 0  # true for NaN, which must not become 0
        at = LSE + head.to(tl.int64) * rows + row0 + position
        tl.store(at, tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("inf")), mask=position < size)


@triton.jit
def _query_step(
    Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, last, row0, t, end, head, rows, q_t, q_h, do_t, do_h, scale,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr,
    GATED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    q, do, lse, delta, gate = load_queries(
        Q, DO, LSE, DELTA, GATE, QD, DOD, row0 + t, end - t, head, rows, q_t, q_h, do_t, do_h,
        DK, DKP, DV, DVP, M, TMA, GATED, WHOLE)  # fmt: skip
    seen = tl.arange(0, M)[None, :] >= (last - t)[:, None]
    return dkv_step(q, do, k, v, seen, lse, gate, delta, dk, dv, scale, not WHOLE, GATED)


@triton.jit(do_not_specialize=[*_PER_BATCH, "token_length", "span"])
def compressed_dkv_kernel(
    Q, DO, K, V, LSE, DELTA, GATE, DKP_, DVP_, QD, DOD, CU, CCU, docs, length, per_sequence, first_query, queries, rows,
    token_length, span,
    q_t, q_h, k_t, k_h, v_t, v_h, do_t, do_h, scale, softmax_scale,
    L: tl.constexpr, S: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    # program (tile of compressed tokens, range of its document's queries, group); writes partial sums in fp32
    tile = tl.program_id(0)
    part = tl.program_id(1)
    g = tl.program_id(2)
    doc, c0, count, first = locate(CCU, docs, tile, length, per_sequence, N, PACKED)
    dk = tl.zeros([N, DKP], tl.float32)
    dv = tl.zeros([N, DVP], tl.float32)
    if PACKED:
        start = tl.load(CU + doc)
        size = tl.load(CU + doc + 1) - start
    else:
        start = doc * token_length
        size = token_length
    row0, origin, size = queries_of_keys(doc, start, size, first_query, queries, PACKED, QUERY_RANGE)
    last = (first + tl.arange(0, N)) * S + L - 1  # last token of each block: the first query that sees it
    # ranges and tiles of queries count from the first query in q
    begin = tl.maximum(part * span, tl.maximum(first * S + L - 1 - origin, 0) // M * M)
    end = tl.minimum(part * span + span, size - origin)
    if (first < count) & (begin < end):
        k = load_tile(K + g.to(tl.int64) * k_h, None, c0 + first, count - first, g, k_t, DK, DKP, N, False, False)
        v = load_tile(V + g.to(tl.int64) * v_h, None, c0 + first, count - first, g, v_t, DV, DVP, N, False, False)
        # query tiles from `middle` to `full` see every key of this tile
        all_seen = (tl.maximum((first + N - 1) * S + L - 1 - origin, 0) + M - 1) // M * M
        middle = tl.minimum(tl.maximum(all_seen, begin), end)
        full = tl.maximum(end // M * M, middle)
        before = (middle - begin + M - 1) // M
        partly = before + (end - full + M - 1) // M
        j = 0
        head = g * HEADS
        for _ in tl.range(0, partly * HEADS):
            t = origin + tl.where(j < before, begin + j * M, full)
            dk, dv = _query_step(
                Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, last, row0, t, size, head, rows, q_t, q_h, do_t, do_h,
                scale, DK, DKP, DV, DVP, M, TMA, GATED, False)  # fmt: skip
            j += 1
            head += (j == partly).to(tl.int32)
            j = tl.where(j == partly, 0, j)
        t = middle
        head = g * HEADS
        for _ in tl.range(0, (full - middle) // M * HEADS):
            dk, dv = _query_step(
                Q, DO, LSE, DELTA, GATE, QD, DOD, k, v, dk, dv, last, row0, origin + t, size, head, rows, q_t, q_h,
                do_t, do_h, scale, DK, DKP, DV, DVP, M, TMA, GATED, True)  # fmt: skip
            t += M
            head += (t == full).to(tl.int32)
            t = tl.where(t == full, middle, t)
    place = (part * tl.num_programs(0) + tile).to(tl.int64) * N + tl.arange(0, N)
    always = tl.full([N], True, tl.int1)
    store_rows(DKP_ + g * DK, place, G * DK, always, dk * softmax_scale, DK, DKP)
    store_rows(DVP_ + g * DV, place, G * DV, always, dv, DV, DVP)


@triton.jit(do_not_specialize=[*_PER_BATCH[:3], "parts"])
def compressed_dkv_sum_kernel(
    PK, PV, DK_, DV_, CCU, docs, length, per_sequence, parts,
    GK: tl.constexpr, GKP: tl.constexpr, GV: tl.constexpr, GVP: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    _, c0, count, first = locate(CCU, docs, tile, length, per_sequence, N, PACKED)
    i = tl.program_id(1) * R + tl.arange(0, R)
    inside = first + i < count
    dk = tl.zeros([R, GKP], tl.float32)
    dv = tl.zeros([R, GVP], tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=4):
        place = (part * tl.num_programs(0) + tile).to(tl.int64) * N + i
        dk += load_rows(PK, place, GK, inside, GK, GKP)
        dv += load_rows(PV, place, GV, inside, GV, GVP)
    store_rows(DK_, c0 + first + i, GK, inside, dk, GK, GKP)
    store_rows(DV_, c0 + first + i, GV, inside, dv, GV, GVP)


def forward(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, documents: Documents, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    B, T, H, DK = q.shape
    G, DV = v.shape[2:]
    if launch is None and (
        fast := gluon_launch("compressed_forward", q, k, v, packed=documents.packed, query_range=documents.query_range)
    ):
        from tercet.attention.kernels.hopper.forward import launch_forward

        return launch_forward(q, k, v, (0, config.compress_block, config.compress_stride), documents, fast)
    o = torch.empty(B, T, H, DV, dtype=q.dtype, device=q.device)
    lse = torch.empty(row_shape("compressed", B, T, H), dtype=torch.float32, device=q.device)
    launch = launch or triton_launch("compressed_forward", q, v)
    (qd,) = descriptors(launch.tma, launch.rows, q)
    kd, vd = descriptors(launch.tma, launch.keys, k, v)
    cu, *bounds = documents.query_tokens(launch.rows)
    call(
        compressed_forward_kernel, (documents.query_tiles(launch.rows) * H,),
        (q, k, v, qd, kd, vd, o, lse, cu, documents.ccu), (*bounds, B * T, documents.compressed_length),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), DK**-0.5 * LOG2E,
        config.compress_block, config.compress_stride, G, H // G, DK, padded(DK), DV, padded(DV),
        launch.rows, launch.keys, documents.packed, documents.query_range, qd is not None, kd is not None),
        **launch.options,
    )  # fmt: skip
    return o, lse


def log_sum_exp(q: Tensor, k: Tensor, config: NSAConfig, documents: Documents) -> Tensor:
    """lse as `forward` computes it, without values or output; undefined for queries that select every block."""
    B, T, H, DK = q.shape
    G = k.shape[2]
    lse = torch.empty(row_shape("compressed", B, T, H), dtype=torch.float32, device=q.device)
    if config.num_blocks(min(documents.first_query + documents.queries, documents.longest)) <= config.select_count:
        return lse
    launch = triton_launch("compressed_forward", q, k)
    (qd,), (kd,) = descriptors(launch.tma, launch.rows, q), descriptors(launch.tma, launch.keys, k)
    cu, *bounds = documents.query_tokens(launch.rows)
    call(
        compressed_lse_kernel, (documents.query_tiles(launch.rows) * H,),
        (q, k, qd, kd, lse, cu, documents.ccu), (*bounds, B * T, documents.compressed_length),
        (q.stride(1), q.stride(2), k.stride(1), k.stride(2), DK**-0.5 * LOG2E, config.compress_block,
        config.compress_stride, config.select_count, config.select_block, G, H // G, DK, padded(DK),
        launch.rows, launch.keys, documents.packed, documents.query_range, qd is not None, kd is not None),
        **launch.options,
    )  # fmt: skip
    return lse


def split_work(launch: Launch, queries: int, heads: int, programs: int, by_heads: bool) -> tuple[int, int]:
    """How many programs share a dK/dV tile, and how: (programs, head sets). They take head sets if there are several,
    else query ranges."""
    # enough programs to fill the device although the first tiles see all queries and the last ones almost none; no
    # more, since each writes its partial sums to memory
    most = -(-2048 // programs)
    # query ranges fit the longest document only; head sets divide documents of any length
    sets = max(n for n in range(1, min(8, most) + 1) if heads % n == 0) if by_heads else 1
    if sets > 1:
        return sets, sets
    return max(1, min(launch.parts, -(-queries * heads // (16 * launch.rows)), most)), 1


def dkv(
    q: Tensor, dout: Tensor, branch: Branch, config: NSAConfig, documents: Documents, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """(dk, dv): partial sums per query range or head set, then added up in a fixed order."""
    k, v, lse, delta, gate = branch
    B, T, H, DK = q.shape
    G, DV = v.shape[2:]
    fast = gluon_launch("compressed_key_gradients", q, dout, v, packed=documents.packed) if launch is None else None
    launch = fast or launch or triton_launch("compressed_key_gradients", q, v)
    M, N = launch.rows, launch.keys
    tiles = documents.compressed_tiles(N)
    if tiles == 0:
        return torch.zeros_like(k), torch.zeros_like(v)
    by_heads = fast is not None and documents.packed and documents.count >= 4
    queries = min(documents.queries, documents.longest)  # per document
    parts, sets = split_work(launch, queries, H // G, tiles * G, by_heads)
    span = queries if sets > 1 else -(-queries // (parts * M)) * M
    pk = torch.empty(parts * tiles * N, G, DK, dtype=torch.float32, device=q.device)
    pv = torch.empty(parts * tiles * N, G, DV, dtype=torch.float32, device=q.device)
    ccu, *bounds = documents.compressed(N)
    if fast:
        from tercet.attention.kernels.hopper.dkv import launch_dkv

        sizes = (0, config.compress_block, config.compress_stride)
        launch_dkv(q, dout, branch, pk, pv, (tiles, parts, G), bounds, span, sizes, documents, fast, sets)
    else:
        qd, dod = descriptors(launch.tma, launch.rows, q, dout)
        call(
            compressed_dkv_kernel, (tiles, parts, G),
            (q, dout, k, v, lse, delta, gate, pk, pv, qd, dod, documents.cu, ccu),
            (*bounds, documents.first_query, documents.queries, B * T, documents.length, span),
            (q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2), dout.stride(1),
            dout.stride(2), DK**-0.5 * LOG2E, DK**-0.5,
            config.compress_block, config.compress_stride, G, H // G, DK, padded(DK), DV, padded(DV), M, N,
            documents.packed, documents.query_range, qd is not None, gate is not None),
            **launch.options,
        )  # fmt: skip
    # packed: padding after the last document's compressed tokens belongs to no tile
    fresh = torch.zeros if documents.packed else torch.empty
    dk = fresh(k.shape, dtype=k.dtype, device=k.device)
    dv = fresh(v.shape, dtype=v.dtype, device=v.device)
    # few numbers per program, so that many programs wait for memory at once
    R = min(N, max(1, 1024 // power_of_2(G * max(DK, DV))))
    call(
        compressed_dkv_sum_kernel, (tiles, N // R), (pk, pv, dk, dv, ccu), (*bounds, parts),
        (G * DK, power_of_2(G * DK), G * DV, power_of_2(G * DV), N, R, documents.packed),
        num_warps=4,
    )  # fmt: skip
    return dk, dv

"""Rows of tiles in registers, shared by the kernels: which query and head a row is, and how its vector is loaded.

A query tile holds QT queries times the h heads of one group, row r = (query r // h, head r % h): every row of the
tile reads the same keys. Rows past QT·h are idle. Vectors of D numbers lie in tiles of DP, the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_rows(start, size, first, kv_head, HEADS: tl.constexpr, QT: tl.constexpr, M: tl.constexpr):
    """(position in the document, flat token, query head, inside) of each of the M rows of a query tile."""
    r = tl.arange(0, M)
    position = first + r // HEADS
    inside = (r < QT * HEADS) & (position < size)
    return position, start + position, kv_head * HEADS + r % HEADS, inside


@triton.jit
def load_rows(X, row, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """[rows, DP] of X, which already points at the head; zeros outside."""
    d = tl.arange(0, DP)
    if D == DP:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (d < D)[None, :]
    return tl.load(X + row.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(
    X, XD, row, count, kv_head, stride,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """N consecutive rows of X (pointing at the head) from flat row `row` on, of which `count` are wanted.

    Plain loads give zeros for the others, unless WHOLE promises that there are none. The copy engine gives whatever
    stands there, zeros past the end: right where that is finite, for their weight is 0. After the last document's
    compressed tokens padding may hold anything, so the partly seen tiles of a packed batch are loaded plainly."""
    if TMA:
        return XD.load([row, kv_head * D])
    d = tl.arange(0, DP)
    i = tl.arange(0, N)
    pointers = X + (row + i).to(tl.int64)[:, None] * stride + d[None, :]
    if WHOLE and D == DP:
        return tl.load(pointers)
    if D == DP:
        return tl.load(pointers, mask=(i < count)[:, None], other=0.0)
    return tl.load(pointers, mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(X, row, stride, inside, value, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    if D == DP:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (d < D)[None, :]
    tl.store(X + row.to(tl.int64)[:, None] * stride + d[None, :], value.to(X.dtype.element_ty), mask=mask)


@triton.jit
def attend(q, k, v, seen, m, l, acc, scale, MASK: tl.constexpr):
    """One step of the online softmax in powers of two; `seen` says which keys a row sees, where MASK."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASK:
        s = tl.where(seen, s, -1e30)
    top = tl.maximum(m, tl.max(s, 1) * scale)
    fade = tl.exp2(m - top)
    p = tl.exp2(s * scale - top[:, None])
    l = l * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return top, l, acc


@triton.jit
def finish(O, LSE, token, head, inside, m, l, acc, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr):
    """Writes o and lse (log2) of a query tile; a row that saw no key gets exactly 0 and +inf."""
    row = token.to(tl.int64) * H + head
    some = l > 0
    share = tl.where(some, l, 1.0)
    store_rows(O, row, DV, inside, acc / share[:, None], DV, DVP)
    tl.store(LSE + row, tl.where(some, m + tl.log2(share), float("inf")), mask=inside)


@triton.jit
def query_gradient(q, do, k, v, seen, lse, gate, gated_sum, acc, scale, MASK: tl.constexpr):
    """acc += ds k, with ds = p (g do·v - g rowsum): the gate costs one fused multiply-add."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    p = tl.exp2(s * scale - lse[:, None])
    ds = p * (dp * gate[:, None] - gated_sum[:, None])
    if MASK:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def key_gradient(q, do, k, v, seen, lse, gate, row_sum, dk, dv, scale, MASK: tl.constexpr, GATED: tl.constexpr):
    """dk, dv of a key tile from one query tile, keys down the rows: Sᵀ feeds both products without a transpose."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # before the exponentials, which then run beside it
    p = tl.exp2(s * scale - lse[None, :])
    if GATED:
        p *= gate[None, :]
    if MASK:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - row_sum[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def load_queries(
    Q, DO, LSE, SUM, GATE, QD, DOD, start, size, first, g, q_t, q_h, do_t, do_h,
    HEADS: tl.constexpr, H: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    QT: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """All that a backward pass reads of a query tile; idle rows get lse = +inf, hence p = 0.

    Offsets within the tile do not change along a loop over tiles, and are 32-bit: the compiler hoists them."""
    r = tl.arange(0, M)
    query = r // HEADS
    head = r % HEADS
    inside = (r < QT * HEADS) & (query < size - first)
    token = (start + first).to(tl.int64)
    if TMA:
        # rows past the document are another's, and finite: their p is 0
        q = QD.load([start + first, g * HEADS, 0]).reshape(M, DK)
        do = DOD.load([start + first, g * HEADS, 0]).reshape(M, DV)
    else:
        at = token * q_t + (g * HEADS).to(tl.int64) * q_h
        q = _load_tile(Q + at, query * q_t + head * q_h, inside, DK, DKP)
        at = token * do_t + (g * HEADS).to(tl.int64) * do_h
        do = _load_tile(DO + at, query * do_t + head * do_h, inside, DV, DVP)
    at = token * H + g * HEADS
    row = query * H + head
    lse = tl.load(LSE + at + row, mask=inside, other=float("inf"))
    row_sum = tl.load(SUM + at + row, mask=inside, other=0.0)
    if GATED:
        # fp32 like the others: a two-byte load would not be pipelined
        gate = tl.load(GATE + at + row, mask=inside, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return first + query, q, do, lse, row_sum, gate


@triton.jit
def _load_tile(X, offset, inside, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    if D == DP:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (d < D)[None, :]
    return tl.load(X + (offset[:, None] + d[None, :]), mask=mask, other=0.0)

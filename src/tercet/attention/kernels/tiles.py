"""Tiles in registers, shared by the kernels of the compressed and the window branch.

A query tile holds M consecutive queries of one head, a key tile N consecutive keys of that head's group: all rows of a
tile are used whatever the number of heads, and the copy engine can load either. Vectors of D numbers lie in tiles of
DP, the next power of two. Values of a row (lse, row sums, gates) lie head by head: fp32 [H, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    X, XD, row, count, head, stride,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr,
    CLEAN: tl.constexpr = False,
):  # fmt: skip
    """N consecutive rows of X (pointing at the head) from flat row `row` on, of which `count` are wanted.

    Plain loads give zeros for the others, unless WHOLE promises that there are none. The copy engine gives whatever
    stands there, zeros past the end: right where that is finite, for their weight is 0. After the last document's
    compressed tokens padding may hold anything: CLEAN puts zeros there."""
    i = tl.arange(0, N)
    if TMA:
        x = XD.load([row, head * D])
        if CLEAN:
            x = tl.where((i < count)[:, None], x, 0.0)
        return x
    d = tl.arange(0, DP)
    pointers = X + row.to(tl.int64) * stride + (i[:, None] * stride + d[None, :])
    if WHOLE and D == DP:
        return tl.load(pointers)
    if D == DP:
        return tl.load(pointers, mask=(i < count)[:, None], other=0.0)
    return tl.load(pointers, mask=(i < count)[:, None] & (d < D)[None, :], other=0.0)


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
def finish(O, LSE, row, inside, head, m, l, acc, rows, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr):
    """Writes o and lse (log2) of a query tile; a row that saw no key gets exactly 0 and +inf."""
    some = l > 0
    share = tl.where(some, l, 1.0)
    store_rows(O + head * DV, row, H * DV, inside, acc / share[:, None], DV, DVP)
    at = LSE + head.to(tl.int64) * rows + row
    tl.store(at, tl.where(some, m + tl.log2(share), float("inf")), mask=inside)


@triton.jit
def in_window(position, i, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BEGIN: tl.constexpr):
    """Which of the keys i … i+N-1 are in the windows of M queries: a place in the tile against a limit of each row, for
    that costs one instruction. Windows that hold both tiles are cut at one end only, at their begin or at their end."""
    n = tl.arange(0, N)[None, :]
    last = (position - i)[:, None]
    if W < M + N:
        return (n <= last) & (n > last - W)
    if BEGIN:
        return n > last - W
    return n <= last


@triton.jit
def query_gradient(q, do, k, v, seen, lse, gate, gated_sum, acc, scale, MASK: tl.constexpr):
    """acc += ds k, with ds = p (g do·v - g rowsum): the gate costs one fused multiply-add."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    if MASK:
        s = tl.where(seen, s, -1e30)
    p = tl.exp2(s * scale - lse[:, None])
    ds = p * (dp * gate[:, None] - gated_sum[:, None])
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
    Q, DO, LSE, SUM, GATE, QD, DOD, row, count, head, rows, q_t, q_h, do_t, do_h,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr,
    GATED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """All that a backward pass reads of a query tile from flat row `row` on, of which `count` are wanted; the others
    get lse = +inf, hence p = 0. WHOLE promises that there are none."""
    wide = head.to(tl.int64)
    q = load_tile(Q + wide * q_h, QD, row, count, head, q_t, DK, DKP, M, TMA, WHOLE)
    do = load_tile(DO + wide * do_h, DOD, row, count, head, do_t, DV, DVP, M, TMA, WHOLE)
    i = tl.arange(0, M)
    at = wide * rows + row
    if WHOLE:
        lse = tl.load(LSE + at + i)
        row_sum = tl.load(SUM + at + i)
    else:
        lse = tl.load(LSE + at + i, mask=i < count, other=float("inf"))
        row_sum = tl.load(SUM + at + i, mask=i < count, other=0.0)
    # fp32 like the others: a two-byte load would not be pipelined
    if GATED and WHOLE:
        gate = tl.load(GATE + at + i)
    elif GATED:
        gate = tl.load(GATE + at + i, mask=i < count, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return q, do, lse, row_sum, gate

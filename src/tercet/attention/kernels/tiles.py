"""Tiles in registers, shared by the kernels of the compressed and the window branch.

A query tile holds M consecutive queries of one head; a key tile holds N consecutive keys of that head's group. So every
row of a tile is used for any number of heads, and TMA can load either. Vectors of D elements are padded to DP, the
next power of two. Values per (query, head) row (log-sum-exp, delta, gate) are fp32 [H, B·T].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Branch(NamedTuple):
    """What the backward reads of the compressed or the window branch. do = gate · dout."""

    k: Tensor
    v: Tensor
    lse: Tensor  # fp32 [H, B, T]
    delta: Tensor  # fp32 [H, B, T]: dout · o
    gate: Tensor | None  # fp32 [H, B, T]


@triton.jit
def load_tile(
    X, XD, row, count, head, stride,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr, WHOLE: tl.constexpr,
    CLEAN: tl.constexpr = False,
):  # fmt: skip
    """Rows `row` to `row + N - 1` of X, which points at the head; only the first `count` are needed.

    Plain loads return zeros for the others; WHOLE says that there are none. TMA returns whatever is in memory (zeros
    past the end of the tensor): padding, or rows of another document. Their weight is 0, which is fine if they are
    finite; CLEAN zeroes them, at some cost, as the forward kernels do with values (and hopper/forward.py does). The
    backward kernels clean only padding: a NaN in one document may reach the gradients of its neighbours in these two
    branches, but the optimizer skips a step with any NaN."""
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
    """[rows, DP] of X, which points at the head; zeros outside."""
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
def softmax_step(q, k, v, seen, m, l, acc, scale, MASK: tl.constexpr):
    """One step of the online softmax, in base 2. With MASK, `seen` says which keys a row sees."""
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
def lse_step(q, k, seen, m, l, scale, MASK: tl.constexpr):
    """softmax_step without values: the largest score and the sum of exponentials."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASK:
        s = tl.where(seen, s, -1e30)
    top = tl.maximum(m, tl.max(s, 1) * scale)
    return top, l * tl.exp2(m - top) + tl.sum(tl.exp2(s * scale - top[:, None]), 1)


@triton.jit
def finish(O, LSE, row, inside, head, m, l, acc, rows, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr):
    """Write o and the log-sum-exp of a query tile. A row that saw no key gets exactly 0 and +inf."""
    some = l != 0  # true for NaN, which must not become 0
    share = tl.where(some, l, 1.0)
    store_rows(O + head * DV, row, H * DV, inside, acc / share[:, None], DV, DVP)
    at = LSE + head.to(tl.int64) * rows + row
    tl.store(at, tl.where(some, m + tl.log2(share), float("inf")), mask=inside)


@triton.jit
def in_window(position, i, W: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BEGIN: tl.constexpr):
    """Which of keys i … i+N-1 are in the windows of M queries.

    Compares the column with a limit per row, which takes one instruction. A window longer than both tiles is cut at one
    end only: at its start (BEGIN) or at its end."""
    n = tl.arange(0, N)[None, :]
    last = (position - i)[:, None]
    if W < M + N:
        return (n <= last) & (n > last - W)
    if BEGIN:
        return n > last - W
    return n <= last


@triton.jit
def dq_step(q, do, k, v, seen, lse, gate, gated_delta, acc, scale, MASK: tl.constexpr):
    """acc += ds k, with ds = p (gate · dout·v - gate · delta): the gate costs one fused multiply-add."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    if MASK:
        s = tl.where(seen, s, -1e30)
    p = tl.exp2(s * scale - lse[:, None])
    ds = p * (dp * gate[:, None] - gated_delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def dkv_step(q, do, k, v, seen, lse, gate, delta, dk, dv, scale, MASK: tl.constexpr, GATED: tl.constexpr):
    """Add one query tile to dk and dv of a key tile. Computes Sᵀ, which feeds both products without a transpose."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # before the exponentials, to overlap with them
    p = tl.exp2(s * scale - lse[None, :])
    if GATED:
        p *= gate[None, :]
    if MASK:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def load_queries(
    Q, DO, LSE, DELTA, GATE, QD, DOD, row, count, head, rows, q_t, q_h, do_t, do_h,
    DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr,
    GATED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(q, dout, lse, delta, gate) of the query tile at row `row`; only the first `count` queries are needed. The others
    get lse = +inf, hence p = 0. WHOLE says that there are none."""
    wide = head.to(tl.int64)
    q = load_tile(Q + wide * q_h, QD, row, count, head, q_t, DK, DKP, M, TMA, WHOLE)
    do = load_tile(DO + wide * do_h, DOD, row, count, head, do_t, DV, DVP, M, TMA, WHOLE)
    i = tl.arange(0, M)
    at = wide * rows + row
    if WHOLE:
        lse = tl.load(LSE + at + i)
        delta = tl.load(DELTA + at + i)
    else:
        lse = tl.load(LSE + at + i, mask=i < count, other=float("inf"))
        delta = tl.load(DELTA + at + i, mask=i < count, other=0.0)
    # fp32 like the others: Triton does not pipeline two-byte loads
    if GATED and WHOLE:
        gate = tl.load(GATE + at + i)
    elif GATED:
        gate = tl.load(GATE + at + i, mask=i < count, other=0.0)
    else:
        gate = tl.full([M], 1.0, tl.float32)
    return q, do, lse, delta, gate

"""Gated sum of the branches (Eq. 5) and, in the backward, delta and the gradients of the gates.

delta = dout · o of a branch: what every branch's backward subtracts, and also the gradient of its gate.

o, out, dout: [B, T, H, Dv]   gates: [B, T, H, 3]   deltas and gates for the backward kernels: fp32 [3, B·T·H], one
plane per branch. The row layout of each plane is the branch's own: `row_shape`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.launch import call, power_of_2


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    SOME, O0, O1, O2, GATES, OUT, rows, gate_t, gate_h, gate_c,
    HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr, GATED: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, DP)
    inside = row < rows
    at = row[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    if GATED:
        gates = GATES + row // H * gate_t + row % H * gate_h
    out = tl.zeros([R, DP], tl.float32)
    if HAS0:
        o = tl.load(O0 + at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            o *= tl.load(gates, mask=inside, other=0.0).to(tl.float32)[:, None]
        out += o
    if HAS1:
        o = tl.load(O1 + at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            o *= tl.load(gates + gate_c, mask=inside, other=0.0).to(tl.float32)[:, None]
        out += o
    if HAS2:
        o = tl.load(O2 + at, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            o *= tl.load(gates + 2 * gate_c, mask=inside, other=0.0).to(tl.float32)[:, None]
        out += o
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def delta_kernel(
    DOUT, O0, O1, O2, GATES, DELTAS, PLANES, DGATES, MIXED, tokens, do_t, do_h, gate_t, gate_h, gate_c,
    HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr, GATED: tl.constexpr, MIX: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    # R tokens of one head
    token = (tl.program_id(0) // H).to(tl.int64) * R + tl.arange(0, R)
    head = (tl.program_id(0) % H).to(tl.int64)
    d = tl.arange(0, DP)
    inside = token < tokens
    row = token * H + head
    plane = tokens.to(tl.int64) * H
    by_head = head * tokens + token
    at = row[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    do = tl.load(DOUT + (token * do_t + head * do_h)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    none = tl.zeros([R, DP], tl.float32)
    o0 = tl.load(O0 + at, mask=mask, other=0.0).to(tl.float32) if HAS0 else none
    o1 = tl.load(O1 + at, mask=mask, other=0.0).to(tl.float32) if HAS1 else none
    o2 = tl.load(O2 + at, mask=mask, other=0.0).to(tl.float32) if HAS2 else none
    s0, s1, s2 = tl.sum(do * o0, 1), tl.sum(do * o1, 1), tl.sum(do * o2, 1)
    tl.store(DELTAS + by_head, s0, mask=inside)
    tl.store(DELTAS + plane + row, s1, mask=inside)
    tl.store(DELTAS + 2 * plane + by_head, s2, mask=inside)
    if GATED:
        gates = GATES + token * gate_t + head * gate_h
        g0 = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        g1 = tl.load(gates + gate_c, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(gates + 2 * gate_c, mask=inside, other=0.0).to(tl.float32)
        tl.store(PLANES + by_head, g0, mask=inside)
        tl.store(PLANES + plane + row, g1, mask=inside)
        tl.store(PLANES + 2 * plane + by_head, g2, mask=inside)
        if MIX:  # same order of additions as in combine_kernel
            mixed = o0 * g0[:, None] + o1 * g1[:, None] + o2 * g2[:, None]
            tl.store(MIXED + at, mixed.to(MIXED.dtype.element_ty), mask=mask)
        tl.store(DGATES + row * 3, s0.to(DGATES.dtype.element_ty), mask=inside)
        tl.store(DGATES + row * 3 + 1, s1.to(DGATES.dtype.element_ty), mask=inside)
        tl.store(DGATES + row * 3 + 2, s2.to(DGATES.dtype.element_ty), mask=inside)


_ROWS = 16


def combine(outputs: list[Tensor | None], gates: Tensor | None) -> Tensor:
    """Σ g_c o_c over the branches; None for a branch that did not run."""
    some = next(o for o in outputs if o is not None)
    out = torch.empty_like(some)
    B, T, H, D = some.shape
    rows = B * T * H
    strides = (0, 0, 0) if gates is None else gates.stride()[1:]
    call(
        combine_kernel, (-(-rows // _ROWS),), (some, *outputs, gates, out), (rows,),
        (*strides, *(o is not None for o in outputs), gates is not None, H, D, power_of_2(D), _ROWS),
        num_warps=4,
    )  # fmt: skip
    return out


class Deltas(NamedTuple):
    deltas: Tensor  # fp32 [3, B·T·H]; 0 for a branch that did not run
    gates: Tensor | None  # fp32 [3, B·T·H]
    dgates: Tensor | None  # like gates
    out: Tensor | None  # the gated sum, recomputed


def deltas(outputs: list[Tensor | None], dout: Tensor, gates: Tensor | None, *, mix: bool = False) -> Deltas:
    """`mix`: recompute the gated sum as well. Use `by_branch` on the deltas and the gates."""
    B, T, H, D = dout.shape
    found = torch.empty(3, B * T * H, dtype=torch.float32, device=dout.device)
    planes = dgates = mixed = None
    strides = (0, 0, 0)
    if gates is not None:
        planes, strides = torch.empty_like(found), gates.stride()[1:]
        dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
        mixed = torch.empty((B, T, H, D), dtype=dout.dtype, device=dout.device) if mix else None
    call(
        delta_kernel, (-(-(B * T) // _ROWS) * H,), (dout, *outputs, gates, found, planes, dgates, mixed), (B * T,),
        (dout.stride(1), dout.stride(2), *strides, *(o is not None for o in outputs), gates is not None,
         mixed is not None, H, D, power_of_2(D), _ROWS),
        num_warps=4,
    )  # fmt: skip
    return Deltas(found, planes, dgates, mixed)


def row_shape(branch: str, B: int, T: int, H: int) -> tuple[int, int, int]:
    """Shape of a branch's values per (query, head): log-sum-exp, delta, gate.

    The only place where the layouts differ. A tile of the compressed or window kernels holds consecutive queries of one
    head; a row tile of the selected kernels holds all heads of a group for each query.
    """
    return (B, T, H) if branch == "selected" else (H, B, T)


def by_branch(planes: Tensor | None, shape: torch.Size) -> list[Tensor] | list[None]:
    """Deltas or gates of the compressed, selected and window branch. shape: of dout."""
    if planes is None:
        return [None] * 3
    return [
        x.view(row_shape(branch, *shape[:3]))
        for x, branch in zip(planes.unbind(0), ("compressed", "selected", "window"), strict=True)
    ]

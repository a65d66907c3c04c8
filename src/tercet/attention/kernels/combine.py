"""The gated sum of the branches (Eq. 5), and in one pass backwards the gates' gradients, which are also the row sums
dout·o_c that every branch's backward needs.

o_c: [B, T, H, Dv], contiguous   gates: [B, T, H, 3]   row sums and gates for the backward kernels: fp32, a plane for
each branch, [H, B, T] for the compressed and the window branch, [B, T, H] for the selected
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.launching import call
from tercet.attention.kernels.settings import power_of_2


@triton.jit(do_not_specialize=["rows"])
def _combine(
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
def _row_sums(
    DOUT, O0, O1, O2, GATES, SUMS, PLANES, DGATES, MIXED, tokens, do_t, do_h, gate_t, gate_h, gate_c,
    HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr, GATED: tl.constexpr, MIX: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    # R tokens of one head
    token = (tl.program_id(0) // H).to(tl.int64) * R + tl.arange(0, R)
    head = tl.program_id(0) % H
    d = tl.arange(0, DP)
    inside = token < tokens
    row = token * H + head
    plane = tokens.to(tl.int64) * H
    by_head = head.to(tl.int64) * tokens + token
    at = row[:, None] * D + d[None, :]
    mask = inside[:, None] & (d < D)[None, :]
    do = tl.load(DOUT + (token * do_t + head * do_h)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    none = tl.zeros([R, DP], tl.float32)
    o0 = tl.load(O0 + at, mask=mask, other=0.0).to(tl.float32) if HAS0 else none
    o1 = tl.load(O1 + at, mask=mask, other=0.0).to(tl.float32) if HAS1 else none
    o2 = tl.load(O2 + at, mask=mask, other=0.0).to(tl.float32) if HAS2 else none
    s0, s1, s2 = tl.sum(do * o0, 1), tl.sum(do * o1, 1), tl.sum(do * o2, 1)
    tl.store(SUMS + by_head, s0, mask=inside)
    tl.store(SUMS + plane + row, s1, mask=inside)
    tl.store(SUMS + 2 * plane + by_head, s2, mask=inside)
    if GATED:
        gates = GATES + token * gate_t + head * gate_h
        g0 = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
        g1 = tl.load(gates + gate_c, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(gates + 2 * gate_c, mask=inside, other=0.0).to(tl.float32)
        tl.store(PLANES + by_head, g0, mask=inside)
        tl.store(PLANES + plane + row, g1, mask=inside)
        tl.store(PLANES + 2 * plane + by_head, g2, mask=inside)
        if MIX:  # in the order of _combine
            mixed = o0 * g0[:, None] + o1 * g1[:, None] + o2 * g2[:, None]
            tl.store(MIXED + at, mixed.to(MIXED.dtype.element_ty), mask=mask)
        tl.store(DGATES + row * 3, s0.to(DGATES.dtype.element_ty), mask=inside)
        tl.store(DGATES + row * 3 + 1, s1.to(DGATES.dtype.element_ty), mask=inside)
        tl.store(DGATES + row * 3 + 2, s2.to(DGATES.dtype.element_ty), mask=inside)


_ROWS = 32


def combine(outputs: list[Tensor | None], gates: Tensor | None) -> Tensor:
    """Σ g_c o_c over the branches that are there; None among the outputs is a branch left out."""
    some = next(o for o in outputs if o is not None)
    out = torch.empty_like(some)
    B, T, H, D = some.shape
    rows = B * T * H
    strides = (0, 0, 0) if gates is None else gates.stride()[1:]
    call(
        _combine, (-(-rows // _ROWS),), (some, *outputs, gates, out), (rows,),
        (*strides, *(o is not None for o in outputs), gates is not None, H, D, power_of_2(D), _ROWS),
        num_warps=4,
    )  # fmt: skip
    return out


def row_sums(
    outputs: list[Tensor | None], dout: Tensor, gates: Tensor | None, *, mix: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(dout·o_c of each branch, gates of each, dgates, with `mix` the gated sum); the sums of branches left out are 0.

    Backward kernels read gates along with the row sums, so they get them in the same form: `by_branch` of both."""
    B, T, H, D = dout.shape
    sums = torch.empty(3, B * T * H, dtype=torch.float32, device=dout.device)
    planes = dgates = mixed = None
    strides = (0, 0, 0)
    if gates is not None:
        planes, strides = torch.empty_like(sums), gates.stride()[1:]
        dgates = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
        mixed = torch.empty((B, T, H, D), dtype=dout.dtype, device=dout.device) if mix else None
    call(
        _row_sums, (-(-(B * T) // _ROWS) * H,), (dout, *outputs, gates, sums, planes, dgates, mixed), (B * T,),
        (dout.stride(1), dout.stride(2), *strides, *(o is not None for o in outputs), gates is not None,
         mixed is not None, H, D, power_of_2(D), _ROWS),
        num_warps=4,
    )  # fmt: skip
    return sums, planes, dgates, mixed


def by_branch(planes: Tensor | None, shape: torch.Size) -> list[Tensor] | list[None]:
    """Row sums or gates of the compressed, the selected and the window branch. shape: dout's."""
    if planes is None:
        return [None] * 3
    B, T, H, _ = shape
    compressed, selected, window = planes.unbind(0)
    return [compressed.view(H, B, T), selected.view(B, T, H), window.view(H, B, T)]

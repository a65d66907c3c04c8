"""Gradient of SwiGLU's activation as one Triton kernel. y: [..., 2F], gate and up; h: [..., F] = silu(gate) · up

torch.compile writes both halves of y's gradient with one kernel that computes both for every element and discards one:
58% of memory bandwidth. Its forward kernel is bandwidth-bound, so the forward pass stays with the compiler.

Imported only where Triton can be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.attention.kernels.launch import call

_BLOCK = 1024


@triton.jit(do_not_specialize=["blocks"])
def _gradient(Y, DH, DY, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at = row * 2 * SIZE + column
    gate = tl.load(Y + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Y + at + SIZE, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(DH + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    dgate = dh * up * share * (1 + gate * (1 - share))
    tl.store(DY + at, dgate.to(DY.dtype.element_ty), mask=inside)
    tl.store(DY + at + SIZE, (dh * gate * share).to(DY.dtype.element_ty), mask=inside)


@torch.library.custom_op("tercet::swiglu_gradient", mutates_args=())
def swiglu_gradient(y: Tensor, dh: Tensor) -> Tensor:
    y, dh = y.contiguous(), dh.contiguous()
    dy, size = torch.empty_like(y), dh.shape[-1]
    blocks = -(-size // _BLOCK)
    call(_gradient, (dh.numel() // size * blocks,), (y, dh, dy), (blocks,), (size, _BLOCK), num_warps=4)
    return dy


@swiglu_gradient.register_fake
def _(y: Tensor, dh: Tensor) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


class SiluMul(torch.autograd.Function):
    """silu(gate) · up, with the gradient from the kernel."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        dy: Tensor = torch.ops.tercet.swiglu_gradient(y, upstream[0])
        return dy

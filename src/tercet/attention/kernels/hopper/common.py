"""Shared by the Gluon kernels: descriptors, barriers and document lookup.

Two rules of ptxas shape the kernels. Where one is broken, ptxas serialises every product (it prints a warning, which a
test looks for):

- Registers that feed a product, or hold its accumulator, are written only while no product runs.
- What is in flight at the end of a loop body is an accumulator that the next iteration adds to.

Operands that stay the same throughout a loop live in shared memory: ptxas 12.8 overwrote a left operand that stayed in
registers with another product's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tercet.attention.kernels import varlen
from tercet.attention.kernels.launch import power_of_2

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # all warps of a program; it was renamed
locate = gluon.jit(varlen.locate.fn)
queries_of_keys = gluon.jit(varlen.queries_of_keys.fn)
visible = gluon.jit(varlen.visible.fn)


@gluon.jit
def entries_of(ORDER, x, start, last, h: gl.constexpr):
    """The entries of a piece's rows x. Rows past the end repeat the last one."""
    return gl.load(ORDER + gl.minimum(start + x // h, last)).to(gl.int32)


@gluon.jit
def copy_rows(to, pointers, d, SIZE: gl.constexpr, D: gl.constexpr):
    """Start copying rows of SIZE numbers to a tile of D columns d; the others become 0."""
    if SIZE == D:
        async_copy.async_copy_global_to_shared(to, pointers)
    else:
        async_copy.async_copy_global_to_shared(to, pointers, mask=(d < SIZE)[None, :])


@gluon.jit
def real_columns(rows, d, SIZE: gl.constexpr, D: gl.constexpr):
    """Mask of a tile's rows, and of those of its D columns d that exist."""
    mask = rows[:, None]
    if SIZE < D:
        mask = mask & (d < SIZE)[None, :]
    return mask


@gluon.constexpr_function
def stored_rows():
    """Layout of a [64, 64] tile for stores. Each thread has the two rows that a product leaves it, so that warps need
    not wait for each other, but eight adjacent numbers at a time."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 64],
    )  # fmt: skip


@gluon.jit
def fast_log2(x):
    """Off by less than 2^-21; one instruction instead of thirty."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def fast_reciprocal(x):
    """Off by one unit in the last place, for x from 2^-126 to 2^126."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tile_of(slots, slot):
    """The tile that TMA writes to slots.index(slot), [1, rows, D], as an operand of products."""
    rows: gl.constexpr = slots.shape[2]
    D: gl.constexpr = slots.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, D], slots.dtype)
    return slots.index(slot)._reinterpret(slots.dtype, [rows, D], layout)


def descriptor(x: Tensor, rows: int) -> Any:
    """Descriptor of tiles of `rows` rows of one head, out of [heads, B·T, size], with zeros up to a power of two of
    columns. x must be describable (tma.py)."""
    batch, tokens, heads, size = x.shape
    made = TensorDescriptor.__new__(TensorDescriptor)  # bypasses slow checks, as in tma.py
    made.base, made.shape, made.strides = x, [heads, batch * tokens, size], [size, x.stride(1), 1]
    made.block_shape = [1, rows, power_of_2(size)]
    made.layout, made.padding = _layout(*made.block_shape, x.dtype), "zero"
    return made


@lru_cache(maxsize=64)
def _layout(heads: int, rows: int, size: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(
        [heads, rows, size], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    )

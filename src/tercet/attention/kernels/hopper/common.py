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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tercet.attention.kernels import varlen

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # all warps of a program; it was renamed
locate = gluon.jit(varlen.locate.fn)
queries_of_keys = gluon.jit(varlen.queries_of_keys.fn)
visible = gluon.jit(varlen.visible.fn)


def descriptor(x: Tensor, rows: int) -> Any:
    """Descriptor of tiles of `rows` rows of one head, out of [B·T, heads·D]. x must be describable (tma.py)."""
    batch, tokens, heads, size = x.shape
    made = TensorDescriptor.__new__(TensorDescriptor)  # bypasses slow checks, as in tma.py
    made.base, made.shape, made.strides = x, [batch * tokens, heads * size], [x.stride(1), 1]
    made.block_shape, made.layout, made.padding = [rows, size], _layout(rows, size, x.dtype), "zero"
    return made


@lru_cache(maxsize=64)
def _layout(rows: int, size: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, size], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)

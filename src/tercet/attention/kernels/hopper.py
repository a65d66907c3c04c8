"""What the Gluon kernels for Hopper share.

Triton waits for a product before anything uses it, and fetches tiles anew for each of a kernel's loops. In Gluon the
order is ours: products run on while the warps do exponentials, and one walk over all tiles fetches ahead throughout.
Two rules of the assembler shape the kernels; where they are broken, it makes every product wait (ptxas -v says so, and
a test reads it): registers that feed a product, or hold its sum, are written only while none runs; and what is in
flight at the end of a loop's body is a sum that the next round adds to. What stays throughout a loop is in shared
memory: the assembler (12.8) overwrote a left side that stayed in registers with another product's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # an older Triton: the kernels in Triton itself do all of it
    gluon = None

from tercet.attention.kernels import settings as launches
from tercet.attention.kernels.copy_engine import describable
from tercet.attention.kernels.settings import Launch

if gluon is not None:
    meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # all warps of a program; it changed its name

# (kernel, head size) -> Launch, for compute capability 9 and heads whose keys and values are alike
OVERLAPPED: dict[tuple[str, int], Launch] = {
    ("compressed_forward", 64): Launch(),
    ("compressed_forward", 128): Launch(),
    ("window_forward", 64): Launch(),
    ("window_forward", 128): Launch(),
    ("query_gradient", 128): Launch(),  # of plain batches; at 64 Triton is as fast at 2k and 8k, and faster at 64k
    ("compressed_key_gradients", 64): Launch(stages=3, parts=48),
    ("compressed_key_gradients", 128): Launch(rows=32, stages=3),
    ("window_key_gradients", 64): Launch(stages=3),
    ("window_key_gradients", 128): Launch(rows=32, stages=3),
    ("selected_key_gradients", 64): Launch(stages=4, registers=128),  # the mean of those that gather and multiply
}


def overlapped(kernel: str, *tensors: Tensor) -> Launch | None:
    """Launch parameters where the Gluon kernel takes the call; `tensors` are all whose tiles it loads, v last."""
    q = tensors[0]
    if gluon is None or launches.generation(q) != 9 or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if any(x.shape[-1] != q.shape[-1] or not describable(x) for x in tensors):
        return None
    return OVERLAPPED.get((kernel, q.shape[-1]))


def descriptor(x: Tensor, rows: int) -> Any:
    """Tiles of `rows` rows of one head, out of [flat rows, heads·D]; the caller knows that x is describable."""
    batch, tokens, heads, size = x.shape
    # made without its own checks, as in copy_engine
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, [batch * tokens, heads * size], [x.stride(1), 1]
    made.block_shape, made.layout, made.padding = [rows, size], _layout(rows, size, x.dtype), "zero"
    return made


@lru_cache(maxsize=64)
def _layout(rows: int, size: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, size], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)

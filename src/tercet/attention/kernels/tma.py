"""Host-side tensor descriptors for TMA, Hopper's copy engine; None where plain loads are needed."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def descriptors(wanted: bool, rows: int, *tensors: Tensor) -> tuple:
    """Descriptors of tiles of `rows` rows of one head, out of [B·T, heads·D]; Nones unless all tensors allow it."""
    found = [_descriptor(x, rows) for x in tensors] if wanted else [None]
    return (None,) * len(tensors) if any(x is None for x in found) else tuple(found)


def describable(x: Tensor) -> bool:
    """Whether TMA can load tiles of x: at least 16 numbers per head, heads adjacent, 16-byte strides."""
    _, tokens, heads, size = x.shape
    _, token, head, _ = x.stride()
    if size < 16 or not tokens or (head != size and heads > 1):
        return False
    width = x.element_size()
    return not (x.data_ptr() % 16 or token * width % 16 or head * width % 16)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    if x.shape[-1] & (x.shape[-1] - 1) or not describable(x):
        return None  # tiles of D columns, a power of two
    batch, tokens, heads, size = x.shape
    # Bypass __init__: its checks take most of 15 µs, and a training step of one layer makes 17 descriptors.
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, [batch * tokens, heads * size], [x.stride(1), 1]
    made.block_shape = [rows, size]
    return made

"""Tensor descriptors for Hopper's copy engine, made on the host; None where plain loads must do."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.attention.kernels.settings import Launch


def key_descriptors(launch: Launch, k: Tensor, v: Tensor) -> tuple:
    """Tiles of `launch.keys` rows of one head, out of [flat rows, heads·D]."""
    return row_descriptors(launch.tma, launch.keys, k, v)


def query_descriptors(launch: Launch, q: Tensor, other: Tensor) -> tuple:
    """Tiles of `launch.rows` queries of one head."""
    return row_descriptors(launch.tma, launch.rows, q, other)


def row_descriptors(wanted: bool, rows: int, *tensors: Tensor) -> tuple:
    """All or none of them."""
    found = [_descriptor(x, rows) for x in tensors] if wanted else [None]
    return (None,) * len(tensors) if any(x is None for x in found) else tuple(found)


def describable(x: Tensor) -> bool:
    """Whether the copy engine can load tiles of x: powers of two, heads side by side, 16-byte strides."""
    _, tokens, heads, size = x.shape
    _, token, head, _ = x.stride()
    if size & (size - 1) or not tokens or (head != size and heads > 1):
        return False
    width = x.element_size()
    return not (x.data_ptr() % 16 or token * width % 16 or head * width % 16)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor | None:
    if not describable(x):
        return None
    batch, tokens, heads, size = x.shape
    # made without its own checks, which take most of 15 microseconds: an operator has seventeen of these
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, [batch * tokens, heads * size], [x.stride(1), 1]
    made.block_shape = [rows, size]
    return made

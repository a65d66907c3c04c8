"""Tensor descriptors for Hopper's copy engine, made on the host; (None, None) where plain loads must do."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tercet.attention.kernels.settings import Launch


def key_descriptors(launch: Launch, k: Tensor, v: Tensor) -> tuple:
    """Tiles of `launch.keys` rows of one head, out of [flat rows, G·D]."""
    if not (launch.tma and all(_fits(x) and (x.stride(2) == x.shape[3] or x.shape[2] == 1) for x in (k, v))):
        return None, None
    return tuple(
        TensorDescriptor(
            x, [x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]], [x.stride(1), 1], [launch.keys, x.shape[3]]
        )
        for x in (k, v)
    )


def query_descriptors(launch: Launch, q: Tensor, dout: Tensor, heads: int, rows: int) -> tuple:
    """Tiles of rows // heads queries times the heads of a group, out of [flat rows, H, D]."""
    if not (launch.tma and rows % heads == 0 and heads & (heads - 1) == 0 and all(_fits(x) for x in (q, dout))):
        return None, None
    return tuple(
        TensorDescriptor(
            x,
            [x.shape[0] * x.shape[1], x.shape[2], x.shape[3]],
            [x.stride(1), x.stride(2), 1],
            [rows // heads, heads, x.shape[3]],
        )
        for x in (q, dout)
    )


def _fits(x: Tensor) -> bool:
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * size % 16 == 0 and x.stride(2) * size % 16 == 0
    return aligned and x.shape[3] & (x.shape[3] - 1) == 0 and x.shape[1] > 0

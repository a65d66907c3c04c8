"""Tensor descriptors for Hopper's copy engine, made on the host; (None, None) where plain loads must do."""

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
    if not (wanted and all(_fits(x) and (x.stride(2) == x.shape[3] or x.shape[2] == 1) for x in tensors)):
        return (None,) * len(tensors)
    return tuple(
        TensorDescriptor(x, [x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]], [x.stride(1), 1], [rows, x.shape[3]])
        for x in tensors
    )


def _fits(x: Tensor) -> bool:
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and x.stride(1) * size % 16 == 0 and x.stride(2) * size % 16 == 0
    return aligned and x.shape[3] & (x.shape[3] - 1) == 0 and x.shape[1] > 0

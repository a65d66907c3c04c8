"""Launches that skip Triton's look at every argument.

Triton inspects all arguments of every launch to find the compiled variant: 60 microseconds with fifty of them, which
is more than the kernels take on short sequences. Where the caller knows what the variant depends on, the variant is
found by that instead.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor


def launch(
    known: dict[Hashable, Any], key: Hashable, kernel: Any, grid: tuple[int, int, int], args: tuple, options: dict
) -> None:
    """Launches `kernel`; `key` must fix all that Triton specialises on: types, constants, alignments, options.

    Arguments that may differ under one key must be declared `do_not_specialize`.
    """
    compiled = known.get(key)
    if compiled is None:
        # None from Triton's interpreter, which compiles nothing.
        known[key] = kernel[grid](*args, **options)
    else:
        compiled[grid](*args)


_VARIANTS: dict[int, dict[Hashable, Any]] = {}


def call(kernel: Any, grid: tuple[int, ...], pointers: tuple, free: tuple, fixed: tuple, **options: int) -> None:
    """Launches `kernel(*pointers, *free, *fixed)`. `free` numbers are declared do_not_specialize; the variant is found
    by the `fixed` ones and by the pointers' types and alignment."""
    grid = (*grid, 1, 1)[:3]
    if 0 in grid:
        return
    device = pointers[0].device.index
    key = (device, fixed, tuple(map(_signature, pointers)), tuple(options.values()))
    launch(_VARIANTS.setdefault(id(kernel), {}), key, kernel, grid, pointers + free + fixed, options)


def _signature(x: Any) -> Hashable:
    if x is None:
        return None
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() & 15
    return x.base.dtype, tuple(x.block_shape)  # a tensor descriptor, whose alignment was checked when it was made

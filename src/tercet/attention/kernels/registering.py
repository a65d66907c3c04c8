"""Operators that have no gradient of their own, registered plainly.

`torch.library.custom_op` puts a Python kernel for autograd and a look at every result's storage around each call: 30
microseconds of the host where this takes 10. What it looked for is the writer's duty then: no result may share memory
with an argument or with another result (tests/kernels/test_operators.py holds them to it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("tercet", "FRAGMENT")


def operator(fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """torch.ops.tercet.NAME of a function that changes none of its arguments; `fake` makes its results' likes."""

    def register(function: _Function) -> _Function:
        name = function.__name__
        _LIBRARY.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tercet::{name}", fake, lib=_LIBRARY)
        return function

    return register

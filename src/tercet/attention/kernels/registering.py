"""Operators that have no gradient of their own, registered plainly.

`torch.library.custom_op` puts a Python kernel for autograd and a look at every result's storage around each call: 30
microseconds of the host where this takes 10. What it looked for is the writer's duty then: no result may share memory
with an argument or with another result (tests/kernels/test_operators.py holds them to it).

They are called under no_grad, or inside an autograd.Function that owns the gradient. Elsewhere, given what needs one,
they raise: PyTorch would go on without it and leave it at a warning. That is asked in the kernel itself and not in one
for autograd, which would be called every time, gradients or none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("tercet", "FRAGMENT")


def operator(fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """torch.ops.tercet.NAME of a function that changes none of its arguments; `fake` makes its results' likes."""

    def register(function: _Function) -> _Function:
        name = function.__name__
        _LIBRARY.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )

        @wraps(function)
        def kernel(*arguments: Any) -> Any:
            if torch.is_grad_enabled():
                _refuse_gradients(name, arguments)
            return function(*arguments)

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tercet::{name}", fake, lib=_LIBRARY)
        return function

    return register


def _refuse_gradients(name: str, arguments: tuple[Any, ...]) -> None:
    for place, given in enumerate(arguments):
        for x in given if isinstance(given, list | tuple) else (given,):
            if isinstance(x, Tensor) and x.requires_grad:
                raise RuntimeError(
                    f"torch.ops.tercet.{name} has no gradient of its own, and its argument {place} needs one: "
                    "call what tercet.attention offers, or this under torch.no_grad()"
                )

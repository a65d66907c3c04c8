"""Registration of custom ops without a gradient, cheaper than torch.library.custom_op.

custom_op wraps each call in an autograd kernel and a check that results share no storage: 30 µs on the host, against 10
here. Without that check, ops must take care that no result shares memory with an argument or another result
(tests/kernels/test_operators.py checks it).

These ops are called under no_grad, or inside an autograd.Function that owns the gradient. Elsewhere they raise if an
argument requires a gradient; PyTorch would only warn and drop it. The op itself checks this, since an autograd kernel
would run on every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("tercet", "FRAGMENT")


def operator(fake: Callable[..., Any], schema: str | None = None) -> Callable[[_Function], _Function]:
    """Register a function that mutates none of its arguments as torch.ops.tercet.NAME.

    fake: its fake implementation; schema: its arguments and results, by default those of its annotations.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        arguments = schema or torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + arguments, tags=(torch.Tag.pt2_compliant_tag,))

        @wraps(function)
        def kernel(*arguments: Any) -> Any:
            if torch.is_grad_enabled():
                _check_no_gradients(name, arguments)
            return function(*arguments)

        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tercet::{name}", fake, lib=_LIBRARY)
        return function

    return register


def must_dispatch() -> bool:
    """Whether PyTorch must see the ops, because it traces the call or a dispatch mode is active. Otherwise a caller may
    call their bodies, which takes less time."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _check_no_gradients(name: str, arguments: tuple[Any, ...]) -> None:
    for place, given in enumerate(arguments):
        for x in given if isinstance(given, list | tuple) else (given,):
            if isinstance(x, Tensor) and x.requires_grad:
                raise RuntimeError(
                    f"torch.ops.tercet.{name} has no gradient, and its argument {place} requires one: "
                    "call the functions of tercet.attention, or use torch.no_grad()"
                )

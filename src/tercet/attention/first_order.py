"""Decorator for hand-written backward passes: requesting a second derivative raises an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Raise under create_graph=True, the only case in which autograd runs a backward pass with gradients enabled.

    torch's once_differentiable alone is silent if only saved tensors require a gradient, and autograd.grad never
    reaches its delayed error: the second derivative would be silently wrong. The compiler traces what
    once_differentiable does.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for second derivatives, and tercet's operators have only first ones: "
                "call grad or backward without create_graph"
            )
        return once(ctx, *grads)

    return wrapper

"""The gated sum as the compiler sees it, made again in the backward pass instead of kept.

The branches' outputs are kept for the gradients of gates and scores; their gated sum is the input of the output
projection, whose weights' gradient asks for it too. Kept, it is one more tensor of q's size per layer: 1.1 GiB of the
M7C model's 65,536 tokens. It is the cheapest of them to make again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def made_again(out: Tensor, outputs: list[Tensor | None], gates: Tensor) -> Tensor:
    """`out`, whose gradient it carries, in value: Σ gate · output over the branches that are there."""
    there = [o is not None for o in outputs]
    present = [o for o in outputs if o is not None]
    result: Tensor = checkpoint(_sum, out, gates, there, *present, use_reentrant=False, preserve_rng_state=False)
    return result


def _sum(out: Tensor, gates: Tensor, there: list[bool], *outputs: Tensor) -> Tensor:
    planes = [gate for gate, has in zip(gates.detach().unbind(-1), there, strict=True) if has]
    total = planes[0].unsqueeze(-1) * outputs[0].to(gates.dtype)
    for gate, output in zip(planes[1:], outputs[1:], strict=True):
        total = total + gate.unsqueeze(-1) * output.to(gates.dtype)
    result: Tensor = _Carried.apply(out, total.to(out.dtype))
    return result


class _Carried(torch.autograd.Function):
    """One tensor's value with another's gradient."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None

"""Chunked cross-entropy: never holds all fp32 logits at once.

With a vocabulary of 50k, the logits of one step are larger than everything else together (65,536 tokens: 13 GB in
fp32), so rows are processed in chunks. The loss is a sum over rows, so each chunk's gradient is computed in the forward
pass, while its logits exist, and only scaled in the backward pass. Recomputing the logits in the backward pass instead
would need the same memory and 4 matmuls instead of 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.model.cost import chunk_rows

IGNORED = -100


class Loss(NamedTuple):
    """Sums, not means: ranks and accumulated passes add both fields and divide once."""

    total: Tensor
    """Loss in nats, summed over all counted targets: fp32, 0-dim, differentiable."""
    tokens: Tensor
    """Number of counted targets: int64, 0-dim, on the device."""


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int | None = None, *, compiled: bool = False
) -> Loss:
    """-log softmax(hidden @ weight.T)[targets], summed over the targets that are not IGNORED.

    hidden: [..., D]; weight: [V, D]; targets: int64 [...]
    rows: rows per chunk; by default chosen from V
    compiled: fuse the work between the matmuls into two kernels that read the logits in the matmul's dtype
    """
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {list(targets.shape)} and hidden {list(hidden.shape)}: "
            "they must be equal except for hidden's last axis"
        )
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = rows or chunk_rows(weight.shape[0])
    total = _ChunkedCrossEntropy.apply(flat, weight, targets, rows, torch.is_grad_enabled(), compiled)
    return Loss(total, (targets != IGNORED).sum())


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, gradient: bool, compiled: bool
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        # needs_input_grad ignores no_grad: without the flag, validation would compute gradients too.
        wants_hidden, wants_weight = (gradient and wanted for wanted in ctx.needs_input_grad[:2])
        with torch.autocast(device, enabled=False):
            w = weight.to(dtype)
            # Sum in at least fp32.
            wide = torch.promote_types(dtype, torch.float32)
            total = torch.zeros((), dtype=wide, device=hidden.device)
            d_hidden = torch.empty_like(hidden) if wants_hidden else None
            d_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
            for start in range(0, hidden.shape[0], rows):
                part = slice(start, start + rows)
                x = hidden[part].to(dtype)
                logits = x @ w.t()
                wanted = wants_hidden or wants_weight
                if compiled:
                    loss, logits = _compiled_loss()(logits, targets[part], gradient=wanted)
                else:
                    logits = logits.to(wide)
                    loss = _loss_inplace(logits, targets[part], gradient=wanted)
                total += loss
                d_logits = logits.to(dtype)
                if d_hidden is not None:
                    d_hidden[part] = d_logits @ w
                if d_weight is not None:
                    d_weight += d_logits.t() @ x
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            # As a vector, the scale takes part in type promotion: the product is rounded to hidden's dtype once, and no
            # fp32 copy is made.
            d_hidden = torch.mul(d_hidden, scale.view(1), out=torch.empty_like(d_hidden))
        return (
            d_hidden,
            None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


def _loss_inplace(logits: Tensor, targets: Tensor, *, gradient: bool) -> Tensor:
    """Summed loss of some rows. Overwrites `logits`, with their gradient if `gradient`."""
    counted = targets != IGNORED
    index = torch.where(counted, targets, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    chosen = logits.gather(1, index).squeeze(1)
    sums = logits.exp_().sum(1)
    if gradient:
        logits *= (counted / sums).unsqueeze(1)
        logits.scatter_add_(1, index, -counted.to(logits.dtype).unsqueeze(1))
    return torch.where(counted, sums.log() - chosen, 0.0).sum()


def _loss(logits: Tensor, targets: Tensor, *, gradient: bool) -> tuple[Tensor, Tensor]:
    """Out-of-place version for torch.compile: (loss, gradient or logits)."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != IGNORED
    index = torch.where(counted, targets, 0).unsqueeze(1)
    shifted = x - x.amax(1, keepdim=True)
    sums = shifted.exp().sum(1)
    loss = torch.where(counted, sums.log() - shifted.gather(1, index).squeeze(1), 0.0).sum()
    if not gradient:
        return loss, logits
    chosen = (torch.arange(x.shape[1], device=x.device) == index).to(x.dtype)
    return loss, ((shifted.exp() / sums.unsqueeze(1) - chosen) * counted.unsqueeze(1)).to(logits.dtype)


@lru_cache(maxsize=1)
def _compiled_loss() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_loss, fullgraph=True)

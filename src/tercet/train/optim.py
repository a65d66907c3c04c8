"""The update: learning-rate schedule, AdamW with decay groups, and clipping by the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tercet.config.sections import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of update number `step`, counted from 1. A pure function: resuming needs no schedule state."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "cosine":
        done = _fraction(step, config.warmup_steps, config.steps)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    # wsd: the decay must not start during warm-up
    start = max(config.warmup_steps, config.steps - round(config.decay_ratio * config.steps))
    return config.lr + (floor - config.lr) * _fraction(step, start, config.steps)


def _fraction(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW. Weight decay applies to matrices, not to norms, biases and other 1-D parameters.

    Embeddings and φ's position embeddings (`compress_*.position`) count as matrices: exempting them now would change
    the updates of resumed runs.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    selectors = [p for name, p in named if ".selector." in name]
    trained = [p for name, p in named if ".selector." not in name]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        # the extra keys are for `update`
        {
            "params": selectors,
            "weight_decay": config.selector.weight_decay,
            "lr_factor": (config.selector.lr or config.lr) / config.lr,
            "clip": config.selector.clip,
        },
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of all current gradients together, on their device. [] fp32"""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def selector_group(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The parameters of learned selectors, which have their own clipping and learning rate; None if there are none."""
    return next((group for group in optimizer.param_groups if "lr_factor" in group), None)


def update(
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip: float,
    norm: Tensor,
    skip: Tensor,
    selector_norm: Tensor | None = None,
) -> None:
    """Clip, update at rate `lr`, clear the gradients. If `skip` (bool on the device), weights and moments stay.

    The fused kernels read `found_inf` on the device, as with a GradScaler, so the host does not wait. Zeroing the
    gradients instead would still change the moments and apply weight decay.
    """
    selectors = selector_group(optimizer)
    others = [group for group in optimizer.param_groups if group is not selectors]
    if clip > 0:
        parameters = [p for group in others for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm, foreach=True)
    for group in others:
        group["lr"] = lr
    if selectors is not None:
        selectors["lr"] = lr * selectors["lr_factor"]
        if selectors["clip"] > 0 and selector_norm is not None:
            parameters = [p for p in selectors["params"] if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, selectors["clip"], selector_norm, foreach=True)
    optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

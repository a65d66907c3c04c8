"""The learning rate as a pure function of the step: an optimizer update, whatever the accumulation."""

from __future__ import annotations

import math

from tercet.config.sections import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of update number `step`, counted from 1. It remembers nothing: resuming needs no state."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "cosine":
        done = _share(step, config.warmup_steps, config.steps)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    # wsd: the decay may not begin inside the warm-up.
    start = max(config.warmup_steps, config.steps - round(config.decay_ratio * config.steps))
    return config.lr + (floor - config.lr) * _share(step, start, config.steps)


def _share(step: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))

"""From logits to the next token: one rule for samples during training and for generation.

The randomness comes in as one uniform number per row, so that the choice itself is a function of tensors: the same on
every device, for every batch, and fit for a CUDA graph. logits: [B, V]; uniform: fp64 [B]; seen: bool [B, V].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -1
"""The choice of a row whose logits are not numbers: an error for whoever reads it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy: the likeliest token, the lowest number among equals."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 is all tokens)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0 (1 is none)"),
        }
        for name, (kept, rule) in rules.items():
            if not kept:
                raise ValueError(f"{name}={getattr(self, name)} must be {rule}")


def uniforms(seed: int, rows: int, steps: int) -> Tensor:
    """fp64 [rows, steps] in [0, 1): row r of seed s draws as row 0 of seed s + r does, whatever the batch."""
    draws = torch.empty(rows, steps, dtype=torch.float64)
    for row in range(rows):
        generator = torch.Generator().manual_seed((seed + row) % 2**63)
        draws[row] = torch.rand(steps, dtype=torch.float64, generator=generator)
    return draws


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """int64 [B]: the next token of each row, NOTHING where the logits are not numbers.

    seen: tokens that the row holds already, which the repetition penalty makes less likely.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    broken = ~logits.amax(-1).isfinite()
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return torch.where(broken, NOTHING, logits.argmax(-1))
    if uniform is None:
        raise ValueError(f"temperature={sampling.temperature} draws at random: give `uniform`, one number per row")
    # stable: equal logits keep the order of their numbers on every device
    values, order = logits.sort(stable=True, dim=-1, descending=True)
    # from the highest, so that a tiny temperature makes no infinity less infinity
    chances = torch.softmax((values - values[..., :1]).double() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < chances.shape[-1]:
        chances[..., sampling.top_k :] = 0
    if sampling.top_p < 1:
        before = chances.cumsum(-1) - chances
        # the share is of what top_k left; the likeliest token always stays
        chances = torch.where(before < sampling.top_p * chances.sum(-1, keepdim=True), chances, 0)
    reached = chances.cumsum(-1)
    index = (reached <= uniform[:, None].to(reached.device) * reached[:, -1:]).sum(-1)
    index = torch.minimum(index, (chances > 0).sum(-1) - 1).clamp(min=0)
    return torch.where(broken, NOTHING, order.gather(-1, index[:, None]).squeeze(-1))

"""Sampling: from logits to the next token, for generation and for samples during training.

Randomness is passed in as one uniform number per row, so sampling is a pure function of tensors: the same on every
device and for every batch size, and capturable in a CUDA graph. logits: [B, V]; uniform: fp64 [B]; seen: bool [B, V].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.model.config import Sampling

INVALID_TOKEN = -1
"""Returned for a row whose logits are not finite; the caller raises."""


def uniform_draws(seed: int, rows: int, steps: int) -> Tensor:
    """fp64 [rows, steps] in [0, 1). Row r of seed s equals row 0 of seed s + r, whatever the batch."""
    draws = torch.empty(rows, steps, dtype=torch.float64)
    for row in range(rows):
        generator = torch.Generator().manual_seed((seed + row) % 2**63)
        draws[row] = torch.rand(steps, dtype=torch.float64, generator=generator)
    return draws


def sample_token(
    logits: Tensor, sampling: Sampling, uniform: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """int64 [B]: the next token of each row, INVALID_TOKEN where the logits are not finite.

    seen: tokens already in the row, which the repetition penalty makes less likely.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    invalid = ~logits.amax(-1).isfinite()
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return torch.where(invalid, INVALID_TOKEN, logits.argmax(-1))
    if uniform is None:
        raise ValueError(f"temperature={sampling.temperature} needs random numbers: pass `uniform`, one number per row")
    # stable: equal logits are ordered by token id on every device
    values, order = logits.sort(stable=True, dim=-1, descending=True)
    # subtract the maximum first: a tiny temperature would otherwise give inf - inf
    probs = torch.softmax((values - values[..., :1]).double() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < probs.shape[-1]:
        probs[..., sampling.top_k :] = 0
    if sampling.top_p < 1:
        before = probs.cumsum(-1) - probs
        # top_p applies to what top_k left; the most likely token always stays
        probs = torch.where(before < sampling.top_p * probs.sum(-1, keepdim=True), probs, 0)
    cumulative = probs.cumsum(-1)
    index = (cumulative <= uniform[:, None].to(cumulative.device) * cumulative[:, -1:]).sum(-1)
    index = torch.minimum(index, (probs > 0).sum(-1) - 1).clamp(min=0)
    return torch.where(invalid, INVALID_TOKEN, order.gather(-1, index[:, None]).squeeze(-1))

"""Rotary positions: half-rotation as in Llama. x: [B, T, heads, D]; positions: [T] or [B, T]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Turn = tuple[Tensor, Tensor]
"""(cos, sin), fp32 [..., T, 1, D/2]."""


class Turns(NamedTuple):
    """The turns of a pass, made once for all its layers."""

    tokens: Turn
    compressed: Turn | None
    """Of the compressed tokens; None where no layer has any."""


class Rotary:
    """theta^(-2i/D) · position / scaling, for every pair (i, i + D/2) of a head.

    `scaling` divides all positions alike: a model trained at 8k reads 32k with scaling 4 (position interpolation).
    """

    def __init__(self, size: int, theta: float = 10000.0, scaling: float = 1.0) -> None:
        if size % 2:
            raise ValueError(f"head_dim={size} is odd: rotary positions turn pairs, take an even size")
        if theta <= 0 or scaling <= 0:
            raise ValueError(f"rope_theta={theta} and rope_scaling={scaling} must be above 0")
        self.size, self.theta, self.scaling = size, float(theta), float(scaling)

    def turn(self, positions: Tensor) -> Turn:
        """Angles are made anew for each pass: a table would have to know the longest T. Not for each layer: compiled
        into the kernels that use them, cosines in fp64 for every head were a third of a training step."""
        exponent = torch.arange(0, self.size, 2, device=positions.device, dtype=torch.float64) / self.size
        # fp64: at position 1,000,000 an fp32 angle is off by 0.06 rad
        angle = (positions[..., None].double() / self.scaling) * self.theta**-exponent
        return angle.cos().float().unsqueeze(-2), angle.sin().float().unsqueeze(-2)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    cos, sin = (part.to(torch.promote_types(x.dtype, torch.float32)) for part in turn)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

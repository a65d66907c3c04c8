"""The gate (Eq. 5): from the layer's input x, three numbers per query head. [B, T, dim] -> [B, T, H, 3]"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KINDS = ("sigmoid", "softmax")


class Gate(nn.Module):
    """Starts at zero: all three gates of every head are equal, ½ each (sigmoid) or ⅓ (softmax)."""

    def __init__(self, dim: int, heads: int, kind: str = "sigmoid") -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"gate={kind!r} is unknown: pick one of {', '.join(KINDS)}")
        self.kind = kind
        self.proj = nn.Linear(dim, 3 * heads)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.opened(self.proj(x))

    def opened(self, product: Tensor, bias: Tensor | None = None) -> Tensor:
        """The gates of what `proj` gives, or of what it gives without its bias, and the bias. [B, T, 3H]"""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if bias is not None:
            logits = logits + bias
        logits = logits.unflatten(-1, (-1, 3))
        return logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)

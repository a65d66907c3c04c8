"""φ (Eq. 7): the l tokens of a block become one compressed token. blocks: [B, Tc, l, G, D] -> [B, Tc, G, D]"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercet.attention.functional import compression_blocks
from tercet.attention.layout import Packing
from tercet.attention.spec import NSAConfig

KINDS = ("mlp", "mean")


class Compression(nn.Module):
    """ "mean", or "mlp": the mean plus a learnt correction from all l tokens and their places in the block.

    The correction's last layer starts at zero, so that "mlp" equals the mean at initialisation. A free-standing MLP
    would start as noise, and the first thousands of selections would be made by it.
    """

    def __init__(self, kind: str, size: int, config: NSAConfig) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"compression={kind!r} is unknown: pick one of {', '.join(KINDS)}")
        self.config = config
        self.kind = kind
        if kind == "mlp":
            self.position = nn.Parameter(torch.empty(config.compress_block, size))
            self.up = nn.Linear(config.compress_block * size, size)
            self.down = nn.Linear(size, size)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        if self.kind == "mean":
            return
        nn.init.normal_(self.position, std=0.02)
        nn.init.normal_(self.up.weight, std=self.up.in_features**-0.5)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor, packing: Packing | None = None) -> Tensor:
        """x: [B, T, G, D] -> [B, Tc, G, D]"""
        return self.phi(compression_blocks(x, self.config, packing))

    def phi(self, blocks: Tensor) -> Tensor:
        mean = blocks.mean(2)
        if self.kind == "mean":
            return mean
        placed = (blocks + self.position[:, None].to(blocks.dtype)).transpose(2, 3).flatten(3)
        correction = self.down(nn.functional.gelu(self.up(placed)))
        return mean + correction.to(mean.dtype)

"""SelectingLayer: base class of layers that select blocks, with a learned selector, its loss, and statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.layout import Packing
from tercet.model.layer import AttentionLayer
from tercet.model.selector import EVERY, BlockSelector, attach_loss, mix_bits, sample_queries
from tercet.model.stats import AttentionStats

Scorer = tuple[Tensor, Tensor]
"""Queries and keys of a learned selector: [B, T, G, size] each."""


class SelectingLayer(AttentionLayer):
    """Base of NSA and block-sparse layers. They set `config`, `selector` (None if it is not learned) and `stats`."""

    config: NSAConfig
    selector: BlockSelector | None
    stats: AttentionStats

    def cache_key(self) -> dict[str, Any]:
        key = super().cache_key() | {"config": self.config}
        return key if self.selector is None else key | self.selector.cache_key()

    def selector_size(self) -> int:
        return 0 if self.selector is None else self.selector.size

    def sample(self, x: Tensor) -> Tensor | None:
        if self.selector is None or not (self.training and torch.is_grad_enabled() and x.numel()):
            return None
        # hashed: as fp32, half-precision numbers end in zeros, and every sample would be the first of its 128 queries
        bits = x.detach()[..., 0].float().view(torch.int32).long() & 0xFFFFFFFF
        return sample_queries(mix_bits(bits), EVERY)

    def with_selector_loss(
        self, out: Tensor, x: Tensor, scored: Scorer | None, q: Tensor, k: Tensor, rows: Tensor, block_indices: Tensor,
        packing: Packing | None, backend: str,
    ) -> Tensor:  # fmt: skip
        """Return `out` with the loss of the learned selector attached: the backward pass of `out` also runs that of the
        loss. Without a learned selector, only measure how well blocks were chosen, if statistics are on.

        scored: the selector's queries and keys; the other arguments: see `BlockSelector.loss_of_rows`.
        """
        if self.selector is None or scored is None:
            self.stats.update_choice(q, k, rows, block_indices, packing)
            return out
        loss, quality = self.selector.loss_of_rows(
            x, scored[1], q, k, rows, block_indices, packing, measure=self.stats.enabled, backend=backend
        )
        self.stats.update_selector(quality)
        return attach_loss(out, loss * self.selector.weight)

"""Tercet's caches behind the face that transformers' generation knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tercet.model.transformer import Transformer


class TercetCache(Cache):
    """One cache per layer, growing. Counts columns of the batch, padding included, as transformers does; how many
    tokens of each row are real, the layers' caches know."""

    def __init__(self, model: Transformer, batch: int) -> None:
        # Not the base class's: it would make layers of keys and values for all tokens.
        self.layers = []
        self._model = model
        self.caches = [layer.make_cache(batch) for layer in model.attention_layers()]
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.caches[0].batch, device=self.caches[0].device)
        self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        batch = self.caches[0].batch
        self.caches = [layer.make_cache(batch) for layer in self._model.attention_layers()]
        self.columns = 0

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a TercetCache cannot forget tokens: assisted generation needs a cache that can")

    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return sum(cache.nbytes() for cache in self.caches)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    def __len__(self) -> int:
        return len(self.caches)

    def __repr__(self) -> str:
        return f"TercetCache(layers={len(self.caches)}, columns={self.columns}, bytes={self.nbytes()})"

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Tercet's layers fill their caches themselves")

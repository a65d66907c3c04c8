"""What generation asks of a model: read prompts, then one token per row at a time.

`Decoder` is the seam: whatever does these two things (with a cache, without, as a CUDA graph) writes the same text.
tokens: int64 [B, T]; logits: [B, V].
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tercet.model.transformer import Transformer

PREFILL_CHUNK = 8192


class Decoder(Protocol):
    """Holds a batch of sequences of any lengths."""

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        """Read the prompts, and give the logits after each one's last token."""

    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        """Read one more token of each active row, and give the logits after it. tokens, active: [B]; what comes for
        rows that are not active means nothing."""

    def keys_read(self) -> int | None:
        """Keys read in the last step, over all rows, KV heads and layers; None where nobody counts."""


class CachedDecoder:
    """Reads prompts in chunks, so that a prompt's activations need not fit in memory, only its cache."""

    def __init__(self, model: Transformer, batch: int, max_len: int, *, chunk: int = PREFILL_CHUNK) -> None:
        self.model, self.chunk = model, chunk
        self.cache = [layer.make_cache(batch, max_len) for layer in model.attention_layers()]
        self._device = model.embedding.weight.device

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        longest = max(map(len, prompts))
        out: Tensor | None = None
        for first in range(0, longest, self.chunk):
            parts = [prompt[first : first + self.chunk] for prompt in prompts]
            width = max(map(len, parts))
            tokens = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self._device)
            lengths = torch.tensor([len(part) for part in parts])
            hidden = self.model.hidden(tokens, cache=self.cache, lengths=lengths)
            # of all these positions only the last of each prompt is wanted: logits of the others are never made
            last = hidden[torch.arange(len(prompts)), (lengths - 1).clamp(min=0).to(self._device)]
            ends = torch.tensor(
                [len(p) > 0 and len(q) <= first + self.chunk for p, q in zip(parts, prompts, strict=True)]
            )
            ends = ends.to(self._device)
            out = last if out is None else torch.where(ends[:, None], last, out)
        assert out is not None
        return self.model.logits(out)

    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        lengths = None if bool(active.all()) else active.long()
        return self.model.logits(self.model.hidden(tokens[:, None], cache=self.cache, lengths=lengths)[:, -1])

    def keys_read(self) -> int | None:
        reads = [cache.reads for cache in self.cache]
        return None if any(r is None for r in reads) else sum(int(r[:, -1].sum()) for r in reads if r is not None)


class PlainDecoder:
    """Reads everything again for each token: slow, and what the others are compared with."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._rows: list[list[int]] = []

    def prefill(self, prompts: list[list[int]]) -> Tensor:
        self._rows = [list(prompt) for prompt in prompts]
        return self._logits()

    def step(self, tokens: Tensor, active: Tensor) -> Tensor:
        for row, token, more in zip(self._rows, tokens.tolist(), active.tolist(), strict=True):
            if more:
                row.append(token)
        return self._logits()

    def keys_read(self) -> int | None:
        return None

    def _logits(self) -> Tensor:
        # row by row: the very thing that no batching or padding can have touched
        device = self.model.embedding.weight.device
        return torch.cat(
            [self.model.logits(self.model.hidden(torch.tensor([row], device=device))[:, -1]) for row in self._rows]
        )

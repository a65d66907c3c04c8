"""Perplexity by position in the context: does the loss keep falling as there is more to read?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.data.loader import Batch, build_loader
from tercet.errors import UsageError
from tercet.inference.load import LanguageModel
from tercet.model.cost import chunk_rows
from tercet.model.loss import IGNORED


@dataclass(frozen=True)
class Stretch:
    """Targets whose position in their document (tokens read before them, less one) lies in first … last."""

    first: int
    last: int
    tokens: int
    nats: float  # summed

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "loss": self.loss, "perplexity": self.perplexity}


def token_losses(model: LanguageModel, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """(position in its document, nats) of all counted targets, in chunks of rows."""
    tokens, targets = batch.tokens.to(model.device), batch.targets.to(model.device)
    if batch.cu_seqlens is None:
        position = torch.arange(tokens.shape[1], device=model.device).expand_as(tokens).flatten()
        hidden = model.hidden(tokens)
    else:
        bounds = batch.cu_seqlens.to(model.device)
        place = torch.arange(tokens.numel(), device=model.device)
        position = place - bounds[torch.searchsorted(bounds, place, right=True) - 1]
        hidden = model.hidden(tokens.reshape(1, -1), bounds, max_seqlen=tokens.shape[1])
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    counted = (targets != IGNORED).nonzero().flatten()
    for rows in counted.split(chunk_rows(model.config.vocab_size)):
        yield position[rows], F.cross_entropy(model.logits(hidden[rows]).float(), targets[rows], reduction="none")


@torch.no_grad()
def by_position(model: LanguageModel, batches: Iterable[Batch]) -> list[Stretch]:
    """Loss over stretches 0, 1, 2-3, 4-7, … of positions: each as long as all before it together."""
    nats: Tensor | None = None
    for batch in batches:
        longest = batch.tokens.shape[1]
        for position, loss in token_losses(model, batch):
            stretch = (position.double() + 0.5).log2().floor().long() + 1
            if nats is None:
                nats = torch.zeros(2, longest.bit_length() + 1, dtype=torch.float64, device=model.device)
            nats[0].scatter_add_(0, stretch, loss.double())
            nats[1].scatter_add_(0, stretch, torch.ones_like(loss, dtype=torch.float64))
    if nats is None:
        raise UsageError("there is nothing to measure: no target tokens; raise data.validation_fraction, or sequences")
    sums, counts = nats.tolist()
    edges = [(0, 0), *((1 << i, (2 << i) - 1) for i in range(len(sums)))]
    return [Stretch(a, b, int(n), s) for (a, b), s, n in zip(edges, sums, counts, strict=False) if n]


def overall(stretches: list[Stretch]) -> Stretch:
    """All of them as one."""
    return Stretch(
        stretches[0].first, stretches[-1].last, sum(s.tokens for s in stretches), sum(s.nats for s in stretches)
    )


def held_out(model: LanguageModel, *, sequences: int, seq_len: int | None = None, batch: int = 1) -> Iterator[Batch]:
    """Validation documents of the model's own data, packed as in training."""
    for name, value in (("sequences", sequences), ("seq_len", seq_len), ("batch", batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1")
    data = model.run.data if seq_len is None else model.run.data.model_copy(update={"seq_len": seq_len})
    with build_loader(
        data, seed=model.run.run.seed, batch_sequences=batch, split="validation", tokenizer=model.tokenizer
    ) as loader:
        yield from islice(loader, -(-sequences // batch))

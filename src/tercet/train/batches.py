"""From the loader's batches to what a step eats, with the cursor of the last batch that was really consumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tercet.data.loader import Batch
from tercet.data.packing import LoaderStats
from tercet.parallel.strategy import Single, Strategy
from tercet.train.step import MicroBatch


def to_device(batch: Batch, device: torch.device, strategy: Strategy | None = None) -> MicroBatch:
    """This rank's part, copied without waiting (the loader pins its memory); packed documents as one long row.

    Without a strategy: the whole batch.
    """
    tokens, targets, documents = (strategy or Single()).share(batch.tokens, batch.targets, batch.cu_seqlens)
    longest = None
    if isinstance(documents, torch.Tensor):
        documents = documents.to(device, non_blocking=True)
        longest = batch.tokens.shape[1]  # sequences end documents
    tokens, targets = (x.to(device, non_blocking=True) for x in (tokens, targets))
    return MicroBatch(tokens, targets, documents, longest)


class StepBatches:
    """The micro-batches of one step after another."""

    def __init__(self, loader: Iterable[Batch], accumulation: int, cursor: dict[str, Any] | None) -> None:
        self._batches: Iterator[Batch] = iter(loader)
        self._accumulation = accumulation
        self.cursor = cursor  # after the last batch handed out: what a checkpoint must hold
        self.epoch = 0
        self.stats: LoaderStats | None = None
        self.bad_records = 0

    def next_step(self) -> list[Batch]:
        """The next step's batches. Fewer at the end of the data, where the last step is smaller; then none."""
        batches = list(itertools.islice(self._batches, self._accumulation))
        if batches:
            self.cursor = batches[-1].state
            self.epoch = batches[-1].stats.epoch
            self.stats = batches[-1].stats
            self.bad_records = batches[-1].stats.skipped
        return batches

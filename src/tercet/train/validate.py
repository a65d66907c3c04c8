"""Loss on validation documents: the same ones, in the same batches, every time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from tercet.config.schema import RunConfig
from tercet.data.loader import Batch, build_loader
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.parallel.strategy import Strategy
from tercet.train.batches import to_device
from tercet.train.step import autocast


class Validation:
    """Reads its batches on first use and keeps them: finding them again may mean reading the whole corpus."""

    def __init__(self, config: RunConfig, strategy: Strategy, tokenizer: Tokenizer) -> None:
        self._config, self._strategy, self._tokenizer = config, strategy, tokenizer
        self._batches: list[Batch] | None = None

    def loss(
        self, model: nn.Module, device: torch.device, progress: Callable[[], None] = lambda: None
    ) -> tuple[float, int]:
        """Mean nats per target token over all ranks, and the number of those tokens. Waits for the device.

        `progress` is called at each batch: a long validation is not a stall.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for batch in self._read(progress):
                progress()
                part = to_device(batch, device, self._strategy)
                with autocast(device, self._config.train.precision):
                    loss = model(part.tokens, part.cu_seqlens, part.targets, max_seqlen=part.max_seqlen)
                total += loss.total
                count += loss.tokens
        model.train(was_training)
        targets = int(self._strategy.all_sum(count).item())
        if targets == 0:
            raise UsageError(
                "validation has no target tokens: the data has no validation documents; raise "
                "data.validation_fraction, or turn validation off with --train.val-tokens 0"
            )
        return float(self._strategy.all_sum(total).item()) / targets, targets

    def _read(self, progress: Callable[[], None]) -> list[Batch]:
        if self._batches is None:
            config, found = self._config, []
            with build_loader(
                config.data,
                seed=config.run.seed,
                batch_sequences=config.train.micro_batch * self._strategy.data_ranks,
                rank=self._strategy.data_rank,
                world_size=self._strategy.data_ranks,
                split="validation",
                tokenizer=self._tokenizer,
            ) as loader:
                for batch in itertools.islice(loader, config.validation_passes):
                    progress()
                    found.append(batch)
            self._batches = found
        return self._batches

"""Validation documents: that there are some, and the loss on them, the same ones in the same batches every time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tercet.config.schema import RunConfig
from tercet.data.loader import Batch, build_loader
from tercet.data.sources import open_stream
from tercet.data.stream import DataError, DataUsageError
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.sampling import NOTHING, Sampling, choose
from tercet.parallel.strategy import Strategy
from tercet.train.step import autocast, to_device

LOOK_AT_ONCE = 64  # records; those of a whole shuffle_block would come later, and none is used


def check_documents(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Refuse data without a document for validation, before any step is made: reads up to the first that there is."""
    if not config.train.val_tokens:
        return
    data = config.data.model_copy(update={"shuffle_block": min(config.data.shuffle_block, LOOK_AT_ONCE)})
    # A mixture breaks off at a part that has none, however many the others have.
    parts = [data.model_copy(update={"mixture": (part,)}) for part in data.mixture] or [data]
    for part in parts:
        try:
            documents = open_stream(part, tokenizer, seed=config.run.seed, split="validation").documents()
            try:
                next(documents, None)
            finally:
                documents.close()
        except DataUsageError as error:
            raise UsageError(
                f"train.val_tokens={config.train.val_tokens} asks for a validation that the data cannot give: {error}; "
                "--train.val-tokens 0 turns it off"
            ) from None
        except DataError as error:
            raise DataError(str(error)) from None  # a kind that can be sent to other ranks


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
                f"validation has no target tokens in the {self._config.validation_passes} passes that train.val_tokens="
                f"{self._config.train.val_tokens} asks for: raise it or data.validation_fraction, or turn validation "
                "off with --train.val-tokens 0"
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


# ------------------------------------------------------------------------------------------------
# A piece of text from the model in training. Plain and uncached: it must work on whatever is being trained.


def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    context: int,
    device: torch.device,
    precision: str,
    seed: int,
    agree: Callable[[Callable[[], int]], int] = lambda choose: choose(),
) -> str:
    """What the model writes after `prompt`, until end of document or `tokens` tokens; at most `context` are read.

    Draws from a generator of its own, so that a run with samples and one without train alike.
    """
    generator = torch.Generator().manual_seed(seed)
    how = Sampling(temperature=temperature)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    start = len(ids)
    was_training = model.training
    model.eval()
    # Every length is a new shape: compiled blocks would be compiled again for each.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(device, precision):
        for _ in range(tokens):
            logits = model(torch.tensor([ids[-context:]], device=device))[:, -1].float().cpu()
            choice = int(choose(logits, how, torch.rand(1, dtype=torch.float64, generator=generator)))
            # Ranks that part here would wait for each other for ever: rank 0's choice is everybody's.
            choice = agree(partial(int, choice))
            if choice in (tokenizer.eos_id, NOTHING):
                break
            ids.append(choice)
    model.train(was_training)
    return tokenizer.decode(ids[start:])

"""Evaluation during training: validation loss on a fixed set of batches, and text samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from tercet.config.schema import RunConfig
from tercet.data.loader import Batch, build_loader
from tercet.data.sources import open_stream
from tercet.data.stream import DataError, DataUsageError, EmptyDataError
from tercet.data.tokenizers import Tokenizer, text_bytes
from tercet.errors import UsageError
from tercet.model.config import Sampling
from tercet.model.loss import IGNORED
from tercet.model.sampling import INVALID_TOKEN, sample_token
from tercet.parallel.strategy import Strategy
from tercet.train.step import autocast, to_device

PREVIEW_RECORDS = 64  # shuffle block of `check_validation_data`, which needs only one document


def check_validation_data(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise before the first step if the data has no validation document. Reads up to the first one."""
    if not config.train.val_tokens:
        return
    data = config.data.model_copy(update={"shuffle_block": min(config.data.shuffle_block, PREVIEW_RECORDS)})
    # Every part of a mixture needs one.
    parts = [data.model_copy(update={"mixture": (part,)}) for part in data.mixture] or [data]
    for part in parts:
        try:
            with closing(open_stream(part, tokenizer, seed=config.run.seed, split="validation").documents()) as found:
                next(found, None)
        except DataUsageError as error:
            raise UsageError(
                f"train.val_tokens={config.train.val_tokens}, but the data has nothing to validate on: {error}; "
                "turn validation off with --train.val_tokens 0"
            ) from None
        except EmptyDataError:
            raise
        except DataError as error:
            raise DataError(str(error)) from None  # subclasses cannot be pickled and sent to other ranks


class Validation:
    """Validation loss. Keeps its batches: finding them again may mean reading the whole corpus."""

    def __init__(self, config: RunConfig, strategy: Strategy, tokenizer: Tokenizer) -> None:
        self._config, self._strategy, self._tokenizer = config, strategy, tokenizer
        self._batches: list[Batch] | None = None
        self._bytes: int | None = None

    def loss(
        self,
        model: nn.Module,
        device: torch.device,
        progress: Callable[[int], None] = lambda batch: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[float, int] | None:
        """Mean loss per target token in nats over all ranks, and the number of target tokens. Waits for the device.

        `progress` is called with the number of each batch, 0 while they are read, so that a long validation does not
        look like a stall. `stop` is called before each batch, on all ranks; None once it returns True.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        was_training, stopped = model.training, False
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(self._load_batches(progress), 1):
                if stopped := stop():
                    break
                progress(number)
                part = to_device(batch, device, self._strategy)
                with autocast(device, self._config.train.precision):
                    loss = model(part.tokens, part.cu_seqlens, part.targets, max_seqlen=part.max_seqlen)
                total += loss.total
                count += loss.tokens
        model.train(was_training)
        if stopped:
            return None
        targets = int(self._strategy.all_sum(count).item())
        if targets == 0:
            raise UsageError(
                f"validation has no target tokens in {self._config.validation_passes} batches "
                f"(train.val_tokens={self._config.train.val_tokens}): raise it or data.validation_fraction, or turn "
                "validation off with --train.val_tokens 0"
            )
        return float(self._strategy.all_sum(total).item()) / targets, targets

    def text_bytes(self, device: torch.device) -> int:
        """UTF-8 bytes of the target tokens of all ranks. All ranks call it."""
        if self._bytes is None:
            targets = [batch.targets[batch.targets != IGNORED].tolist() for batch in self._load_batches()]
            count = sum(text_bytes(self._tokenizer, ids) for ids in targets)
            total = self._strategy.all_sum(torch.tensor(count, dtype=torch.int64, device=device))
            # Ranks that share a sequence have counted the whole of it.
            self._bytes = int(total.item()) * self._strategy.data_ranks // self._strategy.world_size
        return self._bytes

    def _load_batches(self, progress: Callable[[int], None] = lambda batch: None) -> list[Batch]:
        if self._batches is None:
            config, batches = self._config, []
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
                    progress(0)
                    batches.append(batch)
            self._batches = batches
        return self._batches


def sample_text(
    model: Any, tokenizer: Tokenizer, prompt: str, tokens: int, *, temperature: float, context: int,
    device: torch.device, precision: str, seed: int,
    agree: Callable[[Callable[[], int]], int] = lambda choose: choose(), cached: bool = False,
) -> str:  # fmt: skip
    """Continue `prompt` until end of document or `tokens` tokens, reading at most `context` tokens.

    Uncached, it works under every strategy; `cached`, in fp32 on one rank, it is many times as fast until the context
    is full. Uses its own random generator, so that sampling does not change training. `agree` makes all ranks use the
    same choice.
    """
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=temperature)
    ids = tokenizer.encode(prompt, specials=True) or [tokenizer.eos_id]
    start = len(ids)
    was_training = model.training
    model.eval()
    # Every length is a new shape: compiled blocks would compile again for each.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(device, precision):
        cache = [layer.make_cache(1, context) for layer in model.attention_layers()] if cached else None
        new = ids
        for _ in range(tokens):
            if cache is None or len(ids) > context:  # a window that moves would need other positions in the cache
                cache, new = None, ids[-context:]
            logits = model(torch.tensor([new], device=device), cache=cache)[:, -1].float().cpu()
            token = int(sample_token(logits, sampling, torch.rand(1, dtype=torch.float64, generator=generator)))
            # Ranks that choose differently would deadlock in the next forward pass.
            token = agree(partial(int, token))
            if token in (tokenizer.eos_id, INVALID_TOKEN):
                break
            ids.append(token)
            new = ids[-1:]
    model.train(was_training)
    return tokenizer.decode(ids[start:])

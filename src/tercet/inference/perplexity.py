"""Loss by position, and of the same tokens with more or less context before them: does more context keep helping?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.config.data import DataConfig
from tercet.data.loader import Batch, build_loader
from tercet.data.stream import DataUsageError
from tercet.data.tokenizers import text_bytes
from tercet.errors import UsageError
from tercet.inference.arguments import at_least_one
from tercet.inference.load import LanguageModel
from tercet.model.cost import chunk_rows
from tercet.model.loss import IGNORED
from tercet.model.transformer import Transformer

# Sequences in a row without a scored target after which `within_documents` gives up: generated data is endless.
_UNSCORED = 1000


@dataclass(frozen=True)
class PositionBucket:
    """Targets that are predicted from positions first … last of their document."""

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


@torch.no_grad()
def score(model: Transformer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each target [N] after the hidden states [N, dim], and whether it is the most likely token: in chunks that
    bound the logits' memory."""
    rows, nats, right = chunk_rows(model.config.vocab_size), [], []
    for states, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.logits(states).float()
        nats.append(F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="none"))
        right.append(logits.argmax(-1) == wanted)
    return torch.cat(nats), torch.cat(right)


@torch.no_grad()
def token_losses(model: LanguageModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """(position in the document, nats) of all targets that count."""
    tokens, targets = batch.tokens.to(model.device), batch.targets.to(model.device)
    if batch.cu_seqlens is None:
        position = torch.arange(tokens.shape[1], device=model.device).expand_as(tokens).flatten()
        hidden = model.hidden(tokens)
    else:
        bounds = batch.cu_seqlens.to(model.device)
        index = torch.arange(tokens.numel(), device=model.device)
        position = index - bounds[torch.searchsorted(bounds, index, right=True) - 1]
        hidden = model.hidden(tokens.reshape(1, -1), bounds, max_seqlen=tokens.shape[1])
    counted = (targets.flatten() != IGNORED).nonzero().flatten()
    return position[counted], score(model, hidden.flatten(0, 1)[counted], targets.flatten()[counted])[0]


def by_position(model: LanguageModel, batches: Iterable[Batch]) -> list[PositionBucket]:
    """Loss by position, in buckets 0, 1, 2-3, 4-7, …"""
    sums = torch.zeros(2, 64, dtype=torch.float64, device=model.device)
    longest = 0
    for batch in batches:
        longest = batch.tokens.shape[1]
        position, loss = token_losses(model, batch)
        bucket = (position.double() + 0.5).log2().floor().long() + 1
        sums[0].scatter_add_(0, bucket, loss.double())
        sums[1].scatter_add_(0, bucket, torch.ones_like(loss, dtype=torch.float64))
    nats, counts = sums.tolist()
    if not any(counts):
        raise UsageError("there is nothing to measure: no target tokens; raise data.validation_fraction or sequences")
    edges = [(0, 0), *((1 << i, min(2 << i, longest) - 1) for i in range(len(nats)))]
    return [PositionBucket(a, b, int(n), s) for (a, b), s, n in zip(edges, nats, counts, strict=False) if n]


def gain(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference over the sequences, and its standard error; None for one sequence."""
    differences = [a - b for a, b in zip(losses, others, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return statistics.fmean(differences), error


def within_documents(model: LanguageModel, *, length: int, sequences: int, last: int | None = None) -> Iterator[Batch]:
    """Validation sequences of `length` tokens, each from one document and with a target among its `last` tokens (none:
    among all). Raises if there is none."""
    last = length if last is None else last
    found = unscored = 0
    for batch in held_out(model, sequences=1 << 30, seq_len=length, bounds=True):
        if batch.cu_seqlens is None or batch.cu_seqlens.tolist() != [0, length]:
            continue
        if (batch.targets[0, -last:] == IGNORED).all():
            unscored += 1
            if unscored == _UNSCORED:
                break
            continue
        yield batch
        found, unscored = found + 1, 0
        if found == sequences:
            return
    if not found and unscored:
        raise UsageError(
            f"--last {last} has no target to score in {unscored:,} validation sequences of {length:,} tokens (the last "
            "token of a document has none): give a larger --last or shorter --lengths"
        )
    if not found:
        raise UsageError(f"no validation document has {length:,} tokens: give shorter --lengths")


@torch.no_grad()
def loss_with_context(model: LanguageModel, batch: Batch, context: int, last: int) -> float:
    """Nats per token of the `last` targets of one sequence, if the model reads its last `context` tokens."""
    tokens, targets = batch.tokens[0, -context:].to(model.device), batch.targets[0, -last:].to(model.device)
    nats, _ = score(model, model.hidden(tokens[None])[0, -last:], targets)
    return float(nats.double().sum()) / int((targets != IGNORED).sum())


def overall(buckets: list[PositionBucket]) -> PositionBucket:
    """All buckets merged into one."""
    tokens, nats = sum(b.tokens for b in buckets), sum(b.nats for b in buckets)
    return PositionBucket(buckets[0].first, buckets[-1].last, tokens, nats)


def target_bytes(model: LanguageModel, batch: Batch) -> int:
    """UTF-8 bytes of the text of a batch's targets."""
    return text_bytes(model.tokenizer, batch.targets[batch.targets != IGNORED].tolist())


def held_out(
    model: LanguageModel, *, sequences: int, seq_len: int | None = None, batch: int = 1, bounds: bool = False,
    own: DataConfig | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Batches of the model's validation data, packed as in training: `sequences` in all, fewer in the last batch if
    they are not a multiple of `batch`. bounds: with cu_seqlens, even if data.cross_document_attention is set. own:
    read all of this text, once, instead of the model's validation data."""
    at_least_one(sequences=sequences, seq_len=seq_len, batch=batch)
    data = own or model.run.data
    data = data.model_copy(update={"seq_len": model.context if seq_len is None else seq_len})
    if bounds:
        data = data.model_copy(update={"cross_document_attention": False})
    try:
        opened = build_loader(
            data, seed=model.run.run.seed, batch_sequences=batch, split="train" if own else "validation",
            tokenizer=model.tokenizer,
        )  # fmt: skip
    except DataUsageError as error:
        if own:
            raise
        raise DataUsageError(f"{error}, or read another run's validation text with --data-of RUN") from None
    with opened as loader:
        for number, loaded in enumerate(islice(loader, -(-sequences // batch))):
            yield _first_sequences(loaded, sequences - number * batch)


def _first_sequences(batch: Batch, count: int) -> Batch:
    if count >= len(batch.tokens):
        return batch
    tokens, bounds = batch.tokens[:count], batch.cu_seqlens
    if bounds is not None:
        bounds = bounds[bounds <= tokens.numel()]  # documents end with their sequence
    return replace(batch, tokens=tokens, targets=batch.targets[:count], cu_seqlens=bounds)

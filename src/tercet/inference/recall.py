"""The synthetic recall task: key-value facts hidden in noise, queried at the end. Accuracy by distance.

ab=42;………………………?ab=42;    an answer is right if each of its tokens is the model's top choice, given those before it
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.config.data import SyntheticConfig
from tercet.data.loader import build_loader
from tercet.data.synthetic import ASK, IS, KEY_TOKENS
from tercet.inference.arguments import at_least_one, check_recall
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import logits_in_chunks
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer


@dataclass(frozen=True)
class RecallBucket:
    """Questions whose fact is first … last tokens back."""

    first: int
    last: int
    right: int
    asked: int
    nats: float = 0.0  # mean loss per answer token, summed over questions

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy}


def window_reach(config: ModelConfig) -> int | None:
    """How many tokens back information can travel through windows alone: w - 1 per layer. None if a layer is dense or
    has no window."""
    windows = [kind == "window" or (kind == "nsa" and "window" in config.branches) for kind in config.attention_kinds]
    return config.layers * (config.nsa.window - 1) if all(windows) else None


@dataclass(frozen=True)
class Answer:
    right: bool  # every token is the model's top choice
    nats: float  # mean loss per token


@torch.no_grad()
def score_answers(model: Transformer, documents: Tensor, spans: list[tuple[int, int, int]]) -> list[Answer]:
    """Score tokens first … last-1 of each span (row, first, last)."""
    sizes = [last - first for _, first, last in spans]
    rows = torch.tensor([row for row, first, last in spans for _ in range(first, last)])
    positions = torch.tensor([i for _, first, last in spans for i in range(first, last)])
    device = model.embedding.weight.device
    hidden = model.hidden(documents.to(device))[rows.to(device), (positions - 1).to(device)]
    parts = []
    for logits, expected in logits_in_chunks(model, hidden, documents[rows, positions]):
        logits = logits.cpu()
        parts.append((logits.argmax(-1) == expected, F.cross_entropy(logits, expected, reduction="none")))
    right, nats = (torch.cat(part) for part in zip(*parts, strict=True))
    return [Answer(bool(r.all()), float(n.mean())) for r, n in zip(right.split(sizes), nats.split(sizes), strict=True)]


def recall_by_distance(
    model: LanguageModel,
    *,
    length: int,
    documents: int,
    batch: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[RecallBucket]:
    """Accuracy on held-out documents of `length` tokens, by distance to the fact: 64-127, 128-255, …

    progress: called with the tokens of each forward pass.
    """
    at_least_one(length=length, documents=documents, batch=batch)
    data = model.run.data
    check_recall(data)
    task = data.synthetic.model_copy(update={"length": length, "min_distance": 1})
    data = data.model_copy(update={"source": "synthetic", "seq_len": length, "synthetic": task})
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    nats: dict[int, float] = defaultdict(float)
    with build_loader(
        data, seed=model.run.run.seed, batch_sequences=batch, split="validation", tokenizer=model.tokenizer
    ) as loader:
        for first, loaded in zip(range(0, documents, batch), loader, strict=False):
            tokens = loaded.tokens[: documents - first]
            spans, distances = _questions(tokens, task)
            for distance, answer in zip(distances, score_answers(model, tokens, spans), strict=True):
                counted = counts[distance.bit_length() - 1]
                counted[0] += answer.right
                counted[1] += 1
                nats[distance.bit_length() - 1] += answer.nats
            progress(tokens.numel())
    found = sorted(counts.items())
    return [RecallBucket(1 << i, (2 << i) - 1, right, asked, nats[i]) for i, (right, asked) in found]


def bits_per_byte(buckets: list[RecallBucket]) -> float:
    """Of the answers; their tokens are bytes."""
    return sum(b.nats for b in buckets) / sum(b.asked for b in buckets) / math.log(2)


def _questions(documents: Tensor, task: SyntheticConfig) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The span (row, first, last) of each answer, and its distance from the fact's first value token."""
    spans, distances = [], []
    question = KEY_TOKENS + task.value_tokens + 3  # ?ab=42;
    for row, document in enumerate(documents.tolist()):
        first_question = len(document) - 1 - task.queries * question
        text = bytes(token if token < 256 else 0 for token in document)  # EOS may be larger
        for q in range(task.queries):
            at = first_question + q * question
            assert document[at] == ASK
            value = at + KEY_TOKENS + 2
            fact = text.index(text[at + 1 : value], 0, first_question)
            assert document[fact + KEY_TOKENS] == IS
            spans.append((row, value, value + task.value_tokens))
            distances.append(value - (fact + KEY_TOKENS + 1))
    return spans, distances

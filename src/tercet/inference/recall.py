"""Facts hidden in long documents and asked for at the end: the synthetic recall task, by distance, and a needle in a
haystack, by depth and length. An answer is right if each of its tokens is the model's top choice, given those before.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.config.data import SyntheticConfig
from tercet.data.loader import build_loader
from tercet.data.synthetic import ASK, IS, KEY_TOKENS, KEYS, NOISE, VALUES
from tercet.data.tokenizers import text_bytes
from tercet.errors import UsageError
from tercet.inference.arguments import at_least_one, check_depths, check_recall
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import held_out, logits_in_chunks
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


Style = Literal["auto", "recall", "text"]
_MIN_TEXT_LENGTH = 128  # fits the needle and its question even as bytes
_NAMES = ("harbour", "orchard", "lantern", "glacier", "saddle", "violin", "meadow", "compass")


@dataclass(frozen=True)
class NeedleResult:
    """How often the needle was found, at one length and depth (0 is the beginning, 1 the end)."""

    length: int
    depth: float
    right: int
    asked: int
    nats: float  # mean loss per answer token: distinguishes near misses from guessing
    bits_per_byte: float  # of the answers

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy}


def default_lengths(model: LanguageModel, style: Style = "auto") -> tuple[int, ...]:
    """A quarter, half and all of the model's context, without lengths too short for a needle."""
    shortest = 1 if _resolve_style(model, style) == "recall" else _MIN_TEXT_LENGTH
    lengths = tuple(model.context // n for n in (4, 2, 1))
    return tuple(n for n in lengths if n >= shortest) or lengths[-1:]


def find_needles(
    model: LanguageModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int = 8,
    style: Style = "auto",
    seed: int = 0,
    batch: int = 8,
) -> Iterator[NeedleResult]:
    """Yield one result per length and depth."""
    at_least_one(lengths=len(lengths), trials=trials, batch=batch)
    check_depths(depths)
    style = _resolve_style(model, style)
    generator = random.Random(seed)
    haystack = [] if style == "recall" else _validation_tokens(model, max(lengths) * 4)
    for length in lengths:
        for depth in depths:
            documents = [_document(model, style, length, depth, haystack, generator) for _ in range(trials)]
            answers = []
            for first in range(0, trials, batch):
                part = documents[first : first + batch]
                tokens = torch.tensor([document for document, _ in part])
                spans = [(row, length - answer, length) for row, (_, answer) in enumerate(part)]
                answers += score_answers(model, tokens, spans)
            right, nats = sum(a.right for a in answers), sum(a.nats for a in answers) / trials
            total = sum(a.nats * size for a, (_, size) in zip(answers, documents, strict=True))
            text = sum(text_bytes(model.tokenizer, document[-size:]) for document, size in documents)
            yield NeedleResult(length, depth, right, trials, nats, total / math.log(2) / text)


def _resolve_style(model: LanguageModel, style: Style) -> Style:
    if style != "auto":
        return style
    data = model.run.data
    return "recall" if data.source == "synthetic" and data.synthetic.task == "recall" else "text"


def _document(
    model: LanguageModel, style: Style, length: int, depth: float, haystack: list[int], generator: random.Random
) -> tuple[list[int], int]:
    """Tokens that end with the answer, and the answer's length."""
    if style == "recall":
        values = model.run.data.synthetic.value_tokens
        key = [int(generator.choice(KEYS)) for _ in range(2)]
        value = [int(generator.choice(VALUES)) for _ in range(values)]
        fact, question = [*key, ord("="), *value, ord(";")], [ord("?"), *key, ord("=")]
        filler = [int(generator.choice(NOISE)) for _ in range(max(0, length))]
    else:
        encode = model.tokenizer.encode
        name, number = generator.choice(_NAMES), str(generator.randrange(10_000, 100_000))
        statement = f"\nThe secret number of the {name} is"
        fact, question = encode(f"{statement} {number}.\n"), encode(statement)
        value = encode(f"{statement} {number}")[len(question) :]
        start = generator.randrange(max(1, len(haystack) - length))
        filler = haystack[start : start + length]
    room = length - len(fact) - len(question) - len(value)
    if room < 0:
        needed = length - room
        fix = f"use {needed} or more"
        raise UsageError(f"lengths contains {length}, but a needle and its question take {needed} tokens: {fix}")
    at = round(depth * room)
    return [*filler[:at], *fact, *filler[at:room], *question, *value], len(value)


def _validation_tokens(model: LanguageModel, count: int) -> list[int]:
    tokens: list[int] = []
    end = model.tokenizer.eos_id
    for batch in held_out(model, sequences=1 << 30):
        tokens += [token for token in batch.tokens.flatten().tolist() if token != end]
        if len(tokens) >= count:
            return tokens
    if len(tokens) < count // 4:
        raise UsageError(
            f"the model's data has only {len(tokens)} validation tokens for a haystack of {count // 4}: "
            "use shorter lengths, or --style recall"
        )
    return tokens

"""Needle in a haystack: a fact at some depth of a long text, queried at the end, by depth and length.

recall   noise with facts like ab=42; for models trained on the synthetic recall task
text     validation text of the model's own data, with a sentence that states a number
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tercet.data.synthetic import KEYS, NOISE, VALUES
from tercet.data.tokenizers import text_bytes
from tercet.errors import UsageError
from tercet.inference.arguments import at_least_one, check_depths
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import held_out
from tercet.inference.recall import score_answers

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

"""A needle in a haystack: one fact at a given depth of a long text, asked for at its end; depth × length.

recall   noise and ab=42; as in the synthetic task, for models trained on it
text     held-out text of the model's own data, and a sentence with a number
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from tercet.data.synthetic import KEYS, NOISE, VALUES
from tercet.errors import UsageError
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import held_out
from tercet.inference.recall import judge

Style = Literal["auto", "recall", "text"]
_SHORTEST_TEXT = 128  # tokens that a sentence and its question, as bytes, fit into with room to spare
_NAMES = ("harbour", "orchard", "lantern", "glacier", "saddle", "violin", "meadow", "compass")


@dataclass(frozen=True)
class Found:
    """How often the needle at this depth (0 the beginning, 1 the end) of texts of this length was found."""

    length: int
    depth: float
    right: int
    asked: int
    nats: float  # mean loss per token of the answers: tells guessing from almost knowing where none is right

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accuracy": self.accuracy}


def usual_lengths(model: LanguageModel, style: Style = "auto") -> tuple[int, ...]:
    """A quarter, half and all of the model's context, but for those that are too short for a needle in text."""
    least = 1 if _resolved(model, style) == "recall" else _SHORTEST_TEXT
    lengths = tuple(model.context // n for n in (4, 2, 1))
    return tuple(n for n in lengths if n >= least) or lengths[-1:]


def needle(
    model: LanguageModel,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int = 8,
    style: Style = "auto",
    seed: int = 0,
    batch: int = 8,
) -> Iterator[Found]:
    """One result per length and depth, as they come."""
    for name, value, kept, rule in (
        ("lengths", lengths, bool(lengths), "at least one"),
        ("depths", depths, bool(depths) and all(0 <= d <= 1 for d in depths), "numbers from 0 to 1"),
        ("trials", trials, trials >= 1, "at least 1"),
        ("batch", batch, batch >= 1, "at least 1"),
    ):
        if not kept:
            raise UsageError(f"{name}={value} must be {rule}")
    style = _resolved(model, style)
    generator = random.Random(seed)
    hay = [] if style == "recall" else _held_out_tokens(model, max(lengths) * 4)
    for length in lengths:
        for depth in depths:
            made = [_document(model, style, length, depth, hay, generator) for _ in range(trials)]
            answers = []
            for first in range(0, trials, batch):
                part = made[first : first + batch]
                tokens = torch.tensor([document for document, _ in part])
                spans = [(row, length - answer, length) for row, (_, answer) in enumerate(part)]
                answers += judge(model, tokens, spans)
            right, nats = sum(a.right for a in answers), sum(a.nats for a in answers) / trials
            yield Found(length, depth, right, trials, nats)


def _resolved(model: LanguageModel, style: Style) -> Style:
    if style != "auto":
        return style
    data = model.run.data
    return "recall" if data.source == "synthetic" and data.synthetic.task == "recall" else "text"


def _document(
    model: LanguageModel, style: Style, length: int, depth: float, hay: list[int], generator: random.Random
) -> tuple[list[int], int]:
    """Tokens that end with the answer, and how many of them the answer is."""
    if style == "recall":
        values = model.run.data.synthetic.value_tokens
        key = [int(generator.choice(KEYS)) for _ in range(2)]
        value = [int(generator.choice(VALUES)) for _ in range(values)]
        fact, question = [*key, ord("="), *value, ord(";")], [ord("?"), *key, ord("=")]
        straw = [int(generator.choice(NOISE)) for _ in range(max(0, length))]
    else:
        encode = model.tokenizer.encode
        name, number = generator.choice(_NAMES), str(generator.randrange(10_000, 100_000))
        said = f"\nThe secret number of the {name} is"
        fact, question = encode(f"{said} {number}.\n"), encode(said)
        value = encode(f"{said} {number}")[len(question) :]
        start = generator.randrange(max(1, len(hay) - length))
        straw = hay[start : start + length]
    room = length - len(fact) - len(question) - len(value)
    if room < 0:
        least = length - room
        raise UsageError(f"lengths holds {length}: a needle and its question alone take {least} tokens, give more")
    at = round(depth * room)
    return [*straw[:at], *fact, *straw[at:room], *question, *value], len(value)


def _held_out_tokens(model: LanguageModel, count: int) -> list[int]:
    tokens: list[int] = []
    end = model.tokenizer.eos_id
    for batch in held_out(model, sequences=1 << 30):
        tokens += [token for token in batch.tokens.flatten().tolist() if token != end]
        if len(tokens) >= count:
            return tokens
    if len(tokens) < count // 4:
        raise UsageError(
            f"the model's data has {len(tokens)} held-out tokens, and a haystack of {count // 4} was asked for: "
            "shorter lengths, or --style recall"
        )
    return tokens

"""RULER's synthetic tasks (arXiv 2404.06654) with its parameters, in our own wording, for any tokenizer and length.

A question is a text of at most `length` tokens that ends with the answers. One forward pass scores all of them: a token
is right if it is the model's most likely one given the correct text before it. For a single answer this equals greedy
decoding; of several answers, each is judged after the correct previous ones.

Keys, values and wordings are held out from training (tercet.data.exercises).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from tercet.data.exercises import (
    HELD_OUT_WORDINGS,
    HELD_OUT_WORDS,
    TRAINING_WORDINGS,
    Draws,
    Pair,
    distinct,
    ends_line,
    insert,
    line_starts,
    list_text,
)
from tercet.errors import UsageError
from tercet.inference.arguments import RulerTask
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import held_out, score
from tercet.model.transformer import Transformer
from tercet.terminal import table

Wording = Literal["held-out", "training"]
TASKS = get_args(RulerTask)
SINGLE = TASKS[:3]  # with one fact, whose depth is reported
NEEDLES = 4  # keys, values or queries of the tasks with several
HOPS = 4  # of vt: one value, four copies
COMMON_WORDS = 10  # of cwe
COMMON, UNCOMMON = 30, 3  # how often cwe's words appear
SHORT = 4096  # below it, cwe's words appear less often
SHORT_COMMON, SHORT_UNCOMMON = 6, 1
MOST_WORDS = 6000  # of 8,331 held-out made-up words
MOST_PAIRED = 1 << 18  # tokens of a text of facts whose keys are pairs of words: there are 25,921 held-out ones
ALPHA = 2.0  # of fwe: the word of rank k appears in proportion to k^-2
ZETA = math.pi**2 / 6  # of ALPHA
TOKENS_PER_PASS = 1 << 16
TEXTS = 16  # lengths of validation text to draw from
Z = 1.959964  # 95%


class Question(NamedTuple):
    tokens: np.ndarray
    answers: list[tuple[int, int]]  # first and last + 1 token of each


@dataclass(frozen=True)
class RulerResult:
    """Questions of one task and length, at one depth or all."""

    length: int
    task: str
    depth: float | None  # None: all
    questions: int
    right: int  # questions with every answer right
    score: float  # mean share of right answers per question, as RULER scores
    nats: float  # mean loss per answer token

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the score; wider than needed where questions have several answers."""
        n, centre = self.questions, self.score + Z * Z / 2 / self.questions
        spread = Z * math.sqrt(self.score * (1 - self.score) / n + Z * Z / 4 / n / n)
        return max(0.0, (centre - spread) / (1 + Z * Z / n)), min(1.0, (centre + spread) / (1 + Z * Z / n))

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {**asdict(self), "low": low, "high": high}


@torch.no_grad()
def score_answers(model: Transformer, documents: Tensor, spans: list[tuple[int, int, int]]) -> list[tuple[bool, float]]:
    """Of tokens first … last-1 of each span (row, first, last): whether each is the model's top choice, mean loss."""
    sizes = [last - first for _, first, last in spans]
    rows = torch.tensor([row for row, first, last in spans for _ in range(first, last)])
    positions = torch.tensor([i for _, first, last in spans for i in range(first, last)])
    device = model.embedding.weight.device
    hidden = model.hidden(documents.to(device))[rows.to(device), (positions - 1).to(device)]
    nats, right = score(model, hidden, documents[rows, positions].to(device))
    return [(bool(r.all()), float(n.mean())) for r, n in zip(right.split(sizes), nats.split(sizes), strict=True)]


class _DoesNotFitError(Exception):
    """A question is longer than allowed."""


def ask(
    model: LanguageModel,
    *,
    lengths: Sequence[int],
    tasks: Sequence[str] = TASKS,
    questions: int = 400,
    depths: int = 10,
    wording: Wording = "held-out",
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[list[RulerResult] | str]:
    """For each length and task: the result over all questions, then those of each depth; or why it cannot be asked.

    progress: called with the tokens of each forward pass.
    """
    writer = QuestionWriter(model, wording, max(lengths), seed)
    for length in lengths:
        for task in tasks:
            try:
                yield _measure(model, writer, length, task, questions, depths, progress)
            except _DoesNotFitError:
                progress(length * questions)
                yield f"{task} does not fit in {length:,} tokens: give longer --lengths"


def _measure(
    model: LanguageModel,
    writer: QuestionWriter,
    length: int,
    task: str,
    questions: int,
    depths: int,
    progress: Callable[[int], None],
) -> list[RulerResult]:
    per_pass = max(1, TOKENS_PER_PASS // length)
    depths = min(depths, questions)  # so that a few questions reach from the beginning to the end, too
    grid = [i / (depths - 1) if depths > 1 else 0.5 for i in range(depths)] if task in SINGLE else [None]
    scored: list[tuple[float | None, float, float]] = []  # of each question: depth, share of right answers, nats
    for first in range(0, questions, per_pass):
        numbers = range(first, min(first + per_pass, questions))
        places = [grid[number % len(grid)] for number in numbers]
        asked = [writer.question(task, length, n, place) for n, place in zip(numbers, places, strict=True)]
        tokens = torch.full((len(asked), length), model.tokenizer.eos_id)  # padding after the answers changes nothing
        for row, question in enumerate(asked):
            tokens[row, : len(question.tokens)] = torch.from_numpy(question.tokens.astype(np.int64))
        spans = [(row, a, b) for row, question in enumerate(asked) for a, b in question.answers]
        found = iter(score_answers(model, tokens, spans))
        for place, question in zip(places, asked, strict=True):
            answers = [next(found) for _ in question.answers]
            sizes = [b - a for a, b in question.answers]
            share = sum(right for right, _ in answers) / len(answers)
            nats = sum(loss * n for (_, loss), n in zip(answers, sizes, strict=True)) / sum(sizes)
            scored.append((place, share, nats))
        progress(tokens.numel())
    results = []
    for depth in dict.fromkeys([None, *grid]):  # all of them, then each depth
        _, shares, losses = zip(*(s for s in scored if depth in (None, s[0])), strict=True)
        count, right = len(shares), sum(share == 1 for share in shares)
        results.append(RulerResult(length, task, depth, count, right, sum(shares) / count, sum(losses) / count))
    return results


def table_of(results: Sequence[RulerResult]) -> str:
    """Tasks × lengths; below a task with a single fact, its depths."""
    rows: dict[tuple[str, float | None], dict[str, Any]] = {}
    for r in sorted(results, key=lambda r: (TASKS.index(r.task), r.depth is not None, r.depth or 0.0, r.length)):
        label = r.task if r.depth is None else f"at {r.depth:.0%}"
        low, high = (100 * end for end in r.interval)
        rows.setdefault((r.task, r.depth), {"task": label})[str(r.length)] = (
            f"{100 * r.score:.1f} [{low:.1f} {high:.1f}]"
        )
    lengths = sorted({r.length for r in results})
    return table(list(rows.values()), {"task": ("task", str), **{str(n): (f"{n:,}", str) for n in lengths}})


class QuestionWriter:
    """Questions by seed, task, length and number: the same for every model with this tokenizer and validation text."""

    def __init__(self, model: LanguageModel, wording: Wording, longest: int, seed: int) -> None:
        self._tokenizer, self._seed = model.tokenizer, seed
        self._words = HELD_OUT_WORDS
        self._wordings = HELD_OUT_WORDINGS if wording == "held-out" else TRAINING_WORDINGS
        self._ends_line, self._newline = ends_line(self._tokenizer), self._tokenizer.encode("\n")
        self._text = _validation_text(model, longest)
        noise = self._encode(" ".join(self._wordings.filler) + "\n")
        self._noise = np.tile(noise, longest // len(noise) + 1)
        self._entries: dict[tuple[str, int], int] = {}  # list entries that fit, by wording and length

    def question(self, task: str, length: int, number: int, depth: float | None = None) -> Question:
        """depth: of the fact, for the tasks with a single one; None: anywhere."""
        draws = Draws(self._seed, TASKS.index(task), length, number)
        if task == "vt":
            return self._chain(draws, length)
        if task in ("cwe", "fwe"):
            return self._word_list(draws.u64(), length, ranked=task == "fwe")
        if task in ("niah_multikey_2", "niah_multikey_3"):
            return self._among_needles(draws, length, uuids=task.endswith("3"))
        several = {"niah_multikey_1": "one", "niah_multivalue": "values", "niah_multiquery": "keys"}.get(task, "")
        start = draws.below(len(self._text) - length + 1)
        filler = self._noise if task == "niah_single_1" else self._text[start : start + length]
        return self._needles(draws, length, filler, several, uuids=task == "niah_single_3", depth=depth)

    def _needles(
        self, draws: Draws, length: int, filler: np.ndarray, several: str, *, uuids: bool, depth: float | None
    ) -> Question:
        """Facts in a filler. several: "" (one fact), one of several keys, all values of one key, or all keys."""
        words, what, pair = self._words, draws.choice(self._wordings.whats), draws.choice(self._wordings.pairs)
        count = NEEDLES if several else 1
        names = distinct(draws, 1 if several == "values" else count, words.pair) * count
        values = distinct(draws, count, words.uuid if uuids else words.number)
        facts = [_fact(pair, what, name, value) for name, value in zip(names[:count], values, strict=True)]
        if several == "values":
            question, end = draws.choice(self._wordings.values)
            asked = self._question(question.format(what=what, key=names[0]), values, end)
        elif several == "keys":
            question, end = draws.choice(self._wordings.keys)
            order = draws.shuffled(range(count))
            keys = ", ".join(names[i] for i in order)
            asked = self._question(question.format(what=what, keys=keys), [values[i] for i in order], end)
        else:
            one = draws.below(count)
            asked = self._question(pair.ask.format(what=what, key=names[one]), [values[one]], pair.end)
        places = [depth] if depth is not None else sorted(draws.uniform() for _ in facts)
        return self._in_filler(filler, places, facts, asked, length)

    def _chain(self, draws: Draws, length: int) -> Question:
        chain = draws.choice(self._wordings.chains)
        names = distinct(draws, HOPS + 1, lambda d: self._words.letters(d, 5).upper())
        value = self._words.number(draws, 5)
        facts = [chain.value.format(name=names[0], value=value)]
        facts += [chain.copy.format(name=b, source=a) for a, b in pairwise(names)]
        asked = self._question(chain.ask.format(value=value), names, chain.end)
        return self._in_filler(self._noise, sorted(draws.uniform() for _ in facts), facts, asked, length)

    def _among_needles(self, draws: Draws, length: int, *, uuids: bool) -> Question:
        """A text of facts only."""
        words, what, pair = self._words, draws.choice(self._wordings.whats), draws.choice(self._wordings.pairs)
        draw = words.uuid if uuids else words.number
        key = words.uuid if uuids else words.pair if length <= MOST_PAIRED else _triple
        name, value = key(draws), draw(draws)
        asked = self._question(pair.ask.format(what=what, key=name), [value], pair.end)
        fact = self._encode(_fact(pair, what, name, value) + "\n")
        room = length - len(asked.tokens) - len(fact)
        others = distinct(draws, max(2, room // len(fact)), key)
        lines = self._encode_all(_fact(pair, what, other, draw(draws)) + "\n" for other in others if other != name)
        fits = int(np.searchsorted(np.cumsum([len(line) for line in lines]), room, side="right"))
        if fits < 1:
            raise _DoesNotFitError
        lines = lines[:fits]
        lines.insert(draws.below(fits + 1), fact)
        return self._join(np.concatenate(lines), asked)

    def _word_list(self, key: int, length: int, *, ranked: bool) -> Question:
        """A list of as many entries as fit."""
        wording = Draws(key).choice(self._wordings.ranked_lists if ranked else self._wordings.lists)
        make = self._ranked_words if ranked else self._common_words
        size = (wording.title, length)
        entries = self._entries.get(size, length)
        while True:
            draws = Draws(key, 1)
            words, counts, answers = make(draws, entries, length)
            text, order = list_text(draws, wording, words, counts)
            answers = answers if ranked else sorted(answers, key=order.index)
            asked = self._question(wording.ask.format(count=len(answers)), answers, wording.end)
            tokens = self._encode(text)
            if (excess := len(tokens) + len(asked.tokens) - length) <= 0:
                self._entries[size] = entries
                return self._join(tokens, asked)
            entries -= max(1, excess * entries // len(tokens))

    def _common_words(self, draws: Draws, entries: int, length: int) -> tuple[list[str], list[int], list[str]]:
        common, uncommon = (COMMON, UNCOMMON) if length >= SHORT else (SHORT_COMMON, SHORT_UNCOMMON)
        others = (entries - COMMON_WORDS * common) // uncommon
        if others < 1:
            raise _DoesNotFitError
        words = distinct(draws, COMMON_WORDS + min(others, MOST_WORDS), self._words.coined)
        return words, [common] * COMMON_WORDS + [uncommon] * (len(words) - COMMON_WORDS), words[:COMMON_WORDS]

    def _ranked_words(self, draws: Draws, entries: int, length: int) -> tuple[list[str], list[int], list[str]]:
        size = max(5, length // 50)
        counts = [int(entries * rank**-ALPHA / ZETA) for rank in range(1, size + 1)]
        if counts[3] <= counts[4]:
            raise _DoesNotFitError
        words = distinct(draws, size, lambda d: self._words.letters(d, 6))
        words[0] = "..."  # RULER's noise
        return words, counts, words[1:4]

    def _in_filler(
        self, filler: np.ndarray, places: Sequence[float], facts: Sequence[str], asked: Question, length: int
    ) -> Question:
        lines = self._encode_all(fact + "\n" for fact in facts)
        room = length - len(asked.tokens) - sum(map(len, lines))
        if room < 0:
            raise _DoesNotFitError
        filler = filler[:room]
        breaks = np.flatnonzero(self._ends_line[filler]) + 1
        at = line_starts(breaks, np.array([round(place * room) for place in places], dtype=int))
        return self._join(insert(filler, at, lines), asked)

    def _question(self, prompt: str, answers: Sequence[str], end: str) -> Question:
        """The question on a line of its own, with the places of its answers."""
        text = f"\n{prompt}"
        tokens = self._encode(f"{text}{', '.join(answers)}{end}\n").tolist()
        spans = []
        for answer in answers:
            first = _shared(tokens, self._encode(text).tolist())
            text += answer
            whole = self._encode(text).tolist()
            last = _shared(tokens, whole)
            spans.append((first, last + (last < len(whole))))  # a token may hold the answer's end and what follows
            text += ", "
        return Question(np.array(tokens), spans)

    def _join(self, text: np.ndarray, asked: Question) -> Question:
        if text[-len(self._newline) :].tolist() == self._newline:  # the question brings its own
            text = text[: -len(self._newline)]
        spans = [(a + len(text), b + len(text)) for a, b in asked.answers]
        return Question(np.concatenate([text, asked.tokens]), spans)

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text), dtype=np.int64)

    def _encode_all(self, texts: Iterator[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_documents([text.encode() for text in texts])
        return [tokens[:-1].astype(np.int64) for tokens in encoded]  # without EOS


def _fact(pair: Pair, what: str, key: str, value: str) -> str:
    return pair.fact.format(what=what, key=key, value=value)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _triple(draws: Draws) -> str:
    return f"{HELD_OUT_WORDS.pair(draws)}-{HELD_OUT_WORDS.word(draws)}"


def _validation_text(model: LanguageModel, longest: int) -> np.ndarray:
    """Validation documents, joined without EOS."""
    batches = held_out(model, sequences=TEXTS, seq_len=longest)
    text = np.concatenate([batch.tokens.flatten().numpy() for batch in batches])
    text = text[text != model.tokenizer.eos_id]  # padding too
    if len(text) < longest:
        raise UsageError(
            f"the run's data has only {len(text):,} validation tokens for texts of {longest:,}: use shorter "
            "--lengths, or --data-of RUN for the text of a run with more"
        )
    return text

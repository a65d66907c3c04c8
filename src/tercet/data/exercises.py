"""Retrieval exercises in the training text (data.retrieval): facts, and later questions whose answers are those facts.

Some groups of consecutive documents are joined into one. When such a document is packed, each sequence's share of it
becomes a separate exercise: lines with facts and questions are inserted between the lines of the text, and every
question comes after its facts in the same sequence. So no answer is separated from its fact, and distances range from a
few tokens to the whole sequence. No text is dropped or repeated, and everything counts in the loss. Of a very long
document, some of the sequences become exercises. What an exercise contains depends on the seed, the number of its group
and the position in it only.

Training uses TRAINING_WORDS and TRAINING_WORDINGS, evaluation (`tercet eval ruler`) HELD_OUT_WORDS and
HELD_OUT_WORDINGS (with --wording training, those of training); nothing is in both. Words are lists. A number or made-up
string stands for an integer, and is held out if that integer is 3 modulo 7: training never draws one of those,
evaluation no others.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tercet.config.data import SHORTEST_EXERCISE
from tercet.data.stream import Cursor, Document, DocumentGenerator, DocumentStream, ExercisePart, key, random_u64
from tercet.data.tokenizers import ByteTokenizer, Tokenizer

SHORTEST_GROUP, LONGEST_GROUP = 0.5, 3.0  # of joined documents, in sequences
LONG_DOCUMENT = 1 << 19  # tokens; a longer one, plain or joined as a whole, would leave the share far off for long
DENSEST, DENSE = 96, 384  # tokens per line in one half of the exercises; the others have from one line to as many
LINE_SHARE = 2  # lines take at most one half of an exercise
LIST_SHARE = 8  # a word list takes at most about this part
LINE_REACH = 512  # tokens back to look for the start of a line
VERSION = 5  # part of a run's data identity: change it when the same key gives other lines
MODULUS, REMAINDER = 7, 3  # of held-out integers
_CONSONANTS, _VOWELS, _ENDS = "bcdfghjklmnprstvwz", "aeiouy", "gkvxz"  # no word of the lists ends so
_BLOCK = 256

T = TypeVar("T")


class Draws:
    """Random choices as a function of a key: the n-th draw depends on the key and n only."""

    def __init__(self, *parts: int) -> None:
        self._key, self._blocks = key(*parts), 0
        self._values: list[int] = []

    def u64(self) -> int:
        if not self._values:
            self._values = random_u64(key(self._key, self._blocks), _BLOCK).tolist()
            self._blocks += 1
        return self._values.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound); bound may exceed 64 bits."""
        value, size = self.u64(), 1 << 64
        while size < bound << 16:
            value, size = value << 64 | self.u64(), size << 64
        return value % bound

    def uniform(self) -> float:
        return (self.u64() >> 11) * 2.0**-53

    def choice(self, options: Sequence[T]) -> T:
        return options[self.u64() % len(options)]

    def log_uniform(self, low: float, high: float) -> float:
        """A number in [low, high), each doubling equally likely."""
        return low * (high / low) ** self.uniform()

    def shuffled(self, items: Sequence[T]) -> list[T]:
        result = list(items)
        for i in range(len(result) - 1, 0, -1):
            j = self.u64() % (i + 1)
            result[i], result[j] = result[j], result[i]
        return result


@dataclass(frozen=True)
class Words:
    """Where keys and values come from; every method draws one."""

    words: tuple[str, ...]
    held_out: bool

    def integer(self, draws: Draws, low: int, high: int) -> int:
        """An integer in [low, high) on this side of the split."""
        value = low + draws.below(high - low - MODULUS)
        if self.held_out:
            return value + (REMAINDER - value) % MODULUS
        return value + (value % MODULUS == REMAINDER)

    def word(self, draws: Draws) -> str:
        return draws.choice(self.words)

    def pair(self, draws: Draws, joint: str = "-") -> str:
        return f"{draws.choice(self.words)}{joint}{draws.choice(self.words)}"

    def number(self, draws: Draws, digits: int = 7) -> str:
        return str(self.integer(draws, 10 ** (digits - 1), 10**digits))

    def hexadecimal(self, draws: Draws, digits: int) -> str:
        return f"{self.integer(draws, 0, 16**digits):0{digits}x}"

    def uuid(self, draws: Draws) -> str:
        text = self.hexadecimal(draws, 32)
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def letters(self, draws: Draws, count: int) -> str:
        return self._spell(draws, [ascii_lowercase] * count)

    def coined(self, draws: Draws) -> str:
        """A pronounceable made-up word of five letters."""
        return self._spell(draws, [_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _ENDS])

    def _spell(self, draws: Draws, alphabets: Sequence[str]) -> str:
        """An integer as a string with one letter of each alphabet."""
        value, text = self.integer(draws, 0, math.prod(map(len, alphabets))), ""
        for letters in reversed(alphabets):
            value, letter = divmod(value, len(letters))
            text = letters[letter] + text
        return text

    def key(self, draws: Draws) -> str:
        """A key of any kind."""
        kind = draws.below(8)
        if kind < 3:
            return self.pair(draws)
        if kind < 5:
            return self.pair(draws, "_")
        if kind == 5:
            return self.coined(draws)
        return self.hexadecimal(draws, 8) if kind == 6 else self.uuid(draws)

    def value(self, draws: Draws) -> str:
        """A value of any kind."""
        kind = draws.below(8)
        if kind < 4:
            return self.number(draws, 4 + draws.below(6))
        if kind == 4:
            return self.hexadecimal(draws, draws.choice((6, 8, 12, 16)))
        if kind == 5:
            return self.uuid(draws)
        return self.word(draws) if kind == 6 else self.pair(draws)


class Pair(NamedTuple):
    """One fact about a key, and the question for it: `ask`, the answer, `end`. {what} is the name of the property."""

    fact: str
    ask: str
    end: str = ""  # without fields


class Chain(NamedTuple):
    """A variable with a value, copies of it, and the question which variables have that value."""

    value: str
    copy: str
    ask: str
    end: str = ""


class WordList(NamedTuple):
    """A list of words, and the question for the most common ones."""

    title: str
    entry: str  # {number}, {word}
    joint: str
    ask: str  # {count}
    end: str = ""


@dataclass(frozen=True)
class Wordings:
    """How facts and questions are phrased."""

    whats: tuple[str, ...]
    pairs: tuple[Pair, ...]
    values: tuple[tuple[str, str], ...]  # question for all values of {key}, and what follows the answers
    keys: tuple[tuple[str, str], ...]  # question for the values of several {keys}
    chains: tuple[Chain, ...]
    lists: tuple[WordList, ...]  # the answer is in the order of first appearance
    ranked_lists: tuple[WordList, ...]  # the answer is in the order of frequency
    filler: tuple[str, ...]  # sentences without information, for repeated filler

    @classmethod
    def of(cls, table: dict[str, Any]) -> Wordings:
        """From exercises.toml."""
        kinds = {"pairs": Pair, "chains": Chain, "lists": WordList, "ranked_lists": WordList}
        rows: dict[str, Any] = {name: tuple(kinds[name](*row) for row in table[name]) for name in kinds}
        pairs: dict[str, Any] = {
            name: tuple((question, end) for question, end in table[name]) for name in ("values", "keys")
        }
        return cls(tuple(table["whats"]), filler=tuple(table["filler"]), **rows, **pairs)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TRAINING_WORDS = Words(tuple(_TABLES["training"]["words"].split()), held_out=False)
HELD_OUT_WORDS = Words(tuple(_TABLES["held_out"]["words"].split()), held_out=True)
TRAINING_WORDINGS, HELD_OUT_WORDINGS = Wordings.of(_TABLES["training"]), Wordings.of(_TABLES["held_out"])
_W, _P = TRAINING_WORDS, TRAINING_WORDINGS


class ExerciseStream:
    """A stream with `share` of its text in joined documents that become exercises.

    The cursor is that of the last document read, with `retrieval`: tokens read, tokens joined, groups so far, and the
    length of the next group (0: the next document is plain text). The length is part of the cursor because it depends
    on the sequence length, which may change between saving and resuming.
    """

    def __init__(self, stream: DocumentStream, share: float, seq_len: int, tokenizer: Tokenizer, seed: int) -> None:
        self._stream, self._share, self._seq_len, self._seed = stream, share, seq_len, seed
        self.notes = stream.notes
        self._writer = ExerciseWriter(tokenizer)
        self._eos = tokenizer.eos_id
        self._newline = np.array(tokenizer.encode("\n"), dtype=tokenizer.dtype)

    @property
    def identity(self) -> dict[str, Any]:
        return {**self._stream.identity, "data.retrieval": self._share, "data.retrieval_version": VERSION}

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        counts: dict[str, int] = dict.fromkeys(("read", "joined", "groups", "next"), 0)
        counts |= cursor["retrieval"] if cursor else {}
        source = self._stream.documents(cursor)
        pending: Document | None = None
        try:
            while (document := pending or next(source, None)) is not None:
                pending, group, length = None, [document], len(document.tokens)
                stream = key(self._seed, counts["groups"], VERSION)
                if length > LONG_DOCUMENT:
                    counts["read"] += length
                    counts["joined"] += round(self._share * length)
                    counts["groups"] += 1
                    after = {**document.cursor, "retrieval": dict(counts)}
                    segment = partial(self._writer.maybe_segment, document.tokens, document.loss, stream, self._share)
                    yield document._replace(cursor=after, segment=segment)
                    continue
                while length < counts["next"] and (following := next(source, None)) is not None:
                    if len(following.tokens) > LONG_DOCUMENT:
                        pending = following
                        break
                    group.append(following)
                    length += len(following.tokens)
                counts["read"] += length
                is_exercise = counts["next"] > 0
                if is_exercise:
                    counts["joined"] += length
                    counts["groups"] += 1
                due = counts["joined"] < self._share * counts["read"]
                counts["next"] = self._group_length(counts["groups"]) if due else 0
                after = {**group[-1].cursor, "retrieval": dict(counts)}
                yield self._join(group, stream, after) if is_exercise else document._replace(cursor=after)
        finally:
            source.close()

    def _group_length(self, number: int) -> int:
        sequences = SHORTEST_GROUP + (LONGEST_GROUP - SHORTEST_GROUP) * Draws(self._seed, number).uniform()
        return max(1, int(sequences * self._seq_len))

    def _join(self, group: list[Document], stream: int, after: Cursor) -> Document:
        """One document: a newline instead of EOS between the parts."""
        tokens, loss = [], []
        masked = any(document.loss is not None for document in group)
        for document in group:
            ends = document is not group[-1] and document.tokens[-1] == self._eos
            own = document.tokens[:-1] if ends else document.tokens
            tokens.append(own)
            mask = np.ones(len(document.tokens), dtype=bool) if document.loss is None else document.loss
            loss.append(mask[: len(own)])
            if document is not group[-1]:
                tokens.append(self._newline)
                loss.append(np.ones(len(self._newline), dtype=bool))
        joined, counted = np.concatenate(tokens), np.concatenate(loss) if masked else None
        return Document(joined, counted, after, partial(self._writer.segment, joined, counted, stream))


class ExerciseWriter:
    """Puts lines with facts and questions into a document's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ends_line = tokenizer, ends_line(tokenizer)
        self._bytes = isinstance(tokenizer, ByteTokenizer)

    def maybe_segment(
        self, tokens: np.ndarray, loss: np.ndarray | None, stream: int, share: float, offset: int, room: int
    ) -> ExercisePart:
        """`segment` with probability `share`, else plain text: for documents of many sequences."""
        if Draws(stream, offset, 0).uniform() < share:
            return self.segment(tokens, loss, stream, offset, room)
        return _plain(tokens, loss, offset, room)

    def segment(self, tokens: np.ndarray, loss: np.ndarray | None, stream: int, offset: int, room: int) -> ExercisePart:
        """The exercise that starts at `offset` of the document and takes at most `room` tokens."""
        text = tokens[offset : offset + room + 1]  # one more: the last token's target
        size = min(room, len(tokens) - offset)
        if size < SHORTEST_EXERCISE:
            return _plain(tokens, loss, offset, room)
        breaks = np.flatnonzero(self._ends_line[text]) + 1
        lead = "" if len(breaks) * LINE_REACH >= size else "\n"  # for text with few line breaks
        placed = self._encode(write_lines(Draws(stream, offset), size), lead, size // LINE_SHARE)
        lines = [line for _, line in placed]
        added = sum(map(len, lines))
        used = min(room - added, len(tokens) - offset)
        text = text[: used + 1]
        end = used - 1 if offset + used == len(tokens) else used  # the last token of a document is EOS: keep it last
        places = np.array([round(at * end) for at, _ in placed], dtype=int)
        if not lead:
            places = line_starts(breaks[breaks <= end], places)
        if self._bytes:
            places = character_starts(text, places)
        mask = None
        if loss is not None:
            mask = insert(loss[offset : offset + used + 1], places, [np.ones(len(line), dtype=bool) for line in lines])
        return ExercisePart(insert(text, places, lines), mask, used + added, used)

    def _encode(self, items: list[list[Line]], lead: str, budget: int) -> list[tuple[float, np.ndarray]]:
        """The lines of the first items that take at most `budget` tokens together, in order of position."""
        texts = [f"{lead if line.at else ''}{line.text}\n".encode() for item in items for line in item]
        encoded = iter(self._tokenizer.encode_documents(texts))
        chosen: list[tuple[float, np.ndarray]] = []
        for item in items:
            lines = [(line.at, next(encoded)[:-1]) for line in item]  # without EOS
            budget -= sum(len(line) for _, line in lines)
            if budget < 0:
                break
            chosen += lines
        return sorted(chosen, key=lambda line: line[0])  # stable: a question stays after its facts


def _plain(tokens: np.ndarray, loss: np.ndarray | None, offset: int, room: int) -> ExercisePart:
    here, size = slice(offset, offset + room + 1), min(room, len(tokens) - offset)
    return ExercisePart(tokens[here], None if loss is None else loss[here], size, size)


def ends_line(tokenizer: Tokenizer) -> np.ndarray:
    """[vocabulary] bool: the tokens whose text ends with a newline."""
    return np.array([tokenizer.decode([token]).endswith("\n") for token in range(tokenizer.vocab_size)], dtype=bool)


def line_starts(breaks: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Each place, moved back to the start of its line if that is near. breaks: where lines start after the first."""
    starts = np.concatenate([[0], breaks])
    nearest = starts[np.searchsorted(starts, places, side="right") - 1]
    return np.where(places - nearest <= LINE_REACH, nearest, places)


def character_starts(text: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Each place in UTF-8 bytes, moved back to the start of its character."""
    for _ in range(3):  # a character has up to three bytes 10xxxxxx after its first
        places = np.maximum(places - ((text[places] & 0xC0) == 0x80), 0)
    return places


def insert(text: np.ndarray, places: np.ndarray, lines: Sequence[np.ndarray]) -> np.ndarray:
    """The text with each line put in before its place; places ascend."""
    parts, last = [], 0
    for place, line in zip(places.tolist(), lines, strict=True):
        parts += [text[last:place], line]
        last = place
    return np.concatenate([*parts, text[last:]])


class Line(NamedTuple):
    at: float  # position in the exercise: 0 is its start, 1 its end
    text: str


class Style(NamedTuple):
    """How a fact and the question for it are worded."""

    pair: Pair
    what: str

    def fact(self, at: float, name: str, value: str) -> Line:
        return Line(at, self.pair.fact.format(what=self.what, key=name, value=value))


def write_lines(draws: Draws, size: int) -> list[list[Line]]:
    """Facts and questions for an exercise of about `size` tokens; each item is complete in itself."""
    dense = draws.below(2)
    count = int(size / draws.log_uniform(DENSEST, DENSE) if dense else draws.log_uniform(1, max(2, size / DENSEST)))
    common = draws.choice(_P.pairs) if draws.below(2) else None  # one wording for all: only the keys differ
    what = draws.choice(_P.whats)
    items = [] if draws.below(4) else [_word_list(draws, size)]
    while count > 0:
        family = draws.below(15)
        if family == 0:
            items.append(_chain(draws, size))
        else:
            style = Style(common or draws.choice(_P.pairs), what)
            one = family >= 5
            items.append(_one_value(draws, size, style) if one else _several(draws, size, style, one_key=family < 3))
        count -= len(items[-1])
    return items


def _fact_at(draws: Draws) -> float:
    """A place for a fact: the start and the end are as likely as any tenth of the text."""
    return min(1.0, max(0.0, 1.2 * draws.uniform() - 0.1))


def _question_at(draws: Draws, fact: float, size: int) -> float:
    """A place after a fact: the end, anywhere, or near."""
    kind = draws.below(4)
    if kind < 2:
        return 1.0
    if kind == 2:
        return fact + (1 - fact) * draws.uniform()
    return min(1.0, fact + draws.log_uniform(32 / size, 1))


def _one_value(draws: Draws, size: int, style: Style) -> list[Line]:
    name, value, at = _W.key(draws), _W.value(draws), _fact_at(draws)
    lines = [style.fact(at, name, value)]
    if draws.below(4):  # the others are distractors
        ask = style.pair.ask.format(what=style.what, key=name)
        lines.append(Line(_question_at(draws, at, size), f"{ask}{value}{style.pair.end}"))
    return lines


def _several(draws: Draws, size: int, style: Style, *, one_key: bool) -> list[Line]:
    """Several values of one key, asked for in the order of appearance, or several keys, asked for in another order."""
    places = [_fact_at(draws) for _ in range(2 + draws.below(3))]
    places = sorted(places) if one_key else places
    names = [_W.key(draws)] * len(places) if one_key else distinct(draws, len(places), _W.key)
    values = distinct(draws, len(places), _W.value)
    lines = [style.fact(at, name, value) for at, name, value in zip(places, names, values, strict=True)]
    ask, end = draws.choice(_P.values if one_key else _P.keys)
    question = ask.format(what=style.what, key=names[0], keys=", ".join(names))
    return [*lines, Line(_question_at(draws, max(places), size), f"{question}{', '.join(values)}{end}")]


def _chain(draws: Draws, size: int) -> list[Line]:
    """A variable and copies of copies of it, asked for in the order of appearance."""
    chain = draws.choice(_P.chains)
    places = sorted(_fact_at(draws) for _ in range(2 + draws.below(4)))
    upper = draws.below(2)
    names = distinct(draws, len(places), lambda d: _W.letters(d, 5).upper() if upper else _W.pair(d, "_"))
    value = _W.number(draws, 5)
    lines = [Line(places[0], chain.value.format(name=names[0], value=value))]
    for at, name, source in zip(places[1:], names[1:], names, strict=False):
        lines.append(Line(at, chain.copy.format(name=name, source=source)))
    text = f"{chain.ask.format(value=value)}{', '.join(names)}{chain.end}"
    return [*lines, Line(_question_at(draws, places[-1], size), text)]


def _word_list(draws: Draws, size: int) -> list[Line]:
    """A list in which some words are more common than others, and the question which."""
    room = max(8, size // LIST_SHARE // 10)  # entries
    ranked = draws.below(2)
    if ranked:
        wording = draws.choice(_P.ranked_lists)
        words = distinct(draws, room, lambda d: _W.letters(d, 6))
        counts = [int(room / rank**2 / 1.6449) for rank in range(1, len(words) + 1)]
        words[0], top = "...", [word for word, n in zip(words, counts, strict=True) if n > 1][1:4]
    else:
        wording = draws.choice(_P.lists)
        common = 1 + draws.below(min(10, room // 8))
        most = room // 2 // common  # at least 4
        rare = 1 + draws.below(min(3, most // 3))
        repeats = rare * (3 + draws.below(min(8, most // rare - 2)))
        words = distinct(draws, common + max(2, (room - common * repeats) // rare), _W.coined)
        counts, top = [repeats] * common + [rare] * (len(words) - common), words[:common]
    text, order = list_text(draws, wording, words, counts)
    if not ranked:
        top = sorted(top, key=order.index)
    at = _fact_at(draws)
    if not top:
        return [Line(at, text)]
    ask = wording.ask.format(count=len(top))
    return [Line(at, text), Line(_question_at(draws, at, size), f"{ask}{', '.join(top)}{wording.end}")]


def distinct(draws: Draws, count: int, draw: Callable[[Draws], str]) -> list[str]:
    """Different strings, in the order in which they were drawn."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(draws)] = None
    return list(drawn)


def list_text(draws: Draws, wording: WordList, words: list[str], counts: list[int]) -> tuple[str, list[str]]:
    """The shuffled list as text, and its words in order."""
    order = draws.shuffled([word for word, n in zip(words, counts, strict=True) for _ in range(n)])
    entries = [wording.entry.format(number=number, word=word) for number, word in enumerate(order, start=1)]
    return wording.title + wording.joint.join(entries), order

"""Synthetic documents, each a pure function of its number: random tokens, and tasks that need long-range attention.

recall   ……ab=42;………cd=17;…………………………?cd=17;?ab=42;<eos>     facts scattered in noise, queried at the end
copy     ^QXJW…KD;…………………………………………?QXJW…KD;<eos>           a string to repeat at the end

Tokens are ASCII codes, so that documents for a byte tokenizer are readable; with another tokenizer they are just
numbers. Only answers count in the loss. The nearest token of a fact is always more than `min_distance` tokens before
the first token of its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from tercet.config.data import SyntheticConfig
from tercet.data.stream import (
    Cursor,
    DataUsageError,
    Document,
    DocumentGenerator,
    ReadOptions,
    SourceNotes,
    in_validation,
    key,
    mix,
    random_below,
    random_u64,
)
from tercet.data.tokenizers import Tokenizer, smallest_dtype

KEYS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)
VALUES = np.frombuffer(b"0123456789", dtype=np.uint8)
NOISE = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ .,", dtype=np.uint8)
IS, END, ASK, START = (ord(c) for c in "=;?^")
KEY_TOKENS = 2
_NOISE_OF_BYTE = NOISE[np.arange(256) % len(NOISE)]  # one uint64 gives eight noise tokens
ASCII = 128

TokensAndLoss = tuple[np.ndarray, np.ndarray | None]
Task = Callable[[int], TokensAndLoss]  # generates a document from a 64-bit key


class SyntheticStream:
    """An endless stream of generated documents, in the order of their numbers: no shuffling and no epochs.

    A hash of the number decides between training and validation.
    """

    def __init__(self, config: SyntheticConfig, tokenizer: Tokenizer, options: ReadOptions) -> None:
        self.notes = SourceNotes()
        self._options = options
        length = config.length or options.data.seq_len
        # `length` may change with data.seq_len (a length-extension stage); document numbers continue.
        self._facts = config.model_dump(exclude={"length", "min_distance"}) | {"tokenizer": tokenizer.fingerprint}
        self._make = make_task(config, length, tokenizer.vocab_size, tokenizer.eos_id)

    @property
    def identity(self) -> dict[str, Any]:
        return self._options.identity(self._facts)

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        delivered = cursor["documents"] if cursor else 0
        number = cursor["number"] if cursor else 0
        while True:
            numbers = np.arange(number, number + 256, dtype=np.uint64)
            for number in numbers[self._in_split(numbers)].tolist():
                tokens, loss = self._make(key(self._options.seed, number))
                delivered += 1
                counts = {"epoch": 0, "documents": delivered, "skipped": 0, "left_out": 0, "number": number + 1}
                yield Document(tokens, loss, counts)
            number = int(numbers[-1]) + 1

    def _in_split(self, numbers: np.ndarray) -> np.ndarray:
        validation = in_validation(mix(numbers + np.uint64(1)), self._options.data.validation_fraction)
        return validation if self._options.split == "validation" else ~validation


def make_task(config: SyntheticConfig, length: int, vocab_size: int, eos_id: int) -> Task:
    """The generator of a task's documents; rejects sizes that the task does not fit."""
    if config.task == "random":
        return _random(length, vocab_size, eos_id)
    if vocab_size < ASCII:
        raise DataUsageError(
            f"synthetic.task={config.task} writes ASCII codes: vocab_size={vocab_size} is below {ASCII}"
        )
    if chr(eos_id).isprintable() and eos_id < ASCII:
        raise DataUsageError(f"synthetic.task={config.task} writes ASCII codes, but EOS is {eos_id} ({chr(eos_id)!r})")
    return (_recall if config.task == "recall" else _copy)(config, length, smallest_dtype(vocab_size), eos_id)


def _noise(draw: np.ndarray, length: int) -> np.ndarray:
    return _NOISE_OF_BYTE[draw.view(np.uint8)[:length]]


def _random(length: int, vocab_size: int, eos_id: int) -> Task:
    dtype = smallest_dtype(vocab_size)

    def make(stream: int) -> TokensAndLoss:
        # Uniform over all tokens but EOS, which appears only at the end.
        tokens = random_below(stream, length, vocab_size - 1)
        tokens += tokens >= eos_id
        tokens[-1] = eos_id
        return tokens.astype(dtype), None

    return make


def _recall(config: SyntheticConfig, length: int, dtype: np.dtype, eos_id: int) -> Task:
    values = config.value_tokens
    fact = KEY_TOKENS + 1 + values + 1  # ab=42;
    query = 1 + fact  # ?ab=42;
    queries_at = length - 1 - config.queries * query
    # Facts end early enough that the first answer is more than min_distance after the last one.
    usable = min(queries_at, queries_at + KEY_TOKENS + 2 - config.min_distance)
    slots = usable // fact
    if slots < config.pairs:
        need = length + config.pairs * fact - usable
        raise DataUsageError(
            f"synthetic.task=recall: documents of {length} tokens have room for {max(slots, 0)} of {config.pairs} "
            f"pairs before min_distance={config.min_distance}: use length (or data.seq_len) >= {need}, "
            "or fewer pairs, or a smaller min_distance"
        )

    parts = list(accumulate([0, length // 8 + 1, slots, 26 * 26, config.pairs, config.pairs * values]))

    def make(stream: int) -> TokensAndLoss:
        # A single draw for everything: on arrays this small the overhead of each numpy call dominates.
        draw = random_u64(stream, parts[-1])
        noise, where, names, which, digits = (draw[a:b] for a, b in pairwise(parts))
        where, names = np.argsort(where)[: config.pairs], np.argsort(names)[: config.pairs]
        which = np.argsort(which)[: config.queries]

        facts = np.empty((config.pairs, fact), dtype=dtype)  # keys are distinct, so each query has one answer
        facts[:, 0], facts[:, 1], facts[:, 2] = KEYS[names // 26], KEYS[names % 26], IS
        facts[:, 3:-1] = VALUES[(digits % np.uint64(10)).view(np.int64)].reshape(-1, values)
        facts[:, -1] = END

        tokens = _noise(noise, length).astype(dtype)
        tokens[: slots * fact].reshape(slots, fact)[where] = facts
        queries = tokens[queries_at:-1].reshape(config.queries, query)
        queries[:, 0], queries[:, 1:] = ASK, facts[which]
        tokens[-1] = eos_id
        loss = np.zeros(length, dtype=bool)
        loss[queries_at:-1].reshape(config.queries, query)[:, KEY_TOKENS + 2 : -1] = True
        return tokens, loss

    return make


def _copy(config: SyntheticConfig, length: int, dtype: np.dtype, eos_id: int) -> Task:
    size = config.copy_tokens
    copy_at = length - 1 - (size + 2)  # ?string;
    # From the last token of the string to the first of its copy; each token is further from its own copy.
    distance = copy_at + 1 - size
    if distance <= config.min_distance:
        need = length + config.min_distance + 1 - distance
        raise DataUsageError(
            f"synthetic.task=copy: documents of {length} tokens put only {distance} tokens between a string of {size} "
            f"and its copy, min_distance={config.min_distance}: use length (or data.seq_len) >= {need}, a shorter "
            "string, or a smaller min_distance"
        )

    def make(stream: int) -> TokensAndLoss:
        tokens = _noise(random_u64(stream, length // 8 + 1), length).astype(dtype)
        string = KEYS[random_below(key(stream, 1), size, len(KEYS))]
        tokens[0], tokens[1 : size + 1], tokens[size + 1] = START, string, END
        tokens[copy_at], tokens[copy_at + 1 : copy_at + 1 + size], tokens[copy_at + 1 + size] = ASK, string, END
        tokens[-1] = eos_id
        loss = np.zeros(length, dtype=bool)
        loss[copy_at + 1 : copy_at + 1 + size] = True
        return tokens, loss

    return make

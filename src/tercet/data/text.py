"""Documents out of records of text: split, shuffled within blocks, tokenised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tercet.data.order import document_hash, permutation, validation_threshold
from tercet.data.prefetch import Prefetcher
from tercet.data.records import Record
from tercet.data.stream import (
    BadRecordError,
    Cursor,
    DataError,
    DataUsageError,
    Document,
    Documents,
    Reading,
    fresh_counts,
)
from tercet.data.tokenizers import Tokenizer

BLOCK_BYTES = 64 << 20  # a block is held in memory, twice: one being read while the other is used
WHOLE_FILE_BLOCK = 64  # records, where the order of files already shuffles everything
BAD_RECORDS_KEPT = 5
TOKENISE_AT_ONCE = 64  # documents handed to the tokenizer together, which works on them in parallel


class OpenRecords(Protocol):
    def __iter__(self) -> Iterator[Record | BadRecordError]: ...
    def __next__(self) -> Record | BadRecordError: ...
    def place(self) -> Any:
        """Where to open again so that the next record is the one that would come now. JSON-able."""

    def where(self) -> tuple[str, int]:
        """File and number, from 1, of the record that came last."""


class RecordSource(Protocol):
    shuffled_by_order: bool

    def identity(self) -> dict[str, Any]: ...
    def open(self, epoch: int, place: Any) -> OpenRecords:
        """Records of an epoch from `place` on; None is its beginning."""


@dataclass
class _Block:
    epoch: int
    number: int  # within its epoch
    start: Any  # place
    end: Any
    records: list[Record]  # of the split, in file order
    skipped: int
    left_out: int
    last: bool  # the epoch ended within it


class TextStream:
    """Cursor: `place` is where the current block begins, `block` its number, `at` the documents given of it. Going on
    means reading that one block again: exact, with nothing kept but three numbers and a place."""

    def __init__(self, records: RecordSource, tokenizer: Tokenizer, reading: Reading, name: str) -> None:
        self.bad_records: list[str] = []
        self._records, self._tokenizer, self._reading, self._name = records, tokenizer, reading, name
        self._threshold = validation_threshold(reading.validation_fraction)
        self._block_records = WHOLE_FILE_BLOCK if records.shuffled_by_order else reading.shuffle_block
        self._shuffle_in_block = reading.shuffle and not records.shuffled_by_order

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "source": self._name,
            **self._records.identity(),
            "tokenizer": self._tokenizer.fingerprint,
            "validation_fraction": self._reading.validation_fraction,
            "shuffle": self._reading.shuffle,
            "shuffle_block": self._block_records,
            "seed": self._reading.seed,
            "split": self._reading.split,
        }

    def documents(self, cursor: Cursor | None = None) -> Documents:
        counts = fresh_counts() | ({k: cursor[k] for k in fresh_counts()} if cursor else {})
        at = cursor["at"] if cursor else 0
        blocks = Prefetcher(self._blocks(cursor), depth=1)
        try:
            for block in blocks:
                counts["epoch"] = block.epoch
                if at == 0:  # else the cursor has counted this block already
                    counts["skipped"] += block.skipped
                    counts["left_out"] += block.left_out
                yield from self._of_block(block, at, counts)
                at = 0
        finally:
            blocks.close()

    def _of_block(self, block: _Block, at: int, counts: Cursor) -> Iterator[Document]:
        count = len(block.records)
        if at > count:
            raise DataError(
                f"{self._name}: the cursor stands at document {at} of a block that now has {count}: the files changed "
                "since the checkpoint; restore them, or start from the weights alone with train.init_from"
            )
        order: list[int] = list(range(count))
        if self._shuffle_in_block:
            order = permutation(count, self._reading.seed, block.epoch, block.number).tolist()
        for begin in range(at, count, TOKENISE_AT_ONCE):
            group = [block.records[i] for i in order[begin : begin + TOKENISE_AT_ONCE]]
            for offset, (tokens, prompt) in enumerate(encode_records(self._tokenizer, group), start=begin + 1):
                loss = np.arange(len(tokens)) >= prompt if prompt else None
                counts["documents"] += 1
                if offset < count:
                    place = {"place": block.start, "block": block.number, "at": offset}
                elif block.last:
                    place = {"epoch": block.epoch + 1, "place": None, "block": 0, "at": 0}
                else:
                    place = {"place": block.end, "block": block.number + 1, "at": 0}
                yield Document(tokens, loss, {**counts, **place})

    def _blocks(self, cursor: Cursor | None) -> Iterator[_Block]:
        epoch = cursor["epoch"] if cursor else 0
        place = cursor["place"] if cursor else None
        number = cursor["block"] if cursor else 0
        while epoch == 0 or self._reading.repeat:
            found: int | None = 0 if place is None else None  # counted over whole epochs only
            opened = self._records.open(epoch, place)
            last = False
            while not last:
                block = self._read_block(opened, epoch, number)
                found = None if found is None else found + len(block.records)
                number, last = number + 1, block.last
                yield block
            if found == 0:
                raise DataUsageError(
                    f"{self._name}: no document for {self._reading.split} with validation_fraction="
                    f"{self._reading.validation_fraction}: change that fraction, or add documents"
                )
            epoch, place, number = epoch + 1, None, 0

    def _read_block(self, opened: OpenRecords, epoch: int, number: int) -> _Block:
        start = opened.place()
        records: list[Record] = []
        read = size = skipped = left_out = 0
        last = False
        while read < self._block_records and size < BLOCK_BYTES:
            try:
                record = next(opened)
            except StopIteration:
                last = True
                break
            read += 1
            if not isinstance(record, BadRecordError) and (reason := objection(self._tokenizer, record)):
                record = BadRecordError(*opened.where(), reason)
            if isinstance(record, BadRecordError):
                skipped += 1
                self._skip(record)
            elif not record.text:
                left_out += 1
            else:
                size += len(record.text)
                if self._is_mine(record):
                    records.append(record)
        return _Block(epoch, number, start, opened.place(), records, skipped, left_out, last)

    def _skip(self, bad: BadRecordError) -> None:
        if not self._reading.skip_bad:
            raise bad
        if len(self.bad_records) < BAD_RECORDS_KEPT:
            self.bad_records.append(str(bad))

    def _is_mine(self, record: Record) -> bool:
        if self._reading.split == "all":
            return True
        return (hash_of(record) < self._threshold) == (self._reading.split == "validation")


def hash_of(record: Record) -> int:
    return document_hash(record.text if record.prompt is None else record.prompt + b"\0" + record.text)


def objection(tokenizer: Tokenizer, record: Record) -> str | None:
    """Why a record cannot be tokenised without loss; None if it can."""
    return (tokenizer.objection(record.prompt) if record.prompt else None) or tokenizer.objection(record.text)


def encode_records(tokenizer: Tokenizer, records: list[Record]) -> list[tuple[np.ndarray, int]]:
    """Tokens of each record with its EOS, and how many of them at its start are prompt."""
    made: list[tuple[np.ndarray, int]] = []
    for begin in range(0, len(records), TOKENISE_AT_ONCE):
        group = records[begin : begin + TOKENISE_AT_ONCE]
        texts = tokenizer.encode_documents([record.text for record in group])
        prompts = iter(tokenizer.encode_documents([record.prompt for record in group if record.prompt]))
        for record, tokens in zip(group, texts, strict=True):
            prompt = next(prompts)[:-1] if record.prompt else None  # without its EOS
            made.append((tokens, 0) if prompt is None else (np.concatenate([prompt, tokens]), len(prompt)))
    return made

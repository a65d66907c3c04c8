"""Pack documents into sequences with boundaries and targets, and optionally shuffle the sequences. numpy only.

A batch is S sequences of T tokens over all ranks. A rank copies its own share and only advances through the others'.
tokens and targets: [share * T]; cu_seqlens: [documents + 1] over them.

The state after a batch is JSON and resumes exactly. `pack` keeps documents in order; `pack_shuffled` permutes the
sequences within blocks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tercet.config.data import bytes_per_token
from tercet.data.stream import Cursor, DataError, Document, DocumentStream, counts_of, permutation

IGNORE = -100  # target that does not count in the loss
FORMAT = 1


class LoaderStats(NamedTuple):
    """Totals since the start of the run, over all ranks and resumes."""

    documents: int = 0  # read to their end
    epoch: int = 0
    skipped: int = 0  # bad records, where data.bad_records is skip
    left_out: int = 0  # empty documents
    tokens: int = 0  # without padding
    padding: int = 0
    sequences: int = 0
    exercises: int = 0  # pieces of text with facts and questions (data.retrieval)


class PackedBatch(NamedTuple):
    tokens: np.ndarray  # of the packing's dtype, like targets
    targets: np.ndarray
    cu_seqlens: np.ndarray  # int32
    state: dict[str, Any]
    stats: LoaderStats
    ends: Sequence[LoaderStats] = ()  # after each of all S sequences, except those that only pad the last batch


PackedBatches = Generator[PackedBatch, None, None]  # close() stops background readers


@dataclass(frozen=True)
class BatchLayout:
    seq_len: int
    sequences: int  # S, over all ranks
    first: int  # first sequence of this rank
    count: int  # sequences of this rank
    whole: bool  # do not split a document that fits in a sequence
    padding_token: int
    dtype: type[np.signedinteger[Any]] = np.int64  # must hold every token and IGNORE
    accept_changes: bool = False  # of the files: a document that is now too short for the cursor is read from its start


def pack(stream: DocumentStream, packing: BatchLayout, state: dict[str, Any] | None = None) -> PackedBatches:
    """Batches after `state`. The last batch of a stream is padded."""
    packer = _Packer(stream, packing, state)
    try:
        while not packer.ended:
            if (batch := packer.next_batch(packing)) is not None:
                yield batch
    finally:
        packer.close()


class _Packer:
    def __init__(self, stream: DocumentStream, packing: BatchLayout, state: dict[str, Any] | None) -> None:
        self._identity = stream.identity  # once: for files it stats every file
        self._packing = packing
        self._cursor: Cursor | None = state["cursor"] if state else None  # before the current document
        self._offset: int = state["offset"] if state else 0  # tokens already taken from the current document
        self._counts = {name: state[name] if state else 0 for name in ("tokens", "padding", "sequences")}
        self._counts["exercises"] = state.get("exercises", 0) if state else 0
        self.ended = False
        self._documents = stream.documents(self._cursor)
        self._document: Document | None = None
        if self._offset:
            self._document = next(self._documents, None)
            gone = self._document is None or len(self._document.tokens) <= self._offset
            if gone and packing.accept_changes:
                self._offset = 0
            elif gone:
                raise DataError(
                    f"the data changed since the checkpoint: its cursor is at token {self._offset} of a document that "
                    "is now shorter: restore it, or start a new run from the weights with train.init_from"
                )

    def close(self) -> None:
        self._documents.close()

    def next_batch(self, packing: BatchLayout) -> PackedBatch | None:
        """The next batch of that size; None if the stream has no documents left."""
        length = packing.seq_len
        size = packing.count * length
        tokens = np.full(size, packing.padding_token, dtype=packing.dtype)
        targets = np.full(size, IGNORE, dtype=packing.dtype)
        bounds = list(range(0, size + 1, length))  # sequences are separated like documents
        before = self._counts["tokens"]
        self._ends: list[LoaderStats] = []
        self._skip(packing.first * length)
        self._fill(tokens, targets, bounds)
        self._skip((packing.sequences - packing.first - packing.count) * length)
        if self._counts["tokens"] == before:
            return None
        self._counts["sequences"] += packing.sequences
        cu_seqlens = np.array(sorted(set(bounds)), dtype=np.int32)
        return PackedBatch(tokens, targets, cu_seqlens, self._state(), self._stats(), self._ends)

    def _fill(self, tokens: np.ndarray, targets: np.ndarray, bounds: list[int]) -> None:
        """Fill this rank's sequences. They are contiguous, so a long document is copied over several at once."""
        for at, document, offset, take in self._spans(len(tokens)):
            _copy(document, offset, take, tokens[at : at + take], targets[at : at + take])
            bounds.append(at)
            bounds.append(at + take)

    def _skip(self, size: int) -> None:
        """Advance through other ranks' sequences without reading tokens: shards are not even paged in."""
        for _ in self._spans(size):
            pass

    def _spans(self, size: int) -> Iterator[tuple[int, Document, int, int]]:
        """What fills the next `size` tokens: (position, document, offset in it, tokens). Gaps are padding."""
        length, at = self._packing.seq_len, 0
        while at < size:
            if self._document is None:
                self._document = None if self.ended else next(self._documents, None)
                self.ended = self._document is None
            document, offset = self._document, self._offset
            if document is None:
                if (filled := at % length) != 0:
                    self._end_sequence(padding=length - filled)
                self._counts["padding"] += size - at
                return
            remaining = len(document.tokens) - offset
            free = length - at % length
            if document.segment is not None:  # each sequence gets a separate exercise, which fits any room
                segment = document.segment(offset, free)
                yield at, Document(segment.tokens, segment.loss, document.cursor), 0, segment.take
                self._counts["exercises"] += segment.take > segment.used
                at += segment.take
                self._advance(document, segment.take, segment.used)
                if at % length == 0:
                    self._end_sequence()
                continue
            if self._packing.whole and offset == 0 and free < min(remaining, length):
                self._counts["padding"] += free
                at += free
                self._end_sequence()
                continue
            take = min(remaining, size - at)
            yield at, document, offset, take
            for inside in range(free, take, length):
                self._end_sequence(tokens=inside)
            at += take
            self._advance(document, take, take)
            if at % length == 0:
                self._end_sequence()

    def _advance(self, document: Document, take: int, used: int) -> None:
        """Count `take` tokens, made of the next `used` of the current document."""
        self._counts["tokens"] += take
        self._offset += used
        if self._offset == len(document.tokens):
            self._cursor, self._offset, self._document = document.cursor, 0, None

    def _end_sequence(self, tokens: int = 0, padding: int = 0) -> None:
        """Record the end of a sequence, `tokens` and `padding` beyond the current counts."""
        now = self._stats()
        self._ends.append(now._replace(tokens=now.tokens + tokens, padding=now.padding + padding))

    def _stats(self) -> LoaderStats:
        return LoaderStats(**counts_of(self._cursor), **self._counts)

    def _state(self) -> dict[str, Any]:
        counts = {name: count for name, count in self._counts.items() if count or name != "exercises"}
        position = {"identity": self._identity, "cursor": self._cursor, "offset": self._offset}
        return {"format": FORMAT, **position, **counts}


def _copy(document: Document, offset: int, take: int, tokens: np.ndarray, targets: np.ndarray) -> None:
    """Copy tokens; the target of each is the next token of its document, even if in the next sequence. EOS has none."""
    tokens[:] = document.tokens[offset : offset + take]
    following = document.tokens[offset + 1 : offset + 1 + take]
    targets[: len(following)] = following
    if document.loss is not None:
        targets[: len(following)][~document.loss[offset + 1 : offset + 1 + take]] = IGNORE


# Shuffled sequences (data.shuffle_sequences).
#
# Documents come in random order, but the sequences of one document are consecutive: with small steps a long file fills
# many steps in a row, and the model overfits to it. Here N sequences are packed at a time and delivered in an order
# that depends only on the seed and the block's number. Every rank packs whole blocks and copies its share of a batch.
#
# The state is the packing state at the start of the block and the number of sequences delivered from it; resuming packs
# the block again. Stats are those of as many sequences in packing order: a partly delivered block has no exact document
# count, and counting the whole block would run far ahead of the model (by thousands of epochs on small data).


def block_dtype(vocab_size: int) -> type[np.signedinteger[Any]]:
    """The type a block is stored in: signed, to hold IGNORE."""
    return np.int16 if bytes_per_token(vocab_size) == 2 else np.int32


def pack_shuffled(
    stream: DocumentStream, packing: BatchLayout, block: int, seed: int, state: dict[str, Any] | None, limit: int | None
) -> PackedBatches:
    """Like `pack`, with the sequences of every `block` permuted. Blocks use the packing's dtype; batches are int64.

    limit: end after this many sequences, and with them the last block, which is shorter: a following stage of another
    length starts a block of its own, and no sequence is lost.
    """
    start, index, done, handed = state, 0, 0, 0  # the packing state at the block's start, its number, delivered from it
    size = 0  # sequences in the block
    if state is not None:
        if shuffle := state.get("shuffle"):
            start, index, done, handed = (shuffle[name] for name in ("start", "index", "done", "handed"))
            size = shuffle.get("size", block) if done else 0  # keeps its size even if the limit has changed since
        else:  # saved without shuffling: a block starts at its cursor
            handed = state["sequences"]
    end = None if limit is None else handed + limit
    rows: list[_Row] = []
    packer = _Packer(stream, packing, start)
    try:
        while not packer.ended:
            size = size or (block if end is None else max(0, min(block, end - handed)))
            packed = packer.next_batch(replace(packing, sequences=size, first=0, count=size)) if size else None
            if packed is None:
                break
            numbers = _non_padding(packed, packing)
            order = permutation(len(numbers), seed, index)
            for position in range(done, len(numbers)):
                handed += 1
                rows.append(_row(packed, numbers[order[position]], packing.seq_len))
                last = position + 1 == len(numbers)
                shuffle = {
                    "block": block,
                    "seq_len": packing.seq_len,
                    "start": packed.state if last else start,
                    "index": index + 1 if last else index,
                    "done": 0 if last else position + 1,
                    "handed": handed,
                    **({} if size == block else {"size": size}),
                }
                after = {"format": FORMAT, "identity": packed.state["identity"], "shuffle": shuffle}
                stats = packed.ends[numbers[position]]._replace(sequences=handed)
                if len(rows) == packing.sequences:
                    yield _join(rows, packing, after, stats)
                    rows = []
            start, index, done, size = packed.state, index + 1, 0, 0
            del packed  # free it before the next block is packed
        if rows:
            yield _join(rows, packing, after, stats)
    finally:
        packer.close()


def check_block(state: dict[str, Any], block: int, seq_len: int) -> None:
    """Reject a state inside a block of shuffled sequences if blocks have another size or length now, or none."""
    shuffle = state.get("shuffle")
    if not shuffle:
        return
    for key, was, now in (
        ("data.shuffle_sequences", shuffle["block"], block),
        ("data.seq_len", shuffle["seq_len"], seq_len),
    ):
        if was != now and (shuffle["done"] or not block):
            raise DataError(
                f"{key} was {was} and is {now}, but the checkpoint is inside a block of shuffled sequences: set it "
                "back, or start a new run from the weights with train.init_from"
            )


def _non_padding(packed: PackedBatch, packing: BatchLayout) -> list[int]:
    """Numbers of the sequences that are not all padding; the end of the data leaves some."""
    tokens, targets = (array.reshape(-1, packing.seq_len) for array in (packed.tokens, packed.targets))
    padding = tokens[:, 0] == packing.padding_token
    for number in np.flatnonzero(padding):
        padding[number] = (tokens[number] == packing.padding_token).all() and (targets[number] == IGNORE).all()
    return np.flatnonzero(~padding).tolist()


_Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, targets and bounds of documents of one sequence


def _row(packed: PackedBatch, number: int, length: int) -> _Row:
    """A copy of one sequence: a view would keep its whole block in memory until the batch is complete."""
    begin, end = number * length, (number + 1) * length
    first, last = np.searchsorted(packed.cu_seqlens, (begin, end))
    bounds = packed.cu_seqlens[first : last + 1] - begin
    return packed.tokens[begin:end].copy(), packed.targets[begin:end].copy(), bounds


def _join(rows: list[_Row], packing: BatchLayout, state: dict[str, Any], stats: LoaderStats) -> PackedBatch:
    """This rank's share as one batch, padded if the batch is incomplete."""
    length = packing.seq_len
    tokens = np.full((packing.count, length), packing.padding_token, dtype=np.int64)
    targets = np.full((packing.count, length), IGNORE, dtype=np.int64)
    bounds: list[np.ndarray] = [np.arange(0, packing.count * length + 1, length, dtype=np.int32)]
    for index, (*row, ends) in enumerate(rows[packing.first : packing.first + packing.count]):
        tokens[index], targets[index] = row
        bounds.append(ends + index * length)
    cu_seqlens = np.unique(np.concatenate(bounds)).astype(np.int32)
    if missing := packing.sequences - len(rows):
        stats = stats._replace(padding=stats.padding + missing * length, sequences=stats.sequences + missing)
    return PackedBatch(tokens.ravel(), targets.ravel(), cu_seqlens, state, stats)

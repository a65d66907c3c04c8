"""Documents packed into sequences, with their boundaries and targets. numpy only.

S sequences of T tokens are one batch of all ranks together; a rank copies its own and only counts through the others.
tokens and targets: [own * T], cu_seqlens: [documents + 1] over them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tercet.config.data import bytes_per_token
from tercet.data.order import permutation
from tercet.data.stream import Cursor, DataError, Document, DocumentStream, totals

IGNORE = -100  # the target that takes no part in the loss
FORMAT = 1


@dataclass(frozen=True)
class LoaderStats:
    """Counted since the start of the run over all ranks; a resumed run goes on counting."""

    documents: int  # read to their end
    epoch: int
    skipped: int  # bad records left out because data.bad_records is skip
    left_out: int  # empty documents
    tokens: int  # without padding
    padding: int
    sequences: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Mark(NamedTuple):
    """Where the stream stood at the end of a sequence."""

    cursor: Cursor | None
    tokens: int
    padding: int

    def stats(self, sequences: int) -> LoaderStats:
        return LoaderStats(**totals(self.cursor), tokens=self.tokens, padding=self.padding, sequences=sequences)


class Packed(NamedTuple):
    tokens: np.ndarray  # of the packing's dtype, as are targets
    targets: np.ndarray
    cu_seqlens: np.ndarray  # int32
    state: dict[str, Any]
    stats: LoaderStats
    marks: Sequence[Mark] = ()  # of all S sequences; at the end of the stream none of those that only fill the batch


Batches = Generator[Packed, None, None]  # close() stops what runs behind it


@dataclass(frozen=True)
class Packing:
    seq_len: int
    sequences: int  # S
    first: int  # of this rank
    count: int  # of this rank
    whole: bool  # do not split a document that fits in a sequence
    padding_token: int
    dtype: type[np.signedinteger[Any]] = np.int64  # signed, and wide enough for every token


def pack(stream: DocumentStream, packing: Packing, state: dict[str, Any] | None = None) -> Batches:
    """Batches from `state` on. At the end of the stream the last batch is filled up with padding."""
    packer = _Packer(stream, packing, state)
    try:
        while not packer.ended:
            packed = packer.batch()
            if packed is not None:
                yield packed
            del packed  # held while the next is made, a block of shuffled sequences would be there twice
    finally:
        packer.close()


def check_identity(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Refuse a cursor of other data: it would point at other documents."""
    if state.get("format") != FORMAT:
        raise DataError(
            f"data cursor has format {state.get('format')!r}, this version reads {FORMAT}: resume with the version "
            "that wrote it, or start from the weights alone with train.init_from"
        )
    before, now = _flat(state["identity"]), _flat(identity)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise DataError(
                f"the data changed since the checkpoint: {name} was {before.get(name, 'absent')!r} and is "
                f"{now.get(name, 'absent')!r}: restore it, or start from the weights alone with train.init_from"
            )


class _Packer:
    def __init__(self, stream: DocumentStream, packing: Packing, state: dict[str, Any] | None) -> None:
        self._identity = stream.identity
        if state is not None:
            check_identity(state, self._identity)
            if "cursor" not in state:
                raise DataError(
                    "the checkpoint's data cursor stands in a block of shuffled sequences: put data.shuffle_sequences "
                    f"back to {state['shuffle']['block']}, or start from the weights alone with train.init_from"
                )
        self._packing = packing
        self._cursor: Cursor | None = state["cursor"] if state else None  # before the document at hand
        self._offset: int = state["offset"] if state else 0  # tokens taken of the document at hand
        self._counts = {name: state[name] if state else 0 for name in ("tokens", "padding", "sequences")}
        self.ended = False
        self._documents = stream.documents(self._cursor)
        self._document: Document | None = None
        if self._offset:
            self._document = next(self._documents, None)
            if self._document is None or len(self._document.tokens) <= self._offset:
                raise DataError(
                    f"the data changed since the checkpoint: its cursor stands at token {self._offset} of a document "
                    "that is now shorter: restore it, or start from the weights alone with train.init_from"
                )

    def close(self) -> None:
        self._documents.close()

    def batch(self) -> Packed | None:
        """The next batch; None if the stream had nothing left for it."""
        packing, length = self._packing, self._packing.seq_len
        size = packing.count * length
        tokens = np.full(size, packing.padding_token, dtype=packing.dtype)
        targets = np.full(size, IGNORE, dtype=packing.dtype)
        bounds = list(range(0, size + 1, length))  # a sequence's end is a boundary too
        before = self._counts["tokens"]
        self._marks: list[Mark] = []
        self._skip(packing.first * length)
        self._fill(tokens, targets, bounds)
        self._skip((packing.sequences - packing.first - packing.count) * length)
        if self._counts["tokens"] == before:
            return None
        self._counts["sequences"] += packing.sequences
        cu_seqlens = np.array(sorted(set(bounds)), dtype=np.int32)
        return Packed(tokens, targets, cu_seqlens, self._state(), self._stats(), self._marks)

    def _fill(self, tokens: np.ndarray, targets: np.ndarray, bounds: list[int]) -> None:
        """This rank's sequences, which lie one after another: a long document is copied over several at once."""
        for at, document, offset, take in self._spans(len(tokens)):
            _copy(document, offset, take, tokens[at : at + take], targets[at : at + take])
            bounds.append(at)
            bounds.append(at + take)

    def _skip(self, size: int) -> None:
        """Another rank's sequences: only counted, so that of shards not even a page is read."""
        for _ in self._spans(size):
            pass

    def _spans(self, size: int) -> Iterator[tuple[int, Document, int, int]]:
        """What fills the next `size` tokens: (position, document, offset in it, tokens of it). Gaps are padding."""
        length, at = self._packing.seq_len, 0
        while at < size:
            if self._document is None:
                self._document = None if self.ended else next(self._documents, None)
                self.ended = self._document is None
            document, offset = self._document, self._offset
            if document is None:
                if (filled := at % length) != 0:
                    self._mark(padding=length - filled)
                self._counts["padding"] += size - at
                return
            left = len(document.tokens) - offset
            room = length - at % length
            if self._packing.whole and offset == 0 and room < min(left, length):
                self._counts["padding"] += room
                at += room
                self._mark()
                continue
            take = min(left, size - at)
            yield at, document, offset, take
            for inside in range(room, take, length):
                self._mark(tokens=inside)
            at += take
            self._counts["tokens"] += take
            if take == left:
                self._cursor, self._offset, self._document = document.cursor, 0, None
            else:
                self._offset += take
            if at % length == 0:
                self._mark()

    def _mark(self, tokens: int = 0, padding: int = 0) -> None:
        """A sequence ends here, or where so many more have been taken of the document at hand."""
        counts = self._counts
        self._marks.append(Mark(self._cursor, counts["tokens"] + tokens, counts["padding"] + padding))

    def _state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": self._identity,
            "cursor": self._cursor,
            "offset": self._offset,
            **self._counts,
        }

    def _stats(self) -> LoaderStats:
        return LoaderStats(**totals(self._cursor), **self._counts)


def _copy(document: Document, offset: int, take: int, tokens: np.ndarray, targets: np.ndarray) -> None:
    """The target of a token is its successor in the same document, be it in the next sequence; EOS has none."""
    tokens[:] = document.tokens[offset : offset + take]
    following = document.tokens[offset + 1 : offset + 1 + take]
    targets[: len(following)] = following
    if document.loss is not None:
        targets[: len(following)][~document.loss[offset + 1 : offset + 1 + take]] = IGNORE


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


# ------------------------------------------------------------------------------------------------
# Packed sequences in a new order within blocks, so that a long document does not fill many steps in a row.
#
# Documents come in random order, but the sequences of one follow each other. With small steps a single long file is then
# all that the model sees for a while: it learns that file by heart and forgets the rest. Here N sequences are packed at
# a time and handed out in an order that depends on the seed and the block's number only.
#
# The cursor is that of the block's first document, with the number of sequences taken of the block: going on packs the
# block again. Every rank packs whole blocks, and copies its own share of each batch.
#
# Counts are those of as many sequences in the order of packing: which documents a part of a block has read to their end
# has no answer, and the counts of the whole block run ahead of the model, by thousands of epochs where the data is small.


@dataclass(frozen=True)
class _Sequence:
    tokens: np.ndarray  # [T]
    targets: np.ndarray  # [T]
    bounds: np.ndarray  # of documents within it, 0 and T included


@dataclass(frozen=True)
class _Taken:
    sequence: _Sequence
    state: dict[str, Any]  # after it
    stats: LoaderStats


def narrowest(vocab_size: int) -> type[np.signedinteger[Any]]:
    """What a block is held as: signed, for it has room for IGNORE too."""
    return np.int16 if bytes_per_token(vocab_size) == 2 else np.int32


def pack_shuffled(
    stream: DocumentStream, packing: Packing, block: int, seed: int, state: dict[str, Any] | None = None
) -> Batches:
    """As `pack`, with the sequences of every `block` in a new order. A block is of the packing's dtype, batches are
    int64."""
    batch: list[_Taken] = []
    sequences = _sequences(stream, packing, block, seed, state)
    try:
        for taken in sequences:
            batch.append(taken)
            if len(batch) == packing.sequences:
                yield _join(batch, packing)
                batch = []
        if batch:
            yield _join(batch, packing)
    finally:
        sequences.close()  # type: ignore[attr-defined]


def _sequences(
    stream: DocumentStream, packing: Packing, block: int, seed: int, state: dict[str, Any] | None
) -> Iterator[_Taken]:
    identity = stream.identity  # asked once: of files it looks up every name and size
    start, index, done, handed = _place(identity, packing, block, state)
    whole = replace(packing, sequences=block, first=0, count=block)
    packs = pack(stream, whole, start)
    try:
        for packed in packs:
            found = _numbers(packed, packing)
            order = permutation(len(found), seed, index)
            for position in range(done, len(found)):
                handed += 1
                last = position + 1 == len(found)
                place = {
                    "block": block,
                    "seq_len": packing.seq_len,
                    "start": packed.state if last else start,
                    "index": index + 1 if last else index,
                    "done": 0 if last else position + 1,
                    "handed": handed,
                }
                after = {"format": FORMAT, "identity": identity, "shuffle": place}
                sequence = _cut(packed, found[order[position]], packing.seq_len)
                yield _Taken(sequence, after, packed.marks[found[position]].stats(handed))
            start, index, done = packed.state, index + 1, 0
            del packed  # before the next block is made
    finally:
        packs.close()


def _place(
    identity: dict[str, Any], packing: Packing, block: int, state: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, int, int, int]:
    """(cursor of the block, its number, sequences already taken of it, sequences taken in all)."""
    if state is None:
        return None, 0, 0, 0
    check_identity(state, identity)
    place = state.get("shuffle")
    if place is None:  # from a run that did not shuffle sequences: a block begins at its cursor
        return state, 0, 0, state["sequences"]
    for name, now in (("block", block), ("seq_len", packing.seq_len)):
        if place[name] != now and place["done"]:
            key = "data.shuffle_sequences" if name == "block" else "data.seq_len"
            raise DataError(
                f"{key} was {place[name]} and is {now}, in the middle of a block of shuffled sequences: put it back, "
                "or start from the weights alone with train.init_from"
            )
    return place["start"], place["index"], place["done"], place["handed"]


def _numbers(packed: Packed, packing: Packing) -> list[int]:
    """The sequences of a block; those that are nothing but padding, as at the end of the data, are left out."""
    tokens, targets = (array.reshape(-1, packing.seq_len) for array in (packed.tokens, packed.targets))
    padding = tokens[:, 0] == packing.padding_token
    for number in np.flatnonzero(padding):
        padding[number] = (tokens[number] == packing.padding_token).all() and (targets[number] == IGNORE).all()
    return np.flatnonzero(~padding).tolist()


def _cut(packed: Packed, number: int, length: int) -> _Sequence:
    """A copy: a sequence that waits for the rest of its batch would keep its whole block in memory."""
    begin, end = number * length, (number + 1) * length
    first, last = np.searchsorted(packed.cu_seqlens, (begin, end))
    bounds = packed.cu_seqlens[first : last + 1] - begin
    return _Sequence(packed.tokens[begin:end].copy(), packed.targets[begin:end].copy(), bounds)


def _join(batch: list[_Taken], packing: Packing) -> Packed:
    """This rank's share as one batch; what a last batch lacks is padding."""
    length = packing.seq_len
    tokens = np.full(packing.count * length, packing.padding_token, dtype=np.int64)
    targets = np.full(packing.count * length, IGNORE, dtype=np.int64)
    bounds: list[np.ndarray] = [np.arange(0, packing.count * length + 1, length, dtype=np.int32)]
    for place, taken in enumerate(batch[packing.first : packing.first + packing.count]):
        at = place * length
        tokens[at : at + length] = taken.sequence.tokens
        targets[at : at + length] = taken.sequence.targets
        bounds.append(taken.sequence.bounds + at)
    cu_seqlens = np.unique(np.concatenate(bounds)).astype(np.int32)
    lacking, stats = packing.sequences - len(batch), batch[-1].stats
    if lacking:
        stats = replace(stats, padding=stats.padding + lacking * length, sequences=stats.sequences + lacking)
    return Packed(tokens, targets, cu_seqlens, batch[-1].state, stats)

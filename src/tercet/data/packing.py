"""Documents packed into sequences, with their boundaries and targets. numpy only.

S sequences of T tokens are one batch of all ranks together; a rank copies its own and only counts through the others.
tokens and targets: [own * T], cu_seqlens: [documents + 1] over them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from tercet.data.errors import DataError
from tercet.data.stream import Cursor, Document, DocumentStream, totals

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

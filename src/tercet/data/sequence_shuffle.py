"""Packed sequences in a new order within blocks, so that a long document does not fill many steps in a row.

Documents come in random order, but the sequences of one follow each other. With small steps a single long file is then
all that the model sees for a while: it learns that file by heart and forgets the rest. Here N sequences are packed at
a time and handed out in an order that depends on the seed and the block's number only.

The cursor is that of the block's first document, with the number of sequences taken of the block: going on packs the
block again. Every rank packs whole blocks, and copies its own share of each batch.

Counts are those of as many sequences in the order of packing: which documents a part of a block has read to their end
has no answer, and the counts of the whole block run ahead of the model, by thousands of epochs where the data is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tercet.config.data import held_bytes
from tercet.data.errors import DataError
from tercet.data.order import permutation
from tercet.data.packing import FORMAT, IGNORE, Batches, LoaderStats, Packed, Packing, check_identity, pack
from tercet.data.stream import DocumentStream


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
    return np.int16 if held_bytes(vocab_size) == 2 else np.int32


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

"""What every source of documents is to the rest: an iterator that can be started again at any of its documents."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tercet.errors import TercetError, UsageError

# Where a stream stands: JSON-able, and all there is to know. Every cursor counts `epoch`, `documents` (given so
# far), `skipped` (bad records) and `left_out` (empty documents); the other keys belong to the source.
Cursor = dict[str, Any]
Split = Literal["train", "validation", "all"]


class Document(NamedTuple):
    tokens: np.ndarray  # [n] unsigned, its EOS included
    loss: np.ndarray | None  # [n] bool: which tokens count as targets; None: all
    cursor: Cursor  # where the stream stands after this document


Documents = Generator[Document, None, None]  # close() stops what runs behind it


@dataclass(frozen=True)
class Reading:
    """How a stream is to be read; the same for every rank."""

    seed: int
    split: Split
    validation_fraction: float
    repeat: bool  # go on with the next epoch at the end
    shuffle: bool = True
    shuffle_block: int = 4096
    skip_bad: bool = False


class DocumentStream(Protocol):
    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same when a run goes on from a cursor: JSON-able facts about source and order."""

    @property
    def bad_records(self) -> list[str]:
        """The first few records that were skipped, in words."""

    def documents(self, cursor: Cursor | None = None) -> Documents:
        """Documents from `cursor` on; None is the beginning."""


def fresh_counts() -> Cursor:
    return {"epoch": 0, "documents": 0, "skipped": 0, "left_out": 0}


def totals(cursor: Cursor | None) -> dict[str, int]:
    """The counts of a cursor; those of a mixture are summed (its epoch is that of the part read most often)."""
    if cursor is None:
        return fresh_counts()
    if "parts" in cursor:
        counts = [totals(part) for part in cursor["parts"].values()]
        summed = {name: sum(count[name] for count in counts) for name in ("documents", "skipped", "left_out")}
        return {"epoch": max(count["epoch"] for count in counts), **summed}
    return {name: cursor[name] for name in ("epoch", "documents", "skipped", "left_out")}


# ------------------------------------------------------------------------------------------------
# What the data side says when it cannot go on.


class DataError(TercetError):
    """Names the file or value, the rule it breaks and the mend, in one line."""


class DataUsageError(DataError, UsageError):
    """The data that was asked for cannot be: it is not there, or the settings for it do not go together."""


class StoppedWaiting(Exception):
    """The reader was told to stop while it waited for a batch that did not come."""


class BadRecordError(DataError):
    """One record that cannot be read. Fatal, or skipped and counted, as data.bad_records says."""

    def __init__(self, file: str, record: int | str, reason: str) -> None:
        self.file, self.record, self.reason = file, record, reason
        where = f"record {record} of {file}" if record != "" else file
        super().__init__(
            f"{where}: {reason}: mend it, or leave such records out (counted) with --data.bad_records skip"
        )

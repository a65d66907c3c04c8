"""Document streams: the interface that every data source implements, its cursor, and the errors of this package.

A stream is an iterator of documents that can be reopened after any document, from that document's cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tercet.config.data import DataConfig
from tercet.errors import EXIT_EMPTY, TercetError, UsageError

# The complete position of a stream, as JSON. Every cursor counts `epoch`, `documents` (delivered so far), `skipped`
# (bad records) and `left_out` (empty documents); the other keys belong to the source.
Cursor = dict[str, Any]
Split = Literal["train", "validation"]
COUNTS = ("epoch", "documents", "skipped", "left_out")


class ExercisePart(NamedTuple):
    """A document's share of one sequence, with lines put into its text."""

    tokens: np.ndarray  # [take], and one more if the document continues: the last token's target
    loss: np.ndarray | None
    take: int
    used: int  # tokens of the document in it


class Document(NamedTuple):
    tokens: np.ndarray  # [n] unsigned, including EOS
    loss: np.ndarray | None  # [n] bool: tokens that count as targets; None: all
    cursor: Cursor  # position after this document
    segment: Callable[[int, int], ExercisePart] | None = None  # (offset, room) -> an exercise instead of plain tokens


DocumentGenerator = Generator[Document, None, None]  # close() stops background readers


@dataclass(frozen=True)
class ReadOptions:
    """How to read a stream; the same on every rank."""

    data: DataConfig
    source: str  # name of this part of a mixture
    seed: int
    split: Split

    @property
    def repeat(self) -> bool:
        """Whether another epoch follows the end."""
        return self.data.exhaustion == "repeat" and self.split == "train"

    def identity(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The identity of a stream with these facts about its documents and their order."""
        fraction = self.data.validation_fraction
        return {"source": self.source, **facts, "validation_fraction": fraction, "seed": self.seed, "split": self.split}


@dataclass(frozen=True)
class SourceNotes:
    """What is known about a stream besides its documents. The lists grow while it is read."""

    bad_records: list[str] = field(default_factory=list)
    """Messages of the first few skipped records."""
    io_retries: list[str] = field(default_factory=list)
    """One warning for each retry of an I/O error."""
    held_out: list[str] = field(default_factory=list)
    """For each source too small to hold out whole documents: a message about what is held out instead."""
    files: Mapping[str, Any] = field(default_factory=dict)
    """The local files of each source, as FileSets."""


class DocumentStream(Protocol):
    @property
    def identity(self) -> dict[str, Any]:
        """What must not change between saving a cursor and resuming from it: facts about source and order, as JSON."""

    @property
    def notes(self) -> SourceNotes: ...

    def documents(self, cursor: Cursor | None = None) -> DocumentGenerator:
        """Documents after `cursor`; None: from the start."""


def counts_of(cursor: Cursor | None) -> dict[str, int]:
    """The counts in a cursor. For a mixture they are summed; its epoch is that of the part read most often."""
    if cursor is None:
        return dict.fromkeys(COUNTS, 0)
    if "parts" in cursor:
        parts = [counts_of(part) for part in cursor["parts"].values()]
        summed = {name: sum(part[name] for part in parts) for name in COUNTS}
        return summed | {"epoch": max(part["epoch"] for part in parts)}
    return {name: cursor[name] for name in COUNTS}


class DataError(TercetError):
    """Data cannot be read or written. The message is one line: file or value, rule and fix."""


class DataUsageError(DataError, UsageError):
    """The requested data does not exist, or its settings do not fit together."""


class EmptyDataError(DataError):
    """The data is there, but has no document."""

    exit_code = EXIT_EMPTY


class StoppedWaiting(Exception):
    """The run was asked to stop while it waited for a batch."""


class BadRecordError(DataError):
    """A record that cannot be read. data.bad_records decides whether it is fatal or skipped and counted."""

    def __init__(self, file: str, record: int | str, reason: str, fix: str = "fix it") -> None:
        self.file, self.record, self.reason = file, record, reason
        where = f"record {record} of {file}" if record != "" else file
        self.summary = f"{where}: {reason}"
        super().__init__(f"{self.summary}: {fix}, or skip and count such records with --data.bad_records skip")


class BadValueError(Exception):
    """Why a record cannot be used, without its place: `its text is ...`."""

    def __init__(self, reason: str, fix: str = "fix it") -> None:
        super().__init__(reason)
        self.fix = fix


def first_line(error: BaseException) -> str:
    """The first line of a library's error message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""Document streams: the interface that every source implements, errors, random orders, and background reading.

A stream is an iterator of documents that can be reopened after any document, from that document's cursor.

Orders and the validation split are pure functions of integers. There is no generator state to save, and results do not
depend on the numpy version: numpy may change the streams of its own generators, and a run resumed after an upgrade
would read its documents in a different order.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

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
class SourceNotes:
    """What is known about a stream besides its documents. The lists grow while it is read."""

    bad_records: list[str] = field(default_factory=list)  # messages of the first few skipped records
    io_retries: list[str] = field(default_factory=list)  # one warning for each retry of an I/O error
    held_out: list[str] = field(default_factory=list)  # what is held out of sources too small to hold out documents
    files: Mapping[str, Any] = field(default_factory=dict)  # the local files of each source, as FileSets


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


SHORTEST_HELD_OUT = 16  # bytes, or tokens of shards, that are worth holding out
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, a bijection on uint64 with random-looking output."""
    value = value ^ (value >> np.uint64(30))
    value = value * np.uint64(0xBF58476D1CE4E5B9)
    value = value ^ (value >> np.uint64(27))
    value = value * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key(*parts: int) -> int:
    """Combine integers (a seed, an epoch, a block number, ...) into one 64-bit key."""
    state = 0
    for part in parts:  # `mix` on Python integers: ten times faster than numpy for a single number
        state = (state + part + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def random_u64(stream: int, count: int) -> np.ndarray:
    """`count` pseudo-random uint64 (splitmix64) that depend only on `stream`, a `key`."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mix(steps + np.uint64(stream))


def random_below(stream: int, count: int, bound: int) -> np.ndarray:
    """`count` int64 in [0, bound), bound < 2**31; uniform up to a bias below bound / 2**32."""
    halves = random_u64(stream, (count + 1) // 2).view(np.uint32)[:count]
    return ((halves.astype(np.uint64) * np.uint64(bound)) >> np.uint64(32)).view(np.int64)


def permutation(count: int, *parts: int) -> np.ndarray:
    """A permutation of range(count) (int64) that depends only on `parts`."""
    return np.argsort(random_u64(key(*parts), count), kind="stable")


def document_hash(data: bytes) -> int:
    """64 bits of the SHA-256 of a document's UTF-8 text; decides its split."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def in_validation(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents belong to validation: those with hashes in the lowest `fraction` of the range."""
    return hashes < np.uint64(validation_threshold(fraction))


def validation_threshold(fraction: float) -> int:
    return min(int(fraction * 2.0**64), _MASK)


def held_out_end(documents: int, fraction: float, total: int, unit: str) -> tuple[int, str]:
    """How much of the end of a text is for validation where whole documents are too few, and a line that says so.

    total: of the text, in `unit` (bytes, or tokens of shards). 0 and nothing to say if it would be too short.
    """
    size = int(fraction * total)
    if size < SHORTEST_HELD_OUT:
        return 0, ""
    few = f"{documents} documents are" if documents > 1 else "1 document is"
    return size, (
        f"{few} too few to hold out whole ones at validation_fraction={fraction:g}: validation reads the last {size:,} "
        f"of {total:,} {unit} instead"
    )


T = TypeVar("T")
CLOSE_SECONDS = 5.0
POLL_SECONDS = 0.5
# Grace period after a stop request: a source that is merely slow can still deliver the batch of the current step.
GRACE_SECONDS = 2.0


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Generic[T]):
    """Keeps up to `depth` items of `source` ready. Errors in the source are raised when the item is requested.

    A thread rather than a process: the work is numpy copies, file reads and a tokenizer that releases the interpreter
    lock, and a process would have to send every batch through a pipe.
    """

    def __init__(self, source: Generator[T, None, None], depth: int, stop: Callable[[], bool] = lambda: False) -> None:
        """`stop` is polled while waiting: once it returns True, StoppedWaiting is raised after a grace period.

        depth: 0 to read in the calling thread, where `stop` is not polled.
        """
        self.wait_seconds = 0.0  # in total
        self._direct = source if depth == 0 else None
        self._stop_requested = stop
        self._queue: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._end: _End | None = None
        if depth == 0:
            return
        # The thread holds no reference to self, so that an unused Prefetcher is garbage-collected and stops its thread.
        self._thread = threading.Thread(
            target=_run, args=(source, self._queue, self._stop), name="tercet-data", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> T:
        if self._end is None:
            begin = time.perf_counter()
            try:
                item = self._get()
            finally:
                self.wait_seconds += time.perf_counter() - begin
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def _get(self) -> T | _End:
        if self._direct is not None:
            return next(self._direct, _End(None))
        deadline: float | None = None
        while True:
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if not self._stop_requested():
                    continue
            now = time.monotonic()
            if deadline is None:
                deadline = now + GRACE_SECONDS
            if now >= deadline:
                raise StoppedWaiting

    def close(self) -> None:
        """Stop the thread and wait briefly for it: it may hang in a network read, and is a daemon. Iteration ends."""
        if self._direct is not None:
            self._direct.close()
            return
        self._stop.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        if self._end is None:
            self._end = _End(None)
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.get(timeout=0.02)
            except queue.Empty:
                self._thread.join(timeout=0.02)

    def __del__(self) -> None:
        self._stop.set()


def _run(source: Generator[Any, None, None], ready: queue.Queue[Any], stop: threading.Event) -> None:
    end = _End(None)
    try:
        for item in source:
            if not _put(ready, item, stop):
                break
    except BaseException as error:  # re-raised in the reader
        end = _End(error)
    finally:
        source.close()
        _put(ready, end, stop)


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False

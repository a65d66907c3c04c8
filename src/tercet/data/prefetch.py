"""Prefetching: run an iterator in a background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

from tercet.data.stream import StoppedWaiting

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
        self.wait_seconds = 0.0
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

    def __iter__(self) -> Iterator[T]:
        return self

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

"""The event log: events_rank{r}.jsonl, one line per event.

Each line is a single `write` to a file opened for appending, so a killed process loses at most the line it was writing.
A full disk does not end a run: what cannot be written waits in memory (AppendedFile) and follows when there is space.
When a run resumes from step k, measurements of later steps move to `superseded_rank{r}.jsonl`: each step appears once
in the log, and nothing is deleted. No torch at import: reports read this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tercet.atomic_io import atomic_write
from tercet.errors import UsageError
from tercet.parse import parse_json
from tercet.telemetry.events import KINDS, Event, Noted, decode, encode, parse_record


def events_file(folder: Path, rank: int = 0) -> Path:
    return folder / f"events_rank{rank}.jsonl"


def rank_files(folder: Path, name: str) -> dict[int, Path]:
    """The files {name}_rank{r}.jsonl of a run folder, by rank."""
    paths = sorted(folder.glob(f"{name}_rank*.jsonl"))
    return {int(m[1]): path for path in paths if (m := re.fullmatch(rf"{name}_rank(\d+)\.jsonl", path.name))}


def tail(path: Path, size: int = 65536) -> list[str]:
    """The lines in the last `size` bytes of a file; none if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - size))
        return stream.read().decode("utf-8", "replace").splitlines()
    return []


def last_heartbeat(path: Path) -> dict[str, Any]:
    """The last readable heartbeat of a rank; empty if there is none."""
    for line in reversed(tail(path)):
        with contextlib.suppress(ValueError):
            beat = parse_json(line)
            if isinstance(beat, dict) and isinstance(at := beat.get("time"), int | float) and abs(at) < 2**63:
                return beat
    return {}


def is_disk_full(error: OSError) -> bool:
    """Whether the disk is full or a quota is exceeded: space may be freed while the run continues."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_disk_allowed() -> Iterator[None]:
    """For files that a run can do without."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise


class AppendedFile:
    """A file that is only appended to. On a full disk, what was not written waits in memory for the next write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()  # the watchdog writes too
        self.waiting = b""

    def write(self, data: bytes) -> None:
        with self._lock, full_disk_allowed():
            self.waiting += data
            while self.waiting:  # a nearly full disk takes a part
                self.waiting = self.waiting[os.write(self._file, self.waiting) :]

    def sync(self) -> None:
        """fsync everything written so far."""
        with full_disk_allowed():
            os.fsync(self._file)

    def close(self) -> None:
        self.write(b"")
        os.close(self._file)


class EventLog:
    """Appends events to this rank's file and passes each to its readers."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path, self.rank = events_file(folder, rank), rank
        self.readers: list[Callable[[Event], None]] = []
        try:
            self._file = AppendedFile(self.path)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): pick another --run.dir") from None

    @property
    def waiting(self) -> int:
        """Events that the disk had no space for."""
        return self._file.waiting.count(b"\n")

    def emit(self, event: Event) -> None:
        """Write one line, then call the readers. Notes when the disk becomes full and when it has space again."""
        event, late = dataclasses.replace(event, rank=self.rank), self.waiting
        # Names of files may hold bytes that are not UTF-8; backslashreplace writes them as JSON escapes.
        self._file.write(encode(event).encode(errors="backslashreplace"))
        for reader in self.readers:
            reader(event)
        if self.waiting and not late:
            text = f"warning: {self.path}: no space left; events wait in memory and the run continues: free some space"
            self.emit(Noted(step=event.step, text=text))
        elif late and not self.waiting:
            self.emit(Noted(step=event.step, text=f"{self.path} is complete again: {late} events were written late"))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Events of a file in order, without damaged lines and an incomplete last line (from a crash)."""
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                event = decode(line)
            except ValueError:
                continue
            if event is not None:
                yield event


def rewind(folder: Path, rank: int, step: int) -> tuple[int, list[int]]:
    """Move measurements after `step` to superseded_rank{r}.jsonl. Call before opening the log.

    Returns how many were moved, and the numbers of damaged lines, which stay in the file.
    """
    path = events_file(folder, rank)
    if not path.exists():
        return 0, []
    kept: list[bytes] = []
    moved: list[bytes] = []
    damaged: list[int] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # drop an incomplete last line
        try:
            record = parse_record(line)
        except ValueError:
            damaged.append(number)
            kept.append(line + b"\n")
            continue
        cls = KINDS.get(record["kind"])
        # Unknown kinds, from a newer version, count as measurements.
        stale = record["step"] > step and (cls is None or cls.measured)
        (moved if stale else kept).append(line + b"\n")
    if moved:
        with (folder / f"superseded_rank{rank}.jsonl").open("ab") as stream:
            stream.writelines(moved)
    with atomic_write(path) as fresh:
        fresh.write_bytes(b"".join(kept))
    return len(moved), damaged

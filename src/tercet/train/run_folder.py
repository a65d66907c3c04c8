"""The run folder: find or create it, lock it, and remove it again if the run was refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from fnmatch import fnmatch
from pathlib import Path

from tercet.atomic_io import unused
from tercet.config.schema import RunSection
from tercet.errors import TercetError, UsageError
from tercet.telemetry.event_log import events_file, read_events
from tercet.train import manifest

LOCK = "lock"
ENVIRONMENT = "env.json"  # written first: it marks the folder as that of a run
FILE_LISTS = "data_files"  # a file list for each source of data, named by its hash
# What a new run's folder may hold: what other ranks, launchers and a start that was killed leave behind, and logs that
# the shell has opened.
EXPECTED = (
    LOCK, "checkpoints", f"{ENVIRONMENT}.partial", "flight_recorder*", "log", "logs", "*.log", "*.out",
    "*.err", ".*", "lost+found",
)  # fmt: skip


class RunFolder:
    """A run folder that only this run writes to."""

    def __init__(self, path: Path, *, lock: bool = True) -> None:
        """`lock`: rank 0 locks the folder for all ranks."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        try:
            self._existing = {p.name for p in path.iterdir()} if path.is_dir() else set()
            # Innermost first, the order in which `close` removes them again.
            self._created = [p for p in (path / LOCK, self.checkpoints, path, *path.parents) if not p.exists()]
            self._lock = self._open_lock(lock)
        except OSError as error:
            raise UsageError(
                f"run folder {path} cannot be written ({error.strerror}): pick another --run.dir, or fix permissions"
            ) from None

    def _open_lock(self, lock: bool) -> int:
        while True:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            if not lock:
                return handle
            try:
                # The kernel holds the lock, so a killed process leaves none behind.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                pids = " ".join(map(str, _pids_with_open(self.path / LOCK)))
                fix = f"wait for it, stop it with `kill {pids}`" if pids else "wait for it"
                raise TercetError(
                    f"run folder {self.path} is in use by another process{f' (pid {pids})' if pids else ''}: {fix}, "
                    "or pick another --run.dir"
                ) from None
            try:
                if os.path.samestat(os.fstat(handle), os.stat(self.path / LOCK)):
                    return handle
            except FileNotFoundError:
                pass
            os.close(handle)  # another run removed this file after it was opened: lock the new one

    @property
    def has_run(self) -> bool:
        """Whether the folder already holds a run. One that was stopped before its first step leaves nothing to keep."""
        events = events_file(self.path)
        if events.is_file() and events.stat().st_size > 0:  # an empty file: a run that was refused
            logged = read_events(events)
            first = next(logged, None)  # None: the file is damaged
            if first is None or first.step or any(event.step for event in logged):
                return True
        return bool(manifest.complete_checkpoints(self.checkpoints))

    @property
    def other_files(self) -> list[str]:
        """What the folder held before this run, if that was neither a run nor expected."""
        if self.has_run or ENVIRONMENT in self._existing:
            return []
        return sorted(name for name in self._existing if not any(fnmatch(name, pattern) for pattern in EXPECTED))

    def close(self) -> None:
        """Release the folder. If nothing was written to it, remove what this process created."""
        now = {p.name for p in self.path.iterdir()} if self.path.is_dir() else set()
        if now - self._existing <= {LOCK, self.checkpoints.name}:
            for created in self._created:
                try:
                    created.unlink() if created == self.path / LOCK else created.rmdir()
                except FileNotFoundError:
                    continue  # another rank removed it
                except OSError:
                    break  # not empty
        os.close(self._lock)


def _pids_with_open(path: Path) -> list[int]:
    """Processes of this machine that have a file open, if the system has /proc. All ranks of a run open its lock."""
    file, pids = os.path.realpath(path), set()
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # of another user, or closed meanwhile
            if os.readlink(handle) == file:
                pids.add(int(handle.parts[2]))
    return sorted(pids)


def locate(run: RunSection, resume: str | None) -> Path:
    """run.dir; else the run folder of `resume`; else a new folder under runs/."""
    if run.dir is not None:
        return Path(run.dir)
    if resume not in (None, "auto"):
        return manifest.run_of(Path(str(resume)))
    runs = Path("runs")
    if resume == "auto":
        # Match whole names: runs of `tiny` are not runs of `tiny-dense`.
        pattern = re.compile(re.escape(run.name) + r"-\d{8}-\d{6}(-\d+)?")
        named = [p for p in (runs.iterdir() if runs.is_dir() else ()) if pattern.fullmatch(p.name)]
        earlier = [p for p in named if manifest.complete_checkpoints(p / "checkpoints")]
        if earlier:
            return max(earlier, key=lambda p: (p / "checkpoints").stat().st_mtime)
    return unused(runs / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")

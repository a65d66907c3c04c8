"""The watchdog writes a heartbeat, detects a stalled run and dumps its state.

The heartbeat is the last progress, written every few seconds whether or not the run moves. A stall is no progress for a
minimum time and a multiple of this run's own time between log lines, so that slow steps are not mistaken for stuck
ones. The dump has the Python stacks and CPU time of this process (busy or waiting?), CUDA memory, and the last events
and heartbeats of every rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import select
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from tercet.atomic_io import unused
from tercet.config.sections import HealthConfig
from tercet.telemetry.event_log import EventLog, last_heartbeat, rank_files, tail
from tercet.telemetry.events import Event, StageStarted, Stalled, StepLogged

# EX_TEMPFAIL of sysexits.h ("try again"), so that restart scripts can distinguish it from a failure.
STALLED_EXIT = 75
START_SECONDS = 900.0  # without a stall before the first log line, which may include compilation
STALL_FACTOR = 5.0  # times the median interval
LAST_EVENTS = 5


class Watchdog:
    """Use `with Watchdog(...) as dog:` around training, and add `dog.observe` to the event log's readers.

    `dog.at(step, doing)` costs an assignment; a thread writes it to heartbeat_rank{r}.jsonl every `seconds`.
    """

    def __init__(self, folder: Path, rank: int, config: HealthConfig, log: EventLog, seconds: float = 10.0) -> None:
        self._folder, self._rank, self._config, self._log = folder, rank, config, log
        self._seconds = seconds
        self._intervals: deque[float] = deque(maxlen=20)
        self._stop = threading.Event()
        self._stalled_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.at(0, "starting")

    def at(self, step: int, doing: str) -> None:
        """Record progress: the current step and activity."""
        self.step, self.doing, self.moved = step, doing, time.time()

    @property
    def _idle_seconds(self) -> float:
        """Seconds since the last progress."""
        return time.time() - self.moved

    def observe(self, event: Event) -> None:
        """Learn the usual time between log lines."""
        if isinstance(event, StageStarted):
            self._intervals.clear()  # compilation and capture start over
        if isinstance(event, StepLogged):
            self._intervals.append(event.step_seconds * len(event.losses))

    def limit(self) -> float:
        """Seconds without progress that count as a stall."""
        intervals = list(self._intervals)  # a copy: the main thread may clear them
        if not intervals:
            return max(START_SECONDS, self._config.stall_seconds)
        return max(self._config.stall_seconds, STALL_FACTOR * statistics.median(intervals))

    def __enter__(self) -> Self:
        # Python's fault handler needs neither the main thread nor the interpreter lock: it writes on SIGUSR1, and when
        # a thread that never releases the lock keeps this one from running.
        self._stacks = (self._folder / f"stack_rank{self._rank}_signal.txt").open("a")
        faulthandler.register(signal.SIGUSR1, self._stacks)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()
        with contextlib.suppress(OSError):
            path = Path(self._stacks.name)
            if path.stat().st_size == 0:
                path.unlink()

    def _run(self) -> None:
        cpu, beat_at = _cpu_seconds(), 0.0
        while True:
            if time.time() - beat_at >= self._seconds:
                beat_at = time.time()
                self._write_heartbeat()
            limit = self.limit()
            # Poll well within the limit, to notice a stall soon, but never in a busy loop.
            wait = min(5.0, self._seconds, max(0.02, min(limit, self._config.stall_seconds) / 10))
            faulthandler.dump_traceback_later(max(1.0, wait + limit), exit=False, file=self._stacks)
            if self._stop.wait(wait):
                break
            if self._idle_seconds < limit:
                self._end_stall()
                cpu = _cpu_seconds() if self._idle_seconds < wait else cpu
            elif self._stalled_since is None and self._config.stall != "off" and self.doing != "ended":
                self._stall(limit, cpu)
        self._write_heartbeat()

    def _write_heartbeat(self) -> None:
        now = time.time()
        line = {
            "time": now,
            "rank": self._rank,
            "pid": os.getpid(),
            "step": self.step,
            "doing": self.doing,
            "for_seconds": round(now - self.moved, 3),
        }
        path = self._folder / f"heartbeat_rank{self._rank}.jsonl"
        # The event log reports a full disk.
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _stall(self, limit: float, cpu: float) -> None:
        self._stalled_since = self.moved
        idle, doing, step = self._idle_seconds, self.doing, self.step
        path = self._dump(f"no progress for {idle:.1f} s (limit {limit:.1f} s) in step {step} while {doing}", cpu)
        self._emit(Stalled(step=max(0, step - 1), doing=doing, for_seconds=idle, limit_seconds=limit, dump=path.name))
        self._print(f"stalled: no progress for {idle:.0f} s in step {step} while {doing}; see {path}")
        if self._config.stall == "end":
            self._print(f"health.stall=end: exiting with code {STALLED_EXIT}")
            os._exit(STALLED_EXIT)

    def _end_stall(self) -> None:
        if self._stalled_since is None:
            return
        seconds = self.moved - self._stalled_since
        self._stalled_since = None
        doing, step, limit = self.doing, max(0, self.step - 1), self.limit()
        self._emit(Stalled(step=step, doing=doing, for_seconds=seconds, limit_seconds=limit, dump="", over=True))
        self._print(f"progress again after {seconds:.0f} s")

    def _emit(self, event: Stalled) -> None:
        with contextlib.suppress(OSError):
            self._log.emit(event)
            self._log.sync()

    def _dump(self, why: str, cpu_before: float) -> Path:
        """Write stacks, CPU time, CUDA memory and the last events of every rank; returns the path."""
        path = unused(self._folder / f"stack_rank{self._rank}_{time.strftime('%Y%m%d-%H%M%S')}", ".txt")
        last = [
            "\n".join([f"-- {file.name}", *(line[:600] for line in tail(file)[-LAST_EVENTS:])])
            for file in rank_files(self._folder, "events").values()
        ]
        parts = [
            f"{why}\nrank {self._rank}, pid {os.getpid()}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
            self._cpu_use(cpu_before),
            "== Python stacks\n" + stacks(),
            "== CUDA memory\n" + cuda_memory(),
            "\n".join(["== every rank", *heartbeats(self._folder, 3 * self._seconds + 1), *last]),
        ]
        with contextlib.suppress(OSError):
            path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        return path

    def _cpu_use(self, before: float) -> str:
        idle = max(1e-9, self._idle_seconds)
        share = (_cpu_seconds() - before) / idle
        meaning = "busy: slow, or in an endless loop" if share > 0.5 else "waiting"
        return f"CPU use since the last progress, {idle:.1f} s ago: {100 * share:.0f}% of one core: {meaning}"

    def _print(self, text: str) -> None:
        # Not through the screen, whose lock the main thread may hold, and only if stderr can be written without
        # blocking: an unread pipe, or a terminal after Ctrl-S, may be what the run is stuck on.
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [sys.stderr.fileno()], [], 0)[1]:
                os.write(sys.stderr.fileno(), f"rank {self._rank}: {text}\n".encode())


def stacks() -> str:
    """Stacks of all threads of this process, innermost call last."""
    names = {t.ident: t.name for t in threading.enumerate()}
    text = io.StringIO()
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: names.get(item[0], "") != "MainThread"):
        text.write(f"thread {names.get(ident, ident)}\n")
        text.write("".join(traceback.format_stack(frame)))
    return text.getvalue()


def cuda_memory() -> str:
    """The allocator's table; does not call the driver, so a hung GPU cannot block it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "no CUDA device in use"
    return str(torch.cuda.memory_summary(abbreviated=True))


def heartbeats(folder: Path, stale: float) -> list[str]:
    """The last heartbeat of each rank, one per line: the rank behind the others is the likely cause of a stall.

    A heartbeat older than `stale` seconds means that the process is frozen or gone: its thread waits for nothing.
    """
    lines = []
    for rank, path in rank_files(folder, "heartbeat").items():
        beat = last_heartbeat(path)
        try:
            age = time.time() - beat["time"]
            doing = f"step {beat['step']}, {beat['doing']} for {beat['for_seconds'] + age:.0f} s"
            frozen = " (frozen or gone)" if age > stale else ""
            lines.append(f"rank {rank}: {doing}, last heartbeat {age:.0f} s ago{frozen}")
        except (KeyError, TypeError):
            lines.append(f"{path.name}: no readable line")
    return lines


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system

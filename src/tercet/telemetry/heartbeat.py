"""A line every few seconds that says which step the process is at and what it is doing, whether or not it moves."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path


class Heartbeat:
    """`beat.at(step, doing)` costs two assignments; a thread writes heartbeat_rank{r}.jsonl from them."""

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self._path = folder / f"heartbeat_rank{rank}.jsonl"
        self._rank, self._seconds = rank, seconds
        self._step, self._doing, self._since = 0, "starting", time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def at(self, step: int, doing: str) -> None:
        """Progress: the step in work and the phase it is in."""
        self._step, self._doing, self._since = step, doing, time.time()

    @property
    def seconds(self) -> float:
        """Time between two lines."""
        return self._seconds

    @property
    def step(self) -> int:
        """The step in work."""
        return self._step

    @property
    def doing(self) -> str:
        """The phase it is in."""
        return self._doing

    @property
    def moved(self) -> float:
        """When there was progress last."""
        return self._since

    @property
    def idle_seconds(self) -> float:
        """Time since then."""
        return time.time() - self._since

    @property
    def ended(self) -> bool:
        """Whether the run has said its last word."""
        return self._doing == "ended"

    def close(self) -> None:
        """End the thread, after a last line."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(self._line())
                stream.flush()
                while not self._stop.wait(self._seconds):
                    stream.write(self._line())
                    stream.flush()
                stream.write(self._line())
        except OSError:
            return  # a full disk ends the heartbeat; the event log, not this thread, tells of it

    def _line(self) -> str:
        now = time.time()
        line = {
            "time": now,
            "rank": self._rank,
            "pid": os.getpid(),
            "step": self._step,
            "doing": self._doing,
            "for_seconds": round(now - self._since, 3),
        }
        return json.dumps(line) + "\n"

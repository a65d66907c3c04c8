"""exchange_rank{r}.csv: bytes that a rank got from others for each step, by what they were for, where a sequence is
shared. Counted where they are sent, so that recomputation and the way back are in it; validation's count with the
steps before it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from tercet.atomic_io import write_text
from tercet.telemetry.events import Event, StepLogged

COLUMNS = ("raw", "compressed", "window", "selected", "requests", "before")


class ExchangeTable:
    """A reader of the log. `traffic` is the running count of a strategy; `step` is where this process began."""

    def __init__(self, path: Path, traffic: Mapping[str, int], step: int) -> None:
        self._path, self._traffic, self._step = path, traffic, step
        self._before = dict(traffic)
        told = []
        if path.exists():  # what is about to be made again is told again
            with path.open(newline="") as stream:
                told = [row for row in csv.reader(stream) if row and row[0].isdigit() and int(row[0]) <= step]
        fresh = io.StringIO()
        csv.writer(fresh, lineterminator="\n").writerows([("step", *COLUMNS), *told])
        write_text(path, fresh.getvalue())  # a process killed here leaves the rows of before

    def __call__(self, event: Event) -> None:
        if not isinstance(event, StepLogged) or event.step <= self._step:
            return
        steps, now = event.step - self._step, dict(self._traffic)
        row = [round((now.get(name, 0) - self._before.get(name, 0)) / steps) for name in COLUMNS]
        with self._path.open("a", newline="") as stream:
            csv.writer(stream, lineterminator="\n").writerow((event.step, *row))
        self._step, self._before = event.step, now

"""k_stats.csv and fallback_counters.csv: gates, selection and routes as rows, read from the events."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tercet.telemetry.events import Event, LayersObserved, RoutesCounted, RunStarted

STATISTICS = (
    "gate_share_compressed",
    "gate_share_selected",
    "gate_share_window",
    "gate_entropy",
    "gate_max_share",
    "gate_collapse",
    "selected_blocks",
    "selected_distance",
    "selected_forced",
    "selected_overlap",
)
LAYER_COLUMNS = ("step", "layer", "attention", *STATISTICS)
ROUTE_COLUMNS = ("layer", "branch", "route", "reason", "fallback", "calls")


def layer_rows(event: LayersObserved) -> Iterator[tuple[Any, ...]]:
    """One row per layer."""
    columns = [getattr(event, name) for name in STATISTICS]
    for i, kind in enumerate(event.attention):
        yield (event.step, i, kind, *(column[i] for column in columns))


def route_rows(event: RoutesCounted) -> Iterator[tuple[Any, ...]]:
    """One row per layer, branch and route."""
    yield from zip(*(getattr(event, name) for name in ROUTE_COLUMNS), strict=True)


def last_counts(events: Iterable[Event]) -> list[RoutesCounted]:
    """The last count of each process, of those that counted: counts begin anew with every process."""
    last: list[RoutesCounted] = []
    open_count: RoutesCounted | None = None
    for event in events:
        if isinstance(event, RunStarted) and open_count is not None:
            last.append(open_count)
            open_count = None
        elif isinstance(event, RoutesCounted):
            open_count = event
    return [*last, open_count] if open_count is not None else last


def line(values: Iterable[Any]) -> str:
    """A CSV line: floats with all digits, None as nothing, text quoted where it must be."""
    return ",".join(_cell(v) for v in values) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"' if any(c in value for c in ',"\n\r') else value
    return repr(value)


class LayerTable:
    """k_stats.csv: written anew from the events so far, then followed along."""

    def __init__(self, path: Path, past: Iterable[Event]) -> None:
        fresh = path.with_suffix(".csv.tmp")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(line(LAYER_COLUMNS))
            for event in past:
                if isinstance(event, LayersObserved):
                    stream.writelines(line(row) for row in layer_rows(event))
        fresh.replace(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: Event) -> None:
        if isinstance(event, LayersObserved):
            os.write(self._file, "".join(line(row) for row in layer_rows(event)).encode())


class RouteTable:
    """fallback_counters.csv: counts so far, over all processes of the run, so the file is replaced whole each time.
    Header only: nothing counted."""

    def __init__(self, path: Path, past: Iterable[Event] = ()) -> None:
        self._path = path
        self._before: Counter[tuple[Any, ...]] = Counter()  # by earlier processes
        for event in last_counts(past):
            self._before.update(_calls(event))
        self._write(self._before)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoutesCounted):
            self._write(self._before + _calls(event))

    def _write(self, calls: Counter[tuple[Any, ...]]) -> None:
        rows = "".join(line((*key, n)) for key, n in sorted(calls.items()))
        fresh = self._path.with_suffix(".csv.tmp")
        fresh.write_text(line(ROUTE_COLUMNS) + rows, encoding="utf-8")
        fresh.replace(self._path)


def _calls(event: RoutesCounted) -> Counter[tuple[Any, ...]]:
    return Counter({row[:-1]: row[-1] for row in route_rows(event)})

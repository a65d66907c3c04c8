"""Readers of the event stream that write what people's scripts and tools open: CSV files and TensorBoard."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import queue
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tercet.atomic_io import write_text
from tercet.errors import TercetError
from tercet.telemetry.events import (
    CheckpointSaved,
    Event,
    HealthFired,
    LayersObserved,
    ResourcesObserved,
    RoutesCounted,
    RunEnded,
    RunStarted,
    Sampled,
    StepLogged,
    StepsSkipped,
    Validated,
)

TRAINING_COLUMNS = (
    "step",
    "loss",
    "lr",
    "tokens_per_s",
    "grad_norm",
    "tokens",
    "step_seconds",
    "data_seconds",
    "mfu",
    "memory_gib",
    "skipped",
    "epoch",
    "bad_records",
    "time",
)
VALIDATION_COLUMNS = ("step", "loss", "tokens", "seconds", "time")


class CsvSink:
    """One kind of event as rows of a CSV file; floats with all their digits, None as nothing."""

    def __init__(self, path: Path, kind: type[Event], columns: tuple[str, ...], past: Iterable[Event]) -> None:
        """Writes the file anew from the events so far (header and all), then follows along."""
        self._kind, self._columns = kind, columns
        fresh = path.with_suffix(".csv.tmp")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(",".join(columns) + "\n")
            stream.writelines(self._row(e) for e in past if isinstance(e, kind))
        fresh.replace(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, event: Event) -> None:
        if isinstance(event, self._kind):
            os.write(self._file, self._row(event).encode())

    def _row(self, event: Event) -> str:
        values = (getattr(event, column) for column in self._columns)
        return ",".join("" if v is None else repr(v) for v in values) + "\n"


def tensorboard() -> Any:
    """torch.utils.tensorboard, or one sentence that says what it lacks."""
    try:
        import torch.utils.tensorboard as found
    except ImportError as error:
        raise TercetError(
            f"log.tensorboard needs tensorboard ({error}): pip install 'tercet[report]', or --log.no_tensorboard"
        ) from None
    return found


def wandb() -> Any:
    """The same for wandb."""
    try:
        import wandb as found
    except ImportError:
        raise TercetError("log.wandb needs wandb: pip install 'tercet[wandb]', or leave it off") from None
    return found


class TensorBoardSink:
    """Scalars and samples under tb/. After a resume, `purge_step` hides what was superseded."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self._writer: Any = tensorboard().SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None)
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._record: Any = Summary
        self._closed = False

    def __call__(self, event: Event) -> None:
        if self._closed:  # a thread's late word: the writer would open another file for it, or fail
            return
        if isinstance(event, Sampled):
            self._writer.add_text("sample", f"```\n{event.prompt}{event.text}\n```", event.step, walltime=event.time)
        elif isinstance(event, RunEnded):
            self._writer.close()
            self._closed = True
        elif named := scalars(event):
            # One record for all of an event's numbers: add_scalar makes one for each, and the 150 of a log line would
            # hold the interpreter for tens of milliseconds, while training waits for it.
            record = self._record()
            for name, value in named.items():
                record.value.add(tag=name, simple_value=value)
            self._writer.file_writer.add_summary(record, event.step, walltime=event.time)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by name, for tools that draw such."""
    if isinstance(event, StepLogged):
        names = ("loss", "lr", "grad_norm", "tokens_per_s", "memory_gib", "skipped", "data_seconds", "mfu")
        return {f"train/{n}": getattr(event, n) for n in names if getattr(event, n) is not None}
    if isinstance(event, Validated):
        return {"validation/loss": event.loss}
    if isinstance(event, LayersObserved):
        columns = {name: getattr(event, name) for name in STATISTICS}
        rows = {f"layers/{name}/{i}": v for name, column in columns.items() for i, v in enumerate(column)}
        return {name: v for name, v in rows.items() if v is not None}
    if isinstance(event, ResourcesObserved):
        values = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
        named = {k: v for k, v in values.items() if k.endswith(("_seconds", "_gib")) and v is not None}
        return {f"resources/{k}": v for k, v in named.items()}
    return {f"health/{event.rule}": event.value} if isinstance(event, HealthFired) else {}


class WandbSink:
    """The same for Weights & Biases, where somebody has installed it and asked for it."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        # One run folder is one run there too: a resumed one goes on.
        identity = folder.resolve().name
        self._run: Any = wandb().init(
            project="tercet", name=name, id=identity, resume="allow", dir=str(folder), config=config
        )

    def __call__(self, event: Event) -> None:
        if named := scalars(event):
            self._run.log(named, step=event.step)
        elif isinstance(event, RunEnded):
            self._run.finish(exit_code=0 if event.outcome == "completed" else 1)


def csv_sinks(folder: Path, past: list[Event]) -> list[CsvSink]:
    """training.csv and val.csv of a run folder."""
    return [
        CsvSink(folder / "training.csv", StepLogged, TRAINING_COLUMNS, past),
        CsvSink(folder / "val.csv", Validated, VALIDATION_COLUMNS, past),
    ]


# ------------------------------------------------------------------------------------------------
# k_stats.csv and fallback_counters.csv: gates, selection and routes as rows, read from the events.

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


# ------------------------------------------------------------------------------------------------
# exchange_rank{r}.csv: bytes that a rank got from others for each step, by what they were for, where a sequence is
# shared. Counted where they are sent, so that recomputation and the way back are in it; validation's count with the
# steps before it.

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


# ------------------------------------------------------------------------------------------------
# A reader of events that may be slow, in a thread of its own: while it writes, the device works on.

# Longer than any sink needs for what is left; a network that hangs must not keep a finished run.
LEAVE_SECONDS = 30.0


class InBackground:
    """Hands events over and returns. A reader that fails is left out from then on, and that is said once."""

    def __init__(self, name: str, reader: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._name, self._reader, self._say = name, reader, say
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def close(self) -> None:
        """Wait until everything is told."""
        self._queue.put(None)
        self._thread.join(LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"warning: {self._name} did not finish in {LEAVE_SECONDS:.0f} s; the events have everything")

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._reader(event)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self._say(f"warning: {self._name} stopped ({what}); the events in the run folder have everything")
                return


# ------------------------------------------------------------------------------------------------
# metrics.json: the run in a few figures, read from its events. Works on a crashed or running run too.


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Figures of a whole run, over all its processes."""
    events = list(events)
    steps = [e for e in events if isinstance(e, StepLogged)]
    validations = [e for e in events if isinstance(e, Validated)]
    started = [e for e in events if isinstance(e, RunStarted)]
    ended = [e for e in events if isinstance(e, RunEnded)]
    checkpoints = [e for e in events if isinstance(e, CheckpointSaved)]
    last = steps[-1] if steps else None
    best = min(validations, key=lambda e: e.loss, default=None)
    return {
        "outcome": ended[-1].outcome if ended and events[-1] is ended[-1] else "unknown",
        "reason": ended[-1].reason if ended and events[-1] is ended[-1] else None,
        "step": last.step if last else 0,
        "steps": started[-1].steps if started else None,
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "first_loss": steps[0].losses[0] if steps else None,
        "val_loss": validations[-1].loss if validations else None,
        "best_val_loss": best.loss if best else None,
        "best_val_step": best.step if best else None,
        "tokens_per_s": statistics.median(e.tokens_per_s for e in steps) if steps else None,
        "mfu": last.mfu if last else None,
        "memory_gib": max(e.memory_gib for e in steps) if steps else None,
        "data_wait_share": _data_wait(steps),
        "skipped_steps": sum(len(e.steps) for e in events if isinstance(e, StepsSkipped)),
        "processes": len(started),
        "resumes": sum(e.resumed_from is not None for e in started),
        "checkpoints": len(checkpoints),
        "checkpoint_seconds": max((e.seconds for e in checkpoints), default=None),
        "seconds": sum(e.seconds for e in ended),
        "parameters": started[-1].parameters if started else None,
    }


def _data_wait(steps: list[StepLogged]) -> float | None:
    total = sum(e.step_seconds * len(e.losses) for e in steps)
    return sum(e.data_seconds * len(e.losses) for e in steps) / total if total else None

"""Sinks: readers of the event stream that write what other tools open.

    training.csv, val.csv     CsvSink           loss, learning rate, throughput, ...
    k_stats.csv               CsvSink           gates and selection of every layer
    fallback_counters.csv     RouteSink         forward passes by backend
    tb/                       TensorBoardSink   the same numbers for TensorBoard
    Weights & Biases          WandbSink         the same numbers
    metrics.json              summarise         the run in a few figures

A sink is called with each event. Files are rebuilt from the events so far when a process starts, so they are correct
after a resume too.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import queue
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tercet.errors import TercetError
from tercet.telemetry import events
from tercet.telemetry.event_log import AppendedFile, full_disk_allowed, is_disk_full
from tercet.telemetry.events import Event, HealthFired, RouteKey

TRAINING_COLUMNS = (
    "step", "loss", "lr", "tokens_per_s", "grad_norm", "tokens", "step_seconds", "data_seconds", "mfu", "memory_gib",
    "skipped", "epoch", "bad_records", "muon_lr", "time",
)  # fmt: skip
VALIDATION_COLUMNS = ("step", "loss", "tokens", "seconds", "time")
# Per-layer statistics, as events.LayersObserved names them.
STATISTICS = (
    "gate_share_compressed", "gate_share_selected", "gate_share_window", "gate_entropy", "gate_max_share",
    "gate_collapse", "selected_blocks", "selected_distance", "selected_forced", "selected_overlap",
)  # fmt: skip
LAYER_COLUMNS = ("step", "layer", "attention", *STATISTICS)
ROUTE_COLUMNS = ("layer", "branch", "route", "reason", "fallback", "calls")

# Of the kinds of events whose numbers TensorBoard and W&B get: the first part of their names there.
_GROUPS = {"step": "train", "validation": "validation", "layers": "layers", "selectors": "selectors",
           "resources": "resources"}  # fmt: skip

# More than any sink needs to finish; a hanging network must not keep a finished run alive.
CLOSE_SECONDS = 30.0

Row = Sequence[Any]
Sink = Callable[[Event], None]


def _rewrite(path: Path, rows: Iterable[Row]) -> None:
    """CSV: floats with all digits, None as empty, text quoted where necessary."""
    fresh = path.with_suffix(".csv.tmp")
    with fresh.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)
    fresh.replace(path)


class CsvSink:
    """Appends the rows of each event to a CSV file, after rewriting it from past events."""

    def __init__(
        self, path: Path, columns: tuple[str, ...], rows: Callable[[Event], Iterable[Row]], past: Iterable[Event]
    ) -> None:
        self._rows = rows
        _rewrite(path, [columns, *(row for event in past for row in rows(event))])
        self._file = AppendedFile(path)

    def __call__(self, event: Event) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self._rows(event))
        self._file.write(text.getvalue().encode())


def csv_sinks(folder: Path, past: list[Event]) -> list[Sink]:
    """The CSV files of a run folder."""

    def fields(kind: type[Event], columns: tuple[str, ...]) -> Callable[[Event], Iterable[Row]]:
        return lambda event: [tuple(getattr(event, c) for c in columns)] if isinstance(event, kind) else []

    return [
        CsvSink(folder / "training.csv", TRAINING_COLUMNS, fields(events.StepLogged, TRAINING_COLUMNS), past),
        CsvSink(folder / "val.csv", VALIDATION_COLUMNS, fields(events.Validated, VALIDATION_COLUMNS), past),
        CsvSink(folder / "k_stats.csv", LAYER_COLUMNS, layer_rows, past),
        RouteSink(folder / "fallback_counters.csv", past),
    ]


def layer_rows(event: Event) -> Iterator[Row]:
    if isinstance(event, events.LayersObserved):
        for i, (kind, *values) in enumerate(
            zip(event.attention, *(getattr(event, name) for name in STATISTICS), strict=True)
        ):
            yield (event.step, i, kind, *values)


class RouteSink:
    """fallback_counters.csv: totals over all processes of the run, rewritten at each count."""

    def __init__(self, path: Path, past: Iterable[Event]) -> None:
        self._path = path
        self._before = route_totals(past)  # of earlier processes
        self._write(self._before)

    def __call__(self, event: Event) -> None:
        if isinstance(event, events.RoutesCounted):
            with full_disk_allowed():  # the next count writes all of it
                self._write(self._before + event.by_route())

    def _write(self, calls: Counter[RouteKey]) -> None:
        _rewrite(self._path, [ROUTE_COLUMNS, *((*key, n) for key, n in sorted(calls.items()))])


def route_totals(stream: Iterable[Event]) -> Counter[RouteKey]:
    """Forward passes by route over all processes. Each counts from zero, so its last count is its total."""
    total: Counter[RouteKey] = Counter()
    current: Counter[RouteKey] = Counter()
    for event in stream:
        if isinstance(event, events.RunStarted):
            total.update(current)
            current = Counter()
        elif isinstance(event, events.RoutesCounted):
            current = event.by_route()
    total.update(current)
    return total


def import_tensorboard() -> Any:
    """torch.utils.tensorboard, or an error that names the missing package."""
    try:
        import torch.utils.tensorboard as module
    except ImportError as error:
        raise TercetError(
            f"log.tensorboard needs tensorboard ({error}): pip install 'tercet[report]', or --log.no_tensorboard"
        ) from None
    return module


def tensorboard_wanted(setting: bool | str) -> bool:
    """What log.tensorboard means here; auto is true if the package is installed."""
    if setting != "auto":
        return bool(setting)
    try:
        import_tensorboard()
    except TercetError:
        return False
    return True


def import_wandb() -> Any:
    """wandb, or an error that names the missing package."""
    try:
        import wandb as module
    except ImportError:
        raise TercetError("log.wandb needs wandb: pip install 'tercet[wandb]', or drop --log.wandb") from None
    return module


class TensorBoardSink:
    """Scalars and samples under tb/. After a resume, values of later steps are purged."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self._folder = folder
        self._writer = self._open(from_step + 1 if from_step else None)

    def _open(self, purge_step: int | None) -> Any:
        return import_tensorboard().SummaryWriter(str(self._folder), purge_step=purge_step, flush_secs=10)

    def __call__(self, event: Event) -> None:
        if self._writer is None:  # a late event of another thread
            return
        try:
            if isinstance(event, events.Sampled):
                self._writer.add_text("sample", f"```\n{event.prompt}{event.text}\n```", event.step, event.time)
            for name, value in scalars(event).items():
                self._writer.add_scalar(name, value, event.step, event.time)
            if isinstance(event, events.RunEnded):
                self._writer.close()
                self._writer = None
        except OSError:
            self._writer = self._open(None)  # one that failed does not write again
            raise


class WandbSink:
    """The same scalars for Weights & Biases."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        # The id is the run folder's name, so that a resumed run continues the same W&B run.
        identity = folder.resolve().name
        self._run: Any = import_wandb().init(
            project="tercet", name=name, id=identity, resume="allow", dir=str(folder), config=config
        )

    def __call__(self, event: Event) -> None:
        if named := scalars(event):
            self._run.log(named, step=event.step)
        elif isinstance(event, events.RunEnded):
            self._run.finish(exit_code=0 if event.outcome == "completed" else 1)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a measurement, those of each layer too, by the name they have in TensorBoard and W&B."""
    if isinstance(event, HealthFired):
        return {f"health/{event.rule}": event.value}
    named: dict[str, Any] = {}
    for field in dataclasses.fields(event) if event.kind in _GROUPS else ():
        if field.name in ("step", "rank", "time", "layer"):
            continue
        name, value = f"{_GROUPS[event.kind]}/{field.name}", getattr(event, field.name)
        if event.table and isinstance(value, list):
            named |= {f"{name}/{i}": v for i, v in zip(getattr(event, "layer", range(len(value))), value, strict=True)}
        else:
            named[name] = value
    return {name: value for name, value in named.items() if isinstance(value, int | float)}


class BackgroundSink:
    """Runs a slow sink in its own thread. If it fails, it is dropped with one warning and the run continues.

    On a full disk it misses events until there is space again.
    """

    def __init__(self, name: str, sink: Sink, warn: Callable[[str], None]) -> None:
        self._name, self._sink, self._warn = name, sink, warn
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def close(self) -> None:
        """Wait until all events are written, but not forever."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._warn(f"warning: {self._name} did not finish in {CLOSE_SECONDS:.0f} s; events_rank*.jsonl is complete")

    def _run(self) -> None:
        warned = False
        while (event := self._queue.get()) is not None:
            try:
                self._sink(event)
            except Exception as error:
                if isinstance(error, OSError) and is_disk_full(error):
                    if not warned:
                        self._warn(f"warning: {self._name} misses events while the disk is full: free some space")
                    warned = True
                    continue
                reason = f"{type(error).__name__}: {error}"
                self._warn(f"warning: {self._name} stopped ({reason}); events_rank*.jsonl is complete")
                return


def summarise(stream: Iterable[Event]) -> dict[str, Any]:
    """metrics.json: figures of a whole run over all its processes. Works on a crashed or running run too."""
    past = list(stream)
    steps = [e for e in past if isinstance(e, events.StepLogged)]
    validations = [e for e in past if isinstance(e, events.Validated)]
    started = [e for e in past if isinstance(e, events.RunStarted)]
    ended = [e for e in past if isinstance(e, events.RunEnded)]
    end = ended[-1] if ended and past[-1] is ended[-1] else None  # None: it runs, or died
    checkpoints = [e for e in past if isinstance(e, events.CheckpointSaved)]
    last = steps[-1] if steps else None
    best = min(validations, key=lambda e: e.loss, default=None)
    return {
        "outcome": end.outcome if end else "unknown",
        "reason": end.reason if end else None,
        "step": last.step if last else 0,
        "steps": started[-1].steps if started else None,
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "smoothed_loss": mean_of_last([x for e in steps for x in e.losses])[0],
        "first_loss": steps[0].losses[0] if steps else None,
        "val_loss": validations[-1].loss if validations else None,
        "val_bits_per_byte": validations[-1].bits_per_byte if validations else None,
        "best_val_loss": best.loss if best else None,
        "best_val_step": best.step if best else None,
        "tokens_per_s": statistics.median(e.tokens_per_s for e in steps) if steps else None,
        "mfu": last.mfu if last else None,
        "memory_gib": max(e.memory_gib for e in steps) if steps else None,
        "data_wait_share": data_wait_share(steps),
        "skipped_steps": sum(len(e.steps) for e in past if isinstance(e, events.StepsSkipped)),
        "processes": len(started),
        "resumes": sum(e.resumed_from is not None for e in started),
        "checkpoints": len(checkpoints),
        "checkpoint_seconds": max((e.seconds for e in checkpoints), default=None),
        "seconds": sum(e.seconds for e in ended),
        "parameters": started[-1].parameters if started else None,
    }


def smoothing_window(steps: int) -> int:
    """How many losses a smoothed loss averages after this many steps: the last twentieth, at least five."""
    return min(steps, max(5, steps // 20))


def mean_of_last(losses: Sequence[float]) -> tuple[float | None, int]:
    """The smoothed loss, and how many finite losses it averages."""
    finite = [x for x in losses if math.isfinite(x)]
    window = smoothing_window(len(finite))
    return (statistics.fmean(finite[-window:]) if window else None), window


def data_wait_share(steps: list[events.StepLogged]) -> float | None:
    """Share of the step time spent waiting for data; None without steps."""
    total = sum(e.step_seconds * len(e.losses) for e in steps)
    return sum(e.data_seconds * len(e.losses) for e in steps) / total if total else None

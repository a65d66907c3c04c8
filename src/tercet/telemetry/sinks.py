"""Readers of the event stream that write what people's scripts and tools open: CSV files and TensorBoard."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tercet.errors import TercetError
from tercet.telemetry.events import (
    Event,
    HealthFired,
    LayersObserved,
    ResourcesObserved,
    RunEnded,
    Sampled,
    StepLogged,
    Validated,
)
from tercet.telemetry.tables import STATISTICS

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

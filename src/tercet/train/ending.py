"""The last words of a run: its closing event, metrics.json, and what a person is told."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from shlex import quote

from tercet.atomic_io import write_json
from tercet.config.schema import RunConfig
from tercet.telemetry.events import EventLog, RunEnded, read_events
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import summarise
from tercet.telemetry.units import duration, quantity
from tercet.train import manifest
from tercet.train.folder import RunFolder, go_on
from tercet.train.state import TrainState
from tercet.typed import typed

METRICS = "metrics.json"


def close_record(log: EventLog, folder: RunFolder, outcome: str, reason: str, state: TrainState, began: float) -> None:
    """The closing event, and on rank 0 metrics.json."""
    log.emit(RunEnded(step=state.step, outcome=outcome, reason=reason, seconds=time.time() - began))
    if log.rank == 0:
        write_json(folder.path / METRICS, summarise(read_events(log.path)))


def sum_up(
    screen: Screen,
    config: RunConfig,
    folder: RunFolder,
    state: TrainState,
    *,
    completed: bool,
    reason: str,
    began: float,
    first_step: int,
    first_tokens: int,
    bad_records: int,
    bad_examples: Sequence[str],
) -> None:
    """One line of what was done, and what to do next."""
    took = duration(time.time() - began)
    steps = f"{state.step}/{config.train.steps} steps, {quantity(state.tokens)} tokens"
    if first_step:  # the time is this process's alone: a killed one before it may have left none
        steps += f"; since the resume {state.step - first_step} steps, {quantity(state.tokens - first_tokens)} tokens"
    if not completed and state.step == 0:
        screen.say(f"{reason}: left before the first step, with nothing to save")
        return
    if not completed:
        screen.say(
            f"{reason}: saved after step {state.step} and left ({steps}, {took}); go on with: {go_on(folder.path)}"
        )
        return
    if state.step == first_step > 0:
        screen.say(_nothing_left(config, folder, state.step, reason))
        return
    if bad_records:
        screen.say(f"warning: {bad_records} bad records were left out: {'; '.join(bad_examples)}", "bold yellow")
    figures = json.loads((folder.path / METRICS).read_text(encoding="utf-8"))
    losses = [f"{n} {figures[k]:.4f}" for n, k in (("loss", "loss"), ("validation", "val_loss")) if figures[k]]
    screen.say(f"done: {steps} in {took} ({reason}); {', '.join(losses)}; run folder {folder.path}")
    screen.say(f"is it any good?  {typed()} report {quote(str(folder.path))}")


def _nothing_left(config: RunConfig, folder: RunFolder, made: int, reason: str) -> str:
    """Of a run that had ended before it was resumed."""
    planned = config.train.steps
    if made < planned:
        why = f"{made} steps were made before, of {planned} planned, and {reason}"
        more = "--data.exhaustion repeat --checkpoint.allow-config-change"
    else:
        why = f"{made} steps were made before, of {planned} planned"
        more = f"--train.steps {2 * made}"
    return f"nothing was left to do: {why}; to train further: {go_on(folder.path)} {more}"


def newest(folder: RunFolder) -> str:
    """What is safe whatever happened, in words."""
    kept = manifest.complete_checkpoints(folder.checkpoints)
    return f"the newest complete checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"


def disk_sentence(error: OSError, folder: RunFolder) -> str:
    """A disk that failed, what is safe all the same, and how to go on."""
    where = error.filename or folder.path
    return f"{where}: {error.strerror or error}; {newest(folder)}: go on with: {go_on(folder.path)}"

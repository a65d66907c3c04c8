"""Whether a run's record is whole and agrees with itself. A verdict over a record that does not is none."""

from __future__ import annotations

import csv
import math
from itertools import pairwise

from tercet.report.read import Run
from tercet.telemetry.events import Event, RunEnded, RunStarted, StepLogged

# Clocks are set now and then; a log that goes back further was put together by hand.
CLOCK_SECONDS = 5.0


def contradictions(run: Run) -> list[str]:
    """Each way in which the record is cut, missing or at odds with itself, one sentence each. Empty: none."""
    found = list(run.problems)
    found += _ranks(run)
    for rank, stream in sorted(run.events.items()):
        where = f"events_rank{rank}.jsonl"
        found += [f"{where}: {sentence}" for sentence in _stream(stream)]
    found += _training_csv(run)
    found += _metrics(run)
    found += _config(run)
    return found


def _ranks(run: Run) -> list[str]:
    found = []
    for rank in range(run.world_size):
        if not run.events.get(rank):
            found.append(f"rank {rank} of {run.world_size} has no events")
            continue
        other = run.of(StepLogged, rank)
        # Ranks write on their own: while a run is under way one may be a line ahead.
        common = min(len(other), len(run.steps))
        if abs(len(other) - len(run.steps)) > (0 if run.state == "ended" else 1):
            last = other[-1].step if other else 0
            found.append(f"rank {rank} logged up to step {last}, rank 0 up to step {run.step}")
        if any(not _same(a.loss, b.loss) for a, b in zip(other[:common], run.steps[:common], strict=True)):
            found.append(f"rank {rank} and rank 0 tell different losses")
    return found


def _stream(stream: list[Event]) -> list[str]:
    found: list[str] = []
    if not stream or not isinstance(stream[0], RunStarted):
        found.append("does not begin with the start of a run")
    if any(b.time < a.time - CLOCK_SECONDS for a, b in pairwise(stream)):
        found.append("its times go backwards")
    started: RunStarted | None = None
    previous: StepLogged | None = None
    for event in stream:
        if isinstance(event, RunStarted):
            if previous is None and event.step and event.resumed_from is None:
                found.append(f"begins at step {event.step} without a checkpoint to go on from")
            if previous is None:
                first = event.step + 1
            started = event
        elif isinstance(event, StepLogged) and started is not None:
            expected = previous.step + 1 if previous else first
            found += _interval(event, expected, started, previous)
            previous = event
        elif isinstance(event, RunEnded):
            found += _end(event, started, previous)
    ends = [i for i, e in enumerate(stream) if isinstance(e, RunEnded)]
    if ends and any(isinstance(e, StepLogged) for e in _until_start(stream[ends[-1] + 1 :])):
        found.append("goes on after its end")
    return found


def _until_start(stream: list[Event]) -> list[Event]:
    stop = next((i for i, e in enumerate(stream) if isinstance(e, RunStarted)), len(stream))
    return stream[:stop]


def _interval(event: StepLogged, expected: int, started: RunStarted, previous: StepLogged | None) -> list[str]:
    found = []
    steps = event.step - event.first_step + 1
    # A resume from a folder elsewhere may begin in the middle of an interval that the other folder logged.
    taken_over = previous is None and started.resumed_from is not None and event.first_step <= expected
    if event.first_step > expected and not taken_over:
        found.append(f"steps {expected} to {event.first_step - 1} are missing")
    elif event.first_step < expected and not taken_over:
        found.append(f"steps {event.first_step} to {expected - 1} are told twice")
    if len(event.losses) != steps or len(event.grad_norms) != steps:
        found.append(
            f"step {event.step} speaks of {steps} steps and holds {len(event.losses)} losses "
            f"and {len(event.grad_norms)} gradient norms"
        )
    elif not _same(event.losses[-1], event.loss) or not _same(event.grad_norms[-1], event.grad_norm):
        found.append(f"step {event.step} tells two losses or two gradient norms")
    if event.step > started.steps:
        found.append(f"step {event.step} lies beyond the {started.steps} steps of the run")
    made = event.tokens - (previous.tokens if previous else 0)
    span = event.step - (previous.step if previous else 0)
    if made > span * started.tokens_per_step * 1.0001 or made <= 0:
        found.append(
            f"step {event.step}: {made} tokens in {span} steps of {started.tokens_per_step} tokens do not fit together"
        )
    product = event.tokens_per_s * event.step_seconds
    if not math.isclose(product, started.tokens_per_step, rel_tol=0.01):
        found.append(
            f"step {event.step}: {event.tokens_per_s:.0f} tokens/s and {event.step_seconds:.4g} s a step make "
            f"{product:.0f} tokens a step, not {started.tokens_per_step}"
        )
    return found


def _end(event: RunEnded, started: RunStarted | None, previous: StepLogged | None) -> list[str]:
    logged = previous.step if previous else (started.step if started else 0)
    if event.outcome == "completed" and event.step != logged:
        return [f"says that it completed at step {event.step}, but its log ends at step {logged}"]
    if event.outcome == "completed" and started and event.reason == "all steps made" and event.step != started.steps:
        return [f"says that all {started.steps} steps were made, but ended at step {event.step}"]
    if event.step < logged:
        return [f"ended at step {event.step}, before the last step that it logged, {logged}"]
    return []


def _training_csv(run: Run) -> list[str]:
    path = run.folder / "training.csv"
    try:
        with path.open(encoding="utf-8") as stream:
            told = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(stream)]
    except FileNotFoundError:
        return ["training.csv is missing"]
    except (OSError, ValueError, KeyError, TypeError):
        return ["training.csv cannot be read"] if run.state == "ended" else []
    logged = [(e.step, e.loss) for e in run.steps]
    if run.state != "ended":  # the two are written one after the other
        shorter = min(len(told), len(logged))
        told, logged = told[:shorter], logged[:shorter]
    if len(told) != len(logged) or any(
        a[0] != b[0] or not _same(a[1], b[1]) for a, b in zip(told, logged, strict=True)
    ):
        return ["training.csv and the events tell different stories"]
    return []


def _metrics(run: Run) -> list[str]:
    ended = run.ended
    if ended is None or not run.metrics:
        return []
    if run.metrics.get("outcome") != ended.outcome or run.metrics.get("step") != run.step:
        told = f"{run.metrics.get('outcome')} at step {run.metrics.get('step')}"
        return [f"metrics.json says {told}, the events say {ended.outcome} at step {run.step}"]
    return []


def _config(run: Run) -> list[str]:
    if not run.started or not run.config:
        return []
    found = []
    last = run.started[-1]
    pairs = (("train.steps", last.steps), ("train.tokens_per_step", last.tokens_per_step))
    for key, value in pairs:
        if key in run.config and run.config[key] != value:
            found.append(f"config.toml has {key} = {run.config[key]}, the run was started with {value}")
    return found


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))

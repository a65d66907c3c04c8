"""Check that a run's record is complete and consistent. Without that, no gate can be GO."""

from __future__ import annotations

import csv
import math
from itertools import pairwise, takewhile
from pathlib import Path

from tercet.report.read import Run
from tercet.telemetry.events import Event, RunEnded, RunStarted, StageStarted, StepLogged

# Small clock adjustments are normal; a larger jump back means the log was edited or mixed.
CLOCK_SECONDS = 5.0


def contradictions(run: Run) -> list[str]:
    """One sentence for everything that is missing, cut off or inconsistent."""
    found = [*run.problems, *_check_history(run), *_check_ranks(run)]
    for rank, stream in sorted(run.events.items()):
        found += [f"events_rank{rank}.jsonl: {sentence}" for sentence in _check_stream(stream)]
    return [*found, *_check_training_csv(run), *_check_metrics(run), *_check_config(run)]


def _check_history(run: Run) -> list[str]:
    """A run whose first event resumes its own checkpoint has lost the events before it."""
    first = run.started[0] if run.started else None
    if first is None or not first.step or first.resumed_from is None:
        return []
    if Path(first.resumed_from).resolve().parent != (run.folder / "checkpoints").resolve():
        return []  # forked from another run
    return [f"events_rank0.jsonl: steps 1 to {first.step} are missing: the file was deleted before the run resumed"]


def _check_ranks(run: Run) -> list[str]:
    found = []
    for rank in range(run.world_size):
        if not run.events.get(rank):
            found.append(f"rank {rank} of {run.world_size} has no events")
            continue
        ours, theirs = ({e.step: e.loss for e in run.of(StepLogged, each)} for each in (0, rank))
        started = run.of(RunStarted, rank)
        joined = started[-1].step if started else 0  # a resumed run may have more ranks than before
        # Ranks write independently: during a run, one may be a line ahead of another.
        if sum(step > joined for step in ours.keys() ^ theirs.keys()) > (0 if run.state == "ended" else 1):
            last = max(theirs, default=0)
            found.append(f"rank {rank} logged up to step {last}, rank 0 up to step {run.step}")
        if any(not _equal(ours[step], theirs[step]) for step in ours.keys() & theirs.keys()):
            found.append(f"rank {rank} and rank 0 logged different losses")
    return found


def _check_stream(stream: list[Event]) -> list[str]:
    found: list[str] = []
    if not stream or not isinstance(stream[0], RunStarted):
        found.append("does not begin with a run_started event")
    if any(b.time < a.time - CLOCK_SECONDS for a, b in pairwise(stream)):
        found.append("timestamps go backwards")
    started: RunStarted | None = None
    previous: StepLogged | None = None
    for i, event in enumerate(stream):
        if isinstance(event, RunStarted):
            if event.rank and previous and event.step > previous.step:
                previous = None  # the run went on with fewer ranks in between
            if previous is None and event.step and event.resumed_from is None:
                found.append(f"begins at step {event.step} without resuming from a checkpoint")
            if previous is None:
                first = event.step + 1
            started, per_step = event, event.tokens_per_step
        elif isinstance(event, StageStarted):
            per_step = event.tokens_per_step
        elif isinstance(event, StepLogged) and started is not None:
            expected = previous.step + 1 if previous else first
            found += _check_interval(event, expected, started, previous, per_step)
            previous = event
        elif isinstance(event, RunEnded) and not _is_superseded(event, stream[i:]):
            found += _check_end(event, started, previous)
    ends = [i for i, e in enumerate(stream) if isinstance(e, RunEnded)]
    after = takewhile(lambda e: not isinstance(e, RunStarted), stream[ends[-1] + 1 :] if ends else [])
    if any(isinstance(e, StepLogged) for e in after):
        found.append("has steps after the end of the run")
    return found


def _is_superseded(end: RunEnded, later: list[Event]) -> bool:
    """Whether the run was resumed from an earlier step, which moved the last events before this end aside."""
    return any(isinstance(e, RunStarted) and e.superseded > 0 and e.step < end.step for e in later)


def _check_interval(
    event: StepLogged, expected: int, started: RunStarted, previous: StepLogged | None, per_step: int
) -> list[str]:
    """Check one log interval against the one before it and the plan of the run. per_step: tokens, in its stage."""
    found = []
    steps = event.step - event.first_step + 1
    # A run forked from another folder may begin in the middle of an interval logged there.
    forked = previous is None and started.resumed_from is not None and event.first_step <= expected
    if event.first_step > expected:
        found.append(f"steps {expected} to {event.first_step - 1} are missing")
    elif event.first_step < expected and not forked:
        found.append(f"steps {event.first_step} to {expected - 1} are logged twice")
    if len(event.losses) != steps or len(event.grad_norms) != steps:
        found.append(
            f"step {event.step} covers {steps} steps but has {len(event.losses)} losses "
            f"and {len(event.grad_norms)} gradient norms"
        )
    elif not _equal(event.losses[-1], event.loss) or not _equal(event.grad_norms[-1], event.grad_norm):
        found.append(f"step {event.step} has two different losses or gradient norms")
    if event.step > started.steps:
        found.append(f"step {event.step} is beyond the run's {started.steps} steps")
    tokens = event.tokens - (previous.tokens if previous else 0)
    span = event.step - (previous.step if previous else 0)
    staged = per_step != started.tokens_per_step  # a fork within a stage does not know the steps before it
    if (tokens > span * per_step * 1.0001 and not (forked and staged)) or tokens <= 0:
        found.append(f"step {event.step}: {tokens} tokens do not fit {span} steps of {per_step} tokens")
    product = event.tokens_per_s * event.step_seconds
    if not math.isclose(product, per_step, rel_tol=0.01):
        found.append(
            f"step {event.step}: {event.tokens_per_s:.0f} tokens/s at {event.step_seconds:.4g} s per step is "
            f"{product:.0f} tokens per step, expected {per_step}"
        )
    return found


def _check_end(event: RunEnded, started: RunStarted | None, previous: StepLogged | None) -> list[str]:
    logged = previous.step if previous else (started.step if started else 0)
    if event.outcome == "completed" and event.step != logged:
        return [f"reports completion at step {event.step}, but the log ends at step {logged}"]
    # A run may complete early only because its data ended.
    if event.outcome == "completed" and started and "data" not in event.reason and event.step != started.steps:
        return [f"reports that all {started.steps} steps are done, but ended at step {event.step}"]
    if event.step < logged:
        return [f"ended at step {event.step}, before its last logged step {logged}"]
    return []


def _check_training_csv(run: Run) -> list[str]:
    path = run.folder / "training.csv"
    try:
        with path.open(encoding="utf-8") as stream:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(stream)]
    except FileNotFoundError:
        return ["training.csv is missing"]
    except (OSError, ValueError, KeyError, TypeError):
        return ["training.csv cannot be read"] if run.state == "ended" else []
    logged = [(e.step, e.loss) for e in run.steps]
    if run.state != "ended":  # the CSV may lag behind the events by a line
        shorter = min(len(rows), len(logged))
        rows, logged = rows[:shorter], logged[:shorter]
    if len(rows) != len(logged) or any(
        a[0] != b[0] or not _equal(a[1], b[1]) for a, b in zip(rows, logged, strict=True)
    ):
        return ["training.csv does not match the events"]
    return []


def _check_metrics(run: Run) -> list[str]:
    ended = run.ended
    if ended is None or not run.metrics:
        return []
    if run.metrics.get("outcome") != ended.outcome or run.metrics.get("step") != run.step:
        found = f"{run.metrics.get('outcome')} at step {run.metrics.get('step')}"
        return [f"metrics.json says {found}, the events say {ended.outcome} at step {run.step}"]
    return []


def _check_config(run: Run) -> list[str]:
    if not run.started or not run.config:
        return []
    last = run.started[-1]
    expected = {"train.steps": last.steps, "train.tokens_per_step": last.tokens_per_step}
    return [
        f"config.toml has {key} = {run.config[key]}, the run was started with {value}"
        for key, value in expected.items()
        if key in run.config and run.config[key] != value
    ]


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))

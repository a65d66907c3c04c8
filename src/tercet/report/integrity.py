"""Check that a run's record is complete and consistent. Without that, no gate can be GO."""

from __future__ import annotations

import math
from pathlib import Path

from tercet.report.read import Run
from tercet.telemetry.events import Event, RunEnded, RunStarted, StepLogged


def contradictions(run: Run) -> list[str]:
    """One sentence for everything that is missing, cut off or logged twice."""
    found = [*run.problems, *_check_history(run), *_check_ranks(run)]
    return found + [f"events_rank0.jsonl: {sentence}" for sentence in _check_steps(run.events.get(0, []))]


def _check_history(run: Run) -> list[str]:
    """A run whose first event resumes its own checkpoint has lost the events before it."""
    first = run.started[0] if run.started else None
    if first is None or not first.step or first.resumed_from is None:
        return []
    if Path(first.resumed_from).resolve().parent != (run.folder / "checkpoints").resolve():
        return []  # forked from another run
    return [f"events_rank0.jsonl: steps 1 to {first.step} are missing: the file was deleted before the run resumed"]


def _check_ranks(run: Run) -> list[str]:
    """Every rank has logged the intervals and losses that rank 0 has."""
    found = []
    ours = {e.step: e.loss for e in run.steps}
    for rank in range(1, run.world_size):
        started = run.of(RunStarted, rank)
        if not started:
            found.append(f"rank {rank} of {run.world_size} has no events")
            continue
        log = run.logs[rank]
        joined = started[-1].step  # a resumed run may have more ranks than before
        theirs = dict(zip(log.steps, log.losses, strict=True))
        # Ranks write independently: during a run, one may be a line ahead of another.
        if sum(step > joined for step in ours.keys() ^ theirs.keys()) > (0 if run.state == "ended" else 1):
            found.append(f"rank {rank} logged up to step {max(theirs, default=0)}, rank 0 up to step {run.step}")
        if len(theirs) < len(log.steps):
            found.append(f"rank {rank} logged steps twice")
        if any(not _equal(ours[step], theirs[step]) for step in ours.keys() & theirs.keys()):
            found.append(f"rank {rank} and rank 0 logged different losses")
    return found


def _check_steps(stream: list[Event]) -> list[str]:
    """Every step from the start to the end is logged once."""
    found: list[str] = []
    if not stream or not isinstance(stream[0], RunStarted):
        found.append("does not begin with a run_started event")
    expected, forked = 0, False
    superseded = [i for i, e in enumerate(stream) if isinstance(e, RunStarted) and e.superseded > 0]
    for i, event in enumerate(stream):
        if isinstance(event, RunStarted) and not expected:
            if event.step and event.resumed_from is None:
                found.append(f"begins at step {event.step} without resuming from a checkpoint")
            # A run forked from another folder may begin in the middle of an interval logged there.
            expected, forked = event.step + 1, event.resumed_from is not None
        elif isinstance(event, StepLogged) and expected:
            if event.first_step > expected:
                found.append(f"steps {expected} to {event.first_step - 1} are missing")
            elif event.first_step < expected and not forked:
                found.append(f"steps {event.first_step} to {expected - 1} are logged twice")
            if len(event.losses) != event.step - event.first_step + 1:
                found.append(f"the losses of steps {event.first_step} to {event.step} are incomplete")
            expected, forked = event.step + 1, False
        elif isinstance(event, RunEnded) and expected:
            # A run resumed from an earlier step has moved the last events before this end aside.
            if superseded and superseded[-1] > i and any(stream[j].step < event.step for j in superseded if j > i):
                continue
            if event.step < expected - 1 or (event.outcome == "completed" and event.step >= expected):
                found.append(f"ended at step {event.step}, but the log ends at step {expected - 1}")
    return found


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))

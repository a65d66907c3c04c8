"""Gate: whether a run's record is complete. Without that, no gate can be GO."""

from __future__ import annotations

from pathlib import Path

from tercet.report.gates import INCOMPLETE_RECORD_FIX, Gate, GateBuilder
from tercet.report.read import Run
from tercet.telemetry.events import RunStarted
from tercet.telemetry.units import plural


def record_gate(run: Run) -> Gate:
    """Every step once, on every rank."""
    gate = GateBuilder("record", "a complete record of every rank, without gaps")
    gate.add_evidence("events", f"{run.event_count:,} from {len(run.events)} of {run.world_size} ranks")
    gate.add_evidence("state", run.state)
    gaps = record_gaps(run)
    for sentence in gaps[:4]:
        gate.fail(sentence, INCOMPLETE_RECORD_FIX)
    if len(gaps) > 4:
        gate.fail(f"and {len(gaps) - 4} more", "")
    first = run.steps[0].first_step if run.steps else 0  # a fork begins later
    steps = f"steps {first:,} to {run.step:,} without gaps" if first else "no step is logged yet"
    return gate.build(f"{steps}, on {plural(run.world_size, 'rank')}")


def record_gaps(run: Run) -> list[str]:
    """One sentence for everything that is missing, cut off or logged twice."""
    return [*run.problems, *_check_ranks(run), *(f"events_rank0.jsonl: {sentence}" for sentence in _check_steps(run))]


def _check_steps(run: Run) -> list[str]:
    """Every step from the start to the end is logged once."""
    problems = []
    if not isinstance(next(iter(run.events.get(0, [])), None), RunStarted):
        problems.append("does not begin with a run_started event")
    expected, forked = 1, False
    if run.started and (source := run.started[0].resumed_from) is not None:
        before = run.started[0].step
        # A run forked from another folder may begin in the middle of an interval logged there.
        forked = Path(source).resolve().parent != (run.folder / "checkpoints").resolve()
        if before and not forked:
            problems.append(f"steps 1 to {before} are missing: the file was deleted before the run resumed")
        expected = before + 1
    for event in run.steps:
        if event.first_step > expected:
            problems.append(f"steps {expected} to {event.first_step - 1} are missing")
        elif event.first_step < expected and not forked:
            problems.append(f"steps {event.first_step} to {expected - 1} are logged twice")
        expected, forked = event.step + 1, False
    if run.ended and run.ended.outcome == "completed" and run.ended.step >= expected:
        problems.append(f"steps {expected} to {run.ended.step} are missing")
    return problems


def _check_ranks(run: Run) -> list[str]:
    """Every rank has logged the intervals that rank 0 has."""
    problems = []
    ours = {e.step for e in run.steps}
    for rank in range(1, run.world_size):
        started = run.of(RunStarted, rank)
        if not started:
            problems.append(f"rank {rank} of {run.world_size} has no events")
            continue
        joined = started[-1].step  # a resumed run may have more ranks than before
        logged = run.logs[rank].steps
        theirs = set(logged)
        # Ranks write independently: during a run, one may be a line ahead of another.
        if sum(step > joined for step in ours ^ theirs) > (0 if run.state == "ended" else 1):
            problems.append(f"rank {rank} logged up to step {max(theirs, default=0)}, rank 0 up to step {run.step}")
        if len(theirs) < len(logged):
            problems.append(f"rank {rank} logged steps twice")
    return problems

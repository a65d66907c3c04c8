"""GO, NO-GO or NOT TESTED, for each gate and for the whole run, computed from the run's events alone.

A run is GO only if every gate is: what was not tested did not pass. The headline also says whether the run is healthy:
nothing failed in what it did. Health thresholds in the run's own configuration are ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.report import attention_gates, gates
from tercet.report.gates import GO, NO_GO, NOT_APPLICABLE, NOT_TESTED, Gate, Thresholds
from tercet.report.read import Run
from tercet.telemetry.events import HealthFired, RunStarted
from tercet.telemetry.sinks import mean_of_last
from tercet.terminal import plural

HEALTHY, UNHEALTHY, UNKNOWN = "healthy", "unhealthy", "unknown"
# With fewer steps nobody can say whether the loss falls.
MIN_HEALTHY_STEPS = 20
EXIT_CODES = {GO: 0, NO_GO: 3, NOT_TESTED: 4}
INCOMPLETE_RECORD_FIX = "report on a complete run folder"

# (reason, fix, names of the gates it concerns)
Reason = tuple[str, str, list[str]]


@dataclass(frozen=True)
class Verdict:
    """The gates of one run and the overall verdict.

    headline: `word: facts`, such as "Healthy: 500 steps, validation 1.64".
    """

    verdict: str
    health: str
    headline: str
    sentence: str
    gates: tuple[Gate, ...]
    thresholds: Thresholds
    findings: tuple[HealthFired, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def word(self) -> str:
        """What the headline begins with: GO, NO-GO, Healthy, Healthy so far or Too short to judge."""
        return self.headline.partition(":")[0]

    def reasons(self, verdict: str) -> list[Reason]:
        """Why gates have this verdict, and what would change it. A reason that several gates share appears once."""
        names: dict[tuple[str, str], list[str]] = {}
        for gate in self.gates:
            for reason in gate.reasons if gate.verdict == verdict else ():
                names.setdefault(reason, []).append(gate.name)
        return [(sentence, fix, gates) for (sentence, fix), gates in names.items()]

    def warnings(self) -> list[Reason]:
        """What does not change the verdict, but people should know."""
        return [(warning, fix, [gate.name]) for gate in self.gates for warning, fix in gate.warnings]

    def as_dict(self, run: Run) -> dict[str, Any]:
        """The contents of verdict.json."""
        return {
            "verdict": self.verdict,
            "health": self.health,
            "headline": self.headline,
            "exit_code": self.exit_code,
            "sentence": self.sentence,
            "run": {
                "folder": str(run.folder),
                "name": run.name,
                "step": run.step,
                "steps": run.planned,
                "state": run.state,
                "outcome": run.ended.outcome if run.ended else None,
                "world_size": run.world_size,
                "device": run.started[-1].device if run.started else None,
            },
            "gates": [gate.as_dict() for gate in self.gates],
            "thresholds": dataclasses.asdict(self.thresholds),
        }


def judge(run: Run, baseline: Run | None = None, limits: Thresholds | None = None) -> Verdict:
    """Evaluate all gates of a run."""
    limits = limits or Thresholds()
    findings = run.findings
    record = record_gate(run)
    judged = (
        record,
        gates.stability_gate(run, findings, limits),
        gates.memory_gate(run, limits),
        attention_gates.throughput_gate(run, baseline, findings, limits),
        attention_gates.routing_gate(run),
        attention_gates.selection_gate(run, findings, limits),
        attention_gates.fallback_gate(run),
        gates.checkpoint_gate(run, findings, limits),
        gates.data_gate(run, findings, limits),
        gates.numerics_gate(run, findings),
    )
    if record.verdict != GO:
        for gate in judged:
            if gate.verdict == GO:
                gate.not_tested("the record is incomplete, so this gate cannot pass", INCOMPLETE_RECORD_FIX)
    verdicts = {gate.verdict for gate in judged}
    verdict = NO_GO if NO_GO in verdicts else GO if verdicts == {GO} else NOT_TESTED
    health = UNHEALTHY if verdict == NO_GO else HEALTHY if run.step >= MIN_HEALTHY_STEPS else UNKNOWN
    headline, sentence = _headline(run, verdict, health), _sentence(judged)
    return Verdict(verdict, health, headline, sentence, judged, limits, tuple(findings))


def record_gate(run: Run) -> Gate:
    """Whether the record is complete: every step once, on every rank. Without that, no gate can be GO."""
    gate = Gate("record", "a complete record of every rank, without gaps")
    gate.add_evidence("events", f"{run.event_count:,} from {len(run.events)} of {run.world_size} ranks")
    gate.add_evidence("state", run.state)
    gaps = record_gaps(run)
    for sentence in gaps[:4]:
        gate.fail(sentence, INCOMPLETE_RECORD_FIX)
    if len(gaps) > 4:
        gate.fail(f"and {len(gaps) - 4} more")
    first = run.steps[0].first_step if run.steps else 0  # a fork begins later
    steps = f"steps {first:,} to {run.step:,} without gaps" if first else "no step is logged yet"
    gate.passed = f"{steps}, on {plural(run.world_size, 'rank')}"
    return gate


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


def _headline(run: Run, verdict: str, health: str) -> str:
    """The verdict if it is GO or NO-GO, otherwise the health; then how far the run came and its loss."""
    if verdict != NOT_TESTED:
        word = verdict
    elif health == HEALTHY:
        word = "Healthy" if run.ended else "Healthy so far"
    else:
        word = "Too short to judge"
    planned = run.planned or run.step
    facts = [plural(run.step, "step") if run.step == planned else f"{run.step:,} of {plural(planned, 'step')}"]
    loss = run.validations[-1].loss if run.validations else mean_of_last(run.losses)[0]
    if loss is not None:
        measured = "validation" if run.validations else "training loss"
        facts.append(f"{measured} {loss:.{2 if loss >= 1 else 3}f}")
    return f"{word}: {', '.join(facts)}"


def _sentence(judged: tuple[Gate, ...]) -> str:
    def names(verdict: str) -> str:
        return ", ".join(g.name for g in judged if g.verdict == verdict)

    if all(gate.verdict == GO for gate in judged):
        parts = [f"All {len(judged)} gates passed."]
    else:
        parts = [f"Failed: {failed}." if (failed := names(NO_GO)) else "Nothing failed."]
    if warned := ", ".join(gate.name for gate in judged if gate.warnings):
        parts.append(f"Warnings: {warned}.")
    if untested := names(NOT_TESTED):
        parts.append(f"Not tested: {untested}.")
    if inapplicable := names(NOT_APPLICABLE):
        parts.append(f"Not applicable: {inapplicable}.")
    return " ".join(parts)

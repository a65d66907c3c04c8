"""GO, NO-GO or NOT TESTED, for each gate and for the whole run, computed from the run's events alone.

A run is GO only if every gate is: what was not tested did not pass. The headline also says whether the run is healthy:
nothing failed in what it did. Health thresholds in the run's own configuration are ignored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tercet import hints
from tercet.report import attention_gates, training_gates
from tercet.report.gates import (
    GO,
    NO_GO,
    NOT_APPLICABLE,
    NOT_TESTED,
    Gate,
    GateBuilder,
    Thresholds,
)
from tercet.report.read import Run
from tercet.report.record import record_gate
from tercet.report.throughput import throughput_gate
from tercet.telemetry.events import HealthFired
from tercet.telemetry.sinks import mean_of_last
from tercet.telemetry.units import plural

HEALTHY, UNHEALTHY, UNKNOWN = "healthy", "unhealthy", "unknown"
# With fewer steps nobody can say whether the loss falls.
MIN_HEALTHY_STEPS = 20
EXIT_CODES = {GO: 0, NO_GO: 3, NOT_TESTED: 4}

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
    informational: tuple[Gate, ...] = ()  # shown, but not part of the verdict

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
        for gate in (*self.gates, *self.informational):
            for reason in gate.reasons if gate.verdict == verdict else ():
                names.setdefault(reason, []).append(gate.name)
        return [(sentence, fix, gates) for (sentence, fix), gates in names.items()]

    def warnings(self) -> list[Reason]:
        """What does not change the verdict, but people should know."""
        return [(warning, fix, [gate.name]) for gate in self.gates for warning, fix in gate.warnings]

    def why_not_go(self) -> str:
        """Which gates keep a run without failures from GO, in one line."""
        untested = ", ".join(gate.name for gate in self.gates if gate.verdict == NOT_TESTED)
        fixes: dict[str, list[str]] = {}
        for _, fix, names in self.reasons(NOT_APPLICABLE):
            fixes.setdefault(fix, []).extend(names)
        inapplicable = "; ".join(f"{', '.join(names)} ({fix})" for fix, names in fixes.items())
        parts = [f"not tested: {untested}"] * bool(untested) + [f"not applicable: {inapplicable}"] * bool(fixes)
        return f"not GO, which needs every gate to apply and pass; {'; '.join(parts)}"

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
                "steps": run.started[-1].steps if run.started else None,
                "state": run.state,
                "outcome": run.ended.outcome if run.ended else None,
                "world_size": run.world_size,
                "device": run.started[-1].device if run.started else None,
            },
            "gates": [gate.as_dict() for gate in self.gates],
            "beyond": [gate.as_dict() for gate in self.informational],
            "thresholds": dataclasses.asdict(self.thresholds),
        }


def judge(run: Run, baseline: Run | None = None, limits: Thresholds | None = None) -> Verdict:
    """Evaluate all gates of a run."""
    limits = limits or Thresholds()
    findings = run.findings
    gates = [
        training_gates.stability_gate(run, findings, limits),
        training_gates.memory_gate(run, limits),
        throughput_gate(run, baseline, findings, limits),
        attention_gates.routing_gate(run, limits),
        attention_gates.selection_gate(run, findings, limits),
        attention_gates.fallback_gate(run, limits),
        training_gates.checkpoint_gate(run, findings, limits),
        training_gates.data_gate(run, findings, limits),
        training_gates.numerics_gate(run, findings, limits),
    ]
    record = record_gate(run)
    if record.verdict != GO:
        gates = [gate.without_complete_record() for gate in gates]
    all_gates = (record, *gates)
    informational = _multi_device_gate(run)
    verdict = _overall(all_gates)
    health = UNHEALTHY if verdict == NO_GO else HEALTHY if run.step >= MIN_HEALTHY_STEPS else UNKNOWN
    return Verdict(
        verdict,
        health,
        _headline(run, verdict, health),
        _sentence(run, all_gates, informational, limits),
        all_gates,
        limits,
        tuple(findings),
        informational,
    )


def _multi_device_gate(run: Run) -> tuple[Gate, ...]:
    """A single-device run can be GO, but says nothing about training on several devices."""
    if run.world_size > 1:
        return ()
    gate = GateBuilder("several devices", "at least two ranks; not part of the verdict of a single-device run")
    gate.not_tested(
        "ran on one device: collectives, sharded checkpoints and rank failures were not exercised",
        two_rank_command(run),
    )
    return (gate.build(),)


def two_rank_command(run: Run) -> str:
    """How to train the same configuration on two ranks."""
    flags = {"run.dir": f"{run.folder}-2", "parallel.strategy": "fsdp", **_two_rank_batch(run)}
    return hints.train_config(f"{run.folder}/config.toml", flags, ranks=2)


def _two_rank_batch(run: Run) -> dict[str, int]:
    """The batch size that makes a step divisible by two ranks, if it is not already."""
    keys = ("train.tokens_per_step", "train.micro_batch", "data.seq_len")
    tokens, micro_batch, seq_len = (run.config.get(key) for key in keys)
    if not (isinstance(tokens, int) and isinstance(micro_batch, int) and isinstance(seq_len, int)):
        return {}  # config.toml is unreadable, which the record gate reports
    if run.stages:
        return {}  # micro-batches follow the number of ranks
    if tokens % (2 * micro_batch * seq_len) == 0:
        return {}
    if micro_batch % 2 == 0:
        return {"train.micro_batch": micro_batch // 2}
    return {"train.tokens_per_step": 2 * tokens}


def _overall(gates: tuple[Gate, ...]) -> str:
    verdicts = {gate.verdict for gate in gates}
    if NO_GO in verdicts:
        return NO_GO
    return GO if verdicts == {GO} else NOT_TESTED


def _headline(run: Run, verdict: str, health: str) -> str:
    """The verdict if it is GO or NO-GO, otherwise the health; then how far the run came and its loss."""
    if verdict != NOT_TESTED:
        word = verdict
    elif health == HEALTHY:
        word = "Healthy" if run.ended else "Healthy so far"
    else:
        word = "Too short to judge"
    planned = run.started[-1].steps if run.started else run.step
    facts = [plural(run.step, "step") if run.step == planned else f"{run.step:,} of {plural(planned, 'step')}"]
    if run.validations:
        facts.append(f"validation {_short_loss(run.validations[-1].loss)}")
    elif (loss := mean_of_last(run.losses)[0]) is not None:
        facts.append(f"training loss {_short_loss(loss)}")
    return f"{word}: {', '.join(facts)}"


def _short_loss(loss: float) -> str:
    return f"{loss:.2f}" if loss >= 1 else f"{loss:.3f}"


def _sentence(run: Run, gates: tuple[Gate, ...], informational: tuple[Gate, ...], limits: Thresholds) -> str:
    def names(verdict: str) -> str:
        return ", ".join(g.name for g in gates if g.verdict == verdict and not g.short)

    warned = [f"Warnings: {', '.join(g.name for g in gates if g.warnings)}."] if any(g.warnings for g in gates) else []
    if all(gate.verdict == GO for gate in gates):
        more = [f"Not tested, and not part of the verdict: {', '.join(g.name for g in informational)}."]
        return " ".join([f"All {len(gates)} gates passed.", *warned, *(more if informational else [])])
    parts = [f"Failed: {failed}." if (failed := names(NO_GO)) else "Nothing failed.", *warned]
    if any(gate.short for gate in gates):
        parts.append(f"Short run: {run.step:,} of the {limits.min_steps:,} steps that GO needs.")
    if untested := names(NOT_TESTED):
        parts.append(f"Not tested: {untested}.")
    if inapplicable := names(NOT_APPLICABLE):
        parts.append(f"Not applicable: {inapplicable}.")
    return " ".join(parts)

"""Gate: a verdict with its threshold, evidence and fixes; and the builder that every gate uses.

A gate is NO-GO if anything failed, NOT APPLICABLE if this kind of run cannot pass or fail it, NOT TESTED if evidence is
missing, and GO otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tercet.report.read import Run
from tercet.telemetry.events import HealthFired
from tercet.telemetry.health import FIXES

GO, NO_GO, NOT_TESTED, NOT_APPLICABLE = "GO", "NO-GO", "NOT TESTED", "NOT APPLICABLE"


@dataclass(frozen=True)
class Thresholds:
    """The limits of all gates. The run's own configuration has no influence on them."""

    min_steps: int = 500  # logged steps, not planned ones
    memory_share: float = 0.92
    memory_growth: float = 0.05
    memory_growth_gib: float = 0.25
    dense_ratio: float = 1.0
    dense_length: int = 8192  # shorter sequences need not be as fast as dense: there dense is faster than NSA
    tokens_per_s: float | None = None
    data_wait: float = 0.10
    bad_records: float = 0.001
    checkpoint_blocked: float = 0.05
    spikes_per_step: float = 1 / 200
    readings: int = 5  # samples of memory and layer statistics
    lone_branch_layers: float = 0.25  # share of layers that may have a collapsed gate or a dead branch


@dataclass(frozen=True)
class Gate:
    """One verdict and what led to it."""

    name: str
    verdict: str
    sentence: str
    threshold: str
    evidence: tuple[tuple[str, str], ...] = ()
    plot: str | None = None  # anchor of the plot or table that shows it
    fix: str = ""
    reasons: tuple[tuple[str, str], ...] = ()  # (reason, fix) pairs that the sentence joins
    short: bool = False  # NOT TESTED only because the run has too few steps
    warnings: tuple[tuple[str, str], ...] = ()  # (warning, fix) pairs, which do not change the verdict

    def as_dict(self) -> dict[str, Any]:
        """The gate in verdict.json, where NOT APPLICABLE is NOT TESTED with `applicable` false."""
        return {
            "name": self.name,
            "verdict": NOT_TESTED if self.verdict == NOT_APPLICABLE else self.verdict,
            "applicable": self.verdict != NOT_APPLICABLE,
            "sentence": self.sentence,
            "threshold": self.threshold,
            "evidence": dict(self.evidence),
            "plot": self.plot,
            "fix": self.fix,
            "mend": self.fix,  # the key of version 0.1
            "reasons": self.reasons,
            "warnings": self.warnings,
        }

    def without_complete_record(self) -> Gate:
        """This gate when the run's record is incomplete: GO becomes NOT TESTED, NO-GO stays."""
        if self.verdict != GO:
            return self
        reason, fix = "the record is incomplete, so this gate cannot pass", INCOMPLETE_RECORD_FIX
        sentence = f"{reason}: {self.sentence}"
        return dataclasses.replace(self, verdict=NOT_TESTED, sentence=sentence, fix=fix, reasons=((reason, fix),))


ON_CPU, NOT_ON_CPU = "ran on a CPU, where no GPU kernels run", "train on a GPU"
INCOMPLETE_RECORD_FIX = "report on a complete run folder"


@dataclass
class GateBuilder:
    """Collects evidence, failures and missing tests of one gate."""

    name: str
    threshold: str
    plot: str | None = None
    evidence: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    # (reason, fix) pairs by the verdict they ask for; the first in this order wins
    reasons: dict[str, list[tuple[str, str]]] = field(
        default_factory=lambda: {NO_GO: [], NOT_APPLICABLE: [], NOT_TESTED: []}
    )
    too_short: list[tuple[str, str]] = field(default_factory=list)

    def add_evidence(self, name: str, value: object) -> None:
        self.evidence.append((name, str(value)))

    def fail(self, sentence: str, fix: str) -> None:
        """Make the gate NO-GO."""
        if (sentence, fix) not in self.reasons[NO_GO]:
            self.reasons[NO_GO].append((sentence, fix))

    def fail_on(self, findings: Iterable[HealthFired], rule: str) -> None:
        """Make the gate NO-GO if this health rule fired."""
        if fired := [f for f in findings if f.rule == rule]:
            again = f" ({len(fired)} times)" if len(fired) > 1 else ""
            self.fail(f"{fired[0].sentence}{again}", FIXES[rule])

    def not_applicable(self, sentence: str, fix: str) -> None:
        """Make the gate NOT APPLICABLE, unless it is NO-GO. fix: what makes it apply, which GO needs."""
        self.reasons[NOT_APPLICABLE].append((sentence, fix))

    def not_tested(self, sentence: str, fix: str) -> None:
        """Make the gate NOT TESTED, unless it is NO-GO or NOT APPLICABLE."""
        self.reasons[NOT_TESTED].append((sentence, fix))

    def warn(self, sentence: str, fix: str) -> None:
        """Show something that people should know, whatever the verdict."""
        self.warnings.append((sentence, fix))

    def require_steps(self, run: Run, limits: Thresholds) -> None:
        if run.step < limits.min_steps:
            self.too_short.append((f"fewer than {limits.min_steps} steps ({run.step} logged)", "train longer"))

    def build(self, passed: str = "") -> Gate:
        """The gate; `passed` is its sentence if it is GO, or would be in a longer run."""
        verdict = next((v for v, reasons in self.reasons.items() if reasons), NOT_TESTED if self.too_short else GO)
        spoken = self.reasons.get(verdict, [])
        reasons = [*spoken, *self.too_short] if verdict == NOT_TESTED else spoken
        short = verdict == NOT_TESTED and not spoken
        # The report says once that a run is short, not in every gate.
        sentence = "; ".join(s for s, _ in spoken) or (f"so far: {passed}" if short else passed)
        sentence = "; warning: ".join([sentence, *(warning for warning, _ in self.warnings)])
        fix = "; ".join(dict.fromkeys(f for _, f in reasons if f))
        return Gate(
            self.name, verdict, sentence, self.threshold, tuple(self.evidence), self.plot, fix, tuple(reasons), short,
            tuple(self.warnings),
        )  # fmt: skip

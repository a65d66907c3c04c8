"""What a gate is: a verdict with its threshold, evidence and fixes, and the builder that every gate uses.

A gate is NO-GO if anything failed, NOT TESTED if evidence is missing, and GO only if neither is the case.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tercet.report.read import Run

GO, NO_GO, NOT_TESTED = "GO", "NO-GO", "NOT TESTED"


@dataclass(frozen=True)
class Thresholds:
    """The limits of all gates. The run's own configuration has no influence on them."""

    min_steps: int = 500  # logged steps, not planned ones
    memory_share: float = 0.92
    memory_growth: float = 0.05
    memory_growth_gib: float = 0.25
    dense_ratio: float = 1.0
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

    def as_dict(self) -> dict[str, Any]:
        """The gate in verdict.json."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "threshold": self.threshold,
            "evidence": dict(self.evidence),
            "plot": self.plot,
            "mend": self.fix,
            "reasons": self.reasons,
        }

    def without_complete_record(self) -> Gate:
        """This gate when the run's record is incomplete: GO becomes NOT TESTED, NO-GO stays."""
        if self.verdict != GO:
            return self
        reason, fix = "the record is incomplete, so this proves nothing", INCOMPLETE_RECORD_FIX
        sentence = f"{reason}: {self.sentence}"
        return dataclasses.replace(self, verdict=NOT_TESTED, sentence=sentence, fix=fix, reasons=((reason, fix),))


INCOMPLETE_RECORD_FIX = "report on a complete run folder"


@dataclass
class GateBuilder:
    """Collects evidence, failures and missing tests of one gate."""

    name: str
    threshold: str
    plot: str | None = None
    evidence: list[tuple[str, str]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    untested: list[tuple[str, str]] = field(default_factory=list)

    def add_evidence(self, name: str, value: object) -> None:
        self.evidence.append((name, str(value)))

    def fail(self, sentence: str, fix: str) -> None:
        """Make the gate NO-GO."""
        self.failures.append((sentence, fix))

    def not_tested(self, sentence: str, fix: str) -> None:
        """Make the gate NOT TESTED, unless it is NO-GO."""
        self.untested.append((sentence, fix))

    def require_steps(self, run: Run, limits: Thresholds) -> None:
        if run.step < limits.min_steps:
            self.not_tested(f"fewer than {limits.min_steps} steps ({run.step} logged)", "train longer")

    def build(self, passed: str = "") -> Gate:
        """The gate; `passed` is its sentence if it is GO."""
        verdict, reasons = GO, list[tuple[str, str]]()
        if self.failures:
            verdict, reasons = NO_GO, self.failures
        elif self.untested:
            verdict, reasons = NOT_TESTED, self.untested
        sentence = "; ".join(s for s, _ in reasons) if reasons else passed
        fix = "; ".join(dict.fromkeys(f for _, f in reasons if f))
        return Gate(
            self.name, verdict, sentence, self.threshold, tuple(self.evidence), self.plot, fix, tuple(reasons)
        )  # fmt: skip


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

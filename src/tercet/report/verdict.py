"""GO, NO-GO or NOT TESTED, for each gate and for the run. Computed from the run's own events, and from nothing else.

A run is GO only when every gate is: what was not tested is not a pass. Thresholds of the run's own config play no part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from shlex import quote
from typing import Any

from tercet.report import attention_gates, gates
from tercet.report.gates import GO, NO_GO, NOT_TESTED, Case, Gate, Thresholds
from tercet.report.integrity import contradictions
from tercet.report.read import Run
from tercet.telemetry.events import HealthFired
from tercet.telemetry.health import examine
from tercet.typed import typed

EXIT_CODES = {GO: 0, NO_GO: 3, NOT_TESTED: 4}


@dataclass(frozen=True)
class Verdict:
    """The gates of one run, in the order in which they are read."""

    verdict: str
    sentence: str
    gates: tuple[Gate, ...]
    thresholds: Thresholds
    findings: tuple[HealthFired, ...]
    beyond: tuple[Gate, ...] = ()  # what such a run cannot test; said, but no part of its verdict

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def gaps(self) -> list[tuple[str, str, list[str]]]:
        """(reason, how to test it, the gates that it leaves open), a reason that many gates share only once."""
        return _reasons((*self.gates, *self.beyond), NOT_TESTED)

    def objections(self) -> list[tuple[str, str, list[str]]]:
        """(what speaks against it, how to mend it, the gates that say so)."""
        return _reasons(self.gates, NO_GO)

    def as_dict(self, run: Run) -> dict[str, Any]:
        """verdict.json."""
        return {
            "verdict": self.verdict,
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
            "gates": [{**dataclasses.asdict(g), "evidence": dict(g.evidence)} for g in self.gates],
            "beyond": [{**dataclasses.asdict(g), "evidence": dict(g.evidence)} for g in self.beyond],
            "thresholds": dataclasses.asdict(self.thresholds),
        }


def judge(run: Run, twin: Run | None = None, limits: Thresholds | None = None) -> Verdict:
    """Every gate, and what follows from them together."""
    limits = limits or Thresholds()
    findings = examine(run.events.get(0, []))
    for rank in sorted(set(run.events) - {0}):
        # Losses and gradients are the same on every rank; data, layers and routes are each rank's own.
        own = {"loss_spike", "nonfinite", "zero_grad", "throughput_drop"}
        findings += [f for f in examine(run.events[rank]) if f.rule not in own]
    record = _record(run)
    judged = [
        gates.stability(run, findings, limits),
        gates.memory(run, limits),
        gates.throughput(run, twin, findings, limits),
        attention_gates.routing(run, limits),
        attention_gates.selection(run, findings, limits),
        attention_gates.fallbacks(run, limits),
        gates.checkpoints(run, findings, limits),
        gates.data(run, findings, limits),
        attention_gates.numerics(run, findings, limits),
    ]
    if record.verdict != GO:
        judged = [_capped(gate) for gate in judged]
    everything = (record, *judged)
    beyond = _beyond(run)
    return Verdict(_overall(everything), _sentence(everything, beyond), everything, limits, tuple(findings), beyond)


def _reasons(judged: tuple[Gate, ...], verdict: str) -> list[tuple[str, str, list[str]]]:
    found: dict[tuple[str, str], list[str]] = {}
    for gate in judged:
        if gate.verdict == verdict:
            for reason in gate.reasons:
                found.setdefault(reason, []).append(gate.name)
    return [(sentence, mend, names) for (sentence, mend), names in found.items()]


def _beyond(run: Run) -> tuple[Gate, ...]:
    """A run on one device may well be GO; nobody shall read from it that eight will do."""
    if run.world_size > 1:
        return ()
    case = Case("several devices", "two ranks or more; no part of the verdict over a run on one device")
    case.lacks(
        "it ran on one device: sums over ranks, sharded saves and a rank that fails had no part in it",
        f"{typed('torchrun')} --standalone --nproc-per-node=2 -m tercet train "
        f"--config {quote(f'{run.folder}/config.toml')} "
        f"--run.dir {quote(f'{run.folder}-2')} --parallel.strategy fsdp{_dealt_to_two(run)}",
    )
    return (case.close(""),)


def _dealt_to_two(run: Run) -> str:
    """The flags by which a step's tokens can be dealt to two ranks, where they cannot be as they are."""
    keys = ("train.tokens_per_step", "train.micro_batch", "data.seq_len")
    tokens, micro_batch, seq_len = (run.config.get(key) for key in keys)
    if not (isinstance(tokens, int) and isinstance(micro_batch, int) and isinstance(seq_len, int)):
        return ""  # its config cannot be read, which the record tells
    if tokens % (2 * micro_batch * seq_len) == 0:
        return ""
    if micro_batch % 2 == 0:
        return f" --train.micro_batch {micro_batch // 2}"
    return f" --train.tokens_per_step {2 * tokens}"


def _record(run: Run) -> Gate:
    """Whether there is anything to judge by."""
    case = Case("record", "complete, contiguous and in agreement with itself, on every rank")
    case.show(
        "events", f"{sum(len(s) for s in run.events.values()):,} from {len(run.events)} of {run.world_size} ranks"
    )
    case.show("state", run.state)
    found = contradictions(run)
    for sentence in found[:4]:
        case.against(sentence, "judge a run whose folder is whole")
    if len(found) > 4:
        case.against(f"and {len(found) - 4} more", "")
    return case.close(f"steps 1 to {run.step:,} without a gap, on {run.world_size} rank{'s' * (run.world_size > 1)}")


def _capped(gate: Gate) -> Gate:
    """No GO can come out of a record that is not whole; a NO-GO can."""
    if gate.verdict != GO:
        return gate
    reason, mend = "the record is not whole, so this shows nothing", "judge a run whose folder is whole"
    sentence = f"{reason}: {gate.sentence}"
    return dataclasses.replace(gate, verdict=NOT_TESTED, sentence=sentence, mend=mend, reasons=((reason, mend),))


def _overall(judged: tuple[Gate, ...]) -> str:
    verdicts = {g.verdict for g in judged}
    if NO_GO in verdicts:
        return NO_GO
    return NOT_TESTED if NOT_TESTED in verdicts else GO


def _sentence(judged: tuple[Gate, ...], beyond: tuple[Gate, ...]) -> str:
    by = {v: [g.name for g in judged if g.verdict == v] for v in (GO, NO_GO, NOT_TESTED)}
    if by[NO_GO]:
        tail = f" Not tested: {', '.join(by[NOT_TESTED])}." if by[NOT_TESTED] else ""
        return f"Do not go on: {', '.join(by[NO_GO])}.{tail}"
    if by[NOT_TESTED]:
        return f"Nothing speaks against it, but not everything was tested: {', '.join(by[NOT_TESTED])}."
    tail = f" Not tested, and no part of this: {', '.join(g.name for g in beyond)}." if beyond else ""
    return f"All {len(judged)} gates passed.{tail}"

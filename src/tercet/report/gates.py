"""What a gate is, and the gates every run has: stability, memory, checkpoint and resume, data, numerics.

A gate is NO-GO if anything failed, NOT APPLICABLE if this kind of run cannot pass or fail it, NOT TESTED if evidence is
missing, and GO otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tercet import hints
from tercet.report.read import Run
from tercet.telemetry import events
from tercet.telemetry.events import HealthFired
from tercet.telemetry.health import FIXES
from tercet.telemetry.sinks import data_wait_share, mean_of_last
from tercet.terminal import plural
from tercet.train import manifest

GO, NO_GO, NOT_TESTED, NOT_APPLICABLE = "GO", "NO-GO", "NOT TESTED", "NOT APPLICABLE"
PARITY = "kernel parity"  # the doctor's check
DIED = "died"  # a process that left no end event

Reason = tuple[str, str]  # what is the matter, and how to fix it


@dataclass(frozen=True)
class Thresholds:
    """The limits of all gates. The run's own configuration has no influence on them."""

    min_steps: int = 500  # logged steps, not planned ones
    memory_share: float = 0.92
    memory_growth: float = 0.05
    memory_growth_gib: float = 0.25
    dense_length: int = 8192  # from here on a run must be as fast as dense; below, dense is faster than NSA
    tokens_per_s: float | None = None
    data_wait: float = 0.10
    bad_records: float = 0.001
    checkpoint_blocked: float = 0.05
    spikes_per_step: float = 1 / 200
    readings: int = 5  # samples of memory and layer statistics
    lone_branch_layers: float = 0.25  # share of layers that may have a collapsed gate or a dead branch


@dataclass
class Gate:
    """One criterion: what was found, from which the verdict follows."""

    name: str
    threshold: str
    plot: str | None = None  # anchor of the plot or table that shows it
    evidence: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[Reason] = field(default_factory=list)  # people should know them, whatever the verdict
    # by the verdict they ask for; the first in this order wins
    found: dict[str, list[Reason]] = field(default_factory=lambda: {NO_GO: [], NOT_APPLICABLE: [], NOT_TESTED: []})
    passed: str = ""  # the sentence if it is GO

    def add_evidence(self, name: str, value: object) -> None:
        self.evidence.append((name, str(value)))

    def fail(self, sentence: str, fix: str = "") -> None:
        """Make the gate NO-GO."""
        if (sentence, fix) not in self.found[NO_GO]:
            self.found[NO_GO].append((sentence, fix))

    def fail_on(self, findings: Iterable[HealthFired], rule: str) -> None:
        """Make the gate NO-GO if this health rule fired."""
        if fired := [f for f in findings if f.rule == rule]:
            again = f" ({len(fired)} times)" if len(fired) > 1 else ""
            self.fail(f"{fired[0].sentence}{again}", FIXES[rule])

    def not_applicable(self, sentence: str, fix: str) -> None:
        """Make the gate NOT APPLICABLE, unless it is NO-GO. fix: what makes it apply, which GO needs."""
        self.found[NOT_APPLICABLE].append((sentence, fix))

    def not_tested(self, sentence: str, fix: str = "") -> None:
        """Make the gate NOT TESTED, unless it is NO-GO or NOT APPLICABLE."""
        self.found[NOT_TESTED].append((sentence, fix))

    @property
    def verdict(self) -> str:
        return next((verdict for verdict, reasons in self.found.items() if reasons), GO)

    @property
    def reasons(self) -> list[Reason]:
        return self.found.get(self.verdict, [])

    @property
    def sentence(self) -> str:
        sentence = "; ".join(reason for reason, _ in self.reasons) or self.passed
        return "; warning: ".join([sentence, *(warning for warning, _ in self.warnings)])

    @property
    def fix(self) -> str:
        return "; ".join(dict.fromkeys(fix for _, fix in self.reasons if fix))

    def as_dict(self) -> dict[str, Any]:
        """The gate in verdict.json, where NOT APPLICABLE is NOT TESTED with `applicable` false."""
        names = ("name", "sentence", "threshold", "plot", "fix", "reasons", "warnings")
        verdict = NOT_TESTED if self.verdict == NOT_APPLICABLE else self.verdict
        record = {"verdict": verdict, "applicable": self.verdict != NOT_APPLICABLE, "evidence": dict(self.evidence)}
        return {name: getattr(self, name) for name in names} | record


def stability_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """The run kept going and the loss decreased, if the weights that produce it were trained."""
    falls = "" if run.selectors_only else "a decreasing loss, "
    gate = Gate(
        "stability",
        f"at least {limits.min_steps} steps, a clean exit, no stalls, {falls}no unrecovered loss spike",
        "loss",
    )
    gate.add_evidence("steps", f"{run.step:,} of {run.planned:,}")
    ends = _process_ends(run)
    gate.add_evidence("processes", ", ".join(outcome for outcome, _ in ends) or "none")
    _check_earlier_processes(run, ends, gate)
    _check_last_process(run, gate)
    stalls = [s for r in run.events for s in run.of(events.Stalled, r) if not s.over]
    gate.add_evidence("stalls", len(stalls))
    if stalls:
        worst = max(stalls, key=lambda s: s.for_seconds)
        where = f"rank {worst.rank}, step {worst.step + 1}, while {worst.doing}"
        gate.fail(f"stalled {plural(len(stalls), 'time')} ({where})", f"read {worst.dump} in the run folder")
    _check_loss(run, findings, limits, gate)
    if run.step < limits.min_steps:
        gate.not_tested(f"fewer than {limits.min_steps} steps ({run.step} logged)", "train longer")
    loss = f"; training loss {_loss_trend(run)[2]}" if run.losses else ""
    if run.selectors_only:
        loss = "; only the selectors learn, and the selection gate judges what they learned"
    gate.passed = f"{plural(run.step, 'step')}, {ends[-1][0] if ends else ''}{loss}"
    return gate


def _process_ends(run: Run) -> list[tuple[str, str]]:
    """How each process of the run ended, and the reason of its end event."""
    ends: list[tuple[str, str]] = []
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted):
            ends.append((DIED, ""))
        elif isinstance(event, events.RunEnded) and ends:
            ends[-1] = (event.outcome, event.reason)
    if ends and run.state in ("running", "silent"):
        ends[-1] = (run.state, "")
    return ends


def _check_earlier_processes(run: Run, ends: list[tuple[str, str]], gate: Gate) -> None:
    """A process may end badly if the run trained on from a verified checkpoint, or had nothing left to do."""
    recovered = Counter[tuple[str, str, str]]()  # by outcome, reason and what followed
    for (outcome, reason), following in zip(ends, run.started[1:], strict=False):
        if outcome not in ("failed", "halted", DIED):
            continue
        trained_on = _trained_since(run, following) or run.started[-1].step == run.planned
        if trained_on and run.config.get("checkpoint.verify") is not False:
            then = "was resumed" if following.resumed_from else "started again without a checkpoint"
            recovered[outcome, f"({reason})" if reason else "without an end event", then] += 1
        else:
            cause = f": {reason}" if reason else ""
            gate.fail(f"an earlier process {outcome}{cause}", "find the cause before relying on restarts")
    for (outcome, how, then), count in recovered.items():
        fix = "check that the cause is gone; without an end event, the system log may name it"
        gate.warnings.append((f"the process {outcome} {times(count)} {how}, and the run {then}", fix))


def _trained_since(run: Run, start: events.RunStarted) -> bool:
    """Whether the run logged a step since this process started."""
    return bool(run.steps) and run.steps[-1].time >= start.time


def _check_last_process(run: Run, gate: Gate) -> None:
    again = hints.resume(run.folder, run.world_size)
    if run.ended and run.ended.outcome in ("failed", "halted"):
        gate.fail(
            f"the run {run.ended.outcome} after step {run.ended.step}: {run.ended.reason}", f"fix it, then {again}"
        )
    elif run.state == "gone":
        gate.fail(
            f"the process died after step {run.step} without an end event: killed, out of memory or a machine failure",
            f"check the system log, then {again}",
        )
    elif run.state == "silent":
        gate.fail(
            f"the process is alive but its heartbeat stopped after step {run.step}",
            "`kill -USR1 PID` writes its stacks into the run folder",
        )
    elif run.state == "running":
        gate.not_tested(f"still running, at step {run.step}", "report again when the run has ended")


def _check_loss(run: Run, findings: list[HealthFired], limits: Thresholds, gate: Gate) -> None:
    if not run.losses:
        return
    spikes = [f for f in findings if f.rule == "loss_spike"]
    first, last, trend = _loss_trend(run)
    gate.add_evidence("training loss", trend)
    gate.add_evidence("loss spikes", len(spikes))
    if len(run.losses) >= 20 and not last < first and not run.selectors_only:
        gate.fail(f"the loss did not fall: {trend}", "check learning rate, data and gradients")
    if spikes and not last < spikes[-1].threshold:
        gate.fail(f"the loss did not recover from the spike in step {spikes[-1].step}", FIXES["loss_spike"])
    elif len(spikes) > max(1.0, limits.spikes_per_step * len(run.losses)):
        gate.fail(f"{len(spikes)} loss spikes in {len(run.losses)} steps", "lower train.lr or raise train.warmup_steps")


def _loss_trend(run: Run) -> tuple[float, float, str]:
    """Means of the first and of the last losses, and both in words that name their steps: the page also shows single
    losses."""
    finite = [x for x in run.losses if math.isfinite(x)]
    start = finite[:5]
    first = statistics.fmean(start) if start else math.nan
    mean, steps = mean_of_last(finite)
    last = math.nan if mean is None else mean
    if len(start) + steps > len(finite):  # they include the same steps
        return first, last, f"{last:.4f} (mean of the last {plural(steps, 'step')})"
    return first, last, f"{first:.4f} → {last:.4f} (means of the first {len(start)} and the last {steps} steps)"


def memory_gate(run: Run, limits: Thresholds) -> Gate:
    """The run fits in memory and does not grow."""
    gate = Gate(
        "memory",
        f"peak at most {100 * limits.memory_share:.0f}% of the device; growth over the last two thirds of its "
        f"longest process or stage at most {100 * limits.memory_growth:.0f}% or {limits.memory_growth_gib:g} GiB",
    )
    capacity = run.capacity_gib
    peak = max([*(e.memory_gib for e in run.steps), *(log.memory_gib for log in run.logs.values())], default=0.0)
    if capacity is None:
        gate.not_tested("memory capacity is unknown: mem_boot.json is missing")
    elif peak:
        share = peak / capacity
        gate.add_evidence("peak", f"{peak:.2f} of {capacity:.1f} GiB ({100 * share:.0f}%)")
        if share > limits.memory_share:
            fix = "lower train.micro_batch, raise train.activation_checkpointing, or set parallel.strategy=fsdp"
            gate.fail(f"the peak is {100 * share:.0f}% of the device's memory", fix)
    readings = _longest_segment(run)
    later = readings[len(readings) // 3 :]
    if len(later) < limits.readings:
        gate.not_tested(f"memory was sampled only {plural(len(readings), 'time')}", "train longer, or lower log.every")
    else:
        # Medians: a single sample may fall into a save or a validation.
        quarter = max(1, len(later) // 4)
        begin, end = (statistics.median(part) for part in (later[:quarter], later[-quarter:]))
        gate.add_evidence("growth", f"{begin:.3f} → {end:.3f} GiB")
        if end - begin > max(limits.memory_growth * begin, limits.memory_growth_gib):
            gate.fail(f"memory grew from {begin:.2f} to {end:.2f} GiB", "find the leak: --profile.steps A:B")
    gate.passed = f"peak {peak:.2f} of {capacity or 0:.1f} GiB, no growth"
    return gate


def _longest_segment(run: Run) -> list[float]:
    """Allocated GiB in the process and stage that has most samples: other ranks or lengths need other memory."""
    segments: list[list[float]] = [[]]
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted | events.StageStarted):
            segments.append([])
        elif isinstance(event, events.ResourcesObserved):
            segments[-1].append(event.allocated_gib)
    return max(reversed(segments), key=len)


def checkpoint_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Checkpoints were saved, and training resumed from one."""
    gate = Gate(
        "checkpoint and resume",
        "checkpoints saved and complete on disk, no failed save after the newest, at most "
        f"{100 * limits.checkpoint_blocked:.0f}% of the time blocked on saves, at least one resume without a jump in "
        "the loss",
        "breakdown",
    )
    saved, failed = run.of(events.CheckpointSaved), run.of(events.CheckpointFailed)
    gate.add_evidence("saved", len(saved))
    gate.add_evidence("failed", len(failed))
    if failed:
        sentence = f"{plural(len(failed), 'save')} failed: {failed[-1].reason}"
        if saved and saved[-1].time > failed[-1].time:
            gate.warnings.append((f"{sentence}; a later save succeeded", "check that the cause is gone"))
        else:
            gate.fail(sentence, "free disk space or replace the disk")
    if saved:
        _check_saves(run, saved, limits, gate)
    else:
        gate.not_tested("no checkpoint was saved", "set checkpoint.every")
    resumed = [start for start in run.started if start.resumed_from is not None and _trained_since(run, start)]
    gate.add_evidence("resumed and trained on", times(len(resumed)))
    # A spike is found in the interval that `step` ends.
    begins = {e.step: e.first_step for e in run.steps}
    spikes = [f for f in findings if f.rule == "loss_spike"]
    jumps = [f for f in spikes if any(0 < begins.get(f.step, f.step) - start.step <= 10 for start in resumed)]
    if jumps:
        gate.fail(f"the loss jumped after a resume: {jumps[0].sentence}", "compare with an uninterrupted run")
    if not resumed:
        gate.not_tested("never resumed", f"interrupt a run and resume it: {hints.resume(run.folder, run.world_size)}")
    gate.passed = f"{len(saved)} saved, resumed {times(len(resumed))} without a jump in the loss"
    return gate


def _check_saves(run: Run, saved: list[events.CheckpointSaved], limits: Thresholds, gate: Gate) -> None:
    newest = run.folder / "checkpoints" / Path(saved[-1].path).name
    if not newest.parent.is_dir():
        gate.not_tested("the checkpoints are not in this folder", "run the report where they are")
    else:
        try:
            manifest.check_sizes(newest)
            gate.add_evidence("newest", f"{newest.name}, {saved[-1].bytes / 2**20:.1f} MiB, files match the manifest")
        except manifest.CheckpointError as error:
            gate.fail(f"the newest checkpoint is incomplete: {error}", "save again")
    total = sum(e.step_seconds * len(e.losses) for e in run.steps)
    blocked = sum(e.blocked_seconds for e in saved)
    share = blocked / (total + blocked) if total else 0.0
    gate.add_evidence("blocked on saves", f"{blocked:.2f} s in total ({100 * share:.2f}%)")
    if share > limits.checkpoint_blocked and run.step >= limits.min_steps:  # meaningless for a short run
        gate.fail(f"{100 * share:.0f}% of the time was blocked on saves", "raise checkpoint.every, or use async_save")


def times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def data_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Real data, delivered in time, with a validation split."""
    gate = Gate(
        "data",
        f"data that is not synthetic, at most {100 * limits.data_wait:.0f}% of the time waiting for data, at most "
        f"{100 * limits.bad_records:g}% bad records, a validation loss",
        "breakdown",
    )
    source = run.config.get("data.source")
    gate.add_evidence("source", source or "unknown")
    if source is None:
        gate.not_tested("the data source is unknown")
    elif source == "synthetic":
        gate.not_tested("trained on synthetic data", "train on your own data: --data.source")
    # not the first interval of a process, which waits for files, tokenizer and a block of shuffled sequences
    begins = [start.step for start in run.started]
    later = [e for e in run.steps if not any(e.first_step - 1 <= begin < e.step for begin in begins)]
    if (wait := data_wait_share(later)) is not None:
        gate.add_evidence("waiting for data", f"{100 * wait:.2f}% of step time, start excluded")
        if wait > limits.data_wait:
            gate.fail(f"{100 * wait:.0f}% of the time was spent waiting for data", FIXES["data_starvation"])
    gate.fail_on(findings, "data_starvation")
    if run.resources:
        last = run.resources[-1]
        gate.add_evidence("documents", f"{last.documents:,} (epoch {run.steps[-1].epoch if run.steps else 0})")
        gate.add_evidence("padding", f"{last.padding:,} of {last.real_tokens + last.padding:,} tokens")
        gate.add_evidence("bad records", f"{last.bad_records:,} skipped, {last.left_out:,} empty")
        if last.bad_records > limits.bad_records * max(1, last.documents):
            count = f"{last.bad_records} bad records in {last.documents} documents"
            gate.fail(count, "inspect them: tercet data inspect")
    else:
        gate.not_tested("no document counts were logged", "train longer")
    if run.validations:
        validation = run.validations[-1]
        gate.add_evidence("validation", f"loss {validation.loss:.4f} over {validation.tokens:,} tokens")
    else:
        gate.not_tested("no validation loss", "set train.val_every and train.val_tokens")
    gate.passed = f"source {source}, never starved, validation loss measured"
    return gate


def numerics_gate(run: Run, findings: list[HealthFired]) -> Gate:
    """Everything is finite, and the kernels match the reference."""
    gate = Gate(
        "numerics",
        "no non-finite step, no zero gradients, fp32 weights, kernels that match the reference on this device",
        "grad_norm",
    )
    skipped = sum(len(e.steps) for e in run.of(events.StepsSkipped))
    gate.add_evidence("non-finite steps", skipped)
    if skipped:
        gate.fail(f"{plural(skipped, 'step')} not finite", FIXES["nonfinite"])
    gate.fail_on(findings, "zero_grad")
    norms = [n for e in run.steps for n in e.grad_norms]
    finite = [n for n in norms if math.isfinite(n)]
    if not norms:
        gate.not_tested("no gradient norm was logged", "train longer")
    elif finite:
        gate.add_evidence("gradient norm", f"{min(finite):.3g} to {max(finite):.3g}")
    if len(finite) < len(norms) and not skipped:
        gate.fail(f"{len(norms) - len(finite)} gradient norms not finite", FIXES["nonfinite"])
    weights = run.dtypes.get("parameters")
    if weights is None:
        gate.not_tested("dtypes_report.txt is missing")
    else:
        gate.add_evidence("weights", weights)
        gate.add_evidence("compute", run.dtypes.get("compute", "unknown"))
        if any(not part.strip().startswith("float32") for part in weights.split(",")):
            gate.fail(f"weights are stored as {weights}", "store them in fp32: small updates vanish in lower precision")
    if run.validations and not math.isfinite(run.validations[-1].loss):
        gate.fail("the validation loss is not finite")
    _check_parity(run, gate)
    gate.passed = "all finite, no zero gradients, fp32 weights"
    return gate


def _check_parity(run: Run, gate: Gate) -> None:
    if not run.on_gpu or set(run.attention) <= {"dense"}:
        gate.add_evidence(PARITY, "no kernels ran")
        return
    reports = run.of(events.DoctorReported)
    rows = [row for e in reports for row in zip(e.check, e.verdict, e.finding, strict=True) if row[0] == PARITY]
    _, verdict, finding = rows[-1] if rows else (PARITY, "not tested", "the doctor did not run: leave health.doctor on")
    gate.add_evidence(PARITY, f"{verdict}: {finding}")
    if verdict == "failed":
        gate.fail(f"the kernels do not match the reference: {finding}", "tercet doctor; use model.backend=reference")
    elif verdict != "ok":
        gate.not_tested(f"the kernels were not compared with the reference on this device ({finding})", "tercet doctor")

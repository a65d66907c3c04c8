"""The gates every run has: stability, memory, checkpoint and resume, data, numerics."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet import hints
from tercet.report.gates import Gate, GateBuilder, Thresholds
from tercet.report.read import Run
from tercet.telemetry import events
from tercet.telemetry.events import HealthFired
from tercet.telemetry.health import FIXES
from tercet.telemetry.sinks import data_wait_share, mean_of_last
from tercet.telemetry.units import plural
from tercet.train import manifest

PARITY = "kernel parity"  # the doctor's check
DIED = "died"  # a process that left no end event


def stability_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """The run kept going and the loss decreased, if the weights that produce it were trained."""
    falls = "" if run.selectors_only else "a decreasing loss, "
    gate = GateBuilder(
        "stability",
        f"at least {limits.min_steps} steps, a clean exit, no stalls, {falls}no unrecovered loss spike",
        "loss",
    )
    planned = run.started[-1].steps if run.started else 0
    gate.add_evidence("steps", f"{run.step:,} of {planned:,}")
    ends = _process_ends(run)
    gate.add_evidence("processes", ", ".join(outcome for outcome, _ in ends) or "none")
    last = ends[-1][0] if ends else ""
    _check_earlier_processes(run, ends, gate)
    _check_last_process(run, last, gate)
    _check_stalls(run, gate)
    _check_loss(run, findings, limits, gate)
    gate.require_steps(run, limits)
    loss = f"; training loss {_loss_trend(run).text}" if run.losses else ""
    if run.selectors_only:
        loss = "; only the selectors learn, and the selection gate judges what they learned"
    return gate.build(f"{plural(run.step, 'step')}, {last}{loss}")


def _check_earlier_processes(run: Run, ends: list[tuple[str, str]], gate: GateBuilder) -> None:
    """A process may end badly if a later one trained on from a verified checkpoint, or had nothing left to do."""
    verified = run.config.get("checkpoint.verify") is not False
    endings = Counter[tuple[str, str, str]]()  # by outcome, reason and what followed
    for number, (outcome, reason) in enumerate(ends[:-1], 1):
        if outcome not in ("failed", "halted", DIED):
            continue
        later = next((start for start in run.started[number:] if _trained_on(run, start)), None)
        if later is None or not verified:
            cause = f": {reason}" if reason else ""
            gate.fail(f"an earlier process {outcome}{cause}", "find the cause before relying on restarts")
        else:
            endings[outcome, reason, "was resumed" if later.resumed_from else "started again without a checkpoint"] += 1
    for (outcome, reason, then), count in endings.items():
        how, fix = f"({reason})", "check that the cause is gone"
        if outcome == DIED:
            how = "without an end event"
            fix = "look for the cause in the system log: killed, out of memory or a machine failure"
        gate.warn(f"the process {outcome} {times(count)} {how}, and the run {then}", fix)


def _check_last_process(run: Run, outcome: str, gate: GateBuilder) -> None:
    again = hints.resume(run.folder, run.started[-1].world_size if run.started else 1)
    if outcome in ("failed", "halted"):
        assert run.ended is not None
        gate.fail(f"the run {outcome} after step {run.ended.step}: {run.ended.reason}", f"fix it, then {again}")
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


def _check_stalls(run: Run, gate: GateBuilder) -> None:
    stalls = [s for r in run.events for s in run.of(events.Stalled, r) if not s.over]
    gate.add_evidence("stalls", len(stalls))
    if stalls:
        worst = max(stalls, key=lambda s: s.for_seconds)
        gate.fail(
            f"stalled {plural(len(stalls), 'time')} (rank {worst.rank}, step {worst.step + 1}, while {worst.doing})",
            f"read {worst.dump} in the run folder",
        )


def _check_loss(run: Run, findings: list[HealthFired], limits: Thresholds, gate: GateBuilder) -> None:
    if not run.losses:
        gate.not_tested("no step was logged", "train longer")
        return
    spikes = [f for f in findings if f.rule == "loss_spike"]
    trend = _loss_trend(run)
    gate.add_evidence("training loss", trend.text)
    gate.add_evidence("loss spikes", len(spikes))
    if len(run.losses) >= 20 and not trend.last < trend.first and not run.selectors_only:
        gate.fail(f"the loss did not fall: {trend.text}", "check learning rate, data and gradients")
    if spikes and not trend.last < spikes[-1].threshold:
        gate.fail(
            f"the loss did not recover from the spike in step {spikes[-1].step}",
            FIXES["loss_spike"],
        )
    elif len(spikes) > max(1.0, limits.spikes_per_step * len(run.losses)):
        gate.fail(f"{len(spikes)} loss spikes in {len(run.losses)} steps", "lower train.lr or raise train.warmup_steps")


def _process_ends(run: Run) -> list[tuple[str, str]]:
    """How each process of the run ended, and the reason of its end event."""
    ends: list[tuple[str, str]] = []
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted):
            ends.append((DIED, ""))
        elif isinstance(event, events.RunEnded) and ends:
            ends[-1] = (event.outcome, event.reason)
    if ends and run.ended is None and run.state in ("running", "silent"):
        ends[-1] = (run.state, "")
    return ends


def _continued(run: Run, start: events.RunStarted) -> bool:
    """Whether a process trained on from where it started."""
    return any(e.step > start.step and e.time >= start.time for e in reversed(run.steps))


def _trained_on(run: Run, start: events.RunStarted) -> bool:
    """Whether a process trained on, or resumed where nothing was left to do."""
    return _continued(run, start) or (start.resumed_from is not None and start.step == start.steps)


@dataclass(frozen=True)
class LossTrend:
    """Means of the first and of the last losses. `text` names their steps: the page also shows single losses."""

    first: float
    last: float
    text: str


def _loss_trend(run: Run) -> LossTrend:
    finite = [x for x in run.losses if math.isfinite(x)]
    start = finite[:5]
    first = statistics.fmean(start) if start else math.nan
    mean, steps = mean_of_last(finite)
    last = math.nan if mean is None else mean
    if len(start) + steps > len(finite):  # they include the same steps
        return LossTrend(first, last, f"{last:.4f} (mean of the last {plural(steps, 'step')})")
    return LossTrend(
        first, last, f"{first:.4f} → {last:.4f} (means of the first {len(start)} and the last {steps} steps)"
    )


def memory_gate(run: Run, limits: Thresholds) -> Gate:
    """The run fits in memory and does not grow."""
    gate = GateBuilder(
        "memory",
        f"peak at most {100 * limits.memory_share:.0f}% of the device; growth over the last two thirds of its "
        f"longest process or stage at most {100 * limits.memory_growth:.0f}% or {limits.memory_growth_gib:g} GiB",
        "memory",
    )
    readings = _longest_segment(run)
    capacity = run.device_total_gib
    if not run.on_gpu:
        capacity = next((m.get("host_total_gib") for m in run.memory.values()), None)
    peak = max([*(e.memory_gib for e in run.steps), *(log.memory_gib for log in run.logs.values())], default=0.0)
    if capacity is None:
        gate.not_tested("memory capacity is unknown: mem_boot.json is missing", "")
    elif peak:
        gate.add_evidence("peak", f"{peak:.2f} of {capacity:.1f} GiB ({100 * peak / capacity:.0f}%)")
        if peak > limits.memory_share * capacity:
            gate.fail(f"the peak is {100 * peak / capacity:.0f}% of the device's memory", memory_fix(run.config))
    later = readings[len(readings) // 3 :]
    if len(later) < limits.readings:
        gate.not_tested(f"memory was sampled only {plural(len(readings), 'time')}", "train longer, or lower log.every")
    else:
        # Medians: a single sample may fall into a save or a validation.
        begin = statistics.median(e.allocated_gib for e in later[: max(1, len(later) // 4)])
        end = statistics.median(e.allocated_gib for e in later[-max(1, len(later) // 4) :])
        gate.add_evidence("growth", f"{begin:.3f} → {end:.3f} GiB")
        if end - begin > max(limits.memory_growth * begin, limits.memory_growth_gib):
            gate.fail(f"memory grew from {begin:.2f} to {end:.2f} GiB", "find the leak: --profile.steps A:B")
    gate.require_steps(run, limits)
    return gate.build(f"peak {peak:.2f} of {capacity or 0:.1f} GiB, no growth")


def _longest_segment(run: Run) -> list[events.ResourcesObserved]:
    """Readings of the process and stage that has the most: another number of ranks or length needs other memory."""
    segments: list[list[events.ResourcesObserved]] = [[]]
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted | events.StageStarted):
            segments.append([])
        elif isinstance(event, events.ResourcesObserved):
            segments[-1].append(event)
    return max(reversed(segments), key=len)


def checkpoint_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Checkpoints were saved, and training resumed from one."""
    gate = GateBuilder(
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
        newest = next(
            e for e in reversed(run.events[0]) if isinstance(e, events.CheckpointSaved | events.CheckpointFailed)
        )
        if isinstance(newest, events.CheckpointSaved):
            gate.warn(f"{sentence}; a later save succeeded", "check that the cause is gone")
        else:
            gate.fail(sentence, "free disk space or replace the disk")
    if not saved:
        gate.not_tested("no checkpoint was saved", "set checkpoint.every")
    else:
        _check_saves(run, saved, limits, gate)
    resumes = [e for e in run.started if e.resumed_from is not None]
    continued = [start for start in resumes if _continued(run, start)]
    gate.add_evidence("resumed", f"{times(len(resumes))}, trained further after {len(continued)}")
    spikes = [f for f in findings if f.rule == "loss_spike"]
    jumps = [f for f in spikes if any(0 < _spike_step(run, f) - r.step <= 10 for r in continued)]
    if jumps:
        gate.fail(f"the loss jumped after a resume: {jumps[0].sentence}", "compare with an uninterrupted run")
    if not continued:
        gate.not_tested("never resumed", f"interrupt a run and resume it: {hints.resume(run.folder, run.world_size)}")
    return gate.build(f"{len(saved)} saved, resumed {times(len(continued))} without a jump in the loss")


def _spike_step(run: Run, spike: HealthFired) -> int:
    """The step whose loss it is; spike.step is that of the log line."""
    at = bisect.bisect_left(run.steps, spike.step, key=lambda e: e.step)
    losses = ((s, x) for e in run.steps[at : at + 1] for s, x in enumerate(e.losses, e.first_step))
    return next((step for step, loss in losses if loss == spike.value), spike.step)


def _check_saves(run: Run, saved: list[events.CheckpointSaved], limits: Thresholds, gate: GateBuilder) -> None:
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
    gate.add_evidence("standing still", f"{blocked:.2f} s in total ({100 * share:.2f}%)")
    if share > limits.checkpoint_blocked and run.step >= limits.min_steps:  # meaningless for a short run
        gate.fail(f"{100 * share:.0f}% of the time was blocked on saves", "raise checkpoint.every, or use async_save")


def times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def data_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Real data, delivered in time, with a validation split."""
    gate = GateBuilder(
        "data",
        f"data that is not synthetic, at most {100 * limits.data_wait:.0f}% of the time waiting for data, at most "
        f"{100 * limits.bad_records:g}% bad records, a validation loss",
        "breakdown",
    )
    source = run.config.get("data.source")
    gate.add_evidence("source", source or "unknown")
    if source is None:
        gate.not_tested("the data source is unknown", "")
    elif source == "synthetic":
        gate.not_tested("trained on synthetic data", "train on your own data: --data.source")
    # not the first interval of a process, which waits for files, tokenizer and a block of shuffled sequences
    begins = sorted(e.step for e in run.started)
    later = [e for e in run.steps if bisect.bisect_left(begins, e.first_step - 1) == bisect.bisect_left(begins, e.step)]
    if (wait := data_wait_share(later)) is not None:
        gate.add_evidence("waiting for data", f"{100 * wait:.2f}% of step time, start excluded")
        if wait > limits.data_wait:
            gate.fail(f"{100 * wait:.0f}% of the time was spent waiting for data", data_fix(run.config))
    gate.fail_on(findings, "data_starvation")
    if run.resources:
        last = run.resources[-1]
        gate.add_evidence("documents", f"{last.documents:,} (epoch {run.steps[-1].epoch if run.steps else 0})")
        gate.add_evidence("padding", f"{last.padding:,} of {last.real_tokens + last.padding:,} tokens")
        gate.add_evidence("bad records", f"{last.bad_records:,} skipped, {last.left_out:,} empty")
        if last.exercises:
            gate.add_evidence("retrieval exercises", f"{last.exercises:,}")
        if last.bad_records > limits.bad_records * max(1, last.documents):
            gate.fail(
                f"{last.bad_records} bad records in {last.documents} documents", "inspect them: tercet data inspect"
            )
    else:
        gate.not_tested("no document counts were logged", "train longer")
    if run.validations:
        last_validation = run.validations[-1]
        gate.add_evidence("validation", f"loss {last_validation.loss:.4f} over {last_validation.tokens:,} tokens")
    else:
        gate.not_tested("no validation loss", "set train.val_every and train.val_tokens")
    gate.require_steps(run, limits)
    return gate.build(f"source {source}, never starved, validation loss measured")


def numerics_gate(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Everything is finite, and the kernels match the reference."""
    gate = GateBuilder(
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
    if norms:
        finite = [n for n in norms if math.isfinite(n)]
        gate.add_evidence("gradient norm", f"{min(finite, default=0):.3g} to {max(finite, default=0):.3g}")
        if len(finite) < len(norms) and not skipped:
            gate.fail(f"{len(norms) - len(finite)} gradient norms not finite", "lower train.lr")
    else:
        gate.not_tested("no gradient norm was logged", "train longer")
    weights = run.dtypes.get("parameters")
    if weights is None:
        gate.not_tested("dtypes_report.txt is missing", "")
    else:
        gate.add_evidence("weights", weights)
        gate.add_evidence("compute", run.dtypes.get("compute", "unknown"))
        if any(not part.strip().startswith("float32") for part in weights.split(",")):
            gate.fail(f"weights are stored as {weights}", "store them in fp32: small updates vanish in lower precision")
    if run.validations and not math.isfinite(run.validations[-1].loss):
        gate.fail("the validation loss is not finite", "")
    _check_parity(run, gate)
    gate.require_steps(run, limits)
    return gate.build("all finite, no zero gradients, fp32 weights")


def _check_parity(run: Run, gate: GateBuilder) -> None:
    if not run.on_gpu or set(run.attention) <= {"dense"}:
        gate.add_evidence(PARITY, "no kernels ran")
        return
    reports = [
        dict(zip(e.check, zip(e.verdict, e.finding, strict=True), strict=True)) for e in run.of(events.DoctorReported)
    ]
    parity = [report[PARITY] for report in reports if PARITY in report]
    if not parity:
        gate.not_tested("the kernels were not compared with the reference on this device", "leave health.doctor on")
        return
    verdict, finding = parity[-1]
    gate.add_evidence(PARITY, f"{verdict}: {finding}")
    if verdict == "failed":
        gate.fail(f"the kernels do not match the reference: {finding}", "tercet doctor; use model.backend=reference")
    elif verdict != "ok":
        gate.not_tested(f"kernel parity: {finding}", "tercet doctor")


def memory_fix(config: Mapping[str, Any]) -> str:
    """Settings that need less memory, without those that are already as low as they go."""
    mode = config.get("train.activation_checkpointing", "none")
    fixes = ["lower train.micro_batch"] if config.get("train.micro_batch", 2) > 1 else []
    fixes += [f"set train.activation_checkpointing={'full' if mode == 'selective' else 'selective'}"] * (mode != "full")
    return ", or ".join(fixes) or "lower data.seq_len, or shard the model with parallel.strategy=fsdp"


def data_fix(config: Mapping[str, Any]) -> str:
    """How to read data faster."""
    prepared = config.get("data.source") == "shards"
    return "raise data.prefetch" + ("" if prepared else ", or tokenize in advance: tercet data prepare")

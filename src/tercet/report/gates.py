"""The gates by which a run is judged: stability, memory, throughput, data, checkpoints.

Every gate starts at NOT TESTED and needs evidence to leave it. What its thresholds are is said beside each verdict.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote

from tercet.report.dense_baseline import not_a_twin, slow_routes, twin_command
from tercet.report.read import Run, incomplete
from tercet.telemetry.events import (
    CheckpointFailed,
    CheckpointSaved,
    HealthFired,
    RunEnded,
    RunStarted,
    Stalled,
    StepLogged,
    StepsSkipped,
)
from tercet.typed import typed

GO, NO_GO, NOT_TESTED = "GO", "NO-GO", "NOT TESTED"


@dataclass(frozen=True)
class Thresholds:
    """What a run is held to. `min_steps` counts logged steps of the run's own events, never planned ones."""

    min_steps: int = 500
    memory_share: float = 0.92
    memory_growth: float = 0.05
    memory_growth_gib: float = 0.25
    dense_ratio: float = 1.0
    tokens_per_s: float | None = None
    data_wait: float = 0.10
    bad_records: float = 0.001
    checkpoint_blocked: float = 0.05
    spikes_per_step: float = 1 / 200
    readings: int = 5
    lone_branch_layers: float = 0.25


@dataclass(frozen=True)
class Gate:
    """One verdict with everything that led to it."""

    name: str
    verdict: str
    sentence: str
    threshold: str
    evidence: tuple[tuple[str, str], ...] = ()
    plot: str | None = None
    mend: str = ""
    reasons: tuple[tuple[str, str], ...] = ()  # what the sentence is made of, each with its mend


@dataclass
class Case:
    """Collects objections: `against` makes a NO-GO, `lacks` a NOT TESTED; without either it is a GO."""

    name: str
    threshold: str
    plot: str | None = None
    evidence: list[tuple[str, str]] = field(default_factory=list)
    objections: list[tuple[str, str]] = field(default_factory=list)
    gaps: list[tuple[str, str]] = field(default_factory=list)

    def against(self, sentence: str, mend: str) -> None:
        self.objections.append((sentence, mend))

    def lacks(self, sentence: str, mend: str) -> None:
        self.gaps.append((sentence, mend))

    def show(self, name: str, value: object) -> None:
        self.evidence.append((name, str(value)))

    def close(self, good: str) -> Gate:
        verdict, told = (GO, [])
        if self.objections:
            verdict, told = NO_GO, self.objections
        elif self.gaps:
            verdict, told = NOT_TESTED, self.gaps
        sentence = "; ".join(s for s, _ in told) if told else good
        mend = "; ".join(dict.fromkeys(m for _, m in told if m))
        return Gate(self.name, verdict, sentence, self.threshold, tuple(self.evidence), self.plot, mend, tuple(told))


def stability(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """It ran, kept running, and learnt."""
    case = Case(
        "stability",
        f"at least {limits.min_steps} steps, ended in order, no stall, loss fell, no unrecovered loss spike",
        "loss",
    )
    planned = run.started[-1].steps if run.started else 0
    case.show("steps", f"{run.step:,} of {planned:,}")
    outcomes = _ends(run)
    case.show("processes", ", ".join(outcomes) or "none")
    for outcome in outcomes[:-1]:
        if outcome in ("failed", "halted", "ended without a word"):
            case.against(f"an earlier process {outcome}", "find out why before relying on restarts")
    last = outcomes[-1] if outcomes else ""
    if last in ("failed", "halted"):
        assert run.ended is not None
        case.against(f"the run {last} after step {run.ended.step}: {run.ended.reason}", "mend that, then --resume auto")
    elif run.state == "gone":
        case.against(
            f"the process ended without a word after step {run.step}: killed, out of memory, or the machine went down",
            "look at the system's log, then go on with --resume auto",
        )
    elif run.state == "silent":
        case.against(
            f"the process lives but has not spoken since step {run.step}",
            "`kill -USR1 PID` writes its stacks into the run folder",
        )
    elif run.state == "running":
        case.lacks(f"still running, at step {run.step}", "make the report again when it has ended")
    stalls = [s for r in run.events for s in run.of(Stalled, r) if not s.over]
    case.show("stalls", len(stalls))
    if stalls:
        worst = max(stalls, key=lambda s: s.for_seconds)
        case.against(
            f"stalled {len(stalls)} time{'s' * (len(stalls) > 1)} (rank {worst.rank}, step {worst.step + 1}, "
            f"while {worst.doing})",
            f"read {worst.dump} in the run folder",
        )
    _learnt(run, findings, limits, case)
    if run.step < limits.min_steps:
        case.lacks(f"only {run.step} steps were made, {limits.min_steps} are needed", "train for longer")
    begun, ended = _first(run), _last(run)
    fell = f"the training loss fell from {begun.value:.3f} ({begun.of}) to {ended.value:.3f} ({ended.of})"
    return case.close(f"{run.step:,} steps, {last}; {fell}")


def _learnt(run: Run, findings: list[HealthFired], limits: Thresholds, case: Case) -> None:
    losses = [x for e in run.steps for x in e.losses]
    if not losses:
        case.lacks("no step was logged", "train for longer")
        return
    spikes = [f for f in findings if f.rule == "loss_spike"]
    begun, ended = _first(run), _last(run)
    case.show("training loss", f"{begun.value:.4f} → {ended.value:.4f} ({begun.of}, {ended.of})")
    case.show("loss spikes", len(spikes))
    if len(losses) >= 20 and not ended.value < begun.value:
        case.against(
            f"the loss did not fall: {begun.value:.4f} ({begun.of}), {ended.value:.4f} ({ended.of})",
            "look at learning rate, data and gradients",
        )
    if spikes and not ended.value < spikes[-1].threshold:
        case.against(
            f"a loss spike in step {spikes[-1].step} was not recovered from", "lower train.lr, or go back and skip it"
        )
    elif len(spikes) > max(1.0, limits.spikes_per_step * len(losses)):
        case.against(f"{len(spikes)} loss spikes in {len(losses)} steps", "lower train.lr or raise train.warmup_steps")


def _ends(run: Run) -> list[str]:
    """How each process of the run ended."""
    ends: list[str] = []
    for event in run.events.get(0, []):
        if isinstance(event, RunStarted):
            ends.append("ended without a word")
        elif isinstance(event, RunEnded) and ends:
            ends[-1] = event.outcome
    if ends and run.ended is None:
        ends[-1] = {"running": "running", "silent": "silent"}.get(run.state, ends[-1])
    return ends


@dataclass(frozen=True)
class Mean:
    """A loss, and of which steps: beside it the page tells that of one step alone."""

    value: float
    of: str


def _first(run: Run) -> Mean:
    losses = _finite(run)[:5]
    return Mean(statistics.fmean(losses) if losses else math.nan, f"mean of the first {len(losses)} steps")


def _last(run: Run) -> Mean:
    losses = _finite(run)
    losses = losses[-max(5, len(losses) // 20) :]
    return Mean(statistics.fmean(losses) if losses else math.nan, f"mean of the last {len(losses)} steps")


def _finite(run: Run) -> list[float]:
    return [x for e in run.steps for x in e.losses if math.isfinite(x)]


def memory(run: Run, limits: Thresholds) -> Gate:
    """It fits, and goes on fitting."""
    case = Case(
        "memory",
        f"peak at most {100 * limits.memory_share:.0f}% of the device; growth over the last two thirds of the run at "
        f"most {100 * limits.memory_growth:.0f}% or {limits.memory_growth_gib:g} GiB",
        "memory",
    )
    seen = run.resources
    capacity = next((m["device_total_gib"] for m in run.memory.values() if "device_total_gib" in m), None)
    if not run.on_gpu:
        capacity = next((m.get("host_total_gib") for m in run.memory.values()), None)
    mend = "lower train.micro_batch, or set train.activation_checkpointing"
    peak = 0.0
    for rank in run.events:
        peak = max([peak, *(e.memory_gib for e in run.of(StepLogged, rank))])
    if capacity is None:
        case.lacks("the device's memory is not known: mem_boot.json is missing", "")
    elif peak:
        case.show("peak", f"{peak:.2f} of {capacity:.1f} GiB ({100 * peak / capacity:.0f}%)")
        if peak > limits.memory_share * capacity:
            case.against(f"the peak is {100 * peak / capacity:.0f}% of the device's memory", mend)
    later = seen[len(seen) // 3 :]
    if len(later) < limits.readings:
        case.lacks(f"memory was read {len(seen)} times", "train for longer, or lower log.every")
    else:
        # A single reading may catch a save or a validation under way.
        begin = statistics.median(e.allocated_gib for e in later[: max(1, len(later) // 4)])
        end = statistics.median(e.allocated_gib for e in later[-max(1, len(later) // 4) :])
        case.show("growth", f"{begin:.3f} → {end:.3f} GiB")
        if end - begin > max(limits.memory_growth * begin, limits.memory_growth_gib):
            case.against(f"memory grew from {begin:.2f} to {end:.2f} GiB", "find what is kept: --profile.steps A:B")
    if run.step < limits.min_steps:
        case.lacks(f"only {run.step} steps were made, {limits.min_steps} are needed", "train for longer")
    return case.close(f"peak {peak:.2f} GiB of {capacity or 0:.1f}, and it does not grow")


def throughput(run: Run, twin: Run | None, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """As fast as was promised: against the dense twin on the same device, or a stated target."""
    target = limits.tokens_per_s
    threshold = f"at least {limits.dense_ratio:g}× the dense twin's tokens/s on the same device"
    if target is not None:
        threshold = f"at least {target:,.0f} tokens/s, as stated"
    case = Case("throughput", threshold + ", and no lasting drop", "throughput")
    own = speed(run)
    if own is None:
        case.lacks("fewer than two log intervals: the first one only warms up", "train for longer")
        return case.close("")
    case.show("tokens/s", f"{own:,.0f} (median)")
    against = "" if target is None else f", {target:,.0f} were asked for"
    drops = [f for f in findings if f.rule == "throughput_drop"]
    if drops:
        worst = min(drops, key=lambda f: f.value / f.threshold)
        often = f", the worst of {len(drops)} such drops" if len(drops) > 1 else ""
        case.against(f"it dropped: {worst.sentence}{often}", "see what else ran then; look at the step-time plot")
    if target is not None:
        if own < target:
            case.against(f"{own:,.0f} tokens/s, below the stated {target:,.0f}", "profile it: --profile.steps A:B")
    elif twin is None:
        case.lacks("no dense twin and no target to hold it against", twin_command(run))
    else:
        differs = not_a_twin(run, twin)
        other = speed(twin)
        if differs:
            case.show("dense twin", f"none: {differs} ({twin.folder.name})")
            case.lacks(f"{twin.folder.name} is no dense twin: {differs}", twin_command(run))
        elif other is None:
            case.lacks("the dense twin has too few log intervals", "train it for longer")
        else:
            case.show("dense twin", f"{other:,.0f} tokens/s, ratio {own / other:.2f} ({twin.folder.name})")
            if slow := slow_routes(twin):
                case.lacks(
                    f"the dense twin ran on {slow}: quicker than that shows nothing", "mend it and train it again"
                )
            against = f", {own / other:.2f}× the dense twin"
            if own < limits.dense_ratio * other:
                case.against(
                    f"{own / other:.2f}× the dense twin, below {limits.dense_ratio:g}×",
                    "at this length dense may be the better choice: see tercet plan; else profile it",
                )
    if run.step < limits.min_steps:
        case.lacks(f"only {run.step} steps were made, {limits.min_steps} are needed", "train for longer")
    return case.close(f"{own:,.0f} tokens/s{against}")


def speed(run: Run) -> float | None:
    """Median tokens per second, without each process's first interval."""
    first = {e.step for e in run.started}
    speeds = []
    warm = False
    for event in run.events.get(0, []):
        if isinstance(event, RunStarted):
            warm = False
        elif isinstance(event, StepLogged):
            if warm and event.step not in first:
                speeds.append(event.tokens_per_s)
            warm = True
    return statistics.median(speeds) if speeds else None


def data(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """Real data, fast enough, counted, with something held out."""
    case = Case(
        "data",
        f"a real source; at most {100 * limits.data_wait:.0f}% of the time waiting; at most "
        f"{100 * limits.bad_records:g}% bad records; a held-out loss",
        "breakdown",
    )
    source = run.config.get("data.source")
    case.show("source", source or "unknown")
    if source is None:
        case.lacks("the source of the data is not known", "")
    elif source == "synthetic":
        case.lacks("trained on made-up tokens", "train on data that you mean to use: --data.source")
    total = sum(e.step_seconds * len(e.losses) for e in run.steps)
    if total:
        wait = sum(e.data_seconds * len(e.losses) for e in run.steps) / total
        case.show("waiting for data", f"{100 * wait:.2f}% of step time")
        if wait > limits.data_wait:
            case.against(
                f"{100 * wait:.0f}% of the time was spent waiting for data", "raise data.prefetch; tercet data prepare"
            )
    starved = [f for f in findings if f.rule == "data_starvation"]
    if starved:
        case.against(
            f"starved {len(starved)} time{'s' * (len(starved) > 1)}: {starved[0].sentence}", "see data.prefetch"
        )
    if run.resources:
        last = run.resources[-1]
        case.show("documents", f"{last.documents:,} (epoch {run.steps[-1].epoch if run.steps else 0})")
        case.show("padding", f"{last.padding:,} of {last.real_tokens + last.padding:,} tokens")
        case.show("bad records", f"{last.bad_records:,} skipped, {last.left_out:,} empty")
        if last.bad_records > limits.bad_records * max(1, last.documents):
            case.against(f"{last.bad_records} bad records in {last.documents} documents", "tercet data inspect")
    else:
        case.lacks("nothing was counted", "")
    if run.validations:
        case.show("validation", f"loss {run.validations[-1].loss:.4f} over {run.validations[-1].tokens:,} tokens")
    else:
        case.lacks("no held-out loss was measured", "set train.val_every and train.val_tokens")
    if run.step < limits.min_steps:
        case.lacks(f"only {run.step} steps were made, {limits.min_steps} are needed", "train for longer")
    return case.close(f"from {source}, never starved, with a held-out loss")


def checkpoints(run: Run, findings: list[HealthFired], limits: Thresholds) -> Gate:
    """It saves itself, and goes on from what it saved."""
    case = Case(
        "checkpoint and resume",
        f"saved, complete on disk, none failed, at most {100 * limits.checkpoint_blocked:.0f}% of the time standing "
        "still, and resumed at least once without a jump in the loss",
        "breakdown",
    )
    saved, failed = run.of(CheckpointSaved), run.of(CheckpointFailed)
    case.show("saved", len(saved))
    case.show("failed", len(failed))
    if failed:
        case.against(f"{len(failed)} saves failed: {failed[-1].reason}", "free space, or mend the disk")
    if not saved:
        case.lacks("nothing was saved", "set checkpoint.every")
    else:
        path = run.folder / "checkpoints" / Path(saved[-1].path).name
        if not path.parent.is_dir():
            case.lacks("its checkpoints are not in this folder", "make the report where they are")
        elif trouble := incomplete(path):
            case.against(f"the newest checkpoint, {path.name}, is not whole: {trouble}", "save again")
        else:
            case.show("newest", f"{path.name}, {saved[-1].bytes / 2**20:.1f} MiB, files as its manifest says")
        total = sum(e.step_seconds * len(e.losses) for e in run.steps)
        blocked = sum(e.blocked_seconds for e in saved)
        share = blocked / (total + blocked) if total else 0.0
        case.show("standing still", f"{blocked:.2f} s in all ({100 * share:.2f}%)")
        if share > limits.checkpoint_blocked and run.step >= limits.min_steps:  # of a short run it says nothing
            case.against(f"{100 * share:.0f}% of the time went into saving", "raise checkpoint.every, or async_save")
    resumes = [e for e in run.started if e.resumed_from is not None]
    went_on = [r for r in resumes if any(e.step > r.step and e.time >= r.time for e in run.steps)]
    case.show("resumed", f"{times(len(resumes))}, training on after {len(went_on)}")
    jumps = [f for f in findings if f.rule == "loss_spike" and any(0 < f.step - r.step <= 10 for r in went_on)]
    if jumps:
        case.against(f"the loss jumped after a resume: {jumps[0].sentence}", "compare with a run that was not stopped")
    if not went_on:
        case.lacks(
            "it was never resumed",
            f"interrupt a run and go on with: {typed()} train --config {quote(f'{run.folder}/config.toml')} "
            f"--run.dir {quote(str(run.folder))} --resume auto",
        )
    return case.close(f"{len(saved)} saved, resumed {times(len(went_on))}, and the loss went on where it was")


def times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def skipped_steps(run: Run) -> int:
    return sum(len(e.steps) for e in run.of(StepsSkipped))

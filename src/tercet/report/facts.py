"""Everything on a report page besides verdict and plots: key figures, routes, layers, events, config, environment."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tercet.config.keys import flatten_table
from tercet.report.read import Run
from tercet.report.throughput import baseline_mismatch, loss_mismatch
from tercet.telemetry import events
from tercet.telemetry.events import Event, HealthFired
from tercet.telemetry.sinks import STATISTICS, mean_of_last
from tercet.telemetry.units import duration, plural, quantity

# The page of a long run shows at most this many events.
MAX_NOTABLE_EVENTS = 200
# Doctor verdict -> CSS class
_SIGNS = {"ok": "go", "warning": "nt", "failed": "no", "not tested": "nt"}
# Run state without an end event -> text
_STATES = {"running": "still running", "silent": "alive, no heartbeat", "gone": "died"}
# What a long run has most of, and nobody needs to read.
_MEASUREMENTS = (events.StepLogged, events.ResourcesObserved, events.LayersObserved)


# What a long run has most of, and nobody needs to read.
_MEASUREMENTS = (events.StepLogged, events.ResourcesObserved, events.LayersObserved)


@dataclass(frozen=True)
class KeyFigure:
    """A key figure at the top of the page."""

    name: str
    value: str
    note: str = ""
    number: float | None = None  # for comparisons


@dataclass(frozen=True)
class Facts:
    """Content of a page, formatted but not yet escaped."""

    subtitle: str
    period: str
    created: str
    figures: list[KeyFigure]
    routes: list[dict[str, Any]]
    layer_columns: list[str]
    layers: list[list[str]]
    layers_step: int
    notable_events: list[dict[str, Any]]
    event_count: int
    samples: list[events.Sampled]
    config: list[dict[str, str]]
    environment: list[tuple[str, str]]
    doctor: list[dict[str, str]]
    memory: list[tuple[str, str]]
    dtypes: list[tuple[str, str]]


def collect_facts(run: Run, findings: Iterable[HealthFired], baseline: Run | None = None) -> Facts:
    last = run.layers[-1] if run.layers else None
    return Facts(
        subtitle=subtitle(run),
        period=_period(run),
        created=clock_time(run.read_at),
        figures=key_figures(run) + _baseline_figures(run, baseline),
        routes=_routes(run),
        layer_columns=[name.removeprefix("gate_").replace("_", " ") for name in STATISTICS],
        layers=_layer_rows(last) if last else [],
        layers_step=last.step if last else 0,
        notable_events=_notable_events(run, findings),
        event_count=run.event_count,
        samples=run.of(events.Sampled),
        config=[
            {"key": k, "value": format_value(v), "origin": run.origins.get(k, "unknown")} for k, v in run.config.items()
        ],
        environment=[(k, format_value(v)) for k, v in flatten_table(run.environment).items()],
        doctor=_doctor(run),
        memory=_memory(run),
        dtypes=list(run.dtypes.items()),
    )


def key_figures(run: Run) -> list[KeyFigure]:
    """The run in a few numbers."""
    planned = run.started[-1].steps if run.started else 0
    outcome = run.ended.outcome if run.ended else _STATES.get(run.state, run.state)
    figures = [KeyFigure("steps", f"{run.step:,}", f"of {planned:,} planned; {outcome}", run.step)]
    if not run.steps:
        return figures
    last = run.steps[-1]
    in_stage = ""
    if run.stages:
        stage, lengths = run.stages[-1], " → ".join(f"{s.seq_len:,}" for s in run.stages)
        in_stage = f" of stage {stage.stage}"
        figures.append(KeyFigure("sequence length", lengths, f"stage {stage.stage} of {stage.stages}", stage.seq_len))
    tokens_per_step = (run.stages or run.started)[-1].tokens_per_step
    figures.append(KeyFigure("tokens", quantity(last.tokens), f"{tokens_per_step:,} per step", last.tokens))
    smoothed, steps = mean_of_last(run.losses)
    if smoothed is not None:
        first = next(x for x in run.losses if math.isfinite(x))
        note = f"mean of the last {plural(steps, 'step')}; {run.losses[-1]:.4f} in the last, {first:.4f} in the first"
        figures.append(KeyFigure("training loss", f"{smoothed:.4f}", note, smoothed))
    if run.validations:
        length = run.validations[-1].seq_len  # of the stage
        best = min((e for e in run.validations if e.seq_len == length), key=lambda e: e.loss)
        loss = run.validations[-1].loss
        figures.append(KeyFigure("validation loss", f"{loss:.4f}", f"best {best.loss:.4f} at step {best.step:,}", loss))
        figures += _bits_per_byte(run, run.validations[-1])
    else:
        figures.append(KeyFigure("validation loss", "–", "not measured"))
    if (speed := run.tokens_per_s) is not None:
        figures.append(KeyFigure("tokens/s", quantity(speed), f"median{in_stage}, all ranks", speed))
    mfus = [e.mfu for e in run.last_stage_steps if e.mfu is not None]
    if mfus:
        mfu = statistics.median(mfus)
        figures.append(KeyFigure("MFU", f"{100 * mfu:.1f}%", f"median{in_stage}", mfu))
    else:
        figures.append(KeyFigure("MFU", "–", "peak FLOP/s of the device unknown"))
    peak = max(e.memory_gib for e in run.steps)
    figures.append(KeyFigure("peak memory", f"{peak:.2f} GiB", "device" if run.on_gpu else "process", peak))
    seconds = _active_seconds(run)
    processes = f"in {len(run.started)} process{'es' * (len(run.started) > 1)}"
    return [*figures, KeyFigure("time", duration(seconds), processes, seconds)]


def _bits_per_byte(run: Run, validation: events.Validated) -> list[KeyFigure]:
    """The validation loss in a unit that no tokenizer changes, if that is known."""
    if validation.bytes is None and run.config.get("data.tokenizer") == "byte":  # logs of early versions lack the bytes
        validation = dataclasses.replace(validation, bytes=validation.tokens)
    if not validation.bytes or (bits := validation.bits_per_byte) is None:
        return []
    note = f"validation, {validation.bytes / validation.tokens:.2f} bytes per token"
    return [KeyFigure("bits per byte", f"{bits:.4f}", note, bits)]


def _baseline_figures(run: Run, baseline: Run | None) -> list[KeyFigure]:
    """Speed and validation loss compared with the dense baseline, if there is one."""
    if baseline is None or baseline_mismatch(run, baseline):
        return []
    figures = []
    if run.tokens_per_s is not None and baseline.tokens_per_s is not None:
        ratio, note = run.tokens_per_s / baseline.tokens_per_s, f"dense: {quantity(baseline.tokens_per_s)} tokens/s"
        figures.append(KeyFigure("speed vs dense", f"{ratio:.2f}×", note))
    if mismatch := loss_mismatch(run, baseline):
        return [*figures, KeyFigure("loss vs dense", "–", f"not comparable: {mismatch}")]
    dense = {e.step: e.loss for e in baseline.validations}
    common = [(e, dense[e.step]) for e in run.validations if e.step in dense]
    if common:
        last, dense_loss = common[-1]
        change = f"{100 * (last.loss / dense_loss - 1):+.2f}%"
        note = f"validation at step {last.step:,}; dense: {dense_loss:.4f}"
        figures.append(KeyFigure("loss vs dense", change, note))
    return figures


def _active_seconds(run: Run) -> float:
    """Total time from each process's start to its last event."""
    total, begun, last = 0.0, None, 0.0
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted):
            total += last - begun if begun is not None else 0.0
            begun = event.time
        last = event.time
    return total + (last - begun if begun is not None else 0.0)


def subtitle(run: Run) -> str:
    if not run.started:
        return ""
    s = run.started[-1]
    ranks = f", {s.world_size} ranks ({s.strategy})" if s.world_size > 1 else ""
    return f"{quantity(s.parameters)} parameters on {s.device}{ranks}"


def _period(run: Run) -> str:
    stream = run.events.get(0, [])
    if not stream:
        return ""
    return f"{clock_time(stream[0].time)} – {_STATES.get(run.state) or clock_time(stream[-1].time)}"


def clock_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _routes(run: Run) -> list[dict[str, Any]]:
    by_layer: dict[tuple[str, str, str, bool], dict[int, int]] = defaultdict(dict)
    for (layer, branch, route, reason, fallback), calls in run.route_counts.items():
        by_layer[branch, route, reason, fallback][layer] = calls
    names = ("branch", "route", "reason", "fallback")
    return [
        dict(zip(names, key, strict=True)) | {"layers": format_ranges(calls), "calls": f"{sum(calls.values()):,}"}
        for key, calls in sorted(by_layer.items())
    ]


def format_ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> 0–2, 5."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


def _layer_rows(event: events.LayersObserved) -> list[list[str]]:
    columns = [getattr(event, name) for name in STATISTICS]
    return [["–" if c[i] is None else f"{c[i]:.3f}" for c in columns] for i in range(len(event.attention))]


def _notable_events(run: Run, findings: Iterable[HealthFired]) -> list[dict[str, Any]]:
    rows: list[tuple[Event, str, str, str]] = []
    fired = set()
    for rank in sorted(run.events):
        for event in run.events[rank]:
            described = describe(event)
            if described is not None:
                rows.append((event, *described))
            if isinstance(event, HealthFired):
                fired.add((event.rule, event.step, event.rank))
    # The run's own thresholds may have been wider than the defaults that the report applies.
    rows += [
        (f, "no", f.rule, f"{f.sentence} (default thresholds; the run did not report it)")
        for f in findings
        if (f.rule, f.step, f.rank) not in fired
    ]
    rows.sort(key=lambda row: row[0].time)
    if len(rows) > MAX_NOTABLE_EVENTS:
        problems = [row for row in rows if row[1] in ("no", "nt")]
        rows = problems[-MAX_NOTABLE_EVENTS:] or rows[-MAX_NOTABLE_EVENTS:]
    return [
        {"when": clock_time(e.time), "step": e.step, "rank": e.rank, "sign": sign, "kind": kind, "text": text}
        for e, sign, kind, text in rows
    ]


def describe(event: Event) -> tuple[str, str, str] | None:
    """(CSS class, kind, text) of a notable event; None for all others."""
    if isinstance(event, _MEASUREMENTS):
        return None
    if isinstance(event, HealthFired):
        return ("no" if event.action == "halt" else "nt"), event.rule, event.sentence
    if isinstance(event, events.Stalled):
        if event.over:
            return "", "stall", f"progressing again after {event.for_seconds:.0f} s"
        return "no", "stall", f"no progress for {event.for_seconds:.0f} s while {event.doing}; see {event.dump}"
    if isinstance(event, events.StepsSkipped):
        return "no", "non-finite", f"skipped steps {format_ranges(event.steps)}, {event.total} in total"
    if isinstance(event, events.CheckpointFailed):
        return "no", "save failed", event.reason
    if isinstance(event, events.RunEnded):
        return {"completed": "go", "interrupted": ""}.get(event.outcome, "no"), event.outcome, event.reason
    if isinstance(event, events.RunStarted):
        text = f"{event.steps:,} steps on {event.device}"
        if event.resumed_from:
            text = f"resumed from {event.resumed_from}"
        if event.superseded:
            text += f"; {plural(event.superseded, 'later event')} superseded"
        return "", "started", text
    if event.rank:
        return None  # the same on every rank
    if isinstance(event, events.CheckpointSaved):
        size = f"{event.bytes / 2**20:.1f} MiB"
        return "", "saved", f"{event.path}, {size}, training blocked for {event.blocked_seconds:.2f} s"
    if isinstance(event, events.Validated):
        return "", "validation", f"loss {event.loss:.4f} over {event.tokens:,} tokens"
    if isinstance(event, events.GraphChosen):
        return "", "CUDA graph", event.sentence
    if isinstance(event, events.Noted):
        return "", "note", event.text
    return None


def _doctor(run: Run) -> list[dict[str, str]]:
    reports = run.of(events.DoctorReported)
    if not reports:
        return []
    e = reports[-1]
    rows = zip(e.check, e.verdict, e.finding, e.mend, strict=True)
    return [{"check": c, "verdict": v, "sign": _SIGNS.get(v, "nt"), "finding": f, "fix": fix} for c, v, f, fix in rows]


def _memory(run: Run) -> list[tuple[str, str]]:
    steps = [name for name in run.memory if name.startswith("step") and "_rank" not in name]
    name = "step1" if "step1" in steps else next(iter(steps), None)
    record: Mapping[str, Any] = run.memory.get(name or "boot", {})
    keys = ("parameters_mib", "gradients_mib", "optimizer_mib", "buffers_mib")
    return [(k.removesuffix("_mib"), f"{record[k]:.1f} MiB") for k in keys if isinstance(record.get(k), (int, float))]


def format_value(value: Any) -> str:
    """A configuration value as shown on the page."""
    if isinstance(value, dict):  # a part of a mixture
        return ", ".join(f"{k} {format_value(v)}" for k, v in value.items() if v not in ("", [], {}))
    if isinstance(value, (list, tuple)):
        return ("; " if any(isinstance(v, dict) for v in value) else " ").join(map(format_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

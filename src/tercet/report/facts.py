"""Everything on a report page besides verdict and plots: key figures, routes, events, configuration, memory."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tercet.report.read import Run
from tercet.telemetry import events
from tercet.telemetry.events import describe
from tercet.telemetry.sinks import mean_of_last
from tercet.telemetry.units import duration, plural, quantity

# The page of a long run shows at most this many events.
MAX_NOTABLE_EVENTS = 200
# Run state without an end event -> text
_STATES = {"running": "still running", "silent": "alive, no heartbeat", "gone": "died"}
OF_EVERY_RANK = (events.HealthFired, events.Stalled, events.RunStarted, events.RunEnded)


@dataclass(frozen=True)
class KeyFigure:
    """A key figure at the top of the page."""

    name: str
    value: str
    note: str = ""
    number: float | None = None  # for comparisons


def key_figures(run: Run) -> list[KeyFigure]:
    """The run in a few numbers."""
    outcome = run.ended.outcome if run.ended else _STATES.get(run.state, run.state)
    figures = [KeyFigure("steps", f"{run.step:,}", f"of {run.planned:,} planned; {outcome}", run.step)]
    if not run.steps:
        return figures
    last = run.steps[-1]
    in_stage = ""
    if run.stages:
        stage, lengths = run.stages[-1], " → ".join(f"{s.seq_len:,}" for s in run.stages)
        in_stage = f" of stage {stage.stage}"
        figures.append(KeyFigure("sequence length", lengths, f"stage {stage.stage} of {stage.stages}", stage.seq_len))
    figures.append(KeyFigure("tokens", quantity(last.tokens), f"epoch {last.epoch}", last.tokens))
    smoothed, steps = mean_of_last(run.losses)
    if smoothed is not None:
        first = next(x for x in run.losses if math.isfinite(x))
        note = f"mean of the last {plural(steps, 'step')}; {run.losses[-1]:.4f} in the last, {first:.4f} in the first"
        figures.append(KeyFigure("training loss", f"{smoothed:.4f}", note, smoothed))
    if run.validations:
        newest = run.validations[-1]
        best = min((e for e in run.validations if e.seq_len == newest.seq_len), key=lambda e: e.loss)  # of the stage
        note = f"best {best.loss:.4f} at step {best.step:,}"
        figures.append(KeyFigure("validation loss", f"{newest.loss:.4f}", note, newest.loss))
        if newest.bytes and (bits := newest.bits_per_byte) is not None:  # a unit that no tokenizer changes
            note = f"validation, {newest.bytes / newest.tokens:.2f} bytes per token"
            figures.append(KeyFigure("bits per byte", f"{bits:.4f}", note, bits))
    else:
        figures.append(KeyFigure("validation loss", "–", "not measured"))
    if (speed := run.tokens_per_s) is not None:
        figures.append(KeyFigure("tokens/s", quantity(speed), f"median{in_stage}, all ranks", speed))
    if mfus := [e.mfu for e in run.steps if e.mfu is not None and (not run.stages or e.step > run.stages[-1].step)]:
        mfu = statistics.median(mfus)
        figures.append(KeyFigure("MFU", f"{100 * mfu:.1f}%", f"median{in_stage}", mfu))
    else:
        figures.append(KeyFigure("MFU", "–", "peak FLOP/s of the device unknown"))
    peak = max(e.memory_gib for e in run.steps)
    figures.append(KeyFigure("peak memory", f"{peak:.2f} GiB", "device" if run.on_gpu else "process", peak))
    seconds = _active_seconds(run)
    processes = f"in {len(run.started)} process{'es' * (len(run.started) > 1)}"
    return [*figures, KeyFigure("time", duration(seconds), processes, seconds)]


def _active_seconds(run: Run) -> float:
    """Total time from each process's start to its last event."""
    stream = run.events.get(0, [])
    begins = [i for i, event in enumerate(stream) if isinstance(event, events.RunStarted)]
    return sum(stream[after - 1].time - stream[begin].time for begin, after in pairwise([*begins, len(stream)]))


def subtitle(run: Run) -> str:
    """Size, device and ranks."""
    if not run.started:
        return ""
    s = run.started[-1]
    ranks = f", {s.world_size} ranks ({s.strategy})" if s.world_size > 1 else ""
    return f"{quantity(s.parameters)} parameters on {s.device}{ranks}"


def period(run: Run) -> str:
    """When it ran."""
    stream = run.events.get(0, [])
    if not stream:
        return ""
    return f"{clock_time(stream[0].time)} – {_STATES.get(run.state) or clock_time(stream[-1].time)}"


def clock_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def route_rows(run: Run) -> list[dict[str, Any]]:
    """One row per branch and route, with its layers."""
    by_layer: dict[tuple[str, str, str, bool], dict[int, int]] = defaultdict(dict)
    for (layer, branch, route, reason, fallback), calls in run.route_counts.items():
        by_layer[branch, route, reason, fallback][layer] = calls
    names = ("branch", "route", "reason", "fallback", "layers", "calls")
    return [
        dict(zip(names, (*key, ", ".join(map(str, sorted(calls))), f"{sum(calls.values()):,}"), strict=True))
        for key, calls in sorted(by_layer.items())
    ]


def notable_events(run: Run) -> list[dict[str, Any]]:
    """Every event that `describe` has words for; of a long run only the problems. Ranks other than 0 repeat most."""
    stream = (e for rank in sorted(run.events) for e in run.events[rank] if not rank or isinstance(e, OF_EVERY_RANK))
    rows = [(e, *described) for e in stream if (described := describe(e))]
    rows.sort(key=lambda row: row[0].time)
    if len(rows) > MAX_NOTABLE_EVENTS:
        problems = [row for row in rows if row[1]]
        rows = (problems or rows)[-MAX_NOTABLE_EVENTS:]
    return [
        {"when": clock_time(e.time), "step": e.step, "rank": e.rank, "sign": sign, "text": text}
        for e, sign, text in rows
    ]


def memory_rows(run: Run) -> list[tuple[str, str]]:
    """Sizes of weights, gradients and optimizer state."""
    steps = [name for name in run.memory if name.startswith("step") and "_rank" not in name]
    record = run.memory.get("step1" if "step1" in steps else steps[0] if steps else "boot", {})
    keys = ("parameters_mib", "gradients_mib", "optimizer_mib", "buffers_mib")
    return [(k.removesuffix("_mib"), f"{record[k]:.1f} MiB") for k in keys if isinstance(record.get(k), (int, float))]


def format_value(value: Any) -> str:
    """A configuration value as shown on the page."""
    if isinstance(value, dict):  # a part of a mixture
        return ", ".join(f"{k} {format_value(v)}" for k, v in value.items() if v not in ("", [], {}))
    if isinstance(value, (list, tuple)):
        return ("; " if any(isinstance(v, dict) for v in value) else " ").join(map(format_value, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)

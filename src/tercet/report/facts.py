"""What a page tells beside its verdict: figures, routes, layers, events of note, configuration, environment."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tercet.config.keys import flatten_table
from tercet.report.dense_baseline import learnt_otherwise, not_a_twin
from tercet.report.gates import speed
from tercet.report.read import Run, route_counts
from tercet.telemetry import events
from tercet.telemetry.events import Event, HealthFired
from tercet.telemetry.units import duration, quantity

# Of a long run only so many events are shown; the log has them all.
MOST_NOTES = 200
_SIGNS = {"ok": "go", "warning": "nt", "failed": "no", "not tested": "nt"}


@dataclass(frozen=True)
class Figure:
    """A number at the top of the page."""

    name: str
    value: str
    note: str = ""
    number: float | None = None  # for comparisons


@dataclass(frozen=True)
class Facts:
    """All of it, ready to be printed; every text is plain and still has to be escaped."""

    subtitle: str
    when: str
    made: str
    figures: list[Figure]
    routes: list[dict[str, Any]]
    layer_columns: list[str]
    layers: list[list[str]]
    layers_step: int
    notes: list[dict[str, Any]]
    event_count: int
    samples: list[events.Sampled]
    config: list[dict[str, str]]
    environment: list[tuple[str, str]]
    doctor: list[dict[str, str]]
    memory: list[tuple[str, str]]
    dtypes: list[tuple[str, str]]


def gather(run: Run, findings: Iterable[HealthFired], twin: Run | None = None) -> Facts:
    """Everything about a run that is not a verdict or a plot."""
    last = run.layers[-1] if run.layers else None
    return Facts(
        subtitle=_subtitle(run),
        when=_when(run),
        made=_clock(run.read_at),
        figures=figures(run) + _against(run, twin),
        routes=_routes(run),
        layer_columns=[name for name, _ in _LAYER_COLUMNS],
        layers=_layer_rows(last) if last else [],
        layers_step=last.step if last else 0,
        notes=_notes(run, findings),
        event_count=sum(len(s) for s in run.events.values()),
        samples=run.of(events.Sampled),
        config=[{"key": k, "value": _value(v), "origin": run.origins.get(k, "unknown")} for k, v in run.config.items()],
        environment=[(k, _value(v)) for k, v in flatten_table(run.environment).items()],
        doctor=_doctor(run),
        memory=_memory(run),
        dtypes=list(run.dtypes.items()),
    )


def figures(run: Run) -> list[Figure]:
    """The run in a few numbers."""
    planned = run.started[-1].steps if run.started else 0
    outcome = (
        run.ended.outcome
        if run.ended
        else {"gone": "gone without a word", "silent": "silent"}.get(run.state, run.state)
    )
    last = run.steps[-1] if run.steps else None
    made = [Figure("steps", f"{run.step:,}", f"of {planned:,} planned; {outcome}", run.step)]
    if last is None:
        return made
    told = [x for e in run.steps for x in e.losses]
    losses = [x for x in told if math.isfinite(x)]
    made.append(Figure("tokens", quantity(last.tokens), f"{run.started[-1].tokens_per_step:,} a step", last.tokens))
    if losses:
        made.append(Figure("training loss", f"{losses[-1]:.4f}", _of_steps(told[-1], losses[0]), losses[-1]))
    if run.validations:
        best = min(run.validations, key=lambda e: e.loss)
        made.append(
            Figure(
                "validation loss",
                f"{run.validations[-1].loss:.4f}",
                f"best {best.loss:.4f} at step {best.step:,}",
                run.validations[-1].loss,
            )
        )
    else:
        made.append(Figure("validation loss", "–", "never measured"))
    own = speed(run)
    if own is not None:
        made.append(Figure("tokens/s", quantity(own), "median, all ranks", own))
    known = [e.mfu for e in run.steps if e.mfu is not None]
    if known:
        made.append(Figure("MFU", f"{100 * statistics.median(known):.1f}%", "median", statistics.median(known)))
    else:
        made.append(Figure("MFU", "–", "the device's peak is not known"))
    peak = max(e.memory_gib for e in run.steps)
    made.append(Figure("peak memory", f"{peak:.2f} GiB", "device" if run.on_gpu else "of the process", peak))
    seconds = _seconds(run)
    made.append(
        Figure("time", duration(seconds), f"in {len(run.started)} process{'es' * (len(run.started) > 1)}", seconds)
    )
    return made


def _of_steps(newest: float, first: float) -> str:
    """Of which step it is: the gate of stability tells means."""
    return f"of the last {'' if math.isfinite(newest) else 'finite '}step; {first:.4f} at first"


def _against(run: Run, twin: Run | None) -> list[Figure]:
    """The dense twin, where one was given: its speed and its held-out loss after the same step."""
    if twin is None or not_a_twin(run, twin):
        return []
    made = []
    own, other = speed(run), speed(twin)
    if own is not None and other is not None:
        made.append(Figure("speed, dense twin = 1", f"{own / other:.2f}×", f"dense: {quantity(other)} tokens/s"))
    if why := learnt_otherwise(run, twin):
        return [*made, Figure("loss against dense", "–", f"not comparable: {why}")]
    dense = {e.step: e.loss for e in twin.validations}
    both = [(e, dense[e.step]) for e in run.validations if e.step in dense]
    if both:
        last, held_out = both[-1]
        change = f"{100 * (last.loss / held_out - 1):+.2f}%"
        made.append(Figure("loss against dense", change, f"held out, step {last.step:,}; dense: {held_out:.4f}"))
    return made


def _seconds(run: Run) -> float:
    """Time that processes of the run were at work."""
    total, begun, last = 0.0, None, 0.0
    for event in run.events.get(0, []):
        if isinstance(event, events.RunStarted):
            total += last - begun if begun is not None else 0.0
            begun = event.time
        last = event.time
    return total + (last - begun if begun is not None else 0.0)


def _subtitle(run: Run) -> str:
    if not run.started:
        return ""
    s = run.started[-1]
    ranks = f", {s.world_size} ranks ({s.strategy})" if s.world_size > 1 else ""
    return f"{quantity(s.parameters)} parameters on {s.device}{ranks}"


def _when(run: Run) -> str:
    stream = run.events.get(0, [])
    if not stream:
        return ""
    state = {"running": "still running", "silent": "alive but silent", "gone": "gone without a word"}.get(run.state, "")
    until = state or _clock(stream[-1].time)
    return f"{_clock(stream[0].time)} – {until}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _routes(run: Run) -> list[dict[str, Any]]:
    grouped: dict[tuple[str, str, str, bool], tuple[set[int], int]] = defaultdict(lambda: (set(), 0))
    for (layer, branch, route, reason, fallback), calls in route_counts(run).items():
        layers, total = grouped[branch, route, reason, fallback]
        grouped[branch, route, reason, fallback] = (layers | {layer}, total + calls)
    return [
        {"branch": b, "route": r, "reason": why, "fallback": f, "layers": ranges(layers), "calls": f"{calls:,}"}
        for (b, r, why, f), (layers, calls) in sorted(grouped.items())
    ]


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> 0–2, 5."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts)


_LAYER_COLUMNS = (
    ("compressed", "gate_share_compressed"),
    ("selected", "gate_share_selected"),
    ("window", "gate_share_window"),
    ("entropy", "gate_entropy"),
    ("collapsed", "gate_collapse"),
    ("blocks", "selected_blocks"),
    ("distance", "selected_distance"),
    ("forced", "selected_forced"),
    ("overlap", "selected_overlap"),
)


def _layer_rows(event: events.LayersObserved) -> list[list[str]]:
    columns = [getattr(event, field) for _, field in _LAYER_COLUMNS]
    return [["–" if c[i] is None else f"{c[i]:.3f}" for c in columns] for i in range(len(event.attention))]


def _notes(run: Run, findings: Iterable[HealthFired]) -> list[dict[str, Any]]:
    told: list[tuple[Event, str, str, str]] = []
    fired = set()
    for rank in sorted(run.events):
        for event in run.events[rank]:
            said = _note(event, rank)
            if said is not None:
                told.append((event, *said))
            if isinstance(event, HealthFired):
                fired.add((event.rule, event.step, event.rank))
    # Found by the default thresholds although the run itself said nothing: its own may have been wider.
    told += [
        (f, "no", f.rule, f"{f.sentence} (by the default thresholds; the run itself said nothing)")
        for f in findings
        if (f.rule, f.step, f.rank) not in fired
    ]
    told.sort(key=lambda item: item[0].time)
    if len(told) > MOST_NOTES:
        told = [t for t in told if t[1] in ("no", "nt")][-MOST_NOTES:] or told[-MOST_NOTES:]
    return [
        {"when": _clock(e.time), "step": e.step, "rank": e.rank, "sign": sign, "kind": kind, "text": text}
        for e, sign, kind, text in told
    ]


def _note(event: Event, rank: int) -> tuple[str, str, str] | None:
    """(sign, kind, text) of an event worth a line."""
    if isinstance(event, HealthFired):
        return ("no" if event.action == "halt" else "nt"), event.rule, event.sentence
    if isinstance(event, events.Stalled):
        what = f"moving again after {event.for_seconds:.0f} s" if event.over else (
            f"no progress for {event.for_seconds:.0f} s while {event.doing}; see {event.dump}"
        )  # fmt: skip
        return ("" if event.over else "no"), "stall", what
    if isinstance(event, events.StepsSkipped):
        return "no", "non-finite", f"steps {ranges(event.steps)} were skipped, {event.total} so far"
    if isinstance(event, events.CheckpointFailed):
        return "no", "save failed", event.reason
    if isinstance(event, events.RunEnded):
        sign = {"completed": "go", "interrupted": ""}.get(event.outcome, "no")
        return sign, event.outcome, event.reason
    if isinstance(event, events.RunStarted):
        came = (
            f"resumed from {event.resumed_from}" if event.resumed_from else f"{event.steps:,} steps on {event.device}"
        )
        aside = f"; {event.superseded} later measurements moved aside" if event.superseded else ""
        return "", "started", came + aside
    if rank:
        return None
    if isinstance(event, events.CheckpointSaved):
        return (
            "",
            "saved",
            f"{event.path}, {event.bytes / 2**20:.1f} MiB, stood still for {event.blocked_seconds:.2f} s",
        )
    if isinstance(event, events.Validated):
        return "", "validation", f"loss {event.loss:.4f} over {event.tokens:,} tokens"
    if isinstance(event, events.Noted):
        return "", "note", event.text
    return None


def _doctor(run: Run) -> list[dict[str, str]]:
    told = run.of(events.DoctorReported)
    if not told:
        return []
    e = told[-1]
    rows = zip(e.check, e.verdict, e.finding, e.mend, strict=True)
    return [{"check": c, "verdict": v, "sign": _SIGNS.get(v, "nt"), "finding": f, "mend": m} for c, v, f, m in rows]


def _memory(run: Run) -> list[tuple[str, str]]:
    name = next((n for n in ("step1", *run.memory) if n in run.memory and n != "boot"), None)
    record: Mapping[str, Any] = run.memory.get(name or "boot", {})
    keys = ("parameters_mib", "gradients_mib", "optimizer_mib", "buffers_mib")
    return [(k.removesuffix("_mib"), f"{record[k]:.1f} MiB") for k in keys if isinstance(record.get(k), (int, float))]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

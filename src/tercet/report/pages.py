"""The written report: a self-contained HTML page and verdict.json, for one run or several side by side."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tercet.config.keys import flatten_table
from tercet.errors import TercetError, first_few
from tercet.report.gates import GO, NO_GO, NOT_APPLICABLE, NOT_TESTED
from tercet.report.plots import POINTS, all_plots, comparison_plots
from tercet.report.read import Run, with_defaults
from tercet.report.verdict import HEALTHY, Verdict
from tercet.telemetry import events
from tercet.telemetry.events import describe
from tercet.telemetry.sinks import STATISTICS, mean_of_last
from tercet.terminal import duration, plural, quantity
from tercet.version import __version__

# Verdicts, verdicts of the doctor, and severities of events -> CSS class
SIGNS = {GO: "go", NO_GO: "no", NOT_TESTED: "nt", NOT_APPLICABLE: "na", "ok": "go", "failed": "no", "failure": "no"}
# Settings that decide which text a loss is measured on.
_LOSS_KEYS = ("data.source", "data.path", "data.python", "data.mixture", "data.synthetic", "data.hub", "data.tokenizer",
              "data.separator", "data.text_field", "data.prompt_field", "data.validation", "data.seq_len",
              "data.retrieval", "train.stages")  # fmt: skip
# Figures that mean something else with another tokenizer.
_PER_TOKEN = ("tokens", "training loss", "validation loss", "tokens/s")
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


def render_page(template: str, **content: Any) -> str:
    """A page of page/. Everything is escaped except our own SVG and style sheet."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise TercetError("the report page needs jinja2: pip install 'tercet[report]'") from None
    folder = resources.files("tercet.report") / "page"
    pages = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir()}
    env = Environment(
        loader=DictLoader(pages), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {
        "sign": lambda verdict: SIGNS.get(verdict, "nt"),
        "banner": _banner_class,
        "svg": Markup,
        "sentence": _capitalize,
        "clock": clock_time,
        "subtitle": subtitle,
        "value": format_value,
    }
    html: str = env.get_template(template).render(content, style=Markup(pages["style.css"]), version=__version__)
    return html.lstrip()


def _banner_class(verdict: Verdict) -> str:
    """CSS class of the banner: that of the verdict, or `ok` for a healthy run that is not GO."""
    return "ok" if verdict.verdict == NOT_TESTED and verdict.health == HEALTHY else SIGNS[verdict.verdict]


def _capitalize(text: str) -> str:
    """Capitalize the first letter, unless the first word is a file name or a configuration key."""
    first = text.split(" ", 1)[0]
    return text if any(c in first for c in "._=/") else text[:1].upper() + text[1:]


def html_page(run: Run, verdict: Verdict) -> str:
    plots, routes = all_plots(run, verdict.findings), route_rows(run)
    return render_page(
        "run.html",
        run=run,
        verdict=verdict,
        period=period(run),
        figures=key_figures(run),
        plots=plots,
        anchors={p.anchor: "plot" for p in plots} | ({"routes": "table"} if routes else {}),
        thinned=POINTS if len(run.losses) > POINTS else 0,
        routes=routes,
        statistics=STATISTICS,
        layers=run.layers[-1] if run.layers else None,
        notable_events=notable_events(run),
        sample=next(reversed(run.of(events.Sampled)), None),
        defaults={key: value for key, value in run.config.items() if run.origins.get(key) == "default"},
        environment=flatten_table(run.environment).items(),
        doctor=next(reversed(run.of(events.DoctorReported)), None),
        memory=memory_rows(run),
    )


def write_report(run: Run, verdict: Verdict, out: Path) -> Path:
    """Write the report of one run to `out`; returns the path of the page."""
    return _write_files(out, html_page(run, verdict), verdict.as_dict(run))


def _write_files(out: Path, page: str, record: Any) -> Path:
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in (("report.html", page), ("verdict.json", text)):
            # Names of files may hold bytes that are not UTF-8.
            (out / name).write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise TercetError(f"cannot write the report to {out} ({error.strerror}): pick another --out") from None
    return out / "report.html"


class Column(NamedTuple):
    """One run of a comparison: a unique label, and its own page."""

    label: str
    run: Run
    verdict: Verdict
    page: Path


def columns(runs: Sequence[Run], verdicts: Sequence[Verdict], pages: Sequence[Path]) -> list[Column]:
    names = [run.name for run in runs]
    labels = [run.name if names.count(run.name) == 1 else f"{run.name} ({run.folder})" for run in runs]
    return [Column(*given) for given in zip(labels, runs, verdicts, pages, strict=True)]


def write_comparison(columns: Sequence[Column], out: Path) -> tuple[Path, str]:
    """Write the comparison to `out`; returns the path of the page, and the key figures as text."""
    rows, caution = figure_rows(columns), loss_caution([c.run for c in columns])
    tables = [with_defaults(c.run) | flatten_table(c.run.environment) for c in columns]
    page = render_page(
        "compare.html",
        title=" · ".join(c.label for c in columns),
        runs=columns,
        links=[os.path.relpath(c.page, out).replace(os.sep, "/") for c in columns],
        figures=rows,
        plots=comparison_plots([(c.label, c.run) for c in columns]),
        caution=caution,
        differences=[row for row in differences(tables) if row["key"] != "started"],
        created=columns[0].run.read_at,
    )
    path = _write_files(out, page, [c.verdict.as_dict(c.run) for c in columns])
    table = [["", *(c.label for c in columns)]]
    table += [[row["name"], *(f"{c['value']} {c['ratio']}".rstrip() for c in row["cells"])] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return path, "\n".join([*lines, f"×: relative to {columns[0].label}. {caution}".rstrip()])


def differences(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for the keys whose values differ between the tables."""
    keys = dict.fromkeys(k for table in tables for k in table)
    rows = [{"key": key, "cells": [format_value(table.get(key, "–")) for table in tables]} for key in keys]
    return [row for row in rows if len(set(row["cells"])) > 1]


def loss_caution(runs: Sequence[Run]) -> str:
    """Which settings make the losses of these runs incomparable; empty if none does."""
    different = differences([with_defaults(run) for run in runs if run.config])
    keys = [row["key"] for row in different if row["key"].startswith(_LOSS_KEYS)]
    return f"The losses are of different data: {first_few(keys, 4)} differ{'s' * (len(keys) == 1)}." if keys else ""


def figure_rows(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """One row per figure: each run's value, and how many times the first run's it is."""
    tables = []
    for run in (c.run for c in columns):
        sizes = [KeyFigure("parameters", quantity(s.parameters), number=s.parameters) for s in run.started[-1:]]
        tables.append({f.name: f for f in [*sizes, *key_figures(run)]})
    same_tokens = len({t for c in columns if (t := c.run.config.get("data.tokenizer")) is not None}) < 2
    rows = []
    for name in dict.fromkeys(n for t in tables for n in t):
        figures = [t.get(name) or KeyFigure(name, "–") for t in tables]
        comparable = same_tokens or name not in _PER_TOKEN
        first = figures[0].number
        ratios = ["" if not (comparable and first and f.number) else f"{f.number / first:.3f}×" for f in figures[1:]]
        cells = [{"value": f.value, "note": f.note, "ratio": r} for f, r in zip(figures, ["", *ratios], strict=True)]
        rows.append({"name": name if comparable else f"{name} (other tokens)", "cells": cells})
    return rows

"""The written report: a self-contained HTML page and verdict.json, for one run or several side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from tercet.config.keys import flatten_table
from tercet.errors import TercetError, first_few
from tercet.report import facts
from tercet.report.facts import KeyFigure, format_value, key_figures
from tercet.report.gates import GO, NO_GO, NOT_APPLICABLE, NOT_TESTED
from tercet.report.plots import POINTS, all_plots, comparison_plots
from tercet.report.read import Run, with_defaults
from tercet.report.verdict import HEALTHY, Verdict
from tercet.telemetry import events
from tercet.telemetry.sinks import STATISTICS
from tercet.telemetry.units import quantity
from tercet.version import __version__

# Verdicts, verdicts of the doctor, and severities of events -> CSS class
SIGNS = {GO: "go", NO_GO: "no", NOT_TESTED: "nt", NOT_APPLICABLE: "na", "ok": "go", "failed": "no", "failure": "no"}
# Settings that decide which text a loss is measured on.
_LOSS_KEYS = ("data.source", "data.path", "data.python", "data.mixture", "data.synthetic", "data.hub", "data.tokenizer",
              "data.separator", "data.text_field", "data.prompt_field", "data.validation", "data.seq_len",
              "data.retrieval", "train.stages")  # fmt: skip
# Figures that mean something else with another tokenizer.
_PER_TOKEN = ("tokens", "training loss", "validation loss", "tokens/s")


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
        "clock": facts.clock_time,
        "subtitle": facts.subtitle,
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
    plots, routes = all_plots(run, verdict.findings), facts.route_rows(run)
    return render_page(
        "run.html",
        run=run,
        verdict=verdict,
        period=facts.period(run),
        figures=key_figures(run),
        plots=plots,
        anchors={p.anchor: "plot" for p in plots} | ({"routes": "table"} if routes else {}),
        thinned=POINTS if len(run.losses) > POINTS else 0,
        routes=routes,
        statistics=STATISTICS,
        layers=run.layers[-1] if run.layers else None,
        notable_events=facts.notable_events(run),
        sample=next(reversed(run.of(events.Sampled)), None),
        defaults={key: value for key, value in run.config.items() if run.origins.get(key) == "default"},
        environment=flatten_table(run.environment).items(),
        doctor=next(reversed(run.of(events.DoctorReported)), None),
        memory=facts.memory_rows(run),
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

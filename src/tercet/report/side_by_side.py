"""Compare several runs on one page: verdicts, key figures, gates, overlaid plots, and their differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.config.keys import flatten_table
from tercet.errors import first_few
from tercet.report.facts import KeyFigure, format_value, key_figures, subtitle
from tercet.report.figure import SERIES, Plot, abbreviate_y_ticks, draw, label_step_axis, paint_series
from tercet.report.plots import logged_series, loss_axis_limits, paint_losses, step_series, validation_points
from tercet.report.read import Run, with_defaults
from tercet.report.render import escape, render_page
from tercet.report.verdict import Verdict
from tercet.telemetry.units import quantity

# Settings that decide which text a loss is measured on.
_LOSS_KEYS = ("data.source", "data.path", "data.python", "data.mixture", "data.synthetic", "data.hub", "data.tokenizer",
              "data.separator", "data.text_field", "data.prompt_field", "data.validation", "data.seq_len",
              "train.stages")  # fmt: skip
# Figures that mean something else with another tokenizer.
_PER_TOKEN = ("tokens", "training loss", "validation loss", "tokens/s")


@dataclass(frozen=True)
class Column:
    """One run of the comparison."""

    label: str
    run: Run
    verdict: Verdict
    subtitle: str
    link: str


def columns(runs: Sequence[Run], verdicts: Sequence[Verdict], pages: Sequence[Path], out: Path) -> list[Column]:
    """One column per run, with a unique label and a link relative to the page."""
    names, folders = [r.name for r in runs], [(r.name, r.folder.name) for r in runs]
    labels = [
        r.name
        if names.count(r.name) == 1
        else f"{r.name} ({r.folder.name if folders.count((r.name, r.folder.name)) == 1 else r.folder})"
        for r in runs
    ]
    return [
        Column(label, run, verdict, subtitle(run), os.path.relpath(path, out).replace(os.sep, "/"))
        for label, run, verdict, path in zip(labels, runs, verdicts, pages, strict=True)
    ]


def comparison_page(runs: list[Column], created: str) -> str:
    environments = differences([flatten_table(c.run.environment) for c in runs])
    return render_page(
        "compare.html",
        title=" · ".join(c.label for c in runs),
        runs=runs,
        figures=_figure_rows(runs),
        gates=[{"name": gates[0].name, "cells": gates} for gates in zip(*(c.verdict.gates for c in runs), strict=True)],
        plots=_plots(runs),
        caution=loss_caution([c.run for c in runs]),
        differences=differences([with_defaults(c.run) for c in runs]),
        environments=[row for row in environments if row["key"] != "started"],
        created=created,
    )


def figure_table(runs: list[Column]) -> list[list[str]]:
    """The key figures as text: a heading, then one row per figure."""
    rows = [[row["name"], *(f"{c['value']} {c['ratio']}".rstrip() for c in row["cells"])] for row in _figure_rows(runs)]
    return [["", *(c.label for c in runs)], *rows]


def figure_note(runs: list[Column]) -> str:
    return f"×: relative to {runs[0].label}. {loss_caution([c.run for c in runs])}".rstrip()


def comparison_markdown(runs: list[Column]) -> str:
    heading, *rows = ["| " + " | ".join(map(escape, row)) + " |" for row in figure_table(runs)]
    lines = [f"# Comparison of {len(runs)} runs", "", heading, "|" + "---|" * (len(runs) + 1), *rows]
    return "\n".join([*lines, "", escape(figure_note(runs)), ""])


def differences(tables: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows for the keys whose values differ between the tables."""
    keys = dict.fromkeys(k for table in tables for k in table)
    rows = []
    for key in keys:
        cells = [format_value(table.get(key, "–")) for table in tables]
        if any(c != cells[0] for c in cells):
            rows.append({"key": key, "cells": cells})
    return rows


def loss_caution(runs: Sequence[Run]) -> str:
    """Which settings make the losses of these runs incomparable; empty if none does."""
    rows = differences([with_defaults(run) for run in runs if run.config])
    keys = [row["key"] for row in rows if row["key"].startswith(_LOSS_KEYS)]
    named = f"{first_few(keys, 4)} differ{'s' * (len(keys) == 1)}"
    if keys:
        return f"The losses are of different data: {named}."
    if any(row["key"] == "data.retrieval" for row in rows):
        return "data.retrieval differs, so compare validation losses, not training losses."
    return ""


def _figure_rows(runs: list[Column]) -> list[dict[str, Any]]:
    """One row per figure: each run's value, and how many times the first run's it is."""
    tables = [{f.name: f for f in _figures(c.run)} for c in runs]
    same_tokens = len({c.run.config["data.tokenizer"] for c in runs if "data.tokenizer" in c.run.config}) < 2
    rows = []
    for name in dict.fromkeys(n for t in tables for n in t):
        figures = [t.get(name) or KeyFigure(name, "–") for t in tables]
        comparable = same_tokens or name not in _PER_TOKEN
        first = figures[0].number
        ratios = ["" if not (comparable and first and f.number) else f"{f.number / first:.3f}×" for f in figures[1:]]
        cells = [{"value": f.value, "note": f.note, "ratio": r} for f, r in zip(figures, ["", *ratios], strict=True)]
        rows.append({"name": name if comparable else f"{name} (other tokens)", "cells": cells})
    return rows


def _figures(run: Run) -> list[KeyFigure]:
    """The number of parameters, and the key figures."""
    counts = [start.parameters for start in run.started[-1:]]
    return [*(KeyFigure("parameters", quantity(n), number=n) for n in counts), *key_figures(run)]


def _plots(runs: list[Column]) -> list[Plot]:
    """One line per run in each plot."""

    def overlay(anchor: str, title: str, ylabel: str, paint_run: Callable[[Any, Column, str], None]) -> Plot:
        def paint(axes: Any) -> None:
            for column, colour in zip(runs, SERIES * len(runs), strict=False):
                paint_run(axes, column, colour)
            if anchor == "loss":  # limits only after all runs are drawn, or they would cut off the later ones
                lines = [step_series(c.run, "losses") for c in runs]
                limits = loss_axis_limits(lines, [validation_points(c.run) for c in runs])
                axes.set_ylim(*(limits or axes.get_ylim()))
            else:
                axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
                abbreviate_y_ticks(axes)
            label_step_axis(axes, ylabel)
            axes.legend(loc="best")

        return Plot(anchor, title, "Lines: smoothed. Points: validation." * (anchor == "loss"), draw(paint))

    def paint_loss(axes: Any, column: Column, colour: str) -> None:
        paint_losses(axes, column.run, colour, column.label)
        if points := validation_points(column.run):
            axes.plot(*zip(*points, strict=True), "o--", color=colour, markersize=3.5, linewidth=0.8)

    def paint_logged(name: str) -> Callable[[Any, Column, str], None]:
        return lambda axes, c, colour: paint_series(axes, logged_series(c.run.steps, name), colour, label=c.label)

    return [
        overlay("loss", "Loss", "nats per token", paint_loss),
        overlay("throughput", "Throughput", "tokens per second", paint_logged("tokens_per_s")),
        overlay("grad_norm", "Gradient norm", "global 2-norm", paint_logged("grad_norm")),
        overlay("memory", "Peak memory", "GiB", paint_logged("memory_gib")),
    ]

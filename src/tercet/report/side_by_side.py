"""Compare several runs on one page: verdicts, key figures, gates, overlaid plots, and their differences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.config.keys import flatten_table
from tercet.report.facts import Facts, collect_facts, key_figures
from tercet.report.figure import SERIES, Plot, abbreviate_y_ticks, downsample, draw, label_step_axis
from tercet.report.plots import loss_axis_limits, step_series, validation_points
from tercet.report.read import Run
from tercet.report.render import environment
from tercet.report.verdict import Verdict


@dataclass(frozen=True)
class Column:
    """One run of the comparison."""

    label: str
    run: Run
    verdict: Verdict
    facts: Facts
    link: str


def columns(runs: Sequence[Run], verdicts: Sequence[Verdict], pages: Sequence[Path], out: Path) -> list[Column]:
    """One column per run, with a unique label and a link relative to the page."""
    names = [r.name for r in runs]
    labels = [r.name if names.count(r.name) == 1 else f"{r.name} ({r.folder.name})" for r in runs]
    return [
        Column(
            label, run, verdict, collect_facts(run, verdict.findings), os.path.relpath(path, out).replace(os.sep, "/")
        )
        for label, run, verdict, path in zip(labels, runs, verdicts, pages, strict=True)
    ]


def comparison_page(runs: list[Column], created: str) -> str:
    html: str = (
        environment()
        .get_template("compare.html")
        .render(
            title=" · ".join(c.label for c in runs),
            runs=runs,
            figures=_figure_rows(runs),
            gates=_gate_rows(runs),
            plots=_plots(runs),
            differences=differences([c.run.config for c in runs]),
            environments=[
                row for row in differences([flatten_table(c.run.environment) for c in runs]) if row["key"] != "started"
            ],
            created=created,
        )
    )
    return html.lstrip()


def differences(tables: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows for the keys whose values differ between the tables."""
    keys = dict.fromkeys(k for table in tables for k in table)
    rows = []
    for key in keys:
        cells = [table.get(key, "–") for table in tables]
        if any(c != cells[0] for c in cells):
            rows.append({"key": key, "cells": [str(c) for c in cells]})
    return rows


def _figure_rows(runs: list[Column]) -> list[dict[str, Any]]:
    tables = [{f.name: f for f in key_figures(c.run)} for c in runs]
    rows = []
    for name in dict.fromkeys(n for t in tables for n in t):
        found = [t.get(name) for t in tables]
        numbers = [f.number if f else None for f in found]
        first, second = numbers[0], numbers[-1]
        ratio = f"{second / first:.3f}" if len(runs) == 2 and first and second else ""
        shown = [f"{f.value} ({f.note})" if f and f.note else (f.value if f else "–") for f in found]
        rows.append({"name": name, "shown": shown, "ratio": ratio})
    return rows


def _gate_rows(runs: list[Column]) -> list[dict[str, Any]]:
    return [
        {"name": gates[0].name, "cells": list(gates)}
        for gates in zip(*(c.verdict.gates for c in runs), strict=True)
    ]  # fmt: skip


def _plots(runs: list[Column]) -> list[Plot]:
    def overlay(
        anchor: str, title: str, ylabel: str, paint_run: Any, caption: str = "", set_limits: Any = None
    ) -> Plot:
        def paint(figure: Any) -> None:
            axes = figure.subplots()
            for column, colour in zip(runs, SERIES * len(runs), strict=False):
                paint_run(axes, column, colour)
            if set_limits is not None:  # only after all runs are drawn, or it would cut off the later ones
                set_limits(axes)
            label_step_axis(axes, ylabel)
            axes.legend(loc="best")

        return Plot(anchor, title, caption, draw(paint))

    def paint_losses(axes: Any, column: Column, colour: str) -> None:
        rows = step_series(column.run, "losses")
        axes.plot([r[0] for r in rows], [r[1] for r in rows], color=colour, label=column.label)
        points = validation_points(column.run)
        if points:
            axes.plot(*zip(*points, strict=True), "o--", color=colour, markersize=3.5, linewidth=0.8)

    def paint_grad_norms(axes: Any, column: Column, colour: str) -> None:
        rows = step_series(column.run, "grad_norms")
        axes.plot([r[0] for r in rows], [r[1] for r in rows], color=colour, label=column.label)

    def paint_logged(name: str) -> Any:
        def paint_run(axes: Any, column: Column, colour: str) -> None:
            steps = column.run.steps
            rows = downsample([getattr(e, name) for e in steps])
            axes.plot([steps[i].step for i, *_ in rows], [m for _, m, *_ in rows], color=colour, label=column.label)

        return paint_run

    def from_zero(axes: Any) -> None:
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        abbreviate_y_ticks(axes)

    def cut_initial_descent(axes: Any) -> None:
        rows = [r for c in runs if (r := step_series(c.run, "losses"))]
        limits = loss_axis_limits(rows, [validation_points(c.run) for c in runs])
        if limits is not None:
            axes.set_ylim(*limits)

    caption = "Lines: training. Points: validation."
    return [
        overlay("loss", "Loss", "nats per token", paint_losses, caption, cut_initial_descent),
        overlay("throughput", "Throughput", "tokens per second", paint_logged("tokens_per_s"), set_limits=from_zero),
        overlay("grad_norm", "Gradient norm", "global 2-norm", paint_grad_norms),
        overlay("memory", "Peak memory", "GiB", paint_logged("memory_gib"), set_limits=from_zero),
    ]

"""Two or more runs on one page: verdicts, figures, gates, plots over each other, and what differs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.config.keys import flatten_table
from tercet.report.facts import Facts, figures, gather
from tercet.report.figure import SERIES, Plot, draw, thinned
from tercet.report.plots import below_the_descent, label_steps, series, short_numbers, validated
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
    """Runs with labels that tell them apart and links relative to the page."""
    names = [r.name for r in runs]
    labels = [r.name if names.count(r.name) == 1 else f"{r.name} ({r.folder.name})" for r in runs]
    return [
        Column(label, run, verdict, gather(run, verdict.findings), os.path.relpath(path, out).replace(os.sep, "/"))
        for label, run, verdict, path in zip(labels, runs, verdicts, pages, strict=True)
    ]


def page(runs: list[Column], made: str) -> str:
    """The HTML of the comparison."""
    html: str = (
        environment()
        .get_template("compare.html")
        .render(
            title=" · ".join(c.label for c in runs),
            runs=runs,
            figures=_figures(runs),
            gates=_gates(runs),
            plots=_plots(runs),
            differences=differences([c.run.config for c in runs]),
            environments=[
                row for row in differences([flatten_table(c.run.environment) for c in runs]) if row["key"] != "started"
            ],
            made=made,
        )
    )
    return html.lstrip()


def differences(tables: Sequence[Any]) -> list[dict[str, Any]]:
    """Keys whose values are not the same everywhere."""
    keys = dict.fromkeys(k for table in tables for k in table)
    rows = []
    for key in keys:
        cells = [table.get(key, "–") for table in tables]
        if any(c != cells[0] for c in cells):
            rows.append({"key": key, "cells": [str(c) for c in cells]})
    return rows


def _figures(runs: list[Column]) -> list[dict[str, Any]]:
    tables = [{f.name: f for f in figures(c.run)} for c in runs]
    rows = []
    for name in dict.fromkeys(n for t in tables for n in t):
        found = [t.get(name) for t in tables]
        numbers = [f.number if f else None for f in found]
        first, second = numbers[0], numbers[-1]
        ratio = f"{second / first:.3f}" if len(runs) == 2 and first and second else ""
        shown = [f"{f.value} ({f.note})" if f and f.note else (f.value if f else "–") for f in found]
        rows.append({"name": name, "shown": shown, "ratio": ratio})
    return rows


def _gates(runs: list[Column]) -> list[dict[str, Any]]:
    return [
        {"name": gates[0].name, "cells": list(gates)}
        for gates in zip(*(c.verdict.gates for c in runs), strict=True)
    ]  # fmt: skip


def _plots(runs: list[Column]) -> list[Plot]:
    def over(anchor: str, title: str, what: str, paint_run: Any, caption: str = "", frame: Any = None) -> Plot:
        def paint(figure: Any) -> None:
            axes = figure.subplots()
            for column, colour in zip(runs, SERIES * len(runs), strict=False):
                paint_run(axes, column, colour)
            if frame is not None:  # only now: a limit set earlier would cut off the runs that follow
                frame(axes)
            label_steps(axes, what)
            axes.legend(loc="best")

        return Plot(anchor, title, caption, draw(paint))

    def losses(axes: Any, column: Column, colour: str) -> None:
        rows = series(column.run, "losses")
        axes.plot([r[0] for r in rows], [r[1] for r in rows], color=colour, label=column.label)
        held_out = validated(column.run)
        if held_out:
            axes.plot(*zip(*held_out, strict=True), "o--", color=colour, markersize=3.5, linewidth=0.8)

    def norms(axes: Any, column: Column, colour: str) -> None:
        rows = series(column.run, "grad_norms")
        axes.plot([r[0] for r in rows], [r[1] for r in rows], color=colour, label=column.label)

    def of_steps(name: str) -> Any:
        def paint_run(axes: Any, column: Column, colour: str) -> None:
            steps = column.run.steps
            rows = thinned([getattr(e, name) for e in steps])
            axes.plot([steps[i].step for i, *_ in rows], [m for _, m, *_ in rows], color=colour, label=column.label)

        return paint_run

    def from_zero(axes: Any) -> None:
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        short_numbers(axes)

    def cut(axes: Any) -> None:
        rows = [r for c in runs if (r := series(c.run, "losses"))]
        frame = below_the_descent(rows, [validated(c.run) for c in runs])
        if frame is not None:
            axes.set_ylim(*frame)

    return [
        over("loss", "Loss", "nats per token", losses, "Training as lines, validation as points.", cut),
        over("throughput", "Throughput", "tokens per second", of_steps("tokens_per_s"), frame=from_zero),
        over("grad_norm", "Gradient norm", "global 2-norm", norms),
        over("memory", "Peak memory", "GiB", of_steps("memory_gib"), frame=from_zero),
    ]

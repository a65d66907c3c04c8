"""Plots of evaluations, as SVG files. `check_plot` has checked that they can be written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these import torch
    from tercet.inference.recall import NeedleResult
    from tercet.inference.ruler import RulerResult


Curves = Mapping[str, Sequence[tuple[int, float]]]
"""(x, y) of each model."""


def context_plot(curves: Curves, path: Path) -> None:
    """Loss against tokens of context, one line per model."""
    figure, axis = _draw_curves(curves)
    axis.set(xlabel="tokens of context", ylabel="loss (nats per token)")
    _save_svg(figure, path)


def recall_plot(curves: Curves, path: Path, *, window_reach: int | None = None) -> None:
    """Accuracy against distance to the fact, one line per model; marks how far the windows alone reach."""
    figure, axis = _draw_curves(curves)
    if window_reach is not None:
        axis.axvline(window_reach, color="0.5", lw=1, ls="--")
        axis.text(window_reach, 1.02, " reach of the windows", fontsize=8, color="0.4")
    axis.set(xlabel="distance to the fact (tokens)", ylabel="answers right", ylim=(-0.02, 1.08))
    _save_svg(figure, path)


def _draw_curves(curves: Curves) -> tuple[Any, Any]:
    figure, axis = _svg_figure(5.6, 3.2)
    for name, points in curves.items():
        axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=name)
    axis.set_xscale("log", base=2)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure, axis


def needle_map(found: Sequence[NeedleResult], path: Path) -> None:
    """Heatmap of depth × length: accuracy."""
    lengths, depths = sorted({f.length for f in found}), sorted({f.depth for f in found})
    cells = {(f.length, f.depth): f.accuracy for f in found}
    figure, axis = _svg_figure(1.6 + 0.55 * len(lengths), 1.4 + 0.35 * len(depths))
    _heat_map(axis, lengths, [f"{d:.0%}" for d in depths], [[cells[n, d] for n in lengths] for d in depths])
    axis.set(ylabel="depth of the needle")
    _save_svg(figure, path)


def ruler_map(found: Sequence[RulerResult], path: Path) -> None:
    """Heatmaps of task × length if there are several tasks, and of depth × length for each task with a single fact."""
    from tercet.inference.ruler import TASKS

    lengths, tasks = sorted({f.length for f in found}), sorted({f.task for f in found}, key=TASKS.index)
    depths = sorted({f.depth for f in found if f.depth is not None})
    single = [task for task in tasks if any(f.task == task and f.depth is not None for f in found)]
    cells = {(f.length, f.task, f.depth): f.score for f in found}
    columns = len(single) + (tasks != single[:1])
    width = columns * (1.9 + 0.5 * len(lengths))
    figure, axes = _svg_figure(width, 1.4 + 0.3 * max(len(tasks), len(depths)), columns=columns)
    axes = list(axes) if columns > 1 else [axes]
    if columns > len(single):
        _heat_map(axes.pop(0), lengths, tasks, [[cells.get((n, task, None)) for n in lengths] for task in tasks])
    for axis, task in zip(axes, single, strict=True):
        labels = [f"{d:.0%}" for d in depths]
        _heat_map(axis, lengths, labels, [[cells.get((n, task, d)) for n in lengths] for d in depths])
        axis.set(title=task, ylabel="depth of the fact")
    _save_svg(figure, path)


def _heat_map(axis: Any, lengths: Sequence[int], rows: Sequence[str], grid: list[list[float | None]]) -> None:
    """Rows × lengths of accuracies. None: not measured."""
    values = [[math.nan if v is None else v for v in row] for row in grid]
    image = axis.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0, vmax=1)
    axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
    axis.set_yticks(range(len(rows)), rows)
    axis.set(xlabel="tokens")
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if value is not None:
                colour = _text_colour(image, value)
                axis.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=7, color=colour)


def _text_colour(image: Any, value: float) -> str:
    """Black or white, whichever is easier to read on a heat map's cell of this value."""
    red, green, blue, _ = image.to_rgba(value)
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return "black" if luminance > 0.18 else "white"


def _svg_figure(width: float, height: float, *, columns: int = 1) -> tuple[Any, Any]:
    """An empty figure and its axes. Needs matplotlib."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots(1, columns)


def _save_svg(figure: Any, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tercet"}):  # reproducible output
        figure.savefig(path, format="svg", metadata={"Date": None})

"""Plots of sparse attention: gates and selection over time, distances of the selected blocks, quality of the choice."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Any

from tercet.attention.config import BRANCHES
from tercet.report.figure import BLUE, GREEN, LINE, ORANGE, RED, Plot, downsample, draw, integer_ticks, label_step_axis
from tercet.report.read import Run, last_choices
from tercet.telemetry.events import LayersObserved, SelectorsObserved

HEATMAP_COLUMNS = 120  # more would be finer than a screen resolves


def gate_share_plot(run: Run) -> Plot | None:
    samples = _gated_samples(run)
    if not samples:
        return None
    columns = _evenly_spaced(samples)
    branches = _gated_branches(samples)
    shares = [v for e in columns for b in branches for v in getattr(e, f"gate_share_{b}") if v is not None and v == v]
    top = max([2 / 3, *shares])
    layers, steps = _layer_range(samples), [e.step for e in columns]

    def panel(branch: str) -> Callable[[Any], None]:
        def paint(axes: Any) -> None:
            shares_of = [getattr(e, f"gate_share_{branch}") for e in columns]
            table = [[math.nan if v[i] is None else v[i] for v in shares_of] for i in layers]
            bar = _draw_heatmap(axes, table, (steps[0], max(steps[-1], steps[0] + 1)), top)
            axes.set_title(branch)
            axes.set_xlabel("step")
            integer_ticks(axes.xaxis, 5)
            ticks = [(v, t) for v, t in ((0, "0"), (1 / 3, "⅓"), (2 / 3, "⅔"), (1, "1")) if v <= top + 1e-9]
            bar.set_ticks([v for v, _ in ticks], labels=[t for _, t in ticks])

        return paint

    height = 1.5 + 0.1 * min(len(layers), 20)
    start = {1: "", 2: " Both start at one half.", 3: " All start at one third."}[len(branches)]
    caption = f"Each branch's share of the gates, by layer over time.{start}"
    return Plot("gates", "Gate shares", caption, "".join(draw(panel(b), height=height) for b in branches), wide=True)


def _draw_heatmap(axes: Any, table: list[list[float]], span: tuple[int, int], top: float | None = None) -> Any:
    """One row per layer; `span` is the x of the first and the last column. Returns the colour bar."""
    image = axes.imshow(
        table,
        aspect="auto",
        interpolation="nearest",
        vmin=0,
        vmax=top,
        cmap="viridis",
        origin="lower",
        extent=(span[0] - 0.5, span[1] + 0.5, -0.5, len(table) - 0.5),
    )
    axes.grid(False)
    axes.set_ylabel("layer")
    integer_ticks(axes.yaxis)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    return bar


def _draw_bands(axes: Any, x: list[int], bands: list[list[float]], colour: str, **style: Any) -> None:
    """Mean over layers as a line, with their range behind it."""
    means = downsample([sum(b) / len(b) for b in bands])
    low, high = ([row[i] for row in downsample(list(map(of, bands)))] for i, of in ((2, min), (3, max)))
    steps = [x[i] for i, *_ in means]
    axes.fill_between(steps, low, high, color=colour, alpha=0.22, linewidth=0)
    axes.plot(steps, [mean for _, mean, *_ in means], color=colour, **style)


def gate_trend_plot(run: Run) -> Plot | None:
    gated = _gated_samples(run)
    samples = gated or [e for e in run.layers if any(v is not None for v in e.selected_forced)]
    if len(samples) < 2:
        return None

    def panel(rows: tuple[tuple[str, str, str], ...], top: float) -> Callable[[Any], None]:
        def paint(axes: Any) -> None:
            x = [e.step for e in samples]
            for name, colour, label in rows:
                bands = [[v for v in getattr(e, name) if v is not None] or [math.nan] for e in samples]
                _draw_bands(axes, x, bands, colour, label=label)
            label_step_axis(axes, "")
            axes.set_ylim(0, 1.05 * top)
            axes.legend(loc="lower center", ncols=2, bbox_to_anchor=(0.5, 1.0))

        return paint

    equal = math.log(max(2, len(_gated_branches(gated))))
    gates = panel((("gate_entropy", BLUE, "entropy (nats)"), ("gate_collapse", RED, "collapsed")), max(1, equal))
    selection = panel(
        (("selected_forced", ORANGE, "forced"), ("selected_overlap", GREEN, "overlap with last token")), 1
    )
    if not gated:  # block-sparse attention
        caption = "Mean and range over layers, as shares of the selected blocks."
        return Plot("selection_health", "Selection over time", caption, draw(selection, height=2.4), wide=True)
    caption = f"Mean and range over layers. Equal gates have entropy {equal:.2f}; the other values are shares."
    svg = draw(gates, height=2.4) + draw(selection, height=2.4)
    return Plot("selection_health", "Gates and selection over time", caption, svg, wide=True)


def selection_plot(run: Run) -> Plot | None:
    samples = [e for e in run.layers if any(any(d) for d in e.distances)]
    if not samples:
        return None
    last = samples[-5:]
    layers = _layer_range(samples)
    selecting = [i for i in layers if any(sum(e.distances[i]) for e in last)]
    totals = {i: [sum(column) for column in zip(*(e.distances[i] for e in last), strict=True)] for i in selecting}
    used = max(k for row in totals.values() for k, v in enumerate(row) if v) + 1
    none = [math.nan] * used  # of layers that do not select
    shares = [[v / sum(totals[i]) for v in totals[i][:used]] if i in totals else none for i in layers]
    labels = ["0", "1", *(f"{2 ** (k - 1)}–{2**k - 1}" for k in range(2, used))][:used]

    def label_distances(axes: Any) -> None:
        axes.set_xticks(range(used), labels, rotation=40 if used > 4 else 0, ha="right" if used > 4 else "center")
        axes.set_xlabel("distance from the query's block (blocks)")

    def by_layer(axes: Any) -> None:
        _draw_heatmap(axes, shares, (0, used - 1))
        label_distances(axes)

    def over_all(axes: Any) -> None:
        overall = [sum(column) for column in zip(*(row[:used] for row in totals.values()), strict=True)]
        axes.bar(range(used), [v / sum(overall) for v in overall], color=BLUE, width=0.8)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("share of selected blocks")
        label_distances(axes)

    caption = (
        "How far back the selected blocks are, by layer and over all layers. "
        f"Last {len(last)} samples, up to step {samples[-1].step}."
    )
    height = 2.2 + 0.08 * min(len(layers), 20)
    svg = draw(by_layer, height=height) + draw(over_all, height=height)
    return Plot("selection", "Distances of selected blocks", caption, svg, wide=True)


def choice_plot(run: Run) -> Plot | None:
    """How much of the attention the chosen blocks capture: over time, and by layer at the end."""
    readings = [e for e in run.of(SelectorsObserved) if e.layer]
    choices = last_choices(run)
    if choices is None:
        return None
    layers, *last = choices
    rows = (("mass", BLUE, "chosen"), ("best", GREEN, "best possible"), ("random", ORANGE, "random"))

    def over_time(axes: Any) -> None:
        x = [e.step for e in readings]
        marker = "o" if len(x) == 1 else None  # a single reading has no line to draw
        for name, colour, label in rows:
            _draw_bands(axes, x, [getattr(e, name) for e in readings], colour, label=label, marker=marker)
        label_step_axis(axes, "share of attention")
        axes.set_ylim(0, 1.05)
        axes.legend(loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0))

    def by_layer(axes: Any) -> None:
        mass, best, random = last
        axes.vlines(layers, random, best, color=LINE, linewidth=1)
        for values, (_, colour, label) in zip((mass, best, random), rows, strict=True):
            axes.plot(layers, values, "o", color=colour, markersize=4, label=label)
        axes.set_xlabel("layer")
        axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
        axes.set_ylim(0, 1.05)
        integer_ticks(axes.xaxis)

    caption = (
        "Share of a query's attention to free (not forced) blocks that the chosen blocks capture, compared with the "
        "best and a random choice: mean and range over layers, and by layer at the end. From a sample of queries."
    )
    svg = draw(over_time, height=2.4) + draw(by_layer, height=2.4)
    return Plot("choice", "How well blocks are chosen", caption, svg, wide=True)


def _gated_samples(run: Run) -> list[LayersObserved]:
    return [e for e in run.layers if any(v is not None for v in e.gate_entropy)]


def _evenly_spaced(samples: list[LayersObserved]) -> list[LayersObserved]:
    """At most HEATMAP_COLUMNS samples at even distances in steps."""
    count, first, last = min(HEATMAP_COLUMNS, len(samples)), samples[0].step, samples[-1].step
    wanted = (first + (last - first) * i // max(1, count - 1) for i in range(count))
    return [samples[i] for i in dict.fromkeys(bisect.bisect_left(samples, s, key=lambda e: e.step) for s in wanted)]


def _gated_branches(samples: list[LayersObserved]) -> list[str]:
    """The branches that the layers have (model.branches)."""
    return [b for b in BRANCHES if any(v is not None for e in samples for v in getattr(e, f"gate_share_{b}"))]


def _layer_range(samples: list[LayersObserved]) -> range:
    return range(min(len(e.attention) for e in samples))

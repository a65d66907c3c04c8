"""The plots of a report, drawn by one function: matplotlib figures as inline SVG.

Colours are CSS variables of the page, so dark and light mode both work.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from tercet.errors import TercetError
from tercet.report.read import Run
from tercet.telemetry.events import CheckpointSaved, HealthFired, LayersObserved, SelectorsObserved, StepsSkipped
from tercet.terminal import plural, quantity

# Placeholder colours, replaced by variables of style.css after drawing.
INK, MUTED, LINE = "#010102", "#010103", "#010104"
BLUE, ORANGE, GREEN, RED, VIOLET, GREY = SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)},
}
_STYLE: Any = {
    "svg.fonttype": "none",  # keep text as text: searchable and in the page's font
    "svg.hashsalt": "tercet",  # reproducible output
    "text.parse_math": False,  # run names may contain dollar signs
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
}
# Where a legend is.
_INSIDE = {"loc": "best"}
_ABOVE: Mapping[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}

POINTS = 500  # of a series
SMOOTHED_POINTS = 100  # of a loss that is smoothed
Row = tuple[int, float, float, float]  # (step, mean, min, max) of a bin of steps

PHASES = (
    ("data", ORANGE),
    ("forward", BLUE),
    ("backward", VIOLET),
    ("passes", BLUE),  # forward and backward together, in a CUDA graph
    ("optimizer", GREEN),
    ("communication", RED),
    ("other", GREY),
)

# Plots of sparse attention: (event, anchor, title, caption, (field, colour, label) of each line)
_LAYER_PLOTS: tuple[tuple[Any, ...], ...] = (
    (
        LayersObserved, "gates", "Gates", "Each branch's share of the gates, and the share of collapsed gates",
        (
            ("gate_share_compressed", BLUE, "compressed"), ("gate_share_selected", VIOLET, "selected"),
            ("gate_share_window", GREEN, "window"), ("gate_collapse", RED, "collapsed"),
        ),
    ),
    (
        LayersObserved, "selection", "Selection", "Shares of the selected blocks",
        (("selected_forced", ORANGE, "forced"), ("selected_overlap", GREEN, "overlap with last token")),
    ),
    (
        SelectorsObserved, "choice", "How well blocks are chosen",
        "Share of sampled queries' attention to free (not forced) blocks that the chosen blocks capture",
        (("mass", BLUE, "chosen"), ("best", GREEN, "best possible"), ("random", ORANGE, "random")),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    anchor: str
    title: str
    caption: str
    svg: str


class Line(NamedTuple):
    """A series: its means as a line, with the range of all values behind it."""

    rows: Sequence[Row]
    colour: str
    label: str | None = None


def chart(
    name: tuple[str, str, str],
    ylabel: str,
    lines: Iterable[Line] = (),
    *,
    levels: Iterable[tuple[float, str, str]] = (),
    paint: Callable[[Any], None] | None = None,
    ylim: tuple[float | None, float | None] = (None, None),
    ticks: Callable[[float], str] | None = None,
    legend: Mapping[str, Any] = _INSIDE,
) -> Plot:
    """A plot of `lines` over steps. name: anchor, title and caption.

    levels: (value, colour, label) of dashed horizontal lines. paint: draws the rest, on matplotlib axes. ticks: formats
    the numbers of the y axis. The width shows text at about its nominal size both on a phone and in the three columns
    of a wide screen.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, MaxNLocator
    except ImportError as error:
        raise TercetError(f"plots need matplotlib ({error}): pip install 'tercet[report]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.0, 2.6))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes: Any = figure.subplots()
        axes.patch.set_alpha(0)
        for rows, colour, label in lines:
            draw_line(axes, rows, colour, label=label, marker="o" if len(rows) == 1 else None)
        for value, colour, label in levels:
            axes.axhline(value, color=colour, linewidth=1.0, linestyle="--", label=label)
        if paint:
            paint(axes)
        if ylim != (None, None):
            axes.set_ylim(*ylim)
        if ticks:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks(value)))
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(**legend)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return Plot(*name, _in_page_style(buffer.getvalue()))


def _in_page_style(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # The page sets the width; the view box keeps the aspect ratio.
    for size in ("height", "width"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font: (\w+) ([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", '<svg role="img" ', 1)


def draw_line(axes: Any, rows: Sequence[Row], colour: str, **style: Any) -> None:
    if rows:
        steps, means, lows, highs = zip(*rows, strict=True)
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=colour, **style)


def series(steps: Sequence[int], values: Sequence[float], limit: int = POINTS) -> list[Row]:
    """The values as at most `limit` bins, so that pages of long runs stay small. Non-finite values are left out."""
    size = max(1, -(-len(values) // limit))
    rows = []
    for begin in range(0, len(values), size):
        part = [v for v in values[begin : begin + size] if math.isfinite(v)]
        if part:
            middle = begin + min(size, len(values) - begin) // 2
            rows.append((steps[middle], sum(part) / len(part), min(part), max(part)))
    return rows


def step_series(run: Run, name: str, limit: int = POINTS) -> list[Row]:
    """A list of per-step values of the log."""
    lists = [(e.first_step, getattr(e, name)) for e in run.steps]
    steps = array("q", chain.from_iterable(range(first, first + len(values)) for first, values in lists))
    return series(steps, array("d", chain.from_iterable(values for _, values in lists)), limit)


def logged_series(logged: Sequence[Any], name: str) -> list[Row]:
    """A value that is logged once per interval."""
    values = [math.nan if (v := getattr(e, name)) is None else v for e in logged]
    return series([e.step for e in logged], values)


def layer_series(samples: Sequence[Any], name: str) -> list[Row]:
    """A list over layers as one series: their mean and range."""
    steps = [e.step for e in samples]
    values = [[v for v in getattr(e, name) if v is not None and math.isfinite(v)] or [math.nan] for e in samples]
    means, lows, highs = (series(steps, [of(v) for v in values]) for of in (statistics.fmean, min, max))
    return [(step, mean, low[2], high[3]) for (step, mean, *_), low, high in zip(means, lows, highs, strict=True)]


def validation_points(run: Run) -> list[tuple[int, float]]:
    """(step, loss) of every finite validation."""
    return [(e.step, e.loss) for e in run.validations if math.isfinite(e.loss)]


def _draw_losses(axes: Any, run: Run, colour: str, labels: tuple[str, str | None], points_colour: str) -> None:
    """The loss as means of few bins, every step faint behind it, and the validations as points."""
    draw_line(axes, step_series(run, "losses"), colour, linewidth=0.6, alpha=0.4)
    if means := step_series(run, "losses", SMOOTHED_POINTS):
        steps, values, *_ = zip(*means, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.7, label=labels[0])
    if points := validation_points(run):
        axes.plot(*zip(*points, strict=True), "o-", color=points_colour, markersize=3.5, linewidth=0.8, label=labels[1])


def all_plots(run: Run, findings: Sequence[HealthFired]) -> list[Plot]:
    """All plots the run has data for."""
    plots = []
    if run.losses:
        plots.append(loss_plot(run, findings))
    if len(run.steps) > 1:
        median = [] if run.tokens_per_s is None else [(run.tokens_per_s, INK, f"median {run.tokens_per_s:,.0f}")]
        plots.append(
            chart(
                ("throughput", "Throughput", "All ranks; saves and validations excluded."), "tokens per second",
                [Line(logged_series(run.steps, "tokens_per_s"), GREEN)], levels=median, ylim=(0, None), ticks=quantity,
            )
        )  # fmt: skip
    if len(run.resources) > 1:
        plots.append(_step_time_plot(run))
    if rows := step_series(run, "grad_norms"):
        clip = run.config.get("train.clip")
        levels = [(clip, MUTED, f"clipped to {clip:g}")] if isinstance(clip, (int, float)) and clip > 0 else []
        plots.append(
            chart(
                ("grad_norm", "Gradient norm", "Over all parameters and ranks, before clipping."), "global 2-norm",
                [Line(rows, VIOLET, "gradient norm")], levels=levels,
                paint=_log_y_axis if min(low for _, _, low, _ in rows) > 0 else None,
            )
        )  # fmt: skip
    for kind, *name, lines in _LAYER_PLOTS:
        events = run.of(kind)
        used = [line for line in lines if any(v is not None for e in events for v in getattr(e, line[0]))]
        if used:
            anchor, title, caption = name
            drawn = [Line(layer_series(events, field), colour, label) for field, colour, label in used]
            words = (anchor, title, f"{caption}: mean and range over layers.")
            plots.append(chart(words, "share", drawn, ylim=(0, 1.05), legend=_ABOVE))
    return plots


def loss_plot(run: Run, findings: Sequence[HealthFired]) -> Plot:
    limits = loss_limits([run])

    def paint(axes: Any) -> None:
        _draw_losses(axes, run, BLUE, ("training, smoothed", "validation"), ORANGE)
        spikes = [f.step for f in findings if f.rule == "loss_spike"]
        marks = (
            ("next stage", INK, "-", [stage.step for stage in run.stages[1:]]),
            ("resumed", MUTED, ":", [e.step for e in run.started if e.resumed_from is not None]),
            # One line where several would be drawn on the same spot.
            ("spike", RED, "--", {round(400 * step / max(1, run.step)): step for step in spikes}.values()),
        )
        for label, colour, style, steps in marks:
            for i, step in enumerate(steps):
                axes.axvline(step, color=colour, linewidth=0.9, linestyle=style, label=None if i else label)

    caption = f"Line: means of up to {SMOOTHED_POINTS} bins. Behind it: every step."
    if limits[1] is not None and run.steps[0].losses[0] > limits[1]:
        caption += f" The initial descent from {run.steps[0].losses[0]:.2f} is cut off."
    if run.stages:
        lengths = " → ".join(f"{stage.seq_len:,}" for stage in run.stages)
        caption += f" Stages of {lengths} tokens; each validates at its own length."
    if skipped := sum(len(e.steps) for e in run.of(StepsSkipped)):
        caption += f" {skipped} non-finite steps are omitted."
    return chart(("loss", "Loss", caption), "nats per token", paint=paint, ylim=limits)


def loss_limits(runs: Sequence[Run]) -> tuple[float, float] | tuple[None, None]:
    """Limits that cut off the steep start of training, so that the rest is readable; None: autoscale.

    Only the first twentieth is ever cut off: later spikes and validations stay visible.
    """
    lines = [rows for run in runs if (rows := step_series(run, "losses"))]
    if min(map(len, lines), default=0) < 100:
        return None, None
    start = min(rows[len(rows) // 20][0] for rows in lines)
    points = [loss for run in runs for step, loss in validation_points(run) if step >= start]
    lowest = min([*(low for rows in lines for _, _, low, _ in rows), *points])
    highest = max([*(high for rows in lines for _, _, _, high in rows[len(rows) // 20 :]), *points])
    margin = 0.05 * (highest - lowest) or 1.0
    return lowest - margin, highest + margin


def _step_time_plot(run: Run) -> Plot:
    def paint(axes: Any) -> None:
        columns, steps = {}, [e.step for e in run.resources]
        for name, _ in PHASES:
            rows = series(steps, [1e3 * (getattr(e, f"{name}_seconds") or 0.0) for e in run.resources], 200)
            columns[name] = [mean for _, mean, *_ in rows]
            x = [step for step, *_ in rows]
        used = [(name, colour) for name, colour in PHASES if any(v > 0 for v in columns[name])]
        names, colours = zip(*used, strict=True)
        axes.stackplot(x, [columns[n] for n in names], labels=names, colors=colours, linewidth=0)
        totals = sorted(sum(parts) for parts in zip(*(columns[n] for n in names), strict=True))
        # The first interval includes warm-up and may be cut off.
        axes.set_ylim(0, min(totals[-1] * 1.05, 1.6 * totals[len(totals) // 2] + 1e-9))

    saves = run.of(CheckpointSaved)
    caption = (
        f"Timed on {'the device' if run.on_gpu else 'the host'}. Not included: "
        f"{sum(e.blocked_seconds for e in saves):.1f} s blocked on {plural(len(saves), 'save')}, "
        f"{sum(e.seconds for e in run.validations):.1f} s of validation."
    )
    legend = {**_ABOVE, "ncols": 3, "handlelength": 1.0, "columnspacing": 1.2}
    return chart(("breakdown", "Step time", caption), "ms per step", paint=paint, legend=legend)


def _log_y_axis(axes: Any) -> None:
    """A logarithmic axis with ticks at 0.1, 0.2, 0.5, 1 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.minorticks_off()


def comparison_plots(runs: Sequence[tuple[str, Run]]) -> list[Plot]:
    """Plots with one line for each labelled run."""
    coloured = list(zip(runs, SERIES * len(runs), strict=False))

    def paint_losses(axes: Any) -> None:
        for (label, run), colour in coloured:
            _draw_losses(axes, run, colour, (label, None), colour)

    words = ("loss", "Loss", "Lines: smoothed. Points: validation.")
    plots = [chart(words, "nats per token", paint=paint_losses, ylim=loss_limits([run for _, run in runs]))]
    for anchor, title, name, ylabel in (
        ("throughput", "Throughput", "tokens_per_s", "tokens per second"),
        ("grad_norm", "Gradient norm", "grad_norm", "global 2-norm"),
        ("memory", "Peak memory", "memory_gib", "GiB"),
    ):
        lines = [Line(logged_series(run.steps, name), colour, label) for (label, run), colour in coloured]
        plots.append(
            chart(
                (anchor, title, ""), ylabel, lines, ticks=quantity,
                paint=lambda axes: axes.set_ylim(0, 1.15 * axes.get_ylim()[1]),
            )
        )  # fmt: skip
    return plots

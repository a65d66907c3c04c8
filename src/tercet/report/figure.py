"""Draw matplotlib figures as inline SVG. Colours are CSS variables of the page, so dark and light mode both work."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tercet.errors import TercetError
from tercet.telemetry.units import quantity

# Placeholder colours, replaced by variables of style.css after drawing.
INK, MUTED, LINE = "#010102", "#010103", "#010104"
BLUE, ORANGE, GREEN, RED, VIOLET, GREY = SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
_VARIABLES = {
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
    "axes.titlesize": 9.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
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


POINTS = 500  # of a series
Row = tuple[int, float, float, float]  # (step, mean, min, max) of a bin of steps


@dataclass(frozen=True)
class Plot:
    anchor: str
    title: str
    caption: str
    svg: str


def draw(paint: Callable[[Any], None]) -> str:
    """Call `paint` with empty matplotlib axes and return the figure as an <svg> element.

    The width shows text at about its nominal size both on a phone and in the three columns of a wide screen.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TercetError(f"plots need matplotlib ({error}): pip install 'tercet[report]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.0, 2.6))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        paint(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return _use_page_style(buffer.getvalue())


def _use_page_style(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # The page sets the width; the view box keeps the aspect ratio.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font: (\w+) ([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", '<svg role="img" ', 1)


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


def layer_series(steps: Sequence[int], layers: Iterable[Sequence[float | None]]) -> list[Row]:
    """The values of all layers at these steps as one series: their mean and range."""
    finite = [[v for v in values if v is not None and math.isfinite(v)] or [math.nan] for values in layers]
    means, lows, highs = (series(steps, [of(v) for v in finite]) for of in (statistics.fmean, min, max))
    return [(step, mean, low[2], high[3]) for (step, mean, *_), low, high in zip(means, lows, highs, strict=True)]


def paint_series(axes: Any, rows: Sequence[Row], colour: str, **style: Any) -> None:
    """Means as a line, with the range of all values behind it."""
    if rows:
        steps, means, lows, highs = zip(*rows, strict=True)
        axes.fill_between(steps, lows, highs, color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, means, color=colour, **style)


def label_step_axis(axes: Any, ylabel: str) -> None:
    """Steps on the x axis, with integer ticks."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def abbreviate_y_ticks(axes: Any) -> None:
    """12.3k instead of 12300."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))


def log_y_axis(axes: Any) -> None:
    """A logarithmic axis with ticks at 0.1, 0.2, 0.5, 1 instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.minorticks_off()

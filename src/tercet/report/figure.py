"""Draw matplotlib figures as inline SVG. Colours are CSS variables of the page, so dark and light mode both work."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Plot:
    anchor: str
    title: str
    caption: str
    svg: str  # several panels are several <svg> elements, which wrap on a narrow screen
    wide: bool = False


def draw(paint: Callable[[Any], None], *, height: float = 2.6) -> str:
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
        figure = Figure(figsize=(4.0, height))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        paint(figure.subplots())
        for axes in figure.axes:
            axes.patch.set_alpha(0)
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


def downsample(values: Sequence[float], limit: int = POINTS) -> list[tuple[int, float, float, float]]:
    """(middle index, mean, min, max) of at most `limit` bins, so that pages of long runs stay small.

    Non-finite values are left out.
    """
    size = max(1, -(-len(values) // limit))
    rows = []
    for begin in range(0, len(values), size):
        part = [v for v in values[begin : begin + size] if math.isfinite(v)]
        if part:
            rows.append((begin + min(size, len(values) - begin) // 2, sum(part) / len(part), min(part), max(part)))
    return rows


def label_step_axis(axes: Any, ylabel: str) -> None:
    """Steps on the x axis, with integer ticks."""
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.margins(x=0.01)
    integer_ticks(axes.xaxis)


def integer_ticks(axis: Any, count: int = 6) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=count, integer=True))


def abbreviate_y_ticks(axes: Any) -> None:
    """12.3k instead of 12300."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: quantity(v)))


def plain_log_ticks(axes: Any) -> None:
    """0.1, 0.2, 0.5, 1 instead of powers of ten; only the decades if the range is wide."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    low, high = axes.get_ylim()
    if high / low < 120:
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else ""))
    else:
        axes.yaxis.set_minor_formatter(NullFormatter())

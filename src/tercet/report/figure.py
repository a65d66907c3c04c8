"""One drawing as inline SVG that takes its colours from the page, so that it is right in the dark and in the light."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tercet.errors import TercetError

# Colours that no drawing uses otherwise stand for variables of the style sheet.
INK, MUTED, LINE = "#010102", "#010103", "#010104"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)},
}
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
    "svg.hashsalt": "tercet",  # the same run gives the same page
    "text.parse_math": False,  # a run's name may hold dollars
    "font.size": 9,
    "axes.titlesize": 9,
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
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True)
class Plot:
    """A drawing with its place on the page and what to read from it."""

    anchor: str
    title: str
    caption: str
    svg: str
    wide: bool = False


def draw(paint: Callable[[Any], None], *, width: float = 5.6, height: float = 2.7) -> str:
    """`paint` gets an empty matplotlib figure; the answer is an <svg> element."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TercetError(f"the report's plots need matplotlib ({error}): pip install 'tercet[report]'") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        paint(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return _themed(buffer.getvalue())


def _themed(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # The page says how wide it is; the view box keeps its shape.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font: (\w+) ([\d.]+)px [^;\"]*", r"font-weight: \1; font-size: \2px", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", '<svg role="img" ', 1)


def thinned(values: Sequence[float], most: int = 500) -> list[tuple[int, float, float, float]]:
    """(index of the middle, mean, least, greatest) of at most `most` stretches: long runs stay small pages."""
    size = max(1, -(-len(values) // most))
    rows = []
    for begin in range(0, len(values), size):
        part = [v for v in values[begin : begin + size] if v == v and abs(v) != float("inf")]
        if part:
            rows.append((begin + min(size, len(values) - begin) // 2, sum(part) / len(part), min(part), max(part)))
    return rows

"""Charts as plain SVG: the same bytes on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Line = tuple[str, str, list[tuple[float, float]]]  # label, colour, points


def panel(
    at: float, title: str, x_label: str, lines: Sequence[Line], *, log_x: bool, zero: bool,
    x_ticks: Sequence[tuple[float, str]], log_y: bool = False, legend: str = "top left",
) -> list[str]:  # fmt: skip
    """One chart of 390 × 300 whose left edge is `at`. legend: top left, top right or bottom left."""
    left, right, top, bottom = at + 46, at + 372, 44, 246
    xs = [x for _, _, points in lines for x, _ in points]
    ys = [y for _, _, points in lines for _, y in points]
    out = [text((left + right) / 2, 22, title, "middle", 14, bold=True)]
    if not xs:
        return [*out, text((left + right) / 2, (top + bottom) / 2, "not measured", "middle", 13)]
    y_ticks, (low, high) = ticks_of(ys, zero=zero, log=log_y)
    fx = scale(min(xs), max(xs), left + 8, right - 8, log=log_x)
    fy = scale(low, high, bottom, top, log=log_y)
    for y in y_ticks:
        out.append(f'<line x1="{left:g}" x2="{right:g}" y1="{fy(y):.1f}" y2="{fy(y):.1f}" stroke="#dddddd"/>')
        out.append(text(left - 6, fy(y) + 4, f"{y:g}", "end"))
    for x, label in x_ticks:
        if min(xs) <= x <= max(xs):
            out.append(text(fx(x), bottom + 17, label, "middle"))
    out.append(text((left + right) / 2, bottom + 38, x_label, "middle"))
    legend_x = right - 110 if "right" in legend else left + 14
    legend_y = bottom - 4 - 18 * len(lines) if "bottom" in legend else top + 4
    for row, (label, colour, points) in enumerate(lines):
        path = " ".join(f"{fx(x):.1f},{fy(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        out += [f'<circle cx="{fx(x):.1f}" cy="{fy(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        out.append(f'<rect x="{legend_x:g}" y="{legend_y + 18 * row:g}" width="12" height="12" fill="{colour}"/>')
        out.append(text(legend_x + 18, legend_y + 10 + 18 * row, label))
    return out


def ticks_of(values: Sequence[float], *, zero: bool, log: bool) -> tuple[list[float], tuple[float, float]]:
    """Tick values and the range of the axis."""
    low, high = min(values), max(values)
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [10.0**n for n in powers], (10.0 ** powers[0], 10.0 ** powers[-1])
    low = 0.0 if zero else low
    rough = (high - low) / 5
    size = 10 ** math.floor(math.log10(rough))
    gap = next(n * size for n in (1, 2, 5, 10) if n * size >= rough)
    count = range(math.floor(low / gap), math.ceil(high / gap) + 1)
    return [round(n * gap, 10) for n in count], (count[0] * gap, count[-1] * gap)


def scale(low: float, high: float, start: float, end: float, *, log: bool) -> Callable[[float], float]:
    convert = math.log2 if log else float
    return lambda value: start + (end - start) * (convert(value) - convert(low)) / (convert(high) - convert(low))


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{words}</text>'


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    body = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" fill="#222222">', body, *parts, "</svg>\n"])

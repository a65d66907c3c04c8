"""Heat maps of `tercet bench train`. Needs matplotlib (`pip install 'tercet[report]'`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tercet.atomic_io import atomic_write
from tercet.inference.plots import text_colour


def heat_maps(result: dict[str, Any], picture: Path) -> list[str]:
    """Plot `tercet bench train` results: tokens/s of NSA and dense and their ratio, lengths by batch sizes.

    picture: an .svg or .png file. Returns the lines to print.
    """
    try:
        import matplotlib
    except ImportError:
        return [f"{picture} not written: pip install 'tercet[report]', then tercet bench train --plot RESULTS.json"]
    matplotlib.use("Agg")
    from matplotlib import pyplot

    no_kernels = " (no kernels)" * ((result.get("checked") or {}).get("correct", True) is None)
    rows = sorted(result["results"], key=lambda r: bool(r.get("packed")))  # packed rows last: they overwrite plain ones
    lengths, batches = {r["length"] for r in rows}, {r["batch"] for r in rows}
    pyplot.rcParams |= {"font.size": 9, "svg.hashsalt": "tercet"}  # the salt makes SVG files reproducible
    # One above the other: side by side, the text would be too small on a phone.
    size = (max(4.0, 1.2 + 0.9 * len(batches)), 3 * (1.0 + 0.4 * len(lengths)))
    figure, axes = pyplot.subplots(3, 1, figsize=size, layout="constrained")
    panels: list[tuple[str, Callable[[dict[str, Any]], float | None], str]] = [
        ("NSA, thousand tokens/s", lambda r: _thousand_tokens_per_s(r, "nsa"), ".0f"),
        ("dense, thousand tokens/s", lambda r: _thousand_tokens_per_s(r, "dense"), ".0f"),
        (f"NSA, × dense{no_kernels}", lambda r: r["times_dense"], ".2f"),
    ]
    for axis, (title, value, form) in zip(axes, panels, strict=True):
        values = {(r["length"], r["batch"]): value(r) for r in rows}
        paint_cells(axis, title, values, {at: format(n, form) for at, n in values.items() if n is not None})
    form = picture.suffix.removeprefix(".") or "png"
    with atomic_write(picture) as temporary:
        figure.savefig(temporary, format=form, metadata={"Date": None} if form == "svg" else None)
    pyplot.close(figure)
    return [f"wrote {picture}"]


def paint_cells(
    axis: Any, title: str, values: Mapping[tuple[int, int], float | None], labels: Mapping[tuple[int, int], str]
) -> None:
    """One heat map of lengths by batch sizes. labels: the text of each cell, small in one without a value."""
    lengths, batches = sorted({length for length, _ in values}), sorted({batch for _, batch in values})
    axis.set_facecolor("0.92")  # cells without a value
    grid = [[values.get((l, b)) for b in batches] for l in lengths]
    image = axis.imshow([[math.nan if n is None else n for n in line] for line in grid], aspect="auto", cmap="viridis")
    axis.set_xticks(range(len(batches)), [str(b) for b in batches])
    axis.set_yticks(range(len(lengths)), [f"{l:,}" for l in lengths])
    axis.set(title=title, xlabel="sequences per batch", ylabel="tokens per sequence")
    for (length, batch), text in labels.items():
        value = values[length, batch]
        colour, size = ("0.25", 7) if value is None else (text_colour(image, value), 9)
        place = batches.index(batch), lengths.index(length)
        axis.text(*place, "\n".join(textwrap.wrap(text, 16)), ha="center", va="center", color=colour, fontsize=size)


def _thousand_tokens_per_s(row: dict[str, Any], kind: str) -> float | None:
    cell = row.get(kind)
    return cell["tokens_per_s"] / 1e3 if cell is not None and cell["outcome"] == "ok" else None

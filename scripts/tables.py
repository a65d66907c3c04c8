"""Write the tables and the plot of the README and of pages, from docs/results/performance/*.json and the settings.

    python scripts/measure.py docs/results/performance      # on a machine with a GPU
    python scripts/tables.py                                # rewrite them
    python scripts/tables.py --check                        # exit code 1 if something is out of date

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES maps each name to a function.
"""

from __future__ import annotations

import calendar
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "performance"
PAGES = tuple(ROOT / name for name in ("docs/performance.md", "docs/configuration.md", "docs/convert.md", "README.md"))
HEADLINE = ROOT / "docs" / "images" / "headline.svg"
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PARTS = {
    "train": "training steps", "decode-model": "decoding", "operator": "operator", "own": "own queries and keys",
    "large": "larger models", "batches": "small batches", "million": "a million tokens",
}  # fmt: skip
TASKS = ("single", "multi-key", "multi-value", "tracking")
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
COLOURS = {
    "training": "#2e8b57", "prompt": "#8e5ea2", "dense": "#3b6ea5", "own queries and keys": "#2e8b57",
    "means of keys": "#d1782c",
}  # fmt: skip
LABELS = {"block-sparse": "block-sparse", "two-branch": "two-branch", "nsa": "NSA", "dense": "dense"}
MODES = (
    ("nsa", "compressed"), ("nsa", "learned"), ("two-branch", "learned"), ("block-sparse", "compressed"),
    ("block-sparse", "learned"),
)  # fmt: skip

Row = dict[str, Any]


# Reading and formatting


@cache
def part(name: str) -> Row:
    found: Row = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(name: str, **fields: Any) -> list[Row]:
    return [row for row in part(name)["results"] if all(row.get(key) == value for key, value in fields.items())]


@cache
def needles() -> list[Row]:
    """What scripts/needles.py --json wrote."""
    found: list[Row] = json.loads((RESULTS.parent / "needles.json").read_text(encoding="utf-8"))["results"]
    return found


def one(name: str, **fields: Any) -> Row:
    """The row with these fields; no fields if it was not measured."""
    return next(iter(rows(name, **fields)), {})


def day(date: str) -> str:
    year, month, day = map(int, date.split("-"))
    return f"{day} {calendar.month_name[month]} {year}"


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def pair(a: float | None, b: float | None) -> str:
    return "–" if a is None and b is None else f"{number(a)} / {number(b)}"


def thousands(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value:,.0f}"


def tokens(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"


def paragraph(text: str, bullet: str = "") -> str:
    indent = " " * len(bullet)
    return "\n".join(textwrap.wrap(bullet + text, 120, subsequent_indent=indent, break_on_hyphens=False))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        + [f"| {' | '.join(line)} |".replace("  ", " ") for line in lines]
    )


def step(kind: str, length: int, selector: str | None = "learned", packed: bool | None = None) -> Row:
    sparse = {} if kind == "dense" else {"selector": selector}
    return one("train", kind=kind, length=length, packed=kind != "dense" if packed is None else packed, **sparse)


def decoding(kind: str, batch: int, context: int = 65536, selector: str = "learned") -> Row:
    return one("decode-model", kind=kind, selector=selector, batch=batch, context=context)


def with_ratio(row: Row, show: Callable[[float], str]) -> str:
    speed = show(row["tokens_per_s"]) if row.get("tokens_per_s") else "–"
    return speed if row.get("times_dense") is None else f"{speed} ({ratio(row['times_dense'])})"


# Tables


def measured() -> str:
    """Device and versions of the results, and the date of every part."""
    about = {tuple(part(name)[key] for key in ("device", "torch", "triton", "tercet")) for name in PARTS}
    if len(about) > 1:
        raise ValueError(f"{RESULTS} mixes {len(about)} devices or versions: measure all parts with one")
    ((device, torch, triton, tercet),) = about
    dates: dict[str, list[str]] = {}
    for name, label in PARTS.items():
        dates.setdefault(part(name)["date"], []).append(label)
    when = "; ".join(f"{day(date)} ({', '.join(names)})" for date, names in sorted(dates.items()))
    return paragraph(f"One {device}, Tercet {tercet}, torch {torch}, Triton {triton}, bf16. Measured on {when}.")


def answer() -> str:
    """The summary at the top of the page."""
    kinds = ("block-sparse", "two-branch", "nsa")
    at = {n: ", ".join(f"{LABELS[k]} {ratio(step(k, n).get('times_dense'))}×" for k in kinds) for n in LENGTHS}
    decodes = ", ".join(
        f"{LABELS[k]} {' and '.join(ratio(decoding(k, b).get('times_dense')) + '×' for b in (1, 16))}" for k in kinds
    )
    training = (
        f"**Training** steps of `m7c` with learned selectors against dense: at 8k tokens {at[8192]}; at 64k "
        f"{at[65536]}. At shorter contexts there is little or nothing to gain: at 4k {at[4096]}; at 2k {at[2048]}."
    )
    decode = f"**Decoding** with the whole model at 64k tokens and batch 1 and 16, against dense: {decodes}."
    return f"{paragraph(training, '- ')}\n{paragraph(decode, '- ')}"


def train() -> str:
    columns = [("dense", None, False), ("dense", None, True)]
    columns += [(kind, selector, True) for kind, selector in MODES]
    head = ["length", "dense", "dense, packed"]
    head += [LABELS[kind] + ", learned" * (selector == "learned") for kind, selector, _ in columns[2:]]
    cells = [[step(kind, n, selector, packed) for kind, selector, packed in columns] for n in LENGTHS]
    lines = [[tokens(n), *(with_ratio(row, thousands) for row in line)] for n, line in zip(LENGTHS, cells, strict=True)]
    peaks = [max(row.get("peak_gib", 0.0) for row in column) for column in zip(*cells, strict=True)]
    spread = max(row.get("spread", 0.0) for row in rows("train"))
    note = f"Repeated timings of a step differ by up to {spread:.0%}."
    return f"{table(head, [*lines, ['peak, GiB', *map(number, peaks)]])}\n\n{note}"


def batches() -> str:
    lines = []
    for size in sorted({row["batch"] for row in rows("batches")}):
        off, on = (one("batches", batch=size, cuda_graph=graph) for graph in ("off", "on"))
        speeds = [f"{thousands(row['tokens_per_s'])} ({number(row['ms'])} ms)" for row in (off, on)]
        lines.append([str(size), *speeds, pair(off["peak_gib"], on["peak_gib"])])
    return table(["sequences per step", "eager, tokens/s", "CUDA graph, tokens/s", "GiB, eager / graph"], lines)


def large() -> str:
    lines = []
    for row in (row for row in rows("large") if row["kind"] != "dense"):
        dense = one("large", kind="dense", preset=f"{row['preset']}-dense") if row["kind"] == "nsa" else {}
        lines.append(
            [
                f"`{row['preset']}`, {LABELS[row['kind']]}" + ", learned" * (row["selector"] == "learned"),
                *(tokens(row["length"]), thousands(row["tokens_per_s"]), thousands(dense.get("tokens_per_s"))),
                *(ratio(row["times_dense"]), pair(row["ms"], dense.get("ms"))),
                pair(row["peak_gib"], dense.get("peak_gib")),
            ]
        )
    return table(["preset", "length", "tokens/s", "dense, tokens/s", "× dense", "ms", "GiB"], lines)


def million() -> str:
    row = one("million")
    return paragraph(
        f"One training step of `m7c` on a single sequence of {row['length']:,} tokens takes {row['ms'] / 1e3:.1f} s "
        f"and {row['peak_gib']:.1f} GiB on one GPU (full activation checkpointing, without torch.compile; a first "
        "step, with the time to compile its kernels)."
    )


def operator() -> str:
    lines = []
    for shape in ("C8x2k", "C4x4k", "C1x16k", "M4x4k", "P8k", "P16k", "P32k", "P64k"):
        kinds = [one("operator", shape=shape, inputs=kind) for kind in ("random", "smooth")]
        row = kinds[0]
        times = pair(row.get("nsa_forward_ms"), row.get("nsa_both_ms"))
        dense = pair(row.get("cudnn_forward_ms"), row.get("cudnn_both_ms"))
        memory = pair(row.get("nsa_peak_gib"), row.get("cudnn_peak_gib"))
        label = re.sub(r"([A-Z])(?:(\d+)x)?(\d+k)", lambda m: f"{m[1]} {m[2] or 1}×{m[3]}", shape)
        lines.append([label, *(ratio(cell.get("speedup")) for cell in kinds), times, dense, memory])
    head = ["shape", "× dense, random", "× dense, smooth", "random, ms", "dense, ms", "GiB"]
    worst = max(row["worst_error"] for row in rows("operator"))
    wrong = sum(not row["correct"] for row in rows("operator"))
    verdict = f"{wrong} shapes FAIL" if wrong else "all shapes pass"
    note = f"Worst relative error of output and gradients in these runs: {worst:.4f} (limit 0.01); {verdict}."
    return f"{table(head, lines)}\n\n{note}"


def decode_model() -> str:
    head = ["context", "batch", "dense"] + [LABELS[k] + ", learned" * (s == "learned") for k, s in MODES]
    lines = []
    for context, batch in sorted({(row["context"], row["batch"]) for row in rows("decode-model")}):
        found = [one("decode-model", kind="dense", context=context, batch=batch)]
        found += [decoding(kind, batch, context, selector) for kind, selector in MODES]
        lines.append([tokens(context), str(batch), *(with_ratio(row, "{:,.0f}".format) for row in found)])
    caches = [number(row.get("cache_bytes_per_token")) for row in found]
    return table(head, [*lines, ["cache, B/token", "", *caches]])


def own() -> str:
    """Attention alone, blocks chosen by its own queries and keys."""
    lines, found = [], {row["shape"]: row for row in rows("own")}
    for name, key in (("a prompt (forward)", "forward_speedup"), ("training (forward + backward)", "speedup")):
        lines.append([name, *(f"**{row[key]:.1f}**" for row in found.values())])
    return table(["× dense", *(shape.removeprefix("L") for shape in found)], lines)


def own_times() -> str:
    lines = []
    for row in rows("own"):
        times, dense = (pair(row[f"{name}_forward_ms"], row[f"{name}_both_ms"]) for name in ("own", "cudnn"))
        speedups, memory = (
            pair(row["forward_speedup"], row["speedup"]),
            pair(row["own_peak_gib"], row["cudnn_peak_gib"]),
        )
        lines.append([row["shape"].removeprefix("L"), times, number(row["choice_ms"]), dense, speedups, memory])
    return table(["context", "own, ms", "choice, ms", "dense, ms", "× dense", "GiB"], lines)


def facts() -> str:
    """Facts that a model finds without training."""
    found = needles()
    lengths = sorted({row["length"] for row in found})
    lines = []
    for choice in dict.fromkeys(row["choice"] for row in found):
        cells = [next(row for row in found if (row["choice"], row["length"]) == (choice, n)) for n in lengths]
        shown = (f"{row['single']}, {sum(row[task] for task in TASKS):g}, {row['loss']:.3f}" for row in cells)
        lines.append([choice, *shown])
    return table(["choice", *(f"{n:,} tokens" for n in lengths)], lines)


def config_sections() -> str:
    """Sections of the configuration, with the first sentence of their docstrings."""
    from tercet.config.flags import about_table, table_names
    from tercet.config.keys import all_keys

    rows = [[f"`{name}`", about_table(name).partition(". ")[0].rstrip(".")] for name in table_names(all_keys())]
    return table(["section", "contents"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "config-sections": config_sections,
    "measured": measured, "answer": answer, "train": train, "batches": batches, "large": large, "million": million,
    "operator": operator, "decode-model": decode_model, "own": own, "own-times": own_times, "facts": facts,
}  # fmt: skip


# The README's picture, as plain SVG: the same bytes on every machine


def headline() -> str:
    """Speed of attention over length, and facts found without training."""
    lengths = [(int(row["shape"][1:-1]) * 1024, row) for row in rows("own")]
    speed = {
        name: [(n, row[key]) for n, row in lengths]
        for name, key in (("training", "speedup"), ("prompt", "forward_speedup"))
    }
    kept = {"dense": "dense", "own queries and keys": "own, 16 of 64", "means of keys": "means of keys, 16 of 64"}
    found = {
        name: [(row["length"], row["single"]) for row in needles() if row["choice"] == choice]
        for name, choice in kept.items()
    }
    left = _panel(
        20, "Speed of attention, × dense", "context length, tokens", speed, math.log2, True,
        [(n, tokens(n)) for n, _ in lengths],
    )  # fmt: skip
    right = _panel(
        430, "Facts found without training, of 80", "context length, tokens", found, math.log2, False,
        [(n, f"{round(n / 1000)}k") for n, _ in found["dense"]],
    )  # fmt: skip
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 300" width="840" height="300"'
    body = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" fill="#222222">', body, *left, *right, "</svg>\n"])


def _panel(
    at: float, title: str, x_label: str, lines: dict[str, list[tuple[float, float]]], scale: Callable[[float], float],
    rising: bool, x_ticks: Sequence[tuple[float, str]],
) -> list[str]:  # fmt: skip
    """One chart of 390 × 300 whose left edge is `at`. rising: the legend is at the top."""
    left, right, top, bottom = at + 46, at + 372, 44, 246
    xs, ys = ([point[i] for points in lines.values() for point in points] for i in (0, 1))
    low, high = 0.0, max(ys)
    size = 10 ** math.floor(math.log10((high - low) / 5))
    gap = next(n * size for n in (1, 2, 5, 10) if n * size >= (high - low) / 5)
    ticks = [round(n * gap, 10) for n in range(math.floor(low / gap), math.ceil(high / gap) + 1)]

    def fx(x: float) -> float:
        share = (scale(x) - scale(min(xs))) / (scale(max(xs)) - scale(min(xs)))
        return left + 8 + share * (right - left - 16)

    def fy(y: float) -> float:
        return bottom - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top)

    out = [_text((left + right) / 2, 22, title, "middle", 14, bold=True)]
    for y in ticks:
        out.append(f'<line x1="{left:g}" x2="{right:g}" y1="{fy(y):.1f}" y2="{fy(y):.1f}" stroke="#dddddd"/>')
        out.append(_text(left - 6, fy(y) + 4, f"{y:g}", "end"))
    out += [_text(fx(x), bottom + 17, label, "middle") for x, label in x_ticks if min(xs) <= x <= max(xs)]
    out.append(_text((left + right) / 2, bottom + 38, x_label, "middle"))
    legend_x, legend_y = left + 14, top + 4 if rising else bottom - 4 - 18 * len(lines)
    for row, (kind, points) in enumerate(lines.items()):
        path = " ".join(f"{fx(x):.1f},{fy(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[kind]}" stroke-width="2.5"/>')
        out += [f'<circle cx="{fx(x):.1f}" cy="{fy(y):.1f}" r="3.5" fill="{COLOURS[kind]}"/>' for x, y in points]
        y = legend_y + 18 * row
        out.append(f'<rect x="{legend_x:g}" y="{y:g}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        out.append(_text(legend_x + 18, y + 10, kind))
    return out


def _text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{words}</text>'


# Writing


def outdated() -> dict[Path, str]:
    """Files whose content differs from what the results give, with the new content."""

    def filled(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table:{match[2]} is unknown: pick one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    wanted = {page: MARKED.sub(filled, page.read_text(encoding="utf-8")) for page in PAGES} | {HEADLINE: headline()}
    return {file: new for file, new in wanted.items() if file.read_text(encoding="utf-8") != new}


def main(arguments: list[str]) -> int:
    check, changed = "--check" in arguments, outdated()
    for file, new in changed.items():
        if not check:
            file.write_text(new, encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: {'out of date: run python scripts/tables.py' if check else 'updated'}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

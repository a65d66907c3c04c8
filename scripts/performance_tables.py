"""Generate the tables and plots of docs/performance.md and the README from docs/results/performance/*.json.

    python scripts/measure.py docs/results/performance      # on a machine with a GPU
    python scripts/performance_tables.py                    # rewrite tables and plots
    python scripts/performance_tables.py --check            # exit code 1 if something is out of date

A page marks a table with `<!-- table:NAME -->` and `<!-- /table -->`; TABLES below maps each name to a function.
"""

from __future__ import annotations

import calendar
import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results" / "performance"
QUALITY = ROOT / "docs" / "results" / "quality"
IMAGES = ROOT / "docs" / "images"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
MISSING = "not measured"

OPERATOR = {
    "C8x2k": "C 8×2k", "C4x4k": "C 4×4k", "C1x16k": "C 1×16k", "M4x4k": "M 4×4k",
    "P8k": "P 1×8k", "P16k": "P 1×16k", "P32k": "P 1×32k", "P64k": "P 1×64k",
}  # fmt: skip

Row = dict[str, Any]


# Reading


def part(name: str) -> Row:
    """A result file of scripts/measure.py; no rows if it does not exist."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return {"results": []}
    found: Row = json.loads(file.read_text(encoding="utf-8"))
    if found.get("quick"):
        raise ValueError(f"{file} comes from a --quick run: measure on a GPU")
    return found


def rows(name: str, **fields: Any) -> list[Row]:
    """Result rows of a part whose fields have these values."""
    return [row for row in part(name)["results"] if all(row.get(key) == value for key, value in fields.items())]


def first(found: Sequence[Row]) -> Row:
    return found[0] if found else {}


def step(kind: str, length: int) -> Row:
    """A cell of the `train` part; empty if it failed or its loss was wrong."""
    cell = first(rows("train", kind=kind, length=length))
    return cell if cell.get("outcome") == "ok" else {}


def step_ratio(length: int) -> float | None:
    """NSA's tokens/s over dense's; None if the kernels failed their check or the losses differ."""
    from tercet.bench.train import compared

    check = first([row for row in part("train")["results"] if "parity" in row])
    cells = [first(rows("train", kind=kind, length=length)) for kind in ("nsa", "dense")]
    if not all(cells):
        return None
    ratio: float | None = compared(cells, check.get("correct"))[0]["times_dense"]
    return ratio


# Formatting


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = [list(line) for line in lines]
    if not body:
        return MISSING
    return "\n".join([_line(head), "|" + "---|" * len(head), *(_line(cells) for cells in body)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def pair(a: float | None, b: float | None) -> str:
    return "–" if a is None and b is None else f"{number(a)} / {number(b)}"


def thousands(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return "–"
    return f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value:,.0f}"


def tokens(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"


# Tables of docs/performance.md


def measured() -> str:
    """Date, device and versions of the results."""
    found = [part(file.stem) for file in sorted(RESULTS.glob("*.json"))]
    if not found:
        return f"{MISSING}."
    about = {(p["date"], p["device"], p["torch"], p["triton"], p["tercet"]) for p in found}
    if len(about) > 1:
        raise ValueError(f"{RESULTS} mixes runs ({len(about)} dates, devices or versions): measure all parts together")
    ((date, device, torch, triton, tercet),) = about
    return f"Measured on {_day(date)}: one {device}, Tercet {tercet}, torch {torch}, Triton {triton}, bf16."


def _day(date: str) -> str:
    year, month, day = map(int, date.split("-"))
    return f"{day} {calendar.month_name[month]} {year}"


def answer() -> str:
    """The summary at the top of the page."""
    ratios = {length: step_ratio(length) for length in (2048, 8192, 65536)}
    operator64 = first(rows("operator", shape="P64k", inputs="random")).get("speedup")
    decode64 = first(rows("decode", of="attention", context=65536, batch=16)).get("times_dense")
    if None in (*ratios.values(), operator64, decode64):
        return f"{MISSING}."
    return (
        f"- **Training**: a whole step of `m7c` runs at {ratio(ratios[2048])}× dense at 2k tokens, "
        f"{ratio(ratios[8192])}× at 8k and {ratio(ratios[65536])}× at 64k.\n"
        f"- **Operator**: forward + backward with 64 heads of 128 at 64k tokens is {ratio(operator64)}× as fast as "
        f"cuDNN.\n"
        f"- **Decode**: the attention step at 64k tokens and batch 16 is {ratio(decode64)}× as fast as dense."
    )


def operator() -> str:
    lines = []
    for shape, label in OPERATOR.items():
        random, smooth = (first(rows("operator", shape=shape, inputs=kind)) for kind in ("random", "smooth"))
        if random or smooth:
            lines.append(
                [
                    label,
                    *(ratio(row.get("speedup")) for row in (random, smooth)),
                    *(pair(row.get("nsa_forward_ms"), row.get("nsa_both_ms")) for row in (random, smooth)),
                    pair(random.get("cudnn_forward_ms"), random.get("cudnn_both_ms")),
                    pair(random.get("nsa_peak_gib"), random.get("cudnn_peak_gib")),
                ]
            )
    head = ["shape", "× dense, random", "× dense, smooth", "NSA random, ms", "NSA smooth, ms", "dense, ms", "GiB"]
    return table(head, lines)


def operator_checks() -> str:
    found = rows("operator") + rows("growth")
    if not found:
        return f"{MISSING}."
    worst = max(row["worst_error"] for row in found)
    slots = min(row["slots_equal"] for row in found)
    wrong = sum(not row["correct"] for row in found)
    verdict = "all shapes pass" if not wrong else f"{wrong} of {len(found)} shapes FAIL"
    return (
        f"Checks in the same run: worst relative error of output and gradients {worst:.4f} (limit 0.01);\n"
        f"{slots:.2%} of selected blocks equal fp64's; {verdict}."
    )


def operator_graph() -> str:
    lines = []
    for shape in ("C8x2k", "C4x4k", "C1x16k", "M4x4k"):
        row = first(rows("operator", shape=shape, inputs="random"))
        if "nsa_graph_both_ms" in row:
            lines.append(
                [
                    OPERATOR[shape],
                    pair(row["nsa_both_ms"], row.get("cudnn_both_ms")),
                    ratio(row.get("speedup")),
                    pair(row["nsa_graph_both_ms"], row.get("cudnn_graph_both_ms")),
                    ratio(row.get("graph_speedup")),
                ]
            )
    return table(["shape", "eager, NSA / dense, ms", "× dense", "CUDA graph, NSA / dense, ms", "× dense"], lines)


def train() -> str:
    lines = []
    for length in (2048, 4096, 8192, 16384, 32768, 65536):
        nsa, dense = step("nsa", length), step("dense", length)
        if nsa or dense:
            lines.append(
                [
                    tokens(length),
                    thousands(nsa.get("tokens_per_s")),
                    thousands(dense.get("tokens_per_s")),
                    f"**{ratio(step_ratio(length))}**",
                    pair(nsa.get("ms"), dense.get("ms")),
                    pair(nsa.get("peak_gib"), dense.get("peak_gib")),
                ]
            )
    head = ["length", "NSA, tokens/s", "dense, tokens/s", "× dense", "ms per step, NSA / dense", "GiB, NSA / dense"]
    return table(head, lines)


def batches() -> str:
    found = [row for row in rows("batches") if row.get("outcome") == "ok"]
    lines = []
    for size in sorted({row["batch"] for row in found}):
        modes = {row["flags"].get("train.cuda_graph"): row for row in found if row["batch"] == size}
        if modes.keys() != {"off", "on"}:
            continue
        off, on = modes["off"], modes["on"]
        lines.append(
            [
                str(size),
                *(f"{thousands(row.get('tokens_per_s'))} ({number(row.get('ms'))} ms)" for row in (off, on)),
                pair(off.get("peak_gib"), on.get("peak_gib")),
            ]
        )
    return table(["sequences per step", "eager, tokens/s", "CUDA graph, tokens/s", "GiB, eager / graph"], lines)


def decode_attention() -> str:
    found = sorted(rows("decode", of="attention"), key=lambda row: (row["context"], row["batch"]))
    head = ["context", "batch", "NSA, ms", "dense, ms", "fastest dense", "× dense", "keys read per KV head"]
    return table(
        head,
        (
            [
                tokens(row["context"]), str(row["batch"]), f"{row['nsa_ms']:.4f}", f"{row['dense_ms']:.4f}",
                row["dense"], ratio(row["times_dense"]), f"{row['keys_read']:,.0f} of {row['keys_dense']:,}",
            ]
            for row in found
        ),
    )  # fmt: skip


def decode_model() -> str:
    lines = []
    for nsa in sorted(rows("decode", of="model", kind="nsa"), key=lambda row: (row["context"], row["batch"])):
        dense = first(rows("decode", of="model", kind="dense", context=nsa["context"], batch=nsa["batch"]))
        speeds: list[Any] = [nsa.get("tokens_per_s"), dense.get("tokens_per_s")]
        lines.append(
            [
                tokens(nsa["context"]),
                str(nsa["batch"]),
                *(f"{speed:,.0f}" if speed else "out of memory" for speed in speeds),
                ratio(speeds[0] / speeds[1] if all(speeds) else None),
                pair(nsa.get("first_token_s"), dense.get("first_token_s")),
                " / ".join(f"{row.get('cache_bytes_per_token', 0):,.0f}" for row in (nsa, dense)),
            ]
        )
    head = ["context", "batch", "NSA, tokens/s", "dense, tokens/s", "× dense", "first token, s", "cache, B/token"]
    return table(head, lines)


def growth() -> str:
    lines = [
        [
            tokens(row["tokens"]), pair(row.get("nsa_forward_ms"), row.get("nsa_both_ms")),
            pair(row.get("cudnn_forward_ms"), row.get("cudnn_both_ms")), ratio(row.get("speedup")),
            number(row.get("nsa_peak_gib")), number(row.get("cudnn_peak_gib")),
        ]
        for row in sorted(rows("growth"), key=lambda row: row["tokens"])
    ]  # fmt: skip
    return table(["tokens", "NSA, ms", "dense, ms", "× dense", "NSA, GiB", "dense, GiB"], lines)


def million() -> str:
    row = first(rows("million"))
    if row.get("outcome") != "ok":
        return ""
    return (
        f"One training step of `m7c` on a single sequence of {row['length']:,} tokens takes {row['ms'] / 1e3:.1f} s "
        f"and {row['peak_gib']:.1f} GiB\non one GPU (full activation checkpointing, not compiled, first step)."
    )


# Kernel names, first match wins. Inductor's kernels are named triton_poi…, triton_red…, triton_per….
GROUPS = (
    ("dense attention", r"cudnn|fmha|flash"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|splitK"),
    ("optimizer, gradient norm", r"multi_tensor|adam|foreach|lpnorm|norm_kernel"),
    ("elementwise, norms, SwiGLU, loss", r"^triton_|swiglu|^_gradient$"),
    ("copies, sorts, other PyTorch kernels", r"^void |at::|cub|Mem(cpy|set)|memcpy|memset"),
    ("NSA, selected branch", r"query_major|kv_major|selected|partials|sum_dq|sum_dkv|_lists|sort_keys|choose_design"),
    ("NSA, compressed and window branches", r"compressed|window|hopper_"),
    ("NSA, scores and block selection", r"score|select|shortlist"),
    ("NSA, gates, delta, QKV split", r""),
)


def group(kernel: str) -> str:
    return next(name for name, pattern in GROUPS if re.search(pattern, kernel, re.IGNORECASE))


def step_kernels() -> str:
    cells = [
        (length, kind, first(rows("kernels", of="step", kind=kind, length=length)).get("kernels", []))
        for length in (2048, 8192, 65536)
        for kind in ("nsa", "dense")
    ]
    cells = [cell for cell in cells if cell[2]]
    sums = [{name: 0.0 for name, _ in GROUPS} for _ in cells]
    for total, (_, _, kernels) in zip(sums, cells, strict=True):
        for kernel in kernels:
            total[group(kernel["kernel"])] += kernel["ms"]
    names = [name for name, _ in GROUPS if any(total[name] > 0 for total in sums)]
    names.sort(key=lambda name: -max(total[name] for total in sums))
    lines = [[name, *(number(total[name]) if total[name] else "–" for total in sums)] for name in names]
    lines.append(["sum, ms", *(number(sum(total.values())) for total in sums)] if cells else [])
    launches = (sum(kernel["launches"] for kernel in kernels) for _, _, kernels in cells)
    lines.append(["kernel launches", *(f"{count:,}" for count in launches)] if cells else [])
    label = {"nsa": "NSA", "dense": "dense"}
    return table(["kernels", *(f"{tokens(n)}, {label[kind]}" for n, kind, _ in cells)], lines if cells else [])


def operator_kernels() -> str:
    kinds = ("random", "smooth")
    found = {kind: first(rows("kernels", of="operator", inputs=kind)).get("kernels", []) for kind in kinds}
    times: dict[str, dict[str, float]] = {}
    for kind, kernels in found.items():
        for kernel in kernels:
            name = f"`{short(kernel['kernel'])}`"
            by_kind = times.setdefault(name, dict.fromkeys(kinds, 0.0))
            by_kind[kind] += kernel["ms"]
    top = sorted(times, key=lambda name: -max(times[name].values()))[:16]
    lines = [[name, *(number(times[name][kind]) if times[name][kind] else "–" for kind in kinds)] for name in top]
    rest = {kind: sum(t[kind] for name, t in times.items() if name not in top) for kind in kinds}
    if times:
        lines.append(["other", *(number(rest[kind]) for kind in kinds)])
        lines.append(["sum", *(number(sum(t[kind] for t in times.values())) for kind in kinds)])
    return table(["kernel", "random, ms", "smooth, ms"], lines)


def short(kernel: str) -> str:
    """A kernel's name without template arguments and namespaces."""
    name = re.sub(r"^void |\(anonymous namespace\)::", "", kernel).split("<")[0].split("(")[0]
    return name.split("::")[-1][:48]


# README


def readme() -> str:
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    if not rows("train"):
        return f"{MISSING}."
    ratios = [step_ratio(length) for length in lengths]
    memory = [
        (step("nsa", n).get("peak_gib"), step("dense", n).get("peak_gib"))
        for n in lengths
    ]  # fmt: skip
    operator_ratios = [
        first(rows("operator", shape=f"P{n >> 10}k", inputs="random")).get("speedup") if n >= 8192 else None
        for n in lengths
    ]
    decodes = []
    for n in lengths:
        nsa, dense = (
            first(rows("decode", of="model", kind=kind, context=n, batch=16)).get("tokens_per_s")
            for kind in ("nsa", "dense")
        )
        decodes.append(nsa / dense if nsa and dense else None)
    lines = [
        ["`m7c`, training, tokens/s", *(thousands(step("nsa", n).get("tokens_per_s")) for n in lengths)],
        ["its dense baseline, tokens/s", *(thousands(step("dense", n).get("tokens_per_s")) for n in lengths)],
        ["**training step, × dense**", *(f"**{ratio(value)}**" for value in ratios)],
        ["memory, × dense", *(ratio(a / b if a and b else None) for a, b in memory)],
        ["operator with 64 heads of 128, × dense", *map(ratio, operator_ratios)],
        ["decoding at batch 16, × dense", *map(ratio, decodes)],
    ]
    about = part("train")
    note = (
        f"Measured on {_day(about['date'])} with `python scripts/measure.py OUT` on one {about['device']} "
        f"(torch {about['torch']});\ndense is cuDNN attention. Operator: forward + backward, 4 KV heads."
    )
    return f"{table(['context', *map(tokens, lengths)], lines)}\n\n{note}"


TABLES: dict[str, Callable[[], str]] = {
    "measured": measured,
    "answer": answer,
    "operator": operator,
    "operator-checks": operator_checks,
    "operator-graph": operator_graph,
    "train": train,
    "batches": batches,
    "decode-attention": decode_attention,
    "decode-model": decode_model,
    "growth": growth,
    "million": million,
    "step-kernels": step_kernels,
    "operator-kernels": operator_kernels,
    "readme": readme,
}


# Plots, as plain SVG: the same bytes on every machine


Line = tuple[str, str, list[tuple[float, float]]]  # label, colour, points
NSA, DENSE = "#d1782c", "#3b6ea5"


def headline() -> str:
    """The README's picture: training throughput over length, and validation loss over the training run."""
    lengths = (2048, 4096, 8192, 16384, 32768, 65536)
    speed: list[Line] = []
    for kind, label, colour in (("nsa", "NSA (m7c)", NSA), ("dense", "dense", DENSE)):
        points = [(n, step(kind, n)["tokens_per_s"] / 1e3) for n in lengths if step(kind, n)]
        speed.append((label, colour, points))
    loss: list[Line] = []
    for name, label, colour in (("nsa", "NSA (m7c)", NSA), ("dense", "dense", DENSE)):
        with (QUALITY / f"{name}-validation.csv").open(encoding="utf-8") as stream:
            records = [(int(row["step"]) * 65536 / 1e6, float(row["loss"])) for row in csv.DictReader(stream)]
        loss.append((label, colour, [(x, y) for x, y in records if y <= 1.0]))
    left = panel(
        20, "Training throughput, thousand tokens/s", "context length, tokens", speed, log_x=True, zero=True,
        x_ticks=[(n, tokens(n)) for n in lengths],
    )  # fmt: skip
    right = panel(
        430, "Validation loss at 8k, nats per byte", "million bytes trained on", loss, log_x=False, zero=False,
        x_ticks=[(n, str(n)) for n in (50, 100, 150, 200)],
    )  # fmt: skip
    return svg(840, 300, [*left, *right])


def attention_cost() -> str:
    """Time and memory of the operator over the length, log-log."""
    found = sorted((row for row in rows("growth") if row["correct"]), key=lambda row: row["tokens"])
    ticks = [(n, tokens(n)) for n in (8192, 32768, 131072, 524288)]
    parts = []
    for at, title, field in ((20, "Forward + backward, ms", "both_ms"), (430, "Peak memory, GiB", "peak_gib")):
        lines: list[Line] = [
            (label, colour, [(row["tokens"], row[f"{name}_{field}"]) for row in found if f"{name}_{field}" in row])
            for name, label, colour in (("nsa", "NSA", NSA), ("cudnn", "dense, cuDNN", DENSE))
        ]
        parts += panel(at, title, "tokens", lines, log_x=True, log_y=True, zero=False, x_ticks=ticks)
    return svg(840, 300, parts)


def panel(
    at: float, title: str, x_label: str, lines: Sequence[Line], *, log_x: bool, zero: bool,
    x_ticks: Sequence[tuple[float, str]], log_y: bool = False,
) -> list[str]:  # fmt: skip
    """One chart of 390 × 300 whose left edge is `at`."""
    left, right, top, bottom = at + 46, at + 372, 44, 246
    xs = [x for _, _, points in lines for x, _ in points]
    ys = [y for _, _, points in lines for _, y in points]
    out = [text((left + right) / 2, 22, title, "middle", 14, bold=True)]
    if not xs:
        return [*out, text((left + right) / 2, (top + bottom) / 2, MISSING, "middle", 13)]
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
    for row, (label, colour, points) in enumerate(lines):
        path = " ".join(f"{fx(x):.1f},{fy(y):.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        out += [f'<circle cx="{fx(x):.1f}" cy="{fy(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        falling = points and points[-1][1] < points[0][1]
        legend_x = right - 110 if falling else left + 14
        out.append(f'<rect x="{legend_x:g}" y="{top + 4 + 18 * row:g}" width="12" height="12" fill="{colour}"/>')
        out.append(text(legend_x + 18, top + 14 + 18 * row, label))
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


PLOTS: dict[Path, Callable[[], str]] = {
    IMAGES / "headline.svg": headline,
    IMAGES / "attention-cost.svg": attention_cost,
}


# Writing


def fill(page: str) -> str:
    """The page with every marked table generated again."""

    def generated(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table:{match[2]} is unknown: pick one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}\n{match[3]}"

    return MARKED.sub(generated, page)


def outdated() -> dict[Path, str]:
    """Files whose content differs from what the results give, with the new content."""
    wanted = {page: fill(page.read_text(encoding="utf-8")) for page in PAGES}
    wanted |= {file: plot() for file, plot in PLOTS.items()}
    return {file: new for file, new in wanted.items() if not file.exists() or file.read_text("utf-8") != new}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        changed = outdated()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file, new in changed.items():
        if not arguments:
            file.write_text(new, encoding="utf-8")
        state = "updated" if not arguments else "out of date: run python scripts/performance_tables.py"
        print(f"{file.relative_to(ROOT)}: {state}")
    return int(bool(arguments and changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

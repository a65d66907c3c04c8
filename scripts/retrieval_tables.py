"""Tables of docs/results/retrieval.md, for scripts/results_tables.py. Each reads the files of the runs that exist."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results" / "retrieval"
QUALITY = FOLDER.parent / "quality"
CONVERSION = FOLDER.parent / "conversion"


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |".replace("  ", " ") for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _last_line(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    return record


def _ruler(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))["found"]
    return found


def _k(length: int) -> str:
    return f"{length // 1024}k"


def _cell(result: dict[str, Any]) -> str:
    """Percent, with its 95% interval."""
    return f"{result['score']:.0%} ({result['low']:.0%}–{result['high']:.0%})"


def needles() -> str:
    """Sentences found in plain text, of 176 per length."""
    files = {
        "NSA, learned selectors": FOLDER / "learned-needle.txt",
        "NSA, learned selectors, step 1,700": CONVERSION / "scratch-needle.txt",
        "dense, step 1,700": CONVERSION / "dense-needle.txt",
        "dense to step 1,700, then block-sparse for 20M tokens": CONVERSION / "learned-304-needle.txt",
        "NSA, earlier exercises": FOLDER / "earlier-needle.txt",
        "dense, earlier exercises": FOLDER / "dense-needle.txt",
        "NSA, compressed scores, no exercises": QUALITY / "needle-nsa.txt",
        "dense, no exercises": QUALITY / "needle-dense.txt",
    }
    records = {name: _last_line(path)["found"] for name, path in files.items()}
    lengths = sorted({f["length"] for f in records["NSA, learned selectors"]})
    rows = []
    for name, found in records.items():
        right = [sum(f["right"] for f in found if f["length"] == length) for length in lengths]
        rows.append([name, *map(str, right)])
    return _rows(["", *map(_k, lengths)], rows)


def _whole(name: str) -> dict[int, dict[str, Any]]:
    """Results over all depths, by length."""
    return {f["length"]: f for f in _ruler(name) if f["depth"] is None}


def single() -> str:
    """Single needles by length."""
    files = {
        "NSA, learned selectors": "learned-single-training.json",
        "NSA, earlier exercises": "earlier-single-training.json",
        "dense, earlier exercises": "dense-single-training.json",
        "NSA, held-out wording": "learned-single-held-out.json",
    }
    records = {label: _whole(name) for label, name in files.items()}
    lengths = sorted({length for found in records.values() for length in found})
    rows = [
        [label, *(f"{found[n]['score']:.0%}" if n in found else "" for n in lengths)]
        for label, found in records.items()
    ]
    return _rows(["", *map(_k, lengths)], rows)


def probe() -> str:
    """The layers and KV heads that attend to the needle's block at some length, and whether they choose it."""
    found = json.loads((FOLDER / "learned-probe.json").read_text(encoding="utf-8"))["found"]
    rows = []
    for cells in zip(*(record["cells"] for record in found), strict=True):  # one layer and KV head at every length
        if max(cell["mass"] for cell in cells) > 0.2:
            numbers = (f"{cell['mass']:.2f}, {cell['rank']:g}, {cell['chosen']:.0%}" for cell in cells)
            rows.append([f"layer {cells[0]['layer']}, KV head {cells[0]['kv_head']}", *numbers])
    return _rows(["attention, rank, chosen", *(_k(record["length"]) for record in found)], rows)


def losses() -> str:
    """Held-out loss at the same step of the same run through the data, and the time that the steps took."""
    ends = {1700: "8k", 2000: "32k", 2500: "64k"}
    rows = []
    kinds = {
        "learned": "NSA, learned selectors",
        "earlier": "NSA, earlier exercises",
        "dense": "dense, earlier exercises",
    }
    for kind, name in kinds.items():
        with (FOLDER / f"{kind}-validation.csv").open(encoding="utf-8") as stream:
            loss = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)}
        with (FOLDER / f"{kind}-training.csv").open(encoding="utf-8") as stream:
            seconds = {int(row["step"]): float(row["step_seconds"]) for row in csv.DictReader(stream)}
        cells, first, minutes = [], 0, 0.0
        for end in ends:
            step = statistics.median(s for n, s in seconds.items() if first < n <= end)
            minutes += step * (end - first) / 60
            cells.append(f"{loss[end]:.4f}, {step * 1000:.0f} ms, {minutes:.1f} min")
            first = end
        rows.append([name, *cells])
    return _rows(
        ["loss, time of a step, of all steps so far", *(f"step {end:,}, {length}" for end, length in ends.items())],
        rows,
    )


def positions() -> str:
    """Held-out loss by position in the document, after the same steps."""
    files = (CONVERSION / f"{name}-perplexity.txt" for name in ("dense", "scratch"))
    dense, nsa = (_last_line(file)["by_position"] for file in files)
    bins = [pair for pair in zip(dense, nsa, strict=True) if pair[0]["first"] in (8, 64, 512, 1024, 2048, 4096)]
    if any(a["tokens"] != b["tokens"] for a, b in bins):
        raise ValueError("the models were evaluated on different text: run the evaluations again")
    spans = [f"{a['first']:,}–{a['last']:,}" for a, _ in bins]
    rows = [[name, *(f"{pair[i]['loss']:.4f}" for pair in bins)] for i, name in enumerate(("dense", "NSA"))]
    change = [f"{b['loss'] / a['loss'] - 1:.1%}".replace("-", "−") for a, b in bins]
    return _rows(["tokens before", *spans], [*rows, ["NSA vs dense", *change]])


def tasks() -> str:
    """All tasks at the lengths measured, and what a run with earlier exercises found at the longest."""
    found = {(f["task"], f["length"]): f for f in _ruler("learned-tasks.json") if f["depth"] is None}
    earlier = {(f["task"], f["length"]): f for f in _ruler("earlier-tasks.json") if f["depth"] is None}
    lengths = sorted({length for _, length in found})
    rows = [
        [f"`{task}`", *(_cell(found[task, n]) for n in lengths), _cell(earlier[task, lengths[-1]])]
        for task in dict.fromkeys(task for task, _ in found)
    ]
    return _rows(["task", *map(_k, lengths), f"{_k(lengths[-1])}, earlier exercises"], rows)


def context() -> str:
    """Loss of the same last tokens with more context."""
    kinds = ("learned", "dense")
    found = {kind: _last_line(FOLDER / f"{kind}-context.txt")["by_context"] for kind in kinds}
    rows = []
    for cells in zip(*found.values(), strict=True):
        row = [_k(cells[0]["tokens"])]
        for cell, base in zip(cells, (f[0] for f in found.values()), strict=True):
            row += [f"{cell['loss']:.4f}", _gain(cell["losses"], base["losses"])]
        rows.append(row)
    base = f"against {_k(found['dense'][0]['tokens'])}"
    return _rows(["tokens read", "NSA", base, "dense", base], rows)


def _gain(losses: list[float], base: list[float]) -> str:
    differences = [a - b for a, b in zip(losses, base, strict=True)]
    if not any(differences):
        return ""
    return f"{statistics.fmean(differences):+.4f} ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"


TABLES: dict[str, Callable[[], str]] = {
    "retrieval-needles": needles,
    "retrieval-single": single,
    "retrieval-probe": probe,
    "retrieval-losses": losses,
    "retrieval-positions": positions,
    "retrieval-tasks": tasks,
    "retrieval-context": context,
}

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
WORDINGS = {"training": "wording of training", "held-out": "held-out wording"}


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
        "learned selector, with exercises": FOLDER / "learned-needle.txt",
        "compressed scores, without": QUALITY / "needle-nsa.txt",
        "dense, without": QUALITY / "needle-dense.txt",
    }
    records = {name: _last_line(path)["found"] for name, path in files.items()}
    lengths = sorted({f["length"] for f in records["dense, without"]})
    rows = []
    for name, found in records.items():
        right = [sum(f["right"] for f in found if f["length"] == length) for length in lengths]
        rows.append([name, *map(str, right)])
    return _rows(["", *map(_k, lengths)], rows)


def single() -> str:
    """Single needles by length, for both wordings."""
    records = {label: _ruler(f"learned-single-{wording}.json") for wording, label in WORDINGS.items()}
    records["450 more steps at 64k"] = _ruler("learned-longer-single.json")
    lengths = sorted({f["length"] for found in records.values() for f in found})
    rows = []
    for label, found in records.items():
        whole = {f["length"]: f for f in found if f["depth"] is None}
        rows.append([label, *(f"{whole[n]['score']:.0%}" if n in whole else "" for n in lengths)])
    return _rows(["", *map(_k, lengths)], rows)


def depths() -> str:
    """Single needles by depth, at the lengths beyond 8k."""
    found = [f for f in _ruler("learned-single-training.json") if f["depth"] is not None]
    lengths = [n for n in sorted({f["length"] for f in found}) if n >= 8192]
    rows = []
    for depth in sorted({f["depth"] for f in found}):
        cells = {f["length"]: f for f in found if f["depth"] == depth}
        rows.append([f"{depth:.0%}", *(_cell(cells[n]) for n in lengths)])
    return _rows(["depth", *map(_k, lengths)], rows)


def tasks() -> str:
    """All tasks at the lengths measured."""
    found = [f for f in _ruler("learned-tasks.json") if f["depth"] is None]
    lengths = sorted({f["length"] for f in found})
    rows = []
    for task in dict.fromkeys(f["task"] for f in found):
        cells = {f["length"]: f for f in found if f["task"] == task}
        rows.append([f"`{task}`", *(_cell(cells[n]) if n in cells else "" for n in lengths)])
    return _rows(["task", *map(_k, lengths)], rows)


def context() -> str:
    """Loss of the same last tokens with more context."""
    found = _last_line(FOLDER / "learned-context.txt")["by_context"]
    rows = [[_k(f["tokens"]), f"{f['loss']:.4f}", _gain(f["losses"], found[0]["losses"])] for f in found]
    return _rows(["tokens read", "loss", f"against {_k(found[0]['tokens'])}"], rows)


def _gain(losses: list[float], base: list[float]) -> str:
    differences = [a - b for a, b in zip(losses, base, strict=True)]
    if not any(differences):
        return ""
    return f"{statistics.fmean(differences):+.4f} ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"


def selectors() -> str:
    """Share of the attention to free blocks that the chosen blocks receive, mean over layers."""
    with (FOLDER / "learned-selectors.csv").open(encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    rows = []
    for step in dict.fromkeys(row["step"] for row in read):
        layers = [row for row in read if row["step"] == step]
        means = {k: statistics.fmean(float(row[k]) for row in layers) for k in ("kl", "mass", "best", "random")}
        rows.append([f"{int(step):,}", f"{means['kl']:.2f}", *(f"{means[k]:.2f}" for k in ("mass", "best", "random"))])
    return _rows(["step", "KL", "captured", "best possible", "at random"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "retrieval-needles": needles,
    "retrieval-single": single,
    "retrieval-depths": depths,
    "retrieval-tasks": tasks,
    "retrieval-context": context,
    "retrieval-selectors": selectors,
}

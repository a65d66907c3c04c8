"""Tables of docs/results/retrieval.md, for scripts/results_tables.py. Each reads the files of the runs that exist."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results" / "retrieval"
QUALITY = FOLDER.parent / "quality"


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
        "dense, with exercises": FOLDER / "dense-needle.txt",
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
    """Single needles by length, both kinds of attention; lengths that no file of single needles has come from that of
    all tasks, and a wording from what `tercet eval ruler` printed."""
    tasks = [f for f in _ruler("learned-tasks.json") if f["task"] == "niah_single_2"]
    found = {f["length"]: f["score"] for f in (*tasks, *_ruler("learned-single.json")) if f["depth"] is None}
    text = (FOLDER / "learned-single-held-out.txt").read_text(encoding="utf-8")
    printed = re.findall(r"([\d,]+) tokens, niah_single_2 +([\d.]+)%", text)
    records = {
        "learned selector": found,
        "dense": {f["length"]: f["score"] for f in _ruler("dense-single.json") if f["depth"] is None},
        "learned selector, held-out wording": {int(n.replace(",", "")): float(score) / 100 for n, score in printed},
    }
    lengths = sorted({length for scores in records.values() for length in scores})
    rows = [[label, *(f"{scores[n]:.0%}" if n in scores else "" for n in lengths)] for label, scores in records.items()]
    return _rows(["", *map(_k, lengths)], rows)


def blocks() -> str:
    """Single needles of one model that may read more blocks than in training."""
    rows, lengths = [], (8192, 32768)
    for count in (16, 64, 128):
        whole = {f["length"]: f for f in _ruler(f"learned-blocks-{count}.json") if f["depth"] is None}
        rows.append([str(count), *(_cell(whole[n]) if n in whole else "" for n in lengths)])
    return _rows(["blocks read", *map(_k, lengths)], rows)


def losses() -> str:
    """Held-out loss at the same step of the same run through the data."""
    read = {}
    for kind in ("learned", "dense"):
        with (FOLDER / f"{kind}-validation.csv").open(encoding="utf-8") as stream:
            read[kind] = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)}
    steps = sorted(read["dense"])
    rows = [[name, *(f"{read[kind][n]:.4f}" for n in steps)] for kind, name in
            (("learned", "learned selector"), ("dense", "dense"))]  # fmt: skip
    return _rows(["", *(f"step {n:,}" for n in steps)], rows)


def depths() -> str:
    """Single needles by depth, from 8k on."""
    found = [f for f in _ruler("learned-single.json") if f["depth"] is not None]
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
    "retrieval-blocks": blocks,
    "retrieval-losses": losses,
    "retrieval-depths": depths,
    "retrieval-tasks": tasks,
    "retrieval-context": context,
    "retrieval-selectors": selectors,
}

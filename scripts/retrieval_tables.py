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
        "learned selectors, with exercises": FOLDER / "learned-needle.txt",
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


def _whole(name: str) -> dict[int, dict[str, Any]]:
    """Results over all depths, by length."""
    return {f["length"]: f for f in _ruler(name) if f["depth"] is None}


def single() -> str:
    """Single needles by length."""
    files = {
        "learned selectors": "learned-single-training.json",
        "dense": "dense-single.json",
        "learned selectors without rotation": "unrotated-single.json",
        "learned selectors, held-out wording": "learned-single-held-out.json",
    }
    records = {label: _whole(name) for label, name in files.items()}
    lengths = sorted({length for found in records.values() for length in found})
    rows = [
        [label, *(f"{found[n]['score']:.0%}" if n in found else "" for n in lengths)]
        for label, found in records.items()
    ]
    return _rows(["", *map(_k, lengths)], rows)


def probe() -> str:
    """The layers and KV heads that attend to the needle's block, and whether they choose it."""
    rows = []
    for found in json.loads((FOLDER / "learned-probe.json").read_text(encoding="utf-8"))["found"]:
        for cell in found["cells"]:
            if cell["mass"] > 0.2:
                shares = (f"{cell[key]:.0%}" for key in ("chosen", "chosen_if_right", "chosen_if_wrong"))
                place = f"layer {cell['layer']}, KV head {cell['kv_head']}"
                rows.append([_k(found["length"]), place, f"{cell['mass']:.2f}", f"{cell['rank']:g}", *shares])
    return _rows(["length", "", "attention", "rank", "chosen", "right answers", "wrong answers"], rows)


def more_training() -> str:
    """Single needles after training the selectors alone."""
    files = {
        "as trained": "learned-single-training.json",
        "30% exercises": "selectors-30.json",
        "90% exercises, 16 times the queries": "selectors-90.json",
        "the same, learning rate 3e-3": "selectors-90-fast.json",
    }
    records = {label: _whole(name) for label, name in files.items()}
    lengths = sorted(records["30% exercises"])
    rows = [[label, *(_cell(found[n]) for n in lengths)] for label, found in records.items()]
    return _rows(["200 more steps for the selectors", *map(_k, lengths)], rows)


def losses() -> str:
    """Held-out loss at the same step of the same run through the data."""
    kinds = {"learned": "learned selectors", "unrotated": "learned selectors without rotation", "dense": "dense"}
    read = {}
    for kind in kinds:
        with (FOLDER / f"{kind}-validation.csv").open(encoding="utf-8") as stream:
            read[kind] = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(stream)}
    steps = sorted(read["dense"])
    rows = [[name, *(f"{read[kind][n]:.4f}" for n in steps)] for kind, name in kinds.items()]
    return _rows(["", *(f"step {n:,}" for n in steps)], rows)


def depths() -> str:
    """Single needles by depth; the last row leaves out the ends, which every query reads."""
    found = [f for f in _ruler("learned-single-training.json") if f["depth"] is not None]
    lengths = (8192, 32_768, 65_536)
    every = sorted({f["depth"] for f in found})
    rows = []
    for depth in every:
        cells = {f["length"]: f for f in found if f["depth"] == depth}
        rows.append([f"{depth:.0%}", *(_cell(cells[n]) for n in lengths)])
    inner = [[f for f in found if f["length"] == n and 0 < f["depth"] < 1] for n in lengths]
    shares = (sum(f["right"] for f in cells) / sum(f["questions"] for f in cells) for cells in inner)
    rows.append([f"**{every[1]:.0%} to {every[-2]:.0%}**", *(f"**{share:.0%}**" for share in shares)])
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


def _captured(name: str) -> dict[int, dict[str, float]]:
    """Means over layers, by step."""
    with (FOLDER / name).open(encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    return {
        step: {
            key: statistics.fmean(float(row[key]) for row in read if int(row["step"]) == step)
            for key in ("mass", "best", "random")
        }
        for step in sorted({int(row["step"]) for row in read})
    }


def selectors() -> str:
    """Share of the attention to free blocks that the chosen blocks receive, mean over layers."""
    rotated, unrotated = _captured("learned-selectors.csv"), _captured("unrotated-selectors.csv")
    rows = [
        [f"{step:,}", f"{means['mass']:.2f}", f"{unrotated[step]['mass']:.2f}", f"{means['best']:.2f}",
         f"{means['random']:.2f}"]
        for step, means in rotated.items()
    ]  # fmt: skip
    return _rows(["step", "captured", "without rotation", "best possible", "at random"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "retrieval-needles": needles,
    "retrieval-single": single,
    "retrieval-probe": probe,
    "retrieval-more-training": more_training,
    "retrieval-losses": losses,
    "retrieval-depths": depths,
    "retrieval-tasks": tasks,
    "retrieval-context": context,
    "retrieval-selectors": selectors,
}

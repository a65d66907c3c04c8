"""Tables of docs/results/retrieval.md, for scripts/results_tables.py. Each reads the files of the runs that exist."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from result_files import RESULTS, change, k, needles_found, read_csv, read_eval, table
from result_files import losses as read_losses

FOLDER = RESULTS / "retrieval"
SETTINGS = RESULTS / "block-settings"
CONVERSION = RESULTS / "conversion"


def _ruler(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))["found"]
    return found


def _cell(result: dict[str, Any]) -> str:
    """Percent, with its 95% interval."""
    return f"{result['score']:.0%} ({result['low']:.0%}–{result['high']:.0%})"


def needles() -> str:
    """Sentences found in plain text, of 176 per length."""
    files = {
        "NSA, learned selectors": FOLDER / "learned-needle.txt",
        "two-branch, learned selectors": FOLDER / "two-branch-needle.txt",
        "block-sparse, learned selectors": FOLDER / "block-sparse-needle.txt",
        "dense, third run": FOLDER / "dense-needle.txt",
        "NSA, another run, step 1,700": CONVERSION / "scratch-needle.txt",
        "two-branch, step 1,700": FOLDER / "two-branch-1700-needle.txt",
        "block-sparse, step 1,700": FOLDER / "block-sparse-1700-needle.txt",
        "dense, first run, step 1,700": CONVERSION / "dense-needle.txt",
        "dense, second run, step 1,700": CONVERSION / "second" / "dense-needle.txt",
        "first dense run, converted to block-sparse": CONVERSION / "learned-304-needle.txt",
        "second dense run, converted to block-sparse": CONVERSION / "second" / "learned-304-needle.txt",
        "NSA, compressed scores, no exercises": SETTINGS / "needle-nsa.txt",
        "dense, no exercises": SETTINGS / "needle-dense.txt",
    }
    found = {name: needles_found(read_eval(path)) for name, path in files.items()}
    lengths = list(found["NSA, learned selectors"])
    rows = [[name, *(str(by[n][0]) for n in lengths)] for name, by in found.items()]
    return table(["", *map(k, lengths)], rows)


def _whole(name: str) -> dict[int, dict[str, Any]]:
    """Results over all depths, by length."""
    return {f["length"]: f for f in _ruler(name) if f["depth"] is None}


def _scores(name: str) -> dict[int, float]:
    """Share of questions answered, by length; of an evaluation that was cut off, from what it printed."""
    if name.endswith(".json"):
        return {length: f["score"] for length, f in _whole(name).items()}
    lines = (FOLDER / name).read_text(encoding="utf-8")
    found = re.findall(r"^ *([\d,]+) tokens, niah_single_2 +([\d.]+)%", lines, re.MULTILINE)
    return {int(length.replace(",", "")): float(percent) / 100 for length, percent in found}


def single() -> str:
    """Single needles by length."""
    files = {
        "NSA, learned selectors": "learned-single-training.json",
        "two-branch, learned selectors": "two-branch-single-training.json",
        "block-sparse, learned selectors": "block-sparse-single-training.json",
        "dense": "dense-single-training.txt",
        "NSA, held-out wording": "learned-single-held-out.json",
        "two-branch, held-out wording": "two-branch-single-held-out.json",
        "block-sparse, held-out wording": "block-sparse-single-held-out.json",
        "dense, held-out wording": "dense-single-held-out.txt",
    }
    records = {label: _scores(name) for label, name in files.items()}
    lengths = sorted({length for found in records.values() for length in found})
    rows = [[label, *(f"{found[n]:.0%}" if n in found else "" for n in lengths)] for label, found in records.items()]
    return table(["", *map(k, lengths)], rows)


def probe() -> str:
    """The layers and KV heads that attend to the needle's block at some length, and whether they choose it."""
    found = json.loads((FOLDER / "learned-probe.json").read_text(encoding="utf-8"))["found"]
    rows = []
    for cells in zip(*(record["cells"] for record in found), strict=True):  # one layer and KV head at every length
        if max(cell["mass"] for cell in cells) > 0.2:
            numbers = (f"{cell['mass']:.2f}, {cell['rank']:g}, {cell['chosen']:.0%}" for cell in cells)
            rows.append([f"layer {cells[0]['layer']}, KV head {cells[0]['kv_head']}", *numbers])
    return table(["attention, rank, chosen", *(k(record["length"]) for record in found)], rows)


ENDS = {1700: 8192, 2000: 32768, 2500: 65536}  # last step and length of each stage


def validations(kind: str) -> dict[int, float]:
    """Held-out loss by step."""
    return read_losses(FOLDER / f"{kind}-validation.csv")


def step_times(kind: str) -> dict[int, float]:
    """Median seconds of a step by the last step of its stage."""
    seconds = {int(row["step"]): float(row["step_seconds"]) for row in read_csv(FOLDER / f"{kind}-training.csv")}
    starts = (0, *ENDS)
    return {
        end: statistics.median(s for n, s in seconds.items() if start < n <= end)
        for start, end in zip(starts, ENDS, strict=False)
    }


def minutes(kind: str, step: int) -> float:
    """Time of all steps up to this one, each as long as the median of its stage."""
    starts = (0, *ENDS)
    times = step_times(kind).items()
    return sum(s * max(0, min(step, end) - start) for start, (end, s) in zip(starts, times, strict=False)) / 60


def losses() -> str:
    """Held-out loss at the same step of the same run through the data, and the time that the steps took."""
    kinds = {
        "learned": "NSA, learned selectors",
        "two-branch": "two-branch, learned selectors",
        "block-sparse": "block-sparse, learned selectors",
        "dense": "dense",
    }
    rows = []
    for kind, name in kinds.items():
        loss, times = validations(kind), step_times(kind)
        cells = (f"{loss[end]:.4f}, {times[end] * 1000:.0f} ms, {minutes(kind, end):.1f} min" for end in ENDS)
        rows.append([name, *cells])
    head = (f"step {end:,}, {k(length)}" for end, length in ENDS.items())
    return table(["loss, time of a step, of all steps so far", *head], rows)


def positions() -> str:
    """Held-out loss in sequences of 8,192 by position in the document, after the same steps."""
    files = {"dense": "dense", "NSA": "learned", "two-branch": "two-branch", "block-sparse": "block-sparse"}
    found = {name: read_eval(FOLDER / f"{file}-perplexity.txt")["by_position"] for name, file in files.items()}
    if len({tuple(b["tokens"] for b in bins) for bins in found.values()}) != 1:
        raise ValueError("the models were evaluated on different text: run the evaluations again")
    shown = {name: [b for b in bins if b["first"] in (8, 64, 512, 1024, 2048, 4096)] for name, bins in found.items()}
    dense = shown["dense"]
    rows = [[name, *(f"{b['loss']:.4f}" for b in bins)] for name, bins in shown.items()]
    for name in ("NSA", "two-branch", "block-sparse"):
        ratios = (b["loss"] / a["loss"] for a, b in zip(dense, shown[name], strict=True))
        rows.append([f"{name} vs dense", *map(change, ratios)])
    return table(["tokens before", *(f"{b['first']:,}–{b['last']:,}" for b in dense)], rows)


def tasks() -> str:
    """All tasks by length, and what other models find at the longest."""
    files = {"NSA": "learned", "two-branch": "two-branch", "block-sparse": "block-sparse", "dense": "dense"}
    found = {
        kind: {(f["task"], f["length"]): f for f in _ruler(f"{name}-tasks.json") if f["depth"] is None}
        for kind, name in files.items()
    }
    columns = [("NSA", 1024), *((kind, 8192) for kind in files)]
    rows = [
        [f"`{task}`", *(_cell(found[kind][task, length]) for kind, length in columns)]
        for task in dict.fromkeys(task for task, _ in found["NSA"])
    ]
    return table(["task", *(f"{kind}, {k(length)}" for kind, length in columns)], rows)


def context() -> str:
    """Loss of the same last tokens with more context."""
    kinds = {"NSA": "learned", "two-branch": "two-branch", "block-sparse": "block-sparse", "dense": "dense"}
    found = [read_eval(FOLDER / f"{name}-context.txt")["by_context"] for name in kinds.values()]
    rows = []
    for cells in zip(*found, strict=True):
        row = [k(cells[0]["tokens"])]
        for cell, record in zip(cells, found, strict=True):
            row += [f"{cell['loss']:.4f}", _gain(cell["losses"], record[0]["losses"])]
        rows.append(row)
    base = f"against {k(found[0][0]['tokens'])}"
    return table(["tokens read", *(name for kind in kinds for name in (kind, base))], rows)


def _gain(losses: list[float], base: list[float]) -> str:
    differences = [a - b for a, b in zip(losses, base, strict=True)]
    if not any(differences):
        return ""
    return f"{statistics.fmean(differences):+.4f} ± {statistics.stdev(differences) / len(differences) ** 0.5:.4f}"


SMALL = {
    "dense": "dense",
    "learned": "NSA, learned selectors",
    "all": "NSA, every block",
    "random": "NSA, random blocks",
}


def small() -> str:
    """Models of 13M parameters: losses against dense of the same seed, and what they find at 8k, for every seed."""
    found = [row for row in read_csv(FOLDER / "small.csv") if not row["depth"]]
    runs = {(row["kind"], row["seed"]): row for row in found}
    rows = []
    for kind, name in SMALL.items():
        seeds = sorted(seed for each, seed in runs if each == kind)
        cells = []
        for column in ("loss", "far_loss"):
            losses = [float(runs[kind, seed][column]) for seed in seeds]
            dense = [float(runs["dense", seed][column]) for seed in seeds]
            changes = (change(a / b).removesuffix("%") for a, b in zip(losses, dense, strict=True))
            cells.append(" / ".join(f"{loss:.3f}" for loss in losses) if kind == "dense" else " / ".join(changes) + "%")
        for task, digits in (("niah_single_2", 1), ("niah_multikey_1", 0)):
            at = (row for row in found if (row["kind"], row["task"], row["length"]) == (kind, task, "8192"))
            shares = [
                100 * int(row["right"]) / int(row["questions"]) for row in sorted(at, key=lambda row: row["seed"])
            ]
            cells.append(" / ".join(f"{share:.{digits}f}" for share in shares))
        rows.append([name, *cells])
    return table(["", "loss, vs dense", "far, vs dense", "one fact, %", "one of four, %"], rows)


TOY = {
    "dense": "dense",
    "base+all": "NSA, every block",
    "learned": "NSA, learned selector",
    "two+learned": "two-branch, learned selector",
    "sparse+learned": "block-sparse, learned selector",
    "tie+mean": "NSA, compressed scores, tied means",
    "base": "NSA, compressed scores, learned φ",
    "random": "NSA, random blocks",
}


def toy(length: int) -> str:
    """The copying task of scripts/choice_toy.py: what is read from far back, for every seed."""
    rows = []
    found = read_csv(FOLDER / f"toy-{length}.csv")
    for variant, name in TOY.items():
        runs = sorted((row for row in found if row["variant"] == variant), key=lambda row: int(row["seed"]))
        if runs:
            shares = [[100 * float(row[c]) for row in runs if row[c]] for c in ("correct_far", "hit_far", "chance_far")]
            cells = [" / ".join(f"{share:.1f}" for share in each) for each in shares[:2]]
            chance = f"{statistics.fmean(shares[2]):.0f}" if shares[2] else ""
            rows.append([name, *cells, chance, " / ".join(row["copied"] for row in runs)])
    return table(["", "correct, far, %", "source chosen, %", "by chance", "nats per copied token"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "retrieval-needles": needles,
    "retrieval-single": single,
    "retrieval-probe": probe,
    "retrieval-losses": losses,
    "retrieval-positions": positions,
    "retrieval-tasks": tasks,
    "retrieval-context": context,
    "retrieval-small": small,
    "retrieval-toy": lambda: toy(512),
    "retrieval-toy-2048": lambda: toy(2048),
}

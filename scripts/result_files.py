"""Files under docs/results: reading them, and tables of one kind of file. For the scripts that fill the pages."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
BRANCHES = ("compressed", "selected", "window")

Records = dict[str, dict[str, Any]]


# Reading result files


def read_eval(path: Path) -> dict[str, Any]:
    """The JSON line that ends the output of every `tercet eval`."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not end with the JSON line of `tercet eval`: {error}") from error
    return record


def read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8") as stream:
            return list(csv.DictReader(stream))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def losses(path: Path) -> dict[int, float]:
    """Validation loss by step."""
    return {int(row["step"]): float(row["loss"]) for row in read_csv(path)}


def needles_found(record: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Needles found and asked, by length."""
    totals: dict[int, tuple[int, int]] = {}
    for one in record["found"]:
        right, asked = totals.get(one["length"], (0, 0))
        totals[one["length"]] = right + one["right"], asked + one["asked"]
    return dict(sorted(totals.items()))


# Pages

MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def fill(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with every marked table generated anew."""

    def generated(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise ValueError(f"table:{match[2]} is unknown: pick one of {', '.join(tables)}")
        return f"{match[1]}{tables[match[2]]()}\n{match[3]}"

    return MARKED.sub(generated, page)


# Formatting


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def change(ratio: float, digits: int = 1) -> str:
    return f"{ratio - 1:+.{digits}%}".replace("-", "−")


def span(first: int, last: int) -> str:
    return f"{first:,}–{last:,}" if first < last else f"{first:,}"


def share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def k(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


# Tables of one kind of result file; the last record is the baseline


def by_context(records: Records, first: int = 0) -> str:
    """Loss by context length: one row per bin, one column per model, then each model against the last one."""
    bins = {name: [*record["by_position"], record["all"]] for name, record in records.items()}
    measured = {name: [(b["first"], b["last"], b["tokens"]) for b in found] for name, found in bins.items()}
    *others, base = records
    for name in others:
        if measured[name] != measured[base]:
            raise ValueError(f"{name} was measured on other tokens than {base}: evaluate both on the same tokens")
    rows = []
    for at, (low, high, tokens) in enumerate(measured[base]):
        whole = at == len(measured[base]) - 1
        if low < first and not whole:
            continue
        found = {name: column[at]["loss"] for name, column in bins.items()}
        rows.append(
            [
                "all" if whole else span(low, high),
                f"{tokens:,}",
                *(f"{loss:.4f}" for loss in found.values()),
                *(change(found[name] / found[base]) for name in others),
            ]
        )
    return table(["context", "tokens", *records, *(f"{name} vs {base}" for name in others)], rows)


def by_step(records: Records) -> str:
    """Validation loss: one row per step at which all runs were validated."""
    found = {name: {int(r["step"]): float(r["loss"]) for r in record["rows"]} for name, record in records.items()}
    *others, base = found
    rows = [
        [
            f"{step:,}",
            *(f"{by[step]:.3f}" for by in found.values()),
            *(change(found[name][step] / found[base][step]) for name in others),
        ]
        for step in sorted(set.intersection(*map(set, found.values())))
    ]
    return table(["step", *found, *(f"{name} vs {base}" for name in others)], rows)


def needles(records: Records, lengths: Iterable[int] | None = None) -> str:
    """Loss of the answer (correct answers): one row per distance from the end, one column per length and model."""
    found = {
        (length, name): [f for f in record["found"] if f["length"] == length]
        for length in sorted(lengths or {f["length"] for record in records.values() for f in record["found"]})
        for name, record in records.items()
    }
    depths = sorted({f["depth"] for column in found.values() for f in column}, reverse=True)
    rows = []
    for depth in depths:
        at = [[f for f in column if f["depth"] == depth] for column in found.values()]
        rows.append([f"{1 - depth:.0%}", *(f"{f[0]['nats']:.2f} ({f[0]['right']})" if f else "" for f in at)])
    totals = [f"{sum(f['right'] for f in column)} of {sum(f['asked'] for f in column)}" for column in found.values()]
    rows.append(["**correct**", *totals])
    return table(["distance", *(f"{name}, {length / 1024:g}k" for length, name in found)], rows)


def gate_shares(records: Records) -> str:
    """Share of its gates that each layer gives each branch at the last reading."""
    columns: dict[str, list[str]] = {}
    for name, record in records.items():
        last = max(int(r["step"]) for r in record["rows"])
        end = [r for r in record["rows"] if int(r["step"]) == last]
        for branch in BRANCHES:
            columns[f"{name}, {branch}"] = [share(float(r[f"gate_share_{branch}"])) for r in end]
    layers = range(max(map(len, columns.values())))
    return table(["layer", *columns], [[str(at), *(column[at] for column in columns.values())] for at in layers])

"""What runs left behind as Markdown tables: what `tercet eval` printed (its last line), and two files of a run folder.

python scripts/eval_tables.py NSA=perplexity-nsa.txt dense=perplexity-dense.txt    # each against the last one
python scripts/eval_tables.py NSA=needle-nsa.txt dense=needle-dense.txt            # the answer's loss (how many right)
python scripts/eval_tables.py NSA=nsa/val.csv dense=dense/val.csv                  # held-out losses, likewise
python scripts/eval_tables.py NSA=nsa/k_stats.csv                                  # the gates of each layer at the end
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any


def last_line(path: Path) -> dict[str, Any]:
    """The JSON with which every evaluation ends."""
    try:
        record: dict[str, Any] = json.loads(path.read_text().strip().splitlines()[-1])
    except (OSError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not end with the JSON line of a `tercet eval`: {error}") from error
    return record


def rows_of(path: Path) -> dict[str, Any]:
    """A run's val.csv or k_stats.csv."""
    try:
        with path.open(encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for kind, columns in COLUMNS.items():
        if rows and columns <= rows[0].keys():
            return {"eval": kind, "rows": rows}
    raise ValueError(f"{path} is neither a val.csv nor a k_stats.csv of a run")


COLUMNS = {"gates": {"step", "layer", "gate_share_compressed"}, "validations": {"step", "loss"}}


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([row(head), "|" + "---|" * len(head), *(row(cells) for cells in rows)])


def by_context(records: dict[str, dict[str, Any]]) -> str:
    """A column for each stretch of positions that all records have, and one for all of them."""
    columns = {name: [*record["by_position"], record["all"]] for name, record in records.items()}
    spans = {name: [(s["first"], s["last"], s["tokens"]) for s in stretches] for name, stretches in columns.items()}
    *others, base = records
    for name in others:
        if spans[name] != spans[base]:
            raise ValueError(f"{name} was measured on other tokens than {base}: evaluate both on the same ones")
    head = [f"{a:,}–{b:,}" if a < b else f"{a:,}" for a, b, _ in spans[base]]
    rows = [["held-out tokens", *(f"{tokens:,}" for *_, tokens in spans[base])]]
    rows += [[name, *(f"{s['loss']:.4f}" for s in stretches)] for name, stretches in columns.items()]
    losses = {name: [s["loss"] for s in stretches] for name, stretches in columns.items()}
    return table(["context, tokens", *head[:-1], "all"], rows + against_the_last(losses))


def against_the_last(losses: dict[str, list[float]]) -> list[list[str]]:
    *others, base = losses
    compared = ((name, zip(losses[name], losses[base], strict=True)) for name in others)
    return [
        [f"{name} against {base}", *(f"{mine / its - 1:+.1%}".replace("-", "−") for mine, its in pairs)]
        for name, pairs in compared
    ]


def validations(records: dict[str, dict[str, Any]]) -> str:
    """A column for each step at which all runs were validated."""
    found = {name: {int(r["step"]): float(r["loss"]) for r in record["rows"]} for name, record in records.items()}
    steps = sorted(set.intersection(*map(set, found.values())))
    losses = {name: [by_step[step] for step in steps] for name, by_step in found.items()}
    rows = [[name, *(f"{loss:.3f}" for loss in values)] for name, values in losses.items()]
    return table(["step", *(f"{step:,}" for step in steps)], rows + against_the_last(losses))


def gates(records: dict[str, dict[str, Any]]) -> str:
    """What share of its gates each layer gives to each branch, at the last reading."""
    lines, layers = [], 0
    for name, record in records.items():
        last = max(int(r["step"]) for r in record["rows"])
        end = [r for r in record["rows"] if int(r["step"]) == last]
        layers = max(layers, len(end))
        for branch in ("compressed", "selected", "window"):
            shares = [float(r[f"gate_share_{branch}"]) for r in end]
            lines.append([f"{name}, {branch}", *(f"{s:.0%}" if s >= 0.01 else f"{s:.1%}" for s in shares)])
    return table(["layer", *map(str, range(layers))], lines)


def needles(records: dict[str, dict[str, Any]]) -> str:
    """A row for each length and record, a column for each distance from the end as a part of the length."""
    depths = sorted({found["depth"] for record in records.values() for found in record["found"]}, reverse=True)
    rows = []
    for length in sorted({found["length"] for record in records.values() for found in record["found"]}):
        for name, record in records.items():
            here = {found["depth"]: found for found in record["found"] if found["length"] == length}
            cells = [f"{here[d]['nats']:.2f} ({here[d]['right']})" if d in here else "" for d in depths]
            right, asked = (sum(found[key] for found in here.values()) for key in ("right", "asked"))
            rows.append([f"{name}, {length:,} tokens", *cells, f"{right} of {asked}"])
    return table(["back, part of the length", *(f"{1 - depth:.0%}" for depth in depths), "right"], rows)


def main(arguments: list[str]) -> int:
    if not arguments or any("=" not in given for given in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(_tables({name: _read(Path(file)) for name, _, file in (given.partition("=") for given in arguments)}))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> dict[str, Any]:
    return rows_of(path) if path.suffix == ".csv" else last_line(path)


def _tables(records: dict[str, dict[str, Any]]) -> str:
    kinds = {record["eval"] for record in records.values()}
    makers = {"perplexity": by_context, "needle": needles, "validations": validations, "gates": gates}
    if len(kinds) != 1 or not kinds <= makers.keys():
        raise ValueError(f"{', '.join(sorted(kinds))}: give files of one kind: {', '.join(makers)}")
    return makers[kinds.pop()](records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

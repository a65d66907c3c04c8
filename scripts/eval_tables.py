"""Evaluations that ran elsewhere as Markdown tables: from the last line of what `tercet eval` printed.

python scripts/eval_tables.py NSA=perplexity-nsa.txt dense=perplexity-dense.txt    # each against the last one
python scripts/eval_tables.py NSA=needle-nsa.txt dense=needle-dense.txt            # the answer's loss (how many right)
"""

from __future__ import annotations

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
    for name in others:
        ratios = [mine["loss"] / its["loss"] - 1 for mine, its in zip(columns[name], columns[base], strict=True)]
        rows.append([f"{name} against {base}", *(f"{ratio:+.1%}".replace("-", "−") for ratio in ratios)])
    return table(["context, tokens", *head[:-1], "all"], rows)


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
        print(_tables({name: last_line(Path(file)) for name, _, file in (given.partition("=") for given in arguments)}))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _tables(records: dict[str, dict[str, Any]]) -> str:
    kinds = {record["eval"] for record in records.values()}
    makers = {"perplexity": by_context, "needle": needles}
    if len(kinds) != 1 or not kinds <= makers.keys():
        raise ValueError(f"{', '.join(sorted(kinds))}: give runs of perplexity, or runs of needle")
    return makers[kinds.pop()](records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

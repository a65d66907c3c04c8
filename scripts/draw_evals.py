"""Plot saved output of `tercet eval`.

python scripts/draw_evals.py loss-by-position.svg NSA=perplexity-nsa.txt dense=perplexity-dense.txt
python scripts/draw_evals.py loss-by-position.svg --from 8 NSA=perplexity-nsa.txt …  # skip the first tokens
python scripts/draw_evals.py needle-nsa.svg loss=needle-nsa.txt                      # any other name plots the accuracy
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tercet.inference.needle import NeedleResult
from tercet.inference.perplexity import PositionBucket
from tercet.inference.plots import needle_map, perplexity_plot


def last_line(path: Path) -> dict[str, Any]:
    """The JSON line that ends every evaluation."""
    return json.loads(path.read_text().strip().splitlines()[-1])


def fields(kind: type, record: dict[str, Any]) -> Any:
    return kind(**{name: record[name] for name in kind.__dataclass_fields__})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("evaluations", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--from", dest="first", type=int, default=0, help="least context to plot, in tokens")
    given = parser.parse_args(arguments)
    if nameless := [one for one in given.evaluations if "=" not in one]:
        parser.error(f"{nameless[0]}: expected NAME=FILE")
    records = {name: last_line(Path(file)) for name, _, file in (one.partition("=") for one in given.evaluations)}
    kinds = {record["eval"] for record in records.values()}
    if kinds == {"perplexity"}:
        curves = {name: [fields(PositionBucket, s) for s in record["by_position"]] for name, record in records.items()}
        perplexity_plot({n: [s for s in curve if s.first >= given.first] for n, curve in curves.items()}, given.picture)
    elif kinds == {"needle"} and len(records) == 1:
        ((name, record),) = records.items()
        needle_map([fields(NeedleResult, f) for f in record["found"]], given.picture, loss=name == "loss")
    else:
        parser.error(f"{', '.join(sorted(kinds))}: give perplexity files, or one needle file")
    print(given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

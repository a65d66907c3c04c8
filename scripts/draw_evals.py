"""Pictures of evaluations that ran elsewhere: from the last line of what `tercet eval` printed.

python scripts/draw_evals.py loss-by-position.svg NSA=perplexity-nsa.txt dense=perplexity-dense.txt
python scripts/draw_evals.py needle-nsa.svg NSA=needle-nsa.txt
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tercet.inference.needle import Found
from tercet.inference.perplexity import Stretch
from tercet.inference.pictures import needle_map, perplexity_plot


def last_line(path: Path) -> dict[str, Any]:
    """The JSON with which every evaluation ends."""
    return json.loads(path.read_text().strip().splitlines()[-1])


def fields(kind: type, record: dict[str, Any]) -> Any:
    return kind(**{name: record[name] for name in kind.__dataclass_fields__})


def main(arguments: list[str]) -> int:
    if len(arguments) < 2 or any("=" not in given for given in arguments[1:]):
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(arguments[0])
    records = {name: last_line(Path(file)) for name, _, file in (given.partition("=") for given in arguments[1:])}
    kinds = {record["eval"] for record in records.values()}
    if kinds == {"perplexity"}:
        perplexity_plot({n: [fields(Stretch, s) for s in r["by_position"]] for n, r in records.items()}, target)
    elif kinds == {"needle"} and len(records) == 1:
        ((name, record),) = records.items()
        needle_map([fields(Found, f) for f in record["found"]], target, loss=name == "loss")
    else:
        print(f"{', '.join(sorted(kinds))}: give runs of perplexity, or one of needle", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

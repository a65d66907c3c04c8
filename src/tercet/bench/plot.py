"""Cost growth as a picture: time and memory of forward + backward over the length, from a bench's JSON line.

python -m tercet.bench.attention --shapes C1x8k,... --inputs random | tail -1 > growth.json
python -m tercet.bench.plot growth.json docs/attention-cost.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tercet.bench.attention import SHAPES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tercet bench plot", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON line of tercet bench attention")
    parser.add_argument("picture", type=Path, help="SVG to write")
    args = parser.parse_args(argv)
    try:
        import matplotlib
    except ImportError:
        print("tercet bench plot needs matplotlib: pip install 'tercet[report]'", file=sys.stderr)
        return 2
    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    found = json.loads(args.results.read_text())
    rows = sorted((r for r in found["results"] if r["correct"]), key=lambda r: SHAPES[r["shape"]].T)
    plt.rcParams |= {"font.size": 9, "svg.hashsalt": "tercet"}
    figure, (time, memory) = plt.subplots(1, 2, figsize=(8, 3))
    for name, label in (("nsa", "Native Sparse Attention"), ("cudnn", "dense, cuDNN")):
        mine = [r for r in rows if f"{name}_both_ms" in r]
        lengths = [SHAPES[r["shape"]].T for r in mine]
        time.loglog(lengths, [r[f"{name}_both_ms"] for r in mine], "o-", base=2, label=label)
        memory.loglog(lengths, [r[f"{name}_peak_gib"] for r in mine], "o-", base=2, label=label)
    for axis, title in ((time, "forward + backward, ms"), (memory, "peak memory, GiB")):
        axis.set(title=title, xlabel="tokens")
        axis.grid(alpha=0.3)
    time.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(args.picture, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())

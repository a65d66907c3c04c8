"""Train NSA and dense on the same data with the same budget and plot both loss curves.

python scripts/nsa_vs_dense.py                       # train `tiny` and its dense baseline, then plot
python scripts/nsa_vs_dense.py --train.steps 2000    # other flags go to both runs
python scripts/nsa_vs_dense.py --draw-only RUN RUN   # plot existing runs
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable with colour blindness, on light and dark


def column(path: Path, name: str) -> list[float]:
    with path.open() as stream:
        return [float(row[name]) for row in csv.DictReader(stream)]


def smoothed(values: list[float], over: int) -> list[float]:
    """Centred moving average over `over` values; the window shrinks towards both ends."""
    half = over // 2
    reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [sum(values[i - r : i + r + 1]) / (2 * r + 1) for i, r in enumerate(reach)]


def draw(
    runs: dict[str, Path], target: Path, title: str, limits: tuple[float | None, float | None], smooth: int = 1
) -> None:
    """Plot training loss as thin lines and validation loss as dots."""
    matplotlib.rcParams["svg.hashsalt"] = "tercet"  # reproducible files
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, (name, run) in zip(COLOURS, runs.items(), strict=False):
        losses = smoothed(column(run / "training.csv", "loss"), smooth)
        axes.plot(column(run / "training.csv", "step"), losses, color=colour, lw=1, alpha=0.7)
        steps, losses = column(run / "val.csv", "step"), column(run / "val.csv", "loss")
        axes.plot(steps, losses, "o-", color=colour, lw=0, ms=6, label=f"{name}: validation {losses[-1]:.3f}")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title, ylim=limits)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    print(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw-only", nargs="+", type=Path, metavar="RUN", help="plot these runs without training")
    parser.add_argument("--presets", nargs="+", default=["tiny", "tiny-dense"])
    parser.add_argument("--runs", type=Path, default=Path("runs/nsa-vs-dense"))
    parser.add_argument("--output", type=Path, default=Path("docs/images/nsa-vs-dense.svg"))
    parser.add_argument("--title", default="Python source, same data, same budget")
    parser.add_argument("--lowest", type=float, help="lower end of the loss axis")
    parser.add_argument("--highest", type=float, help="upper end of the loss axis")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="moving average over N logged training losses"
    )
    arguments, flags = parser.parse_known_args()  # unknown flags go to `tercet train`
    if arguments.draw_only:
        draw(
            {run.name: run for run in arguments.draw_only},
            arguments.output,
            arguments.title,
            (arguments.lowest, arguments.highest),
            arguments.smooth,
        )
        return 0
    runs: dict[str, Path] = {}
    for preset in arguments.presets:
        runs[preset] = arguments.runs / preset
        command = [sys.executable, "-m", "tercet", "train", "--preset", preset, "--run.dir", str(runs[preset])]
        command += ["--train.val_every", "60", "--log.every", "10", "--resume", "auto"]
        command += flags
        subprocess.run(command, check=True)
    draw(runs, arguments.output, arguments.title, (arguments.lowest, arguments.highest), arguments.smooth)
    return 0


if __name__ == "__main__":
    sys.exit(main())

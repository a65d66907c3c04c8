"""Results of scripts/evidence.sh: collect them, and make the tables and pictures of docs/results/evidence.md.

python scripts/evidence_tables.py collect RUN...   # run folders -> docs/results/evidence/NAME.json and NAME.toml
python scripts/evidence_tables.py draw             # loss against tokens and against seconds, as SVG
python scripts/results_tables.py                   # fills the tables below between their markers

Names of runs: CORPUS-KIND-SEED, CORPUS-KIND-small-LR, CORPUS-KIND-LENGTH-SECONDSs. Seconds are steps times the median
step, so that compilation, validation and saves do not count.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results" / "evidence"
KINDS = {
    "nsa": "NSA (`m7c`)",
    "learned": "NSA, learned selector",
    "block-sparse": "block-sparse, learned selector",
    "all-blocks": "NSA, every block read",
    "random-blocks": "NSA, random blocks",
    "dense": "dense",
    "dense-matched": "dense, parameters matched",
}
NAME = re.compile(
    rf"(?P<corpus>\w+)-(?P<kind>{'|'.join(sorted(KINDS, key=len, reverse=True))})-"
    r"(?:small-(?P<rate>[\d.e-]+)|(?P<length>\d+)-(?P<seconds>\d+)s|(?P<seed>\d+))"
)
POINTS = 100  # of a training curve
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")

Run = dict[str, Any]


# ------------------------------------------------------------ collect


def collect(folder: Path) -> Run:
    """What the tables need of a run folder, with its evaluations if there are any."""
    from tercet.config.load import load
    from tercet.model.cost import parameters

    match = NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(
            f"{folder}: expected a name such as linux-nsa-1, linux-nsa-small-4.4e-3 or linux-nsa-8192-600s"
        )
    config = load(file=folder / "config.toml").config
    training, validation = (_read_csv(folder / name) for name in ("training.csv", "val.csv"))
    if int(training[-1]["step"]) != config.train.steps:
        raise ValueError(f"{folder}: {training[-1]['step']} of {config.train.steps} steps: continue the run first")
    step_seconds = statistics.median(float(row["step_seconds"]) for row in training)
    environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    return {
        "name": folder.name,
        **match.groupdict(),
        "parameters": parameters(config.model).total,
        "learning_rate": config.train.lr,
        "tokens_per_step": config.train.tokens_per_step,
        "steps": config.train.steps,
        "step_seconds": step_seconds,
        "memory_gib": max(float(row["memory_gib"] or 0) for row in training),
        "training": _thin([[int(row["step"]), float(row["loss"])] for row in training]),
        "validation": [[int(row["step"]), float(row["loss"])] for row in validation],
        "by_position": _evaluation(folder / "perplexity.txt", "by_position", ("first", "last", "tokens", "loss")),
        "needles": _evaluation(folder / "needle.txt", "found", ("length", "depth", "right", "asked")),
        "device": environment["device"],
        "versions": {name: environment["packages"].get(name) for name in ("torch", "triton")},
        "started": environment["started"],
    }


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _thin(points: list[list[float]]) -> list[list[float]]:
    """At most POINTS points: means of neighbours, at the last of their steps."""
    width = -(-len(points) // POINTS)
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    return [[part[-1][0], round(statistics.fmean(loss for _, loss in part), 5)] for part in parts]


def _evaluation(path: Path, key: str, fields: tuple[str, ...]) -> list[list[float]] | None:
    """Rows of an evaluation, whose last line is JSON; None if it was not made."""
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
    return [[row[field] for field in fields] for row in record[key]]


def save(run: Run, folder: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{run['name']}.json").write_text(json.dumps(run) + "\n", encoding="utf-8")
    config = (folder / "config.toml").read_text(encoding="utf-8")
    # wherever the corpus was
    config = re.sub(r"[^\"]*/(?=" + run["corpus"] + r"(?:/tokenizer\.json)?\")", "corpus/", config)
    (FOLDER / f"{run['name']}.toml").write_text(config, encoding="utf-8")


# ------------------------------------------------------------ read


def runs(**wanted: object) -> list[Run]:
    """Collected runs; `seed=...` keeps those that have one, `seed=None` those that have none."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]

    def matches(run: Run) -> bool:
        return all((run[key] is not None) if value is ... else run[key] == value for key, value in wanted.items())

    return [run for run in found if matches(run)]


def by_kind(found: Iterable[Run]) -> dict[str, list[Run]]:
    """In the order of KINDS."""
    found = list(found)
    groups = {kind: [run for run in found if run["kind"] == kind] for kind in KINDS}
    return {kind: group for kind, group in groups.items() if group}


def final(run: Run) -> float:
    return float(run["validation"][-1][1])


def _summary(values: list[float]) -> str:
    """Mean, and the range over seeds if there are several."""
    mean = f"{statistics.fmean(values):.4f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4f}–{max(values):.4f})"


def _against(values: list[float], base: list[float]) -> str:
    return f"{statistics.fmean(values) / statistics.fmean(base) - 1:+.1%}".replace("-", "−")


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |".replace("  ", " ") for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


# ------------------------------------------------------------ tables


def controls() -> str:
    """First corpus, equal tokens: every kind, mean and range over seeds."""
    groups = by_kind(runs(corpus="linux", seed=...))
    dense = [final(run) for run in groups["dense"]]
    rows = []
    for kind, group in groups.items():
        losses = [final(run) for run in group]
        against = "" if kind == "dense" else _against(losses, dense)
        step = statistics.median(run["step_seconds"] for run in group)
        rows.append(
            [KINDS[kind], str(len(group)), f"{group[0]['parameters']:,}", _summary(losses), against, f"{step:.3f}"]
        )
    return _rows(["", "seeds", "parameters", "held-out loss (range)", "vs dense", "seconds per step"], rows)


def seeds() -> str:
    """Every corpus: the same seed beside the same seed, so that the order of the data is the same."""
    rows = []
    for corpus in sorted({run["corpus"] for run in runs(seed=...)}):
        groups = by_kind(runs(corpus=corpus, seed=...))
        dense = {run["seed"]: final(run) for run in groups.get("dense", [])}
        for kind, group in groups.items():
            pairs = [final(run) / dense[run["seed"]] - 1 for run in group if run["seed"] in dense]
            if kind != "dense" and pairs:
                each = ", ".join(f"{pair:+.2%}".replace("-", "−") for pair in pairs)
                rows.append([corpus, KINDS[kind], each])
    return _rows(["corpus", "", "held-out loss vs dense with the same seed"], rows)


def context() -> str:
    """First corpus: loss by the number of tokens before, mean over seeds."""
    groups = by_kind(run for run in runs(corpus="linux", seed=...) if run["by_position"])
    bins = [(row[0], row[1]) for row in next(iter(groups.values()))[0]["by_position"] if row[0] >= 8]
    rows = []
    for first, last in bins:
        cells = []
        for group in groups.values():
            losses = [row[3] for run in group for row in run["by_position"] if row[0] == first]
            cells.append(f"{statistics.fmean(losses):.4f}")
        rows.append([f"{first:,}–{last:,}", *cells])
    return _rows(["context", *(KINDS[kind] for kind in groups)], rows)


def needles() -> str:
    """First corpus: needles found, mean over seeds, of all depths and trials."""
    groups = by_kind(run for run in runs(corpus="linux", seed=...) if run["needles"])
    lengths = sorted({row[0] for group in groups.values() for run in group for row in run["needles"]})
    rows = []
    for kind, group in groups.items():
        cells = []
        for length in lengths:
            found = [sum(row[2] for row in run["needles"] if row[0] == length) for run in group]
            asked = sum(row[3] for row in group[0]["needles"] if row[0] == length)
            cells.append(f"{statistics.fmean(found):.0f} of {asked}")
        rows.append([KINDS[kind], *cells])
    return _rows(["", *(f"{length // 1024}k" for length in lengths)], rows)


def rates() -> str:
    """The small model: held-out loss by learning rate."""
    groups = by_kind(runs(rate=...))
    found = sorted({run["learning_rate"] for group in groups.values() for run in group})
    rows = []
    for kind, group in groups.items():
        losses = {run["learning_rate"]: final(run) for run in group}
        best = min(losses.values())
        cells = {rate: f"**{loss:.4f}**" if loss == best else f"{loss:.4f}" for rate, loss in losses.items()}
        rows.append([KINDS[kind], *(cells.get(rate, "") for rate in found)])
    return _rows(["", *(f"{rate:g}" for rate in found)], rows)


def equal_time() -> str:
    """The same seconds of training for every kind, by length."""
    found = runs(length=...)
    rows = []
    for length in sorted({int(run["length"]) for run in found}):
        for kind, group in by_kind(run for run in found if int(run["length"]) == length).items():
            for run in group:
                tokens = run["steps"] * run["tokens_per_step"] / 1e6
                cells = [f"{run['steps'] * run['step_seconds']:,.0f}", f"{tokens:,.0f}M", f"{final(run):.4f}"]
                rows.append([f"{length:,}", KINDS[kind], *cells])
    return _rows(["length", "", "seconds", "tokens", "held-out loss"], rows)


# Which runs a table needs; a table without any is not there, and must not be on the page.
_NEEDS: dict[str, tuple[Callable[[], str], Callable[[Run], bool]]] = {
    "evidence-controls": (
        controls,
        lambda run: run["corpus"] == "linux" and run["kind"] == "dense" and bool(run["seed"]),
    ),
    "evidence-seeds": (seeds, lambda run: run["kind"] == "dense" and bool(run["seed"])),
    "evidence-context": (context, lambda run: run["corpus"] == "linux" and bool(run["seed"] and run["by_position"])),
    "evidence-needles": (needles, lambda run: run["corpus"] == "linux" and bool(run["seed"] and run["needles"])),
    "evidence-rates": (rates, lambda run: run["rate"] is not None),
    "evidence-time": (equal_time, lambda run: run["length"] is not None),
}
TABLES: dict[str, Callable[[], str]] = {
    name: make for name, (make, needed) in _NEEDS.items() if any(needed(run) for run in runs())
}


# ------------------------------------------------------------ pictures


def draw() -> list[Path]:
    """One picture per corpus and x axis, from the collected runs."""
    made = []
    for corpus in sorted({run["corpus"] for run in runs(seed=...)}):
        target = FOLDER / f"{corpus}-tokens.svg"
        _plot(
            target, by_kind(runs(corpus=corpus, seed=...)), "million tokens", lambda run: run["tokens_per_step"] / 1e6
        )
        made.append(target)
    for length in sorted({run["length"] for run in runs(length=...)}, key=int):
        target = FOLDER / f"seconds-{length}.svg"
        _plot(
            target,
            by_kind(runs(length=length)),
            f"seconds of training at length {int(length):,}",
            lambda run: run["step_seconds"],
        )
        made.append(target)
    return made


def _plot(target: Path, groups: dict[str, list[Run]], label: str, per_step: Callable[[Run], float]) -> None:
    """Training loss of the first run of each kind as a line, validation losses of all of them as dots."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "tercet"  # reproducible files
    figure, axes = plt.subplots(figsize=(7, 4))
    highest = max(run["validation"][0][1] for group in groups.values() for run in group)
    lowest = min(final(run) for group in groups.values() for run in group)
    for colour, (kind, group) in zip(COLOURS, groups.items(), strict=False):
        axes.plot(*_line(group[0]["training"], per_step(group[0])), color=colour, lw=1, alpha=0.7)
        for i, run in enumerate(group):
            name = KINDS[kind].replace("`", "") if i == 0 else None
            axes.plot(*_line(run["validation"], per_step(run)), "o", color=colour, ms=4, label=name)
    axes.set(xlabel=label, ylabel="loss, nats per token", ylim=(0.97 * lowest, 1.05 * highest))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def _line(points: list[list[float]], per_step: float) -> tuple[list[float], list[float]]:
    return [step * per_step for step, _ in points], [loss for _, loss in points]


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["collect"] and len(arguments) > 1:
            for folder in map(Path, arguments[1:]):
                save(collect(folder), folder)
                print(FOLDER / f"{folder.name}.json")
        elif arguments == ["draw"]:
            for path in draw():
                print(path)
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tables and picture of docs/results/conversion.md, from what scripts/conversion.sh wrote.

python scripts/conversion_tables.py draw     # loss and needles against tokens, as SVG
python scripts/results_tables.py             # fills the tables below between their markers
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_files import RESULTS, k, needles_found, read_eval, table

FOLDER = RESULTS / "conversion"
KINDS = {
    "block-sparse": "by means",
    "learned": "learned selectors",
    "nsa": "three branches",
    "continued": "dense, trained on",
}
SECOND = "second/"  # a second dense model, trained and converted in the same way
STEPS = (0, 76, 304, 760)
TOKENS_PER_STEP = 65_536
COLOURS = {
    "block-sparse": "#d55e00", "learned": "#0072b2", "nsa": "#009e73", "continued": "#999999", "dense": "#555555",
    "scratch": "#cc79a7",
}  # fmt: skip


def _evaluation(name: str) -> dict[str, Any]:
    return read_eval(FOLDER / f"{name}.txt")


def _has(name: str) -> bool:
    return (FOLDER / f"{name}-perplexity.txt").exists()


def _steps(kind: str) -> list[int]:
    return [step for step in STEPS if _has(f"{kind}-{step}")]


def _kinds() -> dict[str, str]:
    return {kind: label for kind, label in KINDS.items() if _steps(kind)}


def _references() -> dict[str, str]:
    """Models that were not converted, as `_models`."""
    return {"dense, before": "dense", **({"NSA from scratch": "scratch"} if _has("scratch") else {})}


def _models() -> dict[str, str]:
    """Label of each evaluated model, and the beginning of its files' names."""
    models = _references()
    for kind, label in _kinds().items():
        for step in _steps(kind):
            models[f"{label}, {step * TOKENS_PER_STEP / 1e6:.0f}M tokens"] = f"{kind}-{step}"
            if kind == "learned" and step == 0 and _has("learned-warmup"):
                models[f"{label}, trained alone"] = "learned-warmup"
    return models


def _found(name: str) -> dict[int, tuple[int, int]]:
    return needles_found(_evaluation(f"{name}-needle"))


def losses() -> str:
    """Held-out loss, overall and by position."""
    records = {label: _evaluation(f"{name}-perplexity") for label, name in _models().items()}
    if len({tuple(b["tokens"] for b in record["by_position"]) for record in records.values()}) != 1:
        raise ValueError("the models were evaluated on different text: run the evaluations again")
    bins = [b for b in _evaluation("dense-perplexity")["by_position"] if b["first"] >= 512]
    rows = []
    for label, record in records.items():
        by_first = {b["first"]: b["loss"] for b in record["by_position"]}
        rows.append(
            [label, *(f"{loss:.4f}" for loss in (record["all"]["loss"], *(by_first[b["first"]] for b in bins)))]
        )
    return table(["", "all", *(f"{k(b['first'])}–{k(b['last'] + 1)}" for b in bins)], rows)


def needles() -> str:
    found = {label: _found(name) for label, name in _models().items()}
    lengths = list(_found("dense"))
    rows = [[label, *(str(by[n][0]) for n in lengths)] for label, by in found.items()]
    return table(["", *map(k, lengths)], rows)


def target() -> str:
    """After 20M tokens, against dense as it was and trained on for as long: loss, and needles in points."""

    def change(name: str, reference: str, first: int | None) -> str:
        both = (_evaluation(f"{each}-perplexity") for each in (name, reference))
        mine, dense = (
            r["all"]["loss"] if first is None else next(b["loss"] for b in r["by_position"] if b["first"] == first)
            for r in both
        )
        return f"{mine / dense - 1:+.1%}".replace("-", "−")

    def points(name: str, reference: str, length: int) -> str:
        mine, dense = (found / asked for found, asked in (_found(each)[length] for each in (name, reference)))
        return f"{100 * (mine - dense):+.0f}".replace("-", "−")

    references = {"dense": "dense, before", "continued-304": "dense, trained on"}
    rows = [
        [f"{label} vs {against}"]
        + [change(f"{kind}-304", reference, first) for first in (None, 512, 1024)]
        + [points(f"{kind}-304", reference, length) for length in _found("dense")]
        for kind, label in _kinds().items()
        if kind != "continued"
        for reference, against in references.items()
    ]
    asked = [f"needles, {k(length)}" for length in _found("dense")]
    return table(["20M tokens", "loss", "loss, 512–1k", "loss, 1k–2k", *asked], rows)


def answer() -> str:
    """What the converted models reach, beside the dense models that they were."""
    rows = []
    for label, folder, step in (("first", "", 304), ("second", SECOND, 304), ("second", SECOND, 760)):
        name, trained_on = f"{folder}learned-{step}", f"{folder}continued-{step}"
        mine, dense = _found(name), _found(f"{folder}dense")
        longest = max(mine)
        all_of = [sum(found for found, _ in by.values()) for by in (mine, dense)]
        change = ""
        if _has(trained_on):
            losses = [_evaluation(f"{each}-perplexity")["all"]["loss"] for each in (name, trained_on)]
            change = f"{losses[0] / losses[1] - 1:+.1%}"
        rows.append(
            [f"{label}, {step * TOKENS_PER_STEP / 1e6:.0f}M tokens", f"{mine[longest][0]} ({dense[longest][0]})"]
            + [f"{all_of[0]} ({all_of[1]})", change or "not measured"]
        )
    asked = _found("dense")
    longest, total = max(asked), sum(n for _, n in asked.values())
    head = [f"needles at {k(longest)}, of {asked[longest][1]}", f"at all lengths, of {total}"]
    return table(["run", *head, "loss vs dense trained on for as long"], rows)


def second() -> str:
    """Loss and needles of the second dense model and of what became of it."""
    models = {
        "dense, before": "dense",
        "learned selectors, 0M tokens": "learned-0",
        "learned selectors, trained alone": "learned-warmup",
    }
    for step in STEPS[1:]:
        models[f"learned selectors, {step * TOKENS_PER_STEP / 1e6:.0f}M tokens"] = f"learned-{step}"
    models["dense, trained on, 50M tokens"] = "continued-760"
    rows = []
    for label, name in models.items():
        file = f"{SECOND}{name}"
        found = [str(right) for right, _ in _found(file).values()] if (FOLDER / f"{file}-needle.txt").exists() else []
        rows.append(
            [label, f"{_evaluation(f'{file}-perplexity')['all']['loss']:.4f}", *found, *[""] * (4 - len(found))]
        )
    return table(["", "loss", *map(k, _found(f"{SECOND}dense"))], rows)


TABLES: dict[str, Callable[[], str]] = {
    "conversion-losses": losses,
    "conversion-needles": needles,
    "conversion-target": target,
    "conversion-second": second,
    "conversion-answer": answer,
}


def draw() -> Path:
    """Loss and needles against tokens of training after the conversion; models that were not converted as lines."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "tercet"  # reproducible files
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    longest = max(_found("dense"))

    def share(name: str) -> float:
        found, asked = _found(name)[longest]
        return 100 * found / asked

    def loss(name: str) -> float:
        value: float = _evaluation(f"{name}-perplexity")["all"]["loss"]
        return value

    for axes, value in ((left, loss), (right, share)):
        for kind, label in _kinds().items():
            points = {step: value(f"{kind}-{step}") for step in _steps(kind)}
            if kind == "continued":
                points = {0: value("dense"), **points}
            tokens = [step * TOKENS_PER_STEP / 1e6 for step in points]
            axes.plot(tokens, list(points.values()), "o-", color=COLOURS[kind], label=label)
        points = {step: value(f"{SECOND}learned-{step}") for step in STEPS}
        tokens = [step * TOKENS_PER_STEP / 1e6 for step in points]
        axes.plot(tokens, list(points.values()), "s--", color=COLOURS["learned"], label="learned selectors, second run")
        for label, name in _references().items():
            axes.axhline(value(name), color=COLOURS[name], ls="--" if name == "dense" else ":", label=label)
        axes.set(xlabel="million tokens after the conversion", xlim=(-0.5, None))
        axes.grid(alpha=0.25)
    left.plot(
        50, loss(f"{SECOND}continued-760"), "D", color=COLOURS["continued"], label="dense, trained on, second run"
    )
    left.set(ylabel="held-out loss, nats per byte")
    right.set(ylabel=f"needles found at {k(longest)}, %", ylim=(0, 102))
    left.legend(frameon=False)
    figure.tight_layout()
    target = FOLDER / "conversion.svg"
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def main(arguments: list[str]) -> int:
    if arguments != ["draw"]:
        print(__doc__, file=sys.stderr)
        return 2
    print(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

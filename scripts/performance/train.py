"""Training steps of m7c in every mode."""

from __future__ import annotations

from performance import results
from performance.results import Row, first, number, paragraph, ratio, rows, table, thousands, tokens
from tercet.bench.train import compared

LABELS = {
    "dense": "dense", "dense packed": "dense, packed", "nsa": "NSA", "nsa learned": "NSA, learned",
    "two-branch learned": "two-branch, learned", "block-sparse": "block-sparse",
    "block-sparse learned": "block-sparse, learned",
}  # fmt: skip


def train() -> str:
    """Tokens/s of every mode and length, and × dense; which modes are faster than dense, and from where on."""
    names = [mode for mode in LABELS if rows("train", mode=mode, outcome="ok")]
    lengths = sorted({row["length"] for row in rows("train") if "length" in row})
    if not names:
        return f"{results.MISSING}."
    lines = []
    for length in lengths:
        speeds = [thousands(step(mode, length).get("tokens_per_s")) for mode in names]
        ratios = [step_ratio(mode, length) for mode in names]
        lines.append([tokens(length), *map(cell, speeds, ratios)])
    peaks = [max(row["peak_gib"] for row in rows("train", mode=mode, outcome="ok")) for mode in names]
    lines.append(["peak, GiB", *map(number, peaks)])
    head = ["length", *(LABELS[mode] for mode in names)]
    won = _wins([mode for mode in names if not mode.startswith("dense")], lengths)
    return "\n\n".join([table(head, lines), paragraph(" ".join([won, *_limits()]))])


def _limits() -> list[str]:
    """What the measurement leaves open."""
    found = results.part("train")
    sentences = []
    if spread := max((row.get("spread", 0.0) for row in found["results"]), default=0.0):
        sentences.append(f"Repeated timings of a step differ by up to {spread:.0%}.")
    if not found["complete"]:
        sentences.append("The measurement was cut short: lengths that are not here were not reached.")
    return sentences


def _wins(names: list[str], lengths: list[int]) -> str:
    """From which measured length on each mode is at least as fast as dense."""
    parts = []
    for mode in names:
        slower = [n for n in lengths if (step_ratio(mode, n) or 0) < 1]
        faster = [n for n in lengths if n > max(slower, default=0)]
        parts.append(f"{LABELS[mode]} from {tokens(min(faster))}" if faster else f"{LABELS[mode]} at no length")
    return f"At least as fast as dense: {'; '.join(parts)}."


def step_ratio(mode: str, length: int) -> float | None:
    """A mode's tokens/s over dense's; None for dense, if the kernels failed their check or if the losses differ."""
    cells = [step(mode, length), step("dense", length)]
    if mode.startswith("dense") or not all(cells):
        return None
    found: float | None = compared(cells, correct(mode))[0]["times_dense"]
    return found


def step(mode: str, length: int) -> Row:
    return first(rows("train", mode=mode, length=length, outcome="ok"))


def correct(mode: str) -> bool | None:
    """The kernel check of a mode: NSA's and block-sparse's cover the others, which run the same kernels."""
    checked = "block-sparse" if mode.startswith("block-sparse") else "nsa"
    checks = [row for row in rows("train", mode=checked) if "parity" in row]
    found: bool | None = first(checks).get("correct")
    return found


def cell(speed: str, times: float | None) -> str:
    return speed if times is None else f"{speed} ({ratio(times)})"

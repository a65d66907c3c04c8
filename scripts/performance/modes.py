"""Block-sparse mode beside NSA and dense: a section with its own date."""

from __future__ import annotations

from performance import results
from performance.results import Row, first, number, paragraph, ratio, rows, table, thousands, tokens
from tercet.bench.train import compared

LABELS = {
    "dense": "dense", "nsa": "NSA", "nsa learned": "NSA, learned", "two-branch learned": "selected + window, learned",
    "block-sparse": "block-sparse", "block-sparse learned": "block-sparse, learned",
}  # fmt: skip


def modes() -> str:
    """Empty if not measured."""
    training = _training()
    if not training:
        return ""
    about = paragraph(
        "`m7c` in [block-sparse mode](nsa.md#block-sparse-mode), as `tercet import hf --attention block-sparse` "
        "configures it (without `dense_below`), beside NSA's three branches and dense. Blocks are chosen by means of "
        "keys or, where it says learned, by a learned selector, whose own training is part of the step. Tokens/s, and "
        "in brackets × dense."
    )
    return "\n\n".join(["## Block-sparse mode", about, paragraph(" ".join(_measurement())), training])


def _measurement() -> list[str]:
    """When and how it was measured, and what that leaves open."""
    found = results.part("modes")
    sentences = [results.measured_line(found)]
    if spread := max((row.get("spread", 0.0) for row in found["results"]), default=0.0):
        sentences.append(f"Repeated timings of a step differ by up to {spread:.0%}.")
    if not found["complete"]:
        sentences.append("The measurement was cut short: lengths that are not here were not reached.")
    return sentences


def _training() -> str:
    names = [mode for mode in LABELS if rows("modes", mode=mode, outcome="ok")]
    lengths = sorted({row["length"] for row in rows("modes") if "length" in row})
    if not names:
        return ""
    lines = []
    for length in lengths:
        speeds = [thousands(step(mode, length).get("tokens_per_s")) for mode in names]
        ratios = [step_ratio(mode, length) for mode in names]
        lines.append([tokens(length), *map(cell, speeds, ratios)])
    peaks = [max(row["peak_gib"] for row in rows("modes", mode=mode, outcome="ok")) for mode in names]
    lines.append(["peak, GiB", *map(number, peaks)])
    head = ["length", *(LABELS[mode] for mode in names)]
    won = wins({mode: {n: step_ratio(mode, n) for n in lengths} for mode in names if mode != "dense"})
    return "\n\n".join(["Training steps of 65,536 tokens:", table(head, lines), *won])


def wins(ratios: dict[str, dict[int, float | None]], when: str = "") -> list[str]:
    """A sentence that says from which measured length on each mode is at least as fast as dense."""
    parts = []
    for mode, found in ratios.items():
        slower = [n for n, times in found.items() if times is None or times < 1]
        faster = [n for n in found if n > max(slower, default=0)]
        parts.append(f"{LABELS[mode]} from {tokens(min(faster))}" if faster else f"{LABELS[mode]} at no length")
    return [paragraph(f"At least as fast as dense{when}: {'; '.join(parts)}.")] if parts else []


def step_ratio(mode: str, length: int) -> float | None:
    """A mode's tokens/s over dense's; None for dense, if the kernels failed their check or if the losses differ."""
    cells = [step(mode, length), step("dense", length)]
    if mode == "dense" or not all(cells):
        return None
    found: float | None = compared(cells, correct(mode))[0]["times_dense"]
    return found


def step(mode: str, length: int) -> Row:
    return first(rows("modes", mode=mode, length=length, outcome="ok"))


def correct(mode: str) -> bool | None:
    """The kernel check of a mode: NSA's and block-sparse's cover the others, which run the same kernels."""
    checked = "block-sparse" if mode.startswith("block-sparse") else "nsa"
    checks = [row for row in rows("modes", mode=checked) if "parity" in row]
    found: bool | None = first(checks).get("correct")
    return found


def cell(speed: str, times: float | None) -> str:
    return speed if times is None else f"{speed} ({ratio(times)})"

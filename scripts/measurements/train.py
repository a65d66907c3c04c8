"""Whole training steps of m7c in every mode: dense, NSA, two-branch and block-sparse.

Blocks are chosen by compressed scores (block-sparse: means of keys) or by a learned selector. Steps with a learned
selector compute its loss on one query in 128 (train.selector.every), as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from measurements.part import Warmup, free, raise_clocks
from measurements.steps import TOKENS, Cell, measured_steps, step_cells, step_job
from tercet.bench.train_cell import parity

# What `tercet import hf --attention block-sparse` gives a model that has m7c's sizes of blocks.
BLOCK_SPARSE = {"model.gate": "none", "model.compress_selected_keys": "false"}
COMPRESSED: dict[str, Any] = {"model.selector": "compressed"}
LEARNED: dict[str, Any] = {"model.selector": "learned"}
MODES: dict[str, dict[str, Any]] = {
    "dense": {}, "nsa": COMPRESSED,
    "block-sparse": BLOCK_SPARSE | COMPRESSED, "block-sparse learned": BLOCK_SPARSE | LEARNED,
    "nsa learned": LEARNED, "two-branch learned": LEARNED | {"model.branches": ["selected", "window"]},
}  # fmt: skip
CHECKED = ("nsa", "block-sparse")
LENGTHS = (8192, 65536, 2048, 32768, 4096, 16384)  # by importance
TOY_LENGTHS = (256, 128)


def train(quick: bool) -> Iterator[Cell]:
    cells = mode_cells(quick)
    raise_clocks()
    for mode in CHECKED:
        cell = next(cell for cell in cells if cell["mode"] == mode)
        yield {"mode": mode, **parity(cell["preset"], cell["flags"], True)}
    free()
    yield from measured_steps(cells, steps=2 if quick else 3, repeats=1 if quick else 2, check=False)


def mode_cells(quick: bool) -> list[Cell]:
    """All modes of a length in a row. Sparse modes read packed documents; dense is measured both ways."""
    preset, lengths, tokens = ("tiny", TOY_LENGTHS, 256) if quick else ("m7c", LENGTHS, TOKENS)
    own = {"run.device": "cpu", "model.layers": 1} if quick else {"train.cuda_graph": "off"}
    cells = []
    for length in lengths:
        for mode, flags in MODES.items():
            (cell,) = step_cells(preset, (kind_of(mode),), (length,), tokens, flags | own)
            cells.append(cell | {"mode": mode})
        (cell,) = step_cells(preset, ("dense",), (length,), tokens, own, packed="dense")
        cells.append(cell | {"mode": "dense packed"})
    return cells


def kind_of(mode: str) -> str:
    return "dense" if mode == "dense" else "nsa"


def warmups() -> list[Warmup]:
    """Training with two layers: all layers of a model compile to the same code."""
    cells = [cell | {"flags": cell["flags"] | {"model.layers": 2}} for cell in mode_cells(False)]
    jobs = []
    for mode in (*MODES, "dense packed"):
        for lengths in ((2048, 4096, 65536), (8192, 16384, 32768)):
            own = [cell for cell in cells if cell["mode"] == mode and cell["length"] in lengths]
            jobs.append(step_job(f"m7c {mode}, {len(own)} lengths from {lengths[0]}", own, 90, 9.0))
    return jobs

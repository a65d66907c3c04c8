"""Whole training steps: small batches, a million tokens, larger models, sizes of blocks."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from measurements.part import Warmup
from tercet.bench import train as bench
from tercet.config.load import load

Cell = dict[str, Any]
LARGE = ("1b", "350m", "1b-64k", "350m-64k")
TWO_BRANCH = {"model.branches": ["selected", "window"], "model.selector": "learned"}
BLOCKS = {32: 32, 128: 8, 64: 16}  # select_block: select_count, 1,024 tokens each
TOKENS = 65536


def batches(quick: bool) -> Iterator[Cell]:
    yield from measured_steps(batch_cells(quick), steps=2 if quick else 8, repeats=1 if quick else 3, check=False)


def batch_cells(quick: bool) -> list[Cell]:
    """Few sequences per step, where launching kernels takes longer than running them."""
    preset, length, sizes = ("tiny", 64, (1,)) if quick else ("m7c", 2048, (1, 8))
    graphs = ("off",) if quick else ("off", "on")
    device = {"run.device": "cpu"} if quick else {}
    return [
        cell
        for size in sizes
        for graph in graphs
        for cell in step_cells(preset, ("nsa",), (length,), size * length, {"train.cuda_graph": graph} | device)
    ]


def batches_warmups() -> list[Warmup]:
    return [_job(batch_cells(False)[0])]


def million(quick: bool) -> Iterator[Cell]:
    length = 256 if quick else 1 << 20
    flags = {"train.compile": "off"} | ({"run.device": "cpu"} if quick else {})
    cells = step_cells("tiny" if quick else "m7c", ("nsa",), (length,), length, flags, checkpointing="full")
    yield from measured_steps(cells, steps=1, repeats=0, check=False)


def large(quick: bool) -> Iterator[Cell]:
    yield from measured_steps(large_cells(quick), steps=2, repeats=1 if quick else 2, check=True)


def two_branch(quick: bool) -> Iterator[Cell]:
    yield from measured_steps(two_branch_cells(quick), steps=2, repeats=1 if quick else 2, check=True)


def two_branch_cells(quick: bool) -> list[Cell]:
    return large_cells(quick, ("1b",), TWO_BRANCH)


def large_cells(quick: bool, presets: Sequence[str] = LARGE, settings: Mapping[str, Any] | None = None) -> list[Cell]:
    """Larger presets, one pass per step; the host never is the slower side."""
    flags: dict[str, Any] = {"train.cuda_graph": "off", **(settings or {})}
    if quick:
        flags |= {"run.device": "cpu", "model.dim": 32, "model.layers": 1, "model.heads": 2, "model.kv_heads": 1}
        flags |= {"model.head_dim": 16, "model.ffn_dim": 64, "model.vocab_size": 64}
    cells = []
    for preset in presets:
        config = load(preset=preset).config
        length, tokens = config.data.seq_len, config.train.micro_batch * config.data.seq_len
        if quick:
            length = tokens = length // 64
        mode = config.train.activation_checkpointing
        cells += step_cells(preset, ("nsa", "dense"), (length,), tokens, flags, checkpointing=mode)
    return cells


def large_warmups() -> list[Warmup]:
    return _with_two_layers(large_cells(False), gib=18.0)


def two_branch_warmups() -> list[Warmup]:
    return _with_two_layers(two_branch_cells(False), gib=18.0)


def blocks(quick: bool) -> Iterator[Cell]:
    for size, cells in block_cells(quick).items():
        for row in measured_steps(cells, steps=2 if quick else 5, repeats=1 if quick else 2, check=True):
            yield row | {"select_block": size}


def block_cells(quick: bool) -> dict[int, list[Cell]]:
    """m7c that reads 1,024 selected tokens per query in blocks of another size."""
    preset, lengths, tokens = ("tiny", (64,), 64) if quick else ("m7c", (8192, 65536), TOKENS)
    sizes = {16: 8, 32: 4} if quick else BLOCKS
    device = {"run.device": "cpu"} if quick else {"train.cuda_graph": "off"}
    return {
        size: step_cells(
            preset, ("nsa",), lengths, tokens,
            {"model.nsa.select_block": size, "model.nsa.select_count": count} | device,
        )
        for size, count in sizes.items()
    }  # fmt: skip


def blocks_warmups() -> list[Warmup]:
    return _with_two_layers([cell for found in block_cells(False).values() for cell in found], gib=8.0)


def step_cells(
    preset: str, kinds: tuple[str, ...], lengths: tuple[int, ...], tokens: int, flags: dict[str, Any],
    checkpointing: str = "none", packed: str = "nsa",
) -> list[Cell]:  # fmt: skip
    """Cells of `tercet bench train`; kind `packed` reads packed documents, others one row per document."""
    cells = bench.cells_of(preset, kinds, lengths, tokens, (), 2048, checkpointing, (packed,))
    return [cell | {"flags": flags, "statistics": False} for cell in cells]


def measured_steps(cells: list[Cell], *, steps: int, repeats: int, check: bool) -> Iterator[Cell]:
    """Results of `tercet bench train`, each as soon as it is measured; check: compare the kernels with the reference
    first."""
    parity = [cells[0]["preset"], cells[0]["flags"], True] if check else None
    lines: queue.Queue[Cell | Exception | None] = queue.Queue()

    def run() -> None:
        try:
            bench.measured(cells, steps, repeats, 300, parity, on_line=lines.put)
            lines.put(None)
        except Exception as error:
            lines.put(error)

    threading.Thread(target=run, daemon=True).start()
    while (line := lines.get()) is not None:
        if isinstance(line, Exception):
            raise line
        yield line


def step_job(name: str, cells: list[Cell], seconds: float, gib: float) -> Warmup:
    """One step of each cell, one after another."""
    asked = json.dumps({"cells": cells, "steps": 1, "repeats": 0})
    return Warmup(name, seconds, gib, [sys.executable, "-m", "tercet.bench.train_cell", asked])


def _with_two_layers(cells: list[Cell], gib: float) -> list[Warmup]:
    """All layers of a model compile to the same code, and several models of two layers fit in memory."""
    return [_job(cell | {"flags": cell["flags"] | {"model.layers": 2}}, gib) for cell in cells]


def _job(cell: Cell, gib: float | None = None) -> Warmup:
    name = f"{cell['preset']} {cell['batch']} x {cell['length']}{' packed' * cell['packed']}"
    if cell["flags"].get("model.nsa.select_block"):
        name += f", blocks of {cell['flags']['model.nsa.select_block']}"
    tokens = cell["batch"] * cell["length"]
    return step_job(name, [cell], 60 if cell["kind"] == "nsa" else 20, gib or 25.0 * tokens / TOKENS + 2)

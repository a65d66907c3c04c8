"""Benchmark whole training steps of a model and its dense baseline (`tercet bench train`).

A cell is a kind of attention, a batch size and a length. It trains the model for a few intervals with the trainer's own
step: forward, loss, backward, gradient norm, clipping, fused AdamW, non-finite guard, compiled blocks. Tokens are
random and stay on the device.

Checks come first: the kernels of each kind against the reference, each compiled model's first loss against its
uncompiled loss (up to 2^18 tokens; a longer cell reports that its loss was not checked), and the loss of each sparse
model against dense's. If one fails, that ratio is not printed and the exit code is 1. Without kernels to check,
`correct` is null. This module does not import torch: cells run in a subprocess (train_cell.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from tercet.bench.settings import KINDS, check_kinds, of_kind, run
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import check_known
from tercet.terminal import Columns, table

Cell = dict[str, Any]
# Both models start from the same weight distribution: first losses may differ by this share plus the batch's noise.
NEAR = 0.02
# Keys that a cell sets, and the flags that choose their values.
OWN_KEYS = {
    "data.seq_len": "--lengths", "train.micro_batch": "--tokens", "train.tokens_per_step": "--tokens",
    "train.stages": "--lengths", "train.activation_checkpointing": "--checkpointing", "train.compile": "--compile",
    "train.cuda_graph": "--cuda-graph", "run.device": "--device",
}  # fmt: skip


def cells_of(
    preset: str, kinds: Sequence[str], shapes: Sequence[tuple[int, int]], checkpointing: Sequence[str],
    packed: Sequence[str], settings: dict[str, Any],
) -> list[Cell]:  # fmt: skip
    """The cells to measure, all kinds of a shape (batch, length) in a row so that clock drift affects all.

    packed: kinds whose documents are packed into one row; dense is measured with one row per document too, and the
    faster one is the baseline.
    """
    check_kinds(preset, kinds, settings)
    check_known("--packed", packed, KINDS, may_be_empty=True)
    if not shapes:
        raise UsageError("--lengths is empty: nothing to measure")
    found = []
    for (batch, length), mode, kind in product(dict.fromkeys(shapes), checkpointing, kinds):
        name, flags = of_kind(preset, kind, settings)
        for as_one_row in (False, True) if kind == "dense" and kind in packed else (kind in packed,):
            cell = {"kind": kind, "batch": batch, "length": length, "preset": name, "packed": as_one_row}
            found.append({**cell, "checkpointing": mode, "flags": flags})
    return found


def measured(cells: list[Cell], steps: int, repeats: int, seconds: float) -> tuple[list[Cell], list[Cell]]:
    """Check kernels and measure cells in a subprocess: (checks, results). If the process dies, only the current cell is
    lost, and a new one continues."""
    wanted = list({cell["kind"]: cell for cell in cells if cell["kind"] != "dense"}.values())
    checks: list[Cell] = []
    done: list[Cell] = []

    def receive(line: Cell) -> None:
        (checks if "check" in line else done).append(line)
        print(_check_line(line) if "check" in line else f"{len(done)}/{len(cells)}  {_cell_line(line)}", flush=True)

    while len(done) < len(cells):
        asked = {"checks": wanted[len(checks) :], "cells": cells[len(done) :], "steps": steps, "repeats": repeats}
        command = [sys.executable, "-m", "tercet.bench.train_cell", json.dumps(asked)]
        ended = run(command, seconds, lambda text: receive(json.loads(text)) if text.startswith("{") else None)
        if ended.failed and len(checks) < len(wanted):
            raise TercetError(f"could not compare the kernels with the reference: {ended.reason}")
        if len(done) < len(cells):
            lost = ended.reason if ended.late or "memory" in ended.reason else f"failed: {ended.reason}"
            receive({**cells[len(done)], "outcome": lost})
    return checks, done


def _check_line(check: Cell) -> str:
    on = f"{check['device']}, torch {check['torch']}: {check['check']}, kernels vs reference"
    if check["correct"] is None:
        dry_run = "; for a dry run: --preset tiny --lengths 256 --tokens 1024" * check["device"].startswith("CPU")
        return f"{on} not checked: {check['found']}{dry_run}"
    return f"{on}: {check['found']}: {'ok' if check['correct'] else 'WRONG, no ratios are given'}"


def _cell_line(cell: Cell) -> str:
    name = f"{cell['kind']}{' packed' * cell['packed']} {cell['batch']} x {cell['length']}:"
    if cell["outcome"] != "ok":
        return f"{name} {cell['outcome']}"
    checked = "" if cell.get("uncompiled_loss") is not None else " (not checked)"
    return f"{name} {cell['tokens_per_s']:,.0f} tokens/s, {cell['ms']:.2f} ms, loss {cell['first_loss']:.4f}{checked}"


def compared(cells: Sequence[Cell], checks: Sequence[Cell]) -> list[Cell]:
    """The cells, the sparse ones with their ratios to the fastest dense cell of the same shape, if they are correct.

    wrong: why there is no ratio although both were measured.
    """
    failed = {check["check"] for check in checks if check["correct"] is False}
    rows = []
    for cell in cells:
        row = {**cell, "times_dense": None, "times_dense_memory": None}
        rows.append(row)
        same = [c for c in cells if all(c[key] == cell[key] for key in ("batch", "length", "checkpointing"))]
        dense = max(
            (c for c in same if c["kind"] == "dense" and c["outcome"] == "ok"),
            key=lambda c: c["tokens_per_s"], default=None,
        )  # fmt: skip
        if cell["kind"] == "dense" or dense is None or cell["outcome"] != "ok":
            continue
        apart = abs(cell["first_loss"] - dense["first_loss"]) / dense["first_loss"]
        if cell["kind"] in failed:
            row["wrong"] = "its kernels differ from the reference"
        elif apart > NEAR + (cell["batch"] * cell["length"]) ** -0.5:
            row["wrong"] = f"first loss {cell['first_loss']:.4f}, dense {dense['first_loss']:.4f}"
        else:
            row["times_dense"] = cell["tokens_per_s"] / dense["tokens_per_s"]
            if cell["peak_gib"] is not None:
                row["times_dense_memory"] = cell["peak_gib"] / dense["peak_gib"]
    return rows


COLUMNS: Columns = {
    "length": ("length", str), "batch": ("batch", str), "kind": ("kind", str), "checkpointing": ("checkpointing", str),
    "packed": ("documents", lambda packed: "packed" if packed else "rows"), "outcome": ("outcome", str),
    "tokens_per_s": ("tokens/s", "{:,.0f}".format), "times_dense": ("x dense", "{:.2f}".format),
    "peak_gib": ("GiB", "{:.1f}".format), "times_dense_memory": ("GiB, x dense", "{:.2f}".format),
}  # fmt: skip


def main(cells: list[Cell], *, steps: int, repeats: int, seconds: float) -> int:
    started = time.time()
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds:g} is too short: give more than 0")
    kinds = list(dict.fromkeys(f"{cell['kind']}{' packed' * cell['packed']}" for cell in cells))
    shapes = list(dict.fromkeys(f"{cell['batch']} x {cell['length']}" for cell in cells))
    intervals = f"{repeats} x {steps} steps after warm-up" if repeats else f"{steps} steps"
    print(f"{', '.join(kinds)} at {', '.join(shapes)} tokens; {intervals}, at most {seconds:g} s each (--seconds)")
    checks, done = measured(cells, steps, repeats, seconds)
    rows = compared(done, checks)
    print(f"\n{table(rows, COLUMNS)}\n")
    correct: bool | None = None if any(check["correct"] is None for check in checks) else True
    if correct is None:
        ran = ", ".join(sorted({route for cell in done for route in cell.get("routes", ())}))
        print(f"no kernels on this device: times are of {ran or 'the reference'} and do not carry over to a GPU\n")
    for row in rows:
        if "wrong" in row:
            print(f"WRONG: {row['kind']} at length {row['length']}: {row['wrong']}")
    failed = any("wrong" in row or row["outcome"].startswith(("wrong", "failed")) for row in rows)
    if failed or any(check["correct"] is False for check in checks):
        correct = False
    record = {"bench": "train", "steps": steps, "repeats": repeats, "correct": correct, "checks": checks}
    print(json.dumps({**record, "seconds": time.time() - started, "results": rows}), flush=True)
    return 1 if correct is False else 0

"""Benchmark whole training steps of a model and its dense baseline (`tercet bench train`).

A cell is a batch size and a length. It trains the model for a few log intervals with the trainer's own step: forward,
loss, backward, gradient norm, clipping, fused AdamW, non-finite guard, compiled blocks, telemetry. Tokens are random
and stay on the device; `tercet data bench` measures the loader.

Checks come first: the kernels against the reference, each compiled model's first loss against its uncompiled loss (up
to 2^18 tokens; a longer cell reports that its loss was not checked), and NSA's loss against dense's. If one fails, no
ratio is printed and the exit code is 1. Without kernels to check, `correct` is null.

This module does not import torch. Cells run in a subprocess (train_cell.py); if a cell kills it, that cell is reported
as failed and the rest continue in a new one.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from tercet.atomic_io import check_writable, write_text
from tercet.config.load import dense_baseline, load
from tercet.config.schema import RunConfig
from tercet.config.sections import ActivationCheckpointing
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import check_known
from tercet.model.config import is_all_dense

KINDS = ("nsa", "dense")
PICTURES = (".svg", ".png")
# Both models start from the same weight distribution: first losses may differ by this share plus the batch's noise.
NEAR = 0.02
# A larger batch whose tokens/s falls by more than this share is a cliff.
CLIFF = 0.03


def cells_of(
    preset: str, kinds: Sequence[str], lengths: Sequence[int], tokens: int, batches: Sequence[int], batch_length: int,
    checkpointing: str, packed: Sequence[str], plain: Sequence[str] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """The cells to measure, both kinds of a setting in a row so that clock drift affects both.

    packed: kinds whose documents are packed into one row. plain: packed kinds to measure with one row per document too.
    """
    check_known("--kinds", kinds, KINDS)
    check_known("--packed", packed, KINDS, may_be_empty=True)
    check_known("--plain", plain, KINDS, may_be_empty=True)
    check_known("--checkpointing", [checkpointing], get_args(ActivationCheckpointing))
    if wrong := [length for length in lengths if tokens % length]:
        raise UsageError(f"--tokens {tokens} is not a multiple of length {wrong[0]}: pick a multiple")
    settings = [(tokens // length, length) for length in lengths]
    settings += [(b, batch_length) for b in batches if (b, batch_length) not in settings]
    if not settings:
        raise UsageError("neither --lengths nor --batches given: nothing to measure")
    presets = {"nsa": preset, "dense": dense_baseline(preset)}
    return [
        {
            "kind": kind, "batch": batch, "length": length, "preset": presets[kind],
            "checkpointing": checkpointing, "packed": as_one_row,
        }
        for batch, length in settings
        for kind in kinds
        for as_one_row in ((True, False) if kind in packed and kind in plain else (kind in packed,))
    ]  # fmt: skip


def measured(
    cells: list[dict[str, Any]], steps: int, repeats: int, seconds: float, parity: list[Any] | None, *,
    on_line: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:  # fmt: skip
    """Measure cells in a subprocess: (kernel check, results). If the process dies, only the current cell is lost.

    on_line: called with the kernel check and with each result as soon as it is there.
    """
    checked: dict[str, Any] | None = None
    done: list[dict[str, Any]] = []
    while len(done) < len(cells) or (parity is not None and checked is None):
        left = cells[len(done) :]
        asked = {"cells": left, "steps": steps, "repeats": repeats, "parity": parity if checked is None else None}
        command = [sys.executable, "-m", "tercet.bench.train_cell", json.dumps(asked)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        heads = [f"{i:{len(str(len(cells)))}d}/{len(cells)}{_head(c)}" for i, c in enumerate(cells, 1)][len(done) :]
        received, errors = _lines(process, heads, asked["parity"] is not None, seconds, on_line)
        for line in received:
            if "parity" in line:
                checked = line
            else:
                done.append(line)
        if process.returncode:
            if asked["parity"] is not None and checked is None:
                raise TercetError(f"could not compare the kernels with the reference: {_last(errors)}")
            if len(done) < len(cells):
                done.append({**cells[len(done)], "outcome": _died(process.returncode, errors)})
                print(_figures(done[-1]), flush=True)
                if on_line is not None:
                    on_line(done[-1])
    return checked, done


def _lines(
    process: subprocess.Popen[str], heads: list[str], parity: bool, seconds: float,
    on_line: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[list[dict[str, Any]], str]:  # fmt: skip
    """Read the subprocess's JSON lines: (results, stderr). Kills it when a line takes longer than `seconds`.

    Prints the head of a cell's line when the cell starts and the figures when it is done.
    """
    import queue
    import threading

    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout, process.stderr

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    readers = [threading.Thread(target=read), threading.Thread(target=lambda: errors.extend(stderr))]
    for reader in readers:
        reader.start()
    found: list[dict[str, Any]] = []
    pending = iter(heads)
    if not parity:
        print(next(pending, ""), end="", flush=True)
    while len(found) < len(heads) + parity:
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            process.kill()
            errors.append(f"too slow: no result in {seconds:.0f} s\n")
            break
        if line is None:
            break
        if line.startswith("{"):
            found.append(json.loads(line))
            print(_parity_line(found[-1]) if "parity" in found[-1] else _figures(found[-1]))
            if on_line is not None:
                on_line(found[-1])
            print(next(pending, ""), end="", flush=True)
    process.wait()
    for reader in readers:
        reader.join()
    return found, "".join(errors)


def _died(code: int, errors: str) -> str:
    if "out of memory" in errors or code in (-9, 137):
        return "too slow" if "too slow" in errors else "out of memory"
    return f"failed: {_last(errors)}"


def _last(errors: str) -> str:
    return (errors.strip().splitlines() or ["no error message"])[-1][:200]


def _parity_line(checked: dict[str, Any]) -> str:
    on = f"{checked['device']}, torch {checked['torch']}: kernels vs reference"
    if checked["correct"] is None:
        dry_run = "; for a dry run: --preset tiny --lengths 256 --tokens 1024" * checked["device"].startswith("CPU")
        return f"{on} not checked: {checked['of']}{dry_run}"
    verdict = "ok" if checked["correct"] else "WRONG, no ratios are given"
    of = f"{checked['of']}{', packed documents' * checked['packed']}"
    return f"{on}: worst error {checked['parity']:.1e} ({of}): {verdict}"


def _summary(cells: Sequence[dict[str, Any]], steps: int, repeats: int, seconds: float) -> str:
    """One line about the work ahead, printed first: a cell may take minutes."""
    kinds = list(dict.fromkeys(f"{c['kind']}{' packed' * c['packed']}" for c in cells))
    shapes = list(dict.fromkeys(f"{c['batch']} x {c['length']}" for c in cells))
    many = f"{len(kinds)} kind{'s' * (len(kinds) > 1)} x {len(shapes)} shape{'s' * (len(shapes) > 1)}"
    intervals = f"{repeats} x {steps} steps after warm-up" if repeats else f"{steps} steps"
    limit = f"at most {seconds:g} s each (--seconds)"
    return f"{many}, {limit}: {', '.join(kinds)} at {', '.join(shapes)} tokens; {intervals}"


def _head(cell: dict[str, Any]) -> str:
    return f"  {cell['kind']:5} {cell['batch']:5d} x {cell['length']:<8d}{' packed' * cell.get('packed', False)}"


def _figures(cell: dict[str, Any]) -> str:
    """The figures of a cell's line."""
    if cell["outcome"] != "ok":
        return f" {cell['outcome']}"
    memory = f"{cell['peak_gib']:7.2f} GiB" if cell["peak_gib"] is not None else ""
    speed = f"{cell['tokens_per_s']:10,.0f} tokens/s {cell['ms']:9.2f} ms {memory}"
    checked = "" if cell.get("uncompiled_loss") is not None else " (loss not checked)"
    return f" {speed}  loss {cell['first_loss']:.4f}{checked}"


def compared(cells: Sequence[dict[str, Any]], correct: bool | None) -> list[dict[str, Any]]:
    """One row per setting with the ratios to dense; two rows if NSA ran both packed and plain.

    The faster dense cell is the baseline. correct: result of the kernel check; None if there were no kernels to check.
    """
    by_setting: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for cell in cells:
        setting = tuple(cell[name] for name in ("batch", "length", "checkpointing"))
        by_setting.setdefault(setting, {}).setdefault(cell["kind"], []).append(cell)
    rows = []
    for (batch, length, checkpointing), kinds in by_setting.items():
        dense = max(kinds.get("dense", ()), key=lambda cell: cell.get("tokens_per_s", 0.0), default=None)
        for nsa in kinds.get("nsa", (None,)):
            row: dict[str, Any] = {
                "batch": batch, "length": length, "checkpointing": checkpointing,
                "packed": (nsa or dense or {}).get("packed", False),
                "times_dense": None, "times_dense_memory": None,
            }  # fmt: skip
            row |= {kind: cell for kind, cell in (("nsa", nsa), ("dense", dense)) if cell is not None}
            if correct is not False and nsa and dense and nsa["outcome"] == dense["outcome"] == "ok":
                apart = abs(nsa["first_loss"] - dense["first_loss"]) / dense["first_loss"]
                row["near"] = apart <= NEAR + (batch * length) ** -0.5
                if row["near"]:
                    row["times_dense"] = nsa["tokens_per_s"] / dense["tokens_per_s"]
                    if nsa["peak_gib"] is not None:
                        row["times_dense_memory"] = nsa["peak_gib"] / dense["peak_gib"]
            rows.append(row)
    return rows


def cliffs(rows: Sequence[dict[str, Any]], length: int) -> list[str]:
    """Batch sizes at this length with fewer tokens/s than the next smaller one."""
    found = []
    for kind, packed in itertools.product(KINDS, (True, False)):
        cells = [r[kind] for r in rows if r["length"] == length and r.get(kind, {}).get("outcome") == "ok"]
        line = sorted({(c["batch"], c["tokens_per_s"]) for c in cells if c["packed"] == packed})
        for (small, fast), (large, slow) in itertools.pairwise(line):
            if slow < (1 - CLIFF) * fast:
                found.append(f"{kind} at length {length}: batch {small} -> {large} falls to {slow / fast:.0%}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The results as a Markdown table."""
    columns = ("length", "batch", "documents", "NSA, tokens/s", "dense, tokens/s", "x dense", "NSA, GiB", "dense, GiB",
               "x dense")  # fmt: skip
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        parts = [str(row["length"]), str(row["batch"]), "packed" if row["packed"] else "rows"]
        parts += [_figure(row.get(kind), "tokens_per_s", ",.0f") for kind in KINDS]
        parts.append("" if row["times_dense"] is None else f"{row['times_dense']:.2f}")
        parts += [_figure(row.get(kind), "peak_gib", ".1f") for kind in KINDS]
        parts.append("" if row["times_dense_memory"] is None else f"{row['times_dense_memory']:.2f}")
        lines.append("| " + " | ".join(parts) + " |")
    return lines


def _figure(cell: dict[str, Any] | None, name: str, form: str) -> str:
    if cell is None:
        return ""
    if cell["outcome"] != "ok":
        return str(cell["outcome"]) if name == "tokens_per_s" else ""
    return "" if cell[name] is None else format(cell[name], form)


def check_place(flag: str, file: Path | None, kinds: Sequence[str] = ()) -> None:
    """Check, before measuring, that the file can be written and has one of these suffixes."""
    if file is None:
        return
    if kinds and file.suffix not in kinds:
        raise UsageError(f"{flag} {file} has an unsupported suffix: use {' or '.join(kinds)}")
    check_writable(flag, file)


# Keys that a cell sets, and the flags that choose their values.
_OWN_FLAGS = {
    "data.seq_len": "--lengths", "train.micro_batch": "--tokens or --batches", "train.tokens_per_step": "--tokens",
    "train.stages": "--lengths", "train.activation_checkpointing": "--checkpointing", "train.compile": "--compile",
    "train.cuda_graph": "--cuda-graph", "run.device": "--device", "log.every": "--steps",
}  # fmt: skip


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that would not be measured, or that would make the figures wrong."""
    for key, value in settings.items():
        if key in _OWN_FLAGS:
            raise UsageError(f"--settings {key}={value}: this benchmark sets {key} itself; use {_OWN_FLAGS[key]}")


def check_kind(cell: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a column named nsa whose model is dense, or the reverse."""
    attention, preset = config.model.attention, cell["preset"]
    if is_all_dense(attention) != (cell["kind"] == "dense"):
        raise UsageError(
            f"--kinds {cell['kind']} with model.attention={attention} in {preset}: give a preset with sparse layers, "
            "without model.attention in --settings"
        )


def check_device(config: RunConfig) -> None:
    """Fail early if this machine cannot run any cell. Imports torch only for GPU settings, and creates no CUDA context:
    its memory would be missing in the cells."""
    wanted, recorded = config.run.device, config.train.cuda_graph == "on"
    if wanted != "cuda" and not recorded:
        return
    if wanted != "cpu":
        import torch

        if torch.cuda.is_available():
            return
    if wanted == "cuda":
        raise TercetError("--device cuda, but torch sees no CUDA device: use --device cpu, or fix the driver")
    raise UsageError("--cuda-graph on needs a GPU and this run uses the CPU: use --cuda-graph off or auto")


def read_results(file: Path) -> dict[str, Any]:
    """Read a file that `--out` wrote."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        if result["bench"] == "train" and isinstance(result["results"], list):
            return dict(result)
    except OSError as error:
        raise UsageError(f"--plot {file} cannot be read ({error.strerror}): give a file written by --out") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"--plot {file} was not written by `tercet bench train --out`: give such a file")


def main(
    *, preset: str, kinds: Sequence[str], lengths: Sequence[int], tokens: int, batches: Sequence[int],
    batch_length: int, steps: int, repeats: int, checkpointing: str, packed: Sequence[str], plain: Sequence[str],
    statistics: bool, flags: dict[str, Any], seconds: float, out: Path | None, picture: Path | None,
) -> int:  # fmt: skip
    started = time.time()
    cells = cells_of(preset, kinds, lengths, tokens, batches, batch_length, checkpointing, packed, plain)
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds:g} is too short: give more than 0")
    for cell in {(cell["kind"], cell["preset"]): cell for cell in cells}.values():
        # Report an unknown preset before starting a process.
        config = load(preset=cell["preset"], flags=flags).config
        check_kind(cell, config)
        check_device(config)
    check_place("--out", out)
    check_place("--picture", picture, PICTURES)
    for cell in cells:
        cell |= {"flags": flags, "statistics": statistics}
    check = [preset, flags, "nsa" in packed] if "nsa" in kinds else None
    print(_summary(cells, steps, repeats, seconds), flush=True)
    checked, done = measured(cells, steps, repeats, seconds, check)
    correct: bool | None = True if checked is None else checked["correct"]
    rows = compared(done, correct)
    mismatched = [r for r in rows if r.get("near") is False]
    wrong = [c for c in done if c["outcome"].startswith(("wrong", "failed"))]
    print("\n" + "\n".join(table(rows)) + "\n")
    if correct is None:
        ran = ", ".join(sorted({route for c in done for route in c.get("routes", ())}))
        print(f"no kernels on this device: times are of {ran or 'the reference'} and do not carry over to a GPU\n")
    for row in mismatched:
        losses = " and ".join(f"{row[kind]['first_loss']:.4f} ({kind})" for kind in KINDS)
        print(f"WRONG at length {row['length']}: first losses differ too much: {losses}")
    falls = cliffs(rows, batch_length)
    for sentence in falls:
        print(f"warning: {sentence}")
    result = {
        "bench": "train", "preset": preset, "steps": steps, "repeats": repeats,
        "correct": False if mismatched or wrong else correct,
        "checked": checked, "cliffs": falls, "seconds": time.time() - started, "results": rows,
    }  # fmt: skip
    # Print before writing files: a full disk must not lose the results.
    print(json.dumps(result), flush=True)
    if out is not None:
        write_text(out, json.dumps(result) + "\n")
    if picture is not None:
        from tercet.bench.plots import heat_maps

        print("\n".join(heat_maps(result, picture)), file=sys.stderr)  # stdout ends with the JSON line
    return 1 if result["correct"] is False else 0

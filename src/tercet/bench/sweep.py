"""`tercet sweep`: tokens/s and memory over a grid of settings, one subprocess per cell.

A cell that runs out of memory, fails or times out is reported in the table; the sweep continues. Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from tercet.errors import UsageError
from tercet.telemetry.events import StepLogged, events_file, read_events

# Tokens/s below this share of a neighbour's is a cliff: sparse attention costs about the same per token at any length.
CLIFF = 0.6
_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Point:
    """Settings of a cell."""

    strategy: str
    length: int
    batch: int
    checkpointing: str
    bucket_mb: float | None = None  # ddp only

    @property
    def label(self) -> str:
        bucket = f", buckets of {self.bucket_mb:g} MB" if self.bucket_mb is not None else ""
        return f"{self.strategy}, checkpointing {self.checkpointing}{bucket}"


@dataclass(frozen=True)
class Cell:
    """Result of a cell. outcome: "ok", "out of memory", "too slow (…)" or the last line of the error."""

    point: Point
    outcome: str
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    step_seconds: float | None = None
    steps: int = 0


def sweep(
    preset: str = "tiny",
    lengths: tuple[int, ...] = (),
    batches: tuple[int, ...] = (),
    checkpointing: tuple[str, ...] = ("none",),
    strategies: tuple[str, ...] = ("single",),
    bucket_mb: tuple[float, ...] = (25.0,),
    ranks: int = 1,
    steps: int = 6,
    seconds: float = 300.0,
    out: str = "sweep",
    device: str = "auto",
) -> int:
    """Measure tokens/s and memory over lengths, batch sizes, checkpointing, strategies and bucket sizes.

    Args:
        preset: Base configuration of every cell.
        lengths: Sequence lengths; default: the preset's.
        batches: Sequences per device and pass; default: the preset's.
        checkpointing: Activation checkpointing: none, selective, full.
        strategies: single, ddp, fsdp, hsdp, cp; all but single run under torchrun.
        bucket_mb: DDP bucket sizes; other strategies ignore them.
        ranks: Ranks of every strategy but single.
        steps: Optimizer steps per cell; the first is warm-up.
        seconds: Time limit per cell, start-up included.
        out: Folder for sweep.jsonl, sweep.md and the heat maps.
        device: auto, cpu or cuda.
    """
    from tercet.config.load import ConfigError, load
    from tercet.config.sections import ActivationCheckpointing, StrategyName

    for flag, given, known in (
        ("--strategies", strategies, get_args(StrategyName)),
        ("--checkpointing", checkpointing, get_args(ActivationCheckpointing)),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"{flag} {unknown[0]} is unknown: pick from {', '.join(known)}")
    if steps < 2:
        raise UsageError(f"--steps {steps} is too small: the first step is warm-up, give at least 2")
    base = load(preset=preset).config
    grid = points(
        lengths or (base.data.seq_len,), batches or (base.train.micro_batch,), checkpointing, strategies, bucket_mb
    )
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(grid)} cells of {steps} steps, at most {seconds:g} s each, into {folder}")
    cells = []
    with (folder / "sweep.jsonl").open("w", encoding="utf-8") as log:
        for i, point in enumerate(grid, 1):
            cell = measure(point, preset, ranks, steps, seconds, device)
            cells.append(cell)
            log.write(json.dumps(asdict(cell)) + "\n")
            log.flush()
            print(f"{i}/{len(grid)}  {point.label}, {point.batch} × {point.length}: {shown(cell)}", flush=True)
    table = render(cells)
    (folder / "sweep.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n" + "\n".join(table))
    for path in heat_maps(cells, folder):
        print(f"heat map: {path}")
    worked = [c for c in cells if c.tokens_per_s]
    best = max(worked, key=lambda c: c.tokens_per_s or 0.0, default=None)
    print(
        json.dumps(
            {"cells": len(cells), "ok": len(worked), "cliffs": len(cliffs(cells)), "best": best and asdict(best)}
        )
    )
    return 0 if worked else 1


def points(
    lengths: Iterable[int],
    batches: Iterable[int],
    checkpointing: Iterable[str],
    strategies: Iterable[str],
    bucket_mb: Iterable[float],
) -> list[Point]:
    """Every combination; bucket sizes apply to ddp only."""
    found = []
    buckets = list(bucket_mb)
    for strategy, mode, length, batch in itertools.product(strategies, checkpointing, lengths, batches):
        for bucket in buckets if strategy == "ddp" else [None]:
            found.append(Point(strategy, length, batch, mode, bucket))
    return found


def command(point: Point, preset: str, ranks: int, steps: int, device: str, folder: Path) -> list[str]:
    """The `tercet train` command of a cell: no validation, samples or checkpoints."""
    world = 1 if point.strategy == "single" else ranks
    data_ranks = 1 if point.strategy == "cp" else world
    launcher = [sys.executable]
    if point.strategy != "single":
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    settings: dict[str, Any] = {
        "run.dir": folder,
        "run.device": device,
        "parallel.strategy": point.strategy,
        "data.seq_len": point.length,
        "data.shuffle_sequences": 0,  # the preset's shuffle buffer may not fit in memory at this length
        "train.micro_batch": point.batch,
        "train.tokens_per_step": point.batch * point.length * data_ranks,
        "train.activation_checkpointing": point.checkpointing,
        "train.steps": steps,
        "train.val_tokens": 0,
        "train.sample_tokens": 0,
        "checkpoint.every": 0,
        "log.every": 1,
    }
    if point.bucket_mb is not None:
        settings["parallel.bucket_mb"] = point.bucket_mb
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    alone = ["--allow-single-rank"] if point.strategy == "single" else []
    return [*launcher, "-m", "tercet", "train", "--preset", preset, *flags, "--log.no_tensorboard", *alone]


def measure(point: Point, preset: str, ranks: int, steps: int, seconds: float, device: str) -> Cell:
    """Run a cell in a subprocess with a temporary run folder."""
    scratch = Path(tempfile.mkdtemp(prefix="tercet-sweep-"))
    run = scratch / "run"
    with (scratch / "output").open("w+") as output:
        process = subprocess.Popen(
            command(point, preset, ranks, steps, device, run), stdout=output, stderr=subprocess.STDOUT
        )
        started, late = time.monotonic(), False
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()  # torchrun forwards it to its ranks
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    try:
        logged = [e for e in read_events(events_file(run)) if isinstance(e, StepLogged)] if run.exists() else []
        return judge(point, logged, process.returncode, text, time.monotonic() - started if late else None)
    except FileNotFoundError:
        return judge(point, [], process.returncode, text, time.monotonic() - started if late else None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def judge(point: Point, logged: Sequence[StepLogged], code: int, text: str, late: float | None) -> Cell:
    """Turn a run's log, exit code and output into a result. Ignores the first step, which is warm-up."""
    if code != 0 or late is not None:
        if late is not None:
            return Cell(point, f"too slow ({late:.0f} s)", steps=len(logged))
        if any(sign in text for sign in _OUT_OF_MEMORY) or code in (-9, 137):
            return Cell(point, "out of memory", steps=len(logged))
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        lines = errors or [line for line in text.splitlines() if line.strip()] or [f"exit code {code}"]
        return Cell(point, lines[-1].strip()[:200], steps=len(logged))
    counted = logged[1:]
    if not counted:
        return Cell(point, f"data ended after {len(logged)} steps: 2 are needed", steps=len(logged))
    took = statistics.median(e.step_seconds for e in counted)
    return Cell(
        point,
        "ok",
        tokens_per_s=statistics.median(e.tokens_per_s for e in counted),
        memory_gib=max(e.memory_gib for e in logged),
        step_seconds=took,
        steps=len(logged),
    )


def cliffs(cells: Sequence[Cell]) -> list[str]:
    """Neighbouring batch sizes or lengths between which tokens/s drops sharply."""
    worked = {c.point: c.tokens_per_s for c in cells if c.tokens_per_s}
    found = []
    for axis in ("batch", "length"):
        lines: dict[Any, list[Point]] = {}
        for point in worked:
            rest = tuple(value for name, value in asdict(point).items() if name != axis)
            lines.setdefault(rest, []).append(point)
        for line in lines.values():
            line.sort(key=lambda p: getattr(p, axis))
            for a, b in itertools.pairwise(line):
                if worked[b] < CLIFF * worked[a]:
                    found.append(
                        f"{b.label}: {axis} {getattr(a, axis)} → {getattr(b, axis)} drops from "
                        f"{worked[a]:.0f} to {worked[b]:.0f} tokens/s ({worked[b] / worked[a]:.0%})"
                    )
    return found


def shown(cell: Cell) -> str:
    if cell.tokens_per_s is None:
        return cell.outcome
    return f"{cell.tokens_per_s:.0f} tokens/s, {cell.memory_gib:.2f} GiB"


def render(cells: Sequence[Cell]) -> list[str]:
    """Markdown: one table per strategy and checkpointing mode, lengths by batch sizes, then the cliffs."""
    lines = []
    for label, group in _by_label(cells).items():
        batches = sorted({c.point.batch for c in group})
        at = {(c.point.length, c.point.batch): c for c in group}
        lines += [f"### {label}", "", "| length | " + " | ".join(f"batch {b}" for b in batches) + " |"]
        lines.append("|---" * (len(batches) + 1) + "|")
        for length in sorted({c.point.length for c in group}):
            row = [shown(at[length, b]) if (length, b) in at else "" for b in batches]
            lines.append(f"| {length} | " + " | ".join(row) + " |")
        lines.append("")
    found = cliffs(cells)
    return lines + ([f"warning: {sentence}" for sentence in found] or ["no throughput cliffs"])


def heat_maps(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Plot tokens/s and memory, lengths by batch sizes; needs matplotlib and at least two cells."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    written = []
    for number, (label, group) in enumerate(_by_label(cells).items()):
        lengths, batches = sorted({c.point.length for c in group}), sorted({c.point.batch for c in group})
        if len(lengths) * len(batches) < 2:
            continue
        figure, axes = pyplot.subplots(1, 2, figsize=(4 + 2 * len(batches), 2 + 0.6 * len(lengths)))
        for axis, (name, title) in zip(axes, (("tokens_per_s", "tokens/s"), ("memory_gib", "GiB")), strict=True):
            values = {(c.point.length, c.point.batch): getattr(c, name) for c in group}
            grid = [[values.get((l, b)) or float("nan") for b in batches] for l in lengths]
            axis.imshow(grid, aspect="auto", cmap="viridis")
            axis.set_xticks(range(len(batches)), [str(b) for b in batches])
            axis.set_yticks(range(len(lengths)), [str(l) for l in lengths])
            axis.set(xlabel="batch", ylabel="length", title=title)
            outcomes = {(c.point.length, c.point.batch): c.outcome for c in group}
            for y, length in enumerate(lengths):
                for x, batch in enumerate(batches):
                    value = values.get((length, batch))
                    text = f"{value:.3g}" if value else outcomes.get((length, batch), "")[:14]
                    axis.text(x, y, text, ha="center", va="center", color="white" if value else "black", fontsize=8)
        figure.suptitle(label)
        figure.tight_layout()
        path = folder / f"heatmap-{number}.svg"
        figure.savefig(path)
        pyplot.close(figure)
        written.append(path)
    return written


def _by_label(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.point.label, []).append(cell)
    return groups

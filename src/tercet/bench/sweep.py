"""`tercet sweep`: tokens/s and memory over a grid of settings, or the loss over learning rates.

Each cell is a subprocess (cells.py). One that runs out of memory, fails or times out is reported in the table, and the
sweep continues. No torch.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.atomic_io import check_writable_folder
from tercet.bench.cells import CellRun, failure, run_cell
from tercet.bench.learning_rates import DEFAULT_STEPS, sweep_learning_rates
from tercet.bench.plots import paint_cells
from tercet.bench.settings import parse_settings
from tercet.config.sections import ActivationCheckpointing, StrategyName
from tercet.errors import UsageError
from tercet.inference.plots import save_svg, svg_figure
from tercet.telemetry.events import StepLogged
from tercet.telemetry.units import quantity

if TYPE_CHECKING:
    from tercet.config.schema import RunConfig

# Tokens/s below this share of a neighbour's is a cliff: sparse attention costs about the same per token at any length.
CLIFF = 0.6


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
    config: str = "",
    settings: str = "",
    lengths: tuple[int, ...] = (),
    batches: tuple[int, ...] = (),
    checkpointing: tuple[ActivationCheckpointing, ...] = ("none",),
    strategies: tuple[StrategyName, ...] = ("single",),
    bucket_mb: tuple[float, ...] = (25.0,),
    ranks: int = 1,
    lrs: tuple[float, ...] = (),
    steps: int | None = None,
    seconds: float = 300.0,
    out: str = "sweep",
    device: str = "auto",
) -> int:
    """Measure tokens/s and memory over lengths, batch sizes, checkpointing, strategies and bucket sizes.

    With --lrs, train once with each learning rate instead and compare the losses.

    Args:
        preset: Base configuration of every cell.
        config: TOML file with more of it, as for `tercet train`.
        settings: More keys, e.g. data.source=text,data.path=my-texts,model.selector=learned.
        lengths: Sequence lengths; default: the preset's, or its first stage's.
        batches: Sequences per device and pass; default: the preset's.
        checkpointing: Activation checkpointing: none, selective, full.
        strategies: single, ddp, fsdp, hsdp, cp; all but single run under torchrun.
        bucket_mb: DDP bucket sizes; other strategies ignore them.
        ranks: Ranks of every strategy but single.
        lrs: Learning rates to compare, at one length and batch size.
        steps: Optimizer steps per cell, of which the first is warm-up; default: 6, or 100 with --lrs.
        seconds: Time limit per cell, start-up included.
        out: Folder for sweep.jsonl, sweep.md and the plots; must not hold those of an earlier sweep.
        device: auto, cpu or cuda.
    """
    from tercet.config.load import load

    steps = steps if steps is not None else DEFAULT_STEPS if lrs else 6
    if steps < 2:
        raise UsageError(f"--steps {steps} is too small: the first step is warm-up, give at least 2")
    given = parse_settings(settings)
    whole = load(preset=preset, file=config or None, flags=given).config
    base = whole.stages[0]  # every cell has one length
    if whole.train.stages:
        print(f"note: train.stages has no effect: all steps are like those of its first, {whole.train.stages[0]}")
    source = ["--preset", preset, *(["--config", config] if config else [])]
    grid = points(
        lengths or (base.data.seq_len,), batches or (base.train.micro_batch,), checkpointing, strategies, bucket_mb
    )
    folder = Path(out)
    if found := [name for name in ("sweep.jsonl", "sweep.md") if (folder / name).exists()]:
        raise UsageError(f"--out {folder} holds {found[0]} of an earlier sweep: choose another folder, or remove it")
    if lrs:
        keys = given | _learning_rate_keys(lrs, grid, base, ranks)
    check_writable_folder("--out", folder)
    folder.mkdir(parents=True, exist_ok=True)
    if lrs:
        words = launcher(grid[0].strategy, source, ranks, device)
        return sweep_learning_rates(lrs, base, words, keys, steps, seconds, folder)
    print(f"{len(grid)} cells of {steps} steps, at most {seconds:g} s each, into {folder}")
    cells = []
    with (folder / "sweep.jsonl").open("w", encoding="utf-8") as log:
        for i, point in enumerate(grid, 1):
            words = launcher(point.strategy, source, ranks, device)
            cell = judge(point, run_cell(words, given | cell_keys(point, ranks, steps), seconds))
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


def launcher(strategy: str, source: Sequence[str], ranks: int, device: str) -> list[str]:
    """The `tercet train` command of a strategy, without the keys of a cell. source: --preset and --config."""
    words = [sys.executable]
    if strategy != "single":
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += ["-m", "tercet", "train", *source, "--run.device", device, "--parallel.strategy", strategy]
    return [*words, "--log.no_tensorboard", *(["--allow-single-rank"] if strategy == "single" else [])]


def cell_keys(point: Point, ranks: int, steps: int) -> dict[str, Any]:
    """The configuration of a cell: no accumulation, validation, samples or checkpoints."""
    return _point_keys(point, _pass_tokens(point, ranks)) | {
        "data.shuffle_sequences": 0,  # the preset's shuffle buffer may not fit in memory at this length
        "profile.steps": None,  # it would be measured too
        "train.steps": steps, "train.val_tokens": 0, "train.sample_tokens": 0, "checkpoint.every": 0, "log.every": 1,
    }  # fmt: skip


def _pass_tokens(point: Point, ranks: int) -> int:
    """Tokens of a pass, on all ranks."""
    return point.batch * point.length * (1 if point.strategy in ("single", "cp") else ranks)


def _point_keys(point: Point, tokens_per_step: int) -> dict[str, Any]:
    keys = {
        "data.seq_len": point.length, "train.micro_batch": point.batch, "train.tokens_per_step": tokens_per_step,
        "train.activation_checkpointing": point.checkpointing, "train.stages": (),
    }  # fmt: skip
    return keys if point.bucket_mb is None else keys | {"parallel.bucket_mb": point.bucket_mb}


def _learning_rate_keys(lrs: Sequence[float], grid: Sequence[Point], base: RunConfig, ranks: int) -> dict[str, Any]:
    """The configuration that all learning rates share."""
    if wrong := [lr for lr in lrs if not lr > 0]:
        raise UsageError(f"--lrs {wrong[0]:g} must be above 0: give learning rates such as 0.0003")
    if base.train.optimizer == "muon" and base.train.muon.lr is not None:
        raise UsageError(
            f"--lrs varies train.lr, but train.muon.lr={base.train.muon.lr:g} is set, and Muon's matrices would keep "
            "it: leave it out, then they learn at the rates of --lrs too"
        )
    if len(grid) > 1:
        raise UsageError(f"--lrs with {len(grid)} combinations of other settings: give one length, batch size, …")
    (point,) = grid
    pass_tokens = _pass_tokens(point, ranks)
    # As many tokens as in the base configuration, in whole passes.
    return _point_keys(point, pass_tokens * max(1, base.train.tokens_per_step // pass_tokens))


def judge(point: Point, run: CellRun) -> Cell:
    """Turn a run into a result. Ignores the first step, which is warm-up."""
    logged = [event for event in run.events if isinstance(event, StepLogged)]
    if run.failed:
        return Cell(point, failure(run), steps=len(logged))
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
    if found := cliffs(cells):
        return lines + [f"warning: {sentence}" for sentence in found]
    return lines + ["no throughput cliffs"] * any(cell.tokens_per_s is not None for cell in cells)


def heat_maps(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Plot tokens/s and memory, lengths by batch sizes; needs matplotlib and at least two cells."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    written = []
    for number, (label, group) in enumerate(_by_label(cells).items()):
        lengths, batches = sorted({c.point.length for c in group}), sorted({c.point.batch for c in group})
        if len(lengths) * len(batches) < 2:
            continue
        # One above the other: side by side, the text would be too small on a phone.
        size = (max(4.0, 1.2 + 1.1 * len(batches)), 2 * (1.1 + 0.5 * len(lengths)))
        figure, axes = svg_figure(*size, rows=2)
        at = {(c.point.length, c.point.batch): c for c in group}
        panels = (("tokens_per_s", "tokens/s"), ("memory_gib", "memory, GiB"))
        for axis, (name, title) in zip(axes, panels, strict=True):
            values = {where: getattr(cell, name) for where, cell in at.items()}
            labels = {where: _cell_text(name, values[where], cell) for where, cell in at.items()}
            paint_cells(axis, title, values, labels)
        figure.suptitle(label)
        path = folder / f"heatmap-{number}.svg"
        save_svg(figure, path)
        written.append(path)
    return written


def _cell_text(name: str, value: float | None, cell: Cell) -> str:
    if value is None:
        return textwrap.shorten(cell.outcome, 40, placeholder=" …")
    return quantity(value) if name == "tokens_per_s" else f"{value:.3g}"


def _by_label(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.point.label, []).append(cell)
    return groups

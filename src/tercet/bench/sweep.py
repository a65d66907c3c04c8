"""`tercet sweep`: tokens/s and memory over a grid of settings, or with --lrs the loss over learning rates. No torch.

Each cell is a `tercet train` in a process of its own (settings.py). One that runs out of memory, fails or times out is
reported in the table, and the sweep continues.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tercet.atomic_io import check_writable_folder
from tercet.bench.settings import Ended, parse_settings, run
from tercet.config.load import load
from tercet.config.sections import ActivationCheckpointing, StrategyName
from tercet.errors import UsageError
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import Event, StepLogged, Validated
from tercet.telemetry.sinks import mean_of_last

if TYPE_CHECKING:
    from tercet.config.schema import RunConfig


# Tokens/s below this share of a neighbour's is a cliff: sparse attention costs about the same per token at any length.
CLIFF = 0.6
# Keys that a cell sets, and what chooses their values.
OWN_KEYS = {
    "data.seq_len": "--lengths", "train.micro_batch": "--batches", "train.tokens_per_step": "--batches",
    "train.stages": "--lengths", "train.activation_checkpointing": "--checkpointing", "train.steps": "--steps",
    "parallel.strategy": "--strategies", "run.device": "--device", "run.dir": "--out", "profile.steps": "tercet train",
    "train.sample_tokens": "tercet train", "checkpoint.every": "tercet train", "log.every": "--steps",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Settings of a cell."""

    strategy: str
    length: int
    batch: int
    checkpointing: str

    @property
    def label(self) -> str:
        return f"{self.strategy}, checkpointing {self.checkpointing}"


@dataclass(frozen=True)
class Cell:
    """Result of a cell. outcome: "ok", "out of memory", "too slow (…)" or the last line of the error."""

    point: Point
    outcome: str
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    step_seconds: float | None = None
    steps: int = 0


class Job(NamedTuple):
    """A cell to run: its name, and what turns the run into a result."""

    name: str
    point: Point
    keys: dict[str, Any]
    judge: Callable[[Ended, Sequence[Event]], Any]


def sweep(
    preset: str = "tiny",
    config: str = "",
    settings: str = "",
    lengths: tuple[int, ...] = (),
    batches: tuple[int, ...] = (),
    checkpointing: tuple[ActivationCheckpointing, ...] = ("none",),
    strategies: tuple[StrategyName, ...] = ("single",),
    ranks: int = 1,
    lrs: tuple[float, ...] = (),
    steps: int | None = None,
    seconds: float = 300.0,
    out: str = "sweep",
    device: str = "auto",
) -> int:
    """Measure tokens/s and memory over lengths, batch sizes, checkpointing and strategies.

    With --lrs, train once with each learning rate instead and compare the losses.

    Args:
        preset: Base configuration of every cell.
        config: TOML file with more of it, as for `tercet train`.
        settings: More keys, e.g. data.source=text,data.path=my-texts,model.selector=learned.
        lengths: Sequence lengths; default: the preset's, or its first stage's.
        batches: Sequences per device and pass; default: the preset's.
        checkpointing: Activation checkpointing: none, selective, full.
        strategies: single, ddp, fsdp, hsdp, cp; all but single run under torchrun.
        ranks: Ranks of every strategy but single.
        lrs: Learning rates to compare, at one length and batch size.
        steps: Optimizer steps per cell, of which the first is warm-up; default: 6, or 100 with --lrs.
        seconds: Time limit per cell, start-up included.
        out: Folder for sweep.jsonl and sweep.md; must not hold those of an earlier sweep.
        device: auto, cpu or cuda.
    """
    steps = steps if steps is not None else RATE_STEPS if lrs else 6
    if steps < 2:
        raise UsageError(f"--steps {steps} is too small: the first step is warm-up, give at least 2")
    given = parse_settings(settings, OWN_KEYS)
    whole = load(preset=preset, file=config or None, flags=given).config
    base = whole.stages[0]  # every cell has one length
    if whole.train.stages:
        print(f"note: train.stages has no effect: all steps are like those of its first, {whole.train.stages[0]}")
    grid = [
        Point(*one)
        for one in itertools.product(
            strategies, lengths or (base.data.seq_len,), batches or (base.train.micro_batch,), checkpointing
        )
    ]
    folder = Path(out)
    if found := [name for name in ("sweep.jsonl", "sweep.md") if (folder / name).exists()]:
        raise UsageError(f"--out {folder} holds {found[0]} of an earlier sweep: choose another folder, or remove it")
    rates = sorted(set(lrs))
    check_rates(rates, base, len(grid))
    check_writable_folder("--out", folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = ["--preset", preset, *(["--config", config] if config else [])]

    best: Callable[[Any], Any] = fastest
    show: Callable[[Any], str] = shown
    table_of: Callable[[Any], list[str]] = render
    if rates:  # as many tokens as in the base configuration, in whole passes
        tokens = pass_tokens(grid[0], ranks)
        shared = point_keys(grid[0], tokens * max(1, base.train.tokens_per_step // tokens))
        jobs: list[Job] = [
            Job(f"lr {lr:g}", grid[0], shared | rate_keys(base, lr, steps), partial(judge_rate, lr)) for lr in rates
        ]
        best, show, table_of = best_rate, rate_shown, render_rates
    else:
        jobs = [
            Job(f"{p.label}, {p.batch} × {p.length}", p, cell_keys(p, ranks, steps), partial(judge, p)) for p in grid
        ]
    print(f"{len(jobs)} cells of {steps} steps, at most {seconds:g} s each, into {folder}")
    cells: list[Any] = []
    with (folder / "sweep.jsonl").open("w", encoding="utf-8") as log:
        for i, job in enumerate(jobs, 1):
            words = launcher(job.point.strategy, source, ranks, device)
            cells.append(job.judge(*run_cell(words, {**given, **job.keys}, seconds)))
            log.write(json.dumps(asdict(cells[-1])) + "\n")
            log.flush()
            print(f"{i}/{len(jobs)}  {job.name}: {show(cells[-1])}", flush=True)
    table = table_of(cells)
    (folder / "sweep.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n" + "\n".join(table))
    winner = best(cells)
    record = winner and {key: value for key, value in asdict(winner).items() if key != "losses"}
    print(json.dumps({"cells": len(cells), "ok": sum(cell.outcome == "ok" for cell in cells), "best": record}))
    return 0 if winner else 1


def run_cell(words: Sequence[str], keys: Mapping[str, Any], seconds: float) -> tuple[Ended, list[Event]]:
    """Run `tercet train` with these keys in a temporary run folder, for at most `seconds`."""
    with tempfile.TemporaryDirectory(prefix="tercet-sweep-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "run"
        ended = run([*words, *as_flags({**keys, "run.dir": folder})], seconds)
        return ended, list(read_events(events_file(folder))) if events_file(folder).exists() else []


def as_flags(keys: Mapping[str, Any]) -> list[str]:
    """Configuration keys as words of a command line."""
    return [part for key, value in keys.items() for part in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def launcher(strategy: str, source: Sequence[str], ranks: int, device: str) -> list[str]:
    """The `tercet train` command of a strategy, without the keys of a cell. source: --preset and --config."""
    words = [sys.executable]
    if strategy != "single":
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += ["-m", "tercet", "train", *source, "--run.device", device, "--parallel.strategy", strategy]
    return [*words, "--log.no_tensorboard", *(["--allow-single-rank"] if strategy == "single" else [])]


def pass_tokens(point: Point, ranks: int) -> int:
    """Tokens of a pass, on all ranks."""
    return point.batch * point.length * (1 if point.strategy in ("single", "cp") else ranks)


def point_keys(point: Point, tokens_per_step: int) -> dict[str, Any]:
    return {
        "data.seq_len": point.length, "train.micro_batch": point.batch, "train.tokens_per_step": tokens_per_step,
        "train.activation_checkpointing": point.checkpointing, "train.stages": (), "train.sample_tokens": 0,
        "profile.steps": None, "checkpoint.every": 0,
    }  # fmt: skip


def cell_keys(point: Point, ranks: int, steps: int) -> dict[str, Any]:
    """The configuration of a cell: no accumulation, validation, samples or checkpoints."""
    return point_keys(point, pass_tokens(point, ranks)) | {
        "data.shuffle_sequences": 0,  # the preset's shuffle buffer may not fit in memory at this length
        "train.steps": steps, "train.val_tokens": 0, "log.every": 1,
    }  # fmt: skip


def judge(point: Point, ended: Ended, events: Sequence[Event]) -> Cell:
    """Turn a run into a result. Ignores the first step, which is warm-up."""
    logged = [event for event in events if isinstance(event, StepLogged)]
    if ended.failed:
        return Cell(point, ended.reason, steps=len(logged))
    counted = logged[1:]
    if not counted:
        return Cell(point, f"data ended after {len(logged)} steps: 2 are needed", steps=len(logged))
    speed = statistics.median(e.tokens_per_s for e in counted)
    took = statistics.median(e.step_seconds for e in counted)
    return Cell(point, "ok", speed, max(e.memory_gib for e in logged), took, len(logged))


def fastest(cells: Sequence[Cell]) -> Cell | None:
    return max((c for c in cells if c.tokens_per_s), key=lambda c: c.tokens_per_s or 0.0, default=None)


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
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.point.label, []).append(cell)
    lines = []
    for label, group in groups.items():
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
    return lines + ["no throughput cliffs"] * (fastest(cells) is not None)


RATE_STEPS = 100
# Tokens of the validation after the last step: enough to rank learning rates that differ by a factor.
VALIDATION_TOKENS = 65536


@dataclass(frozen=True)
class LRCell:
    """Result of one learning rate. outcome: "ok", "diverged", "too slow (…)", or the reason of a failure."""

    lr: float
    outcome: str
    loss: float | None = None  # of the validation after the last step; without validation, the smoothed training loss
    validated: bool = False
    losses: tuple[float, ...] = ()  # of every step
    tokens_per_s: float | None = None


def check_rates(rates: Sequence[float], base: RunConfig, combinations: int) -> None:
    """Raise if the learning rates cannot be compared."""
    if wrong := [lr for lr in rates if not lr > 0]:
        raise UsageError(f"--lrs {wrong[0]:g} must be above 0: give learning rates such as 0.0003")
    if rates and base.train.optimizer == "muon" and base.train.muon.lr is not None:
        raise UsageError(
            f"--lrs varies train.lr, but train.muon.lr={base.train.muon.lr:g} is set, and Muon's matrices would keep "
            "it: leave it out, then they learn at the rates of --lrs too"
        )
    if rates and combinations > 1:
        raise UsageError(f"--lrs with {combinations} combinations of other settings: give one length, batch size, …")


def rate_keys(base: RunConfig, lr: float, steps: int) -> dict[str, Any]:
    """The settings of a run: warm-up takes at most a tenth of it, and it validates at the end only."""
    return {
        "train.lr": lr, "train.steps": steps, "log.every": max(1, steps // 20),
        "train.warmup_steps": min(base.train.warmup_steps, max(1, steps // 10)),
        "train.val_every": 0, "train.val_tokens": min(base.train.val_tokens, VALIDATION_TOKENS),
    }  # fmt: skip


def judge_rate(lr: float, ended: Ended, events: Sequence[Event]) -> LRCell:
    """Turn a run into a result."""
    logged = [event for event in events if isinstance(event, StepLogged)]
    losses = tuple(loss for event in logged for loss in event.losses)
    speed = statistics.median(event.tokens_per_s for event in logged) if logged else None
    diverged = any(not math.isfinite(loss) for loss in losses)
    if ended.failed and not diverged:
        return LRCell(lr, ended.reason, losses=losses, tokens_per_s=speed)
    final, _ = mean_of_last(losses)
    if diverged or final is None or (len(losses) > 1 and final > losses[0]):
        return LRCell(lr, "diverged", losses=losses, tokens_per_s=speed)
    validated = [event.loss for event in events if isinstance(event, Validated)]
    return LRCell(lr, "ok", validated[-1] if validated else final, bool(validated), losses, speed)


def best_rate(cells: Sequence[LRCell]) -> LRCell | None:
    return min((cell for cell in cells if cell.loss is not None), key=lambda cell: cell.loss or 0.0, default=None)


def rate_shown(cell: LRCell) -> str:
    if cell.loss is None:
        return cell.outcome
    return f"{'validation' if cell.validated else 'training'} loss {cell.loss:.4f}"


def render_rates(cells: Sequence[LRCell]) -> list[str]:
    """Markdown: one row per rate, and what to do next."""
    found = best_rate(cells)
    lines = ["| learning rate | loss | tokens/s |", "|---|---|---|"]
    for cell in cells:
        speed = "" if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}"
        lines.append(f"| {cell.lr:g}{' (best)' if cell is found else ''} | {rate_shown(cell)} | {speed} |")
    if found is None:
        diverged = any(cell.outcome == "diverged" for cell in cells)
        return [*lines, "", "no learning rate worked: try smaller ones" if diverged else "no run ended; see the table"]
    advice = f"train with --train.lr {found.lr:g}"
    if len(cells) > 1 and found is cells[0]:
        advice += f", or try smaller learning rates: the best is the smallest one, add --lrs {found.lr / 3:.2g}"
    elif len(cells) > 1 and found is cells[-1]:
        advice += f", or try larger learning rates: the best is the largest one, add --lrs {found.lr * 3:.2g}"
    return [*lines, "", advice, "Longer runs usually need a slightly smaller learning rate."]

"""`tercet sweep --lrs …`: short runs that differ in the learning rate only, their losses, and a plot. No torch."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.bench.cells import CellRun, failure, run_cell
from tercet.inference.plots import save_svg, svg_figure
from tercet.telemetry.events import StepLogged, Validated
from tercet.telemetry.sinks import mean_of_last, smoothing_window
from tercet.telemetry.units import plural

if TYPE_CHECKING:
    from tercet.config.schema import RunConfig

DEFAULT_STEPS = 100
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


def settings(config: RunConfig, lr: float, steps: int) -> dict[str, Any]:
    """The settings of a run: warm-up takes at most a tenth of it, and it validates at the end only."""
    return {
        "train.lr": lr,
        "train.steps": steps,
        "train.warmup_steps": min(config.train.warmup_steps, max(1, steps // 10)),
        "train.val_every": 0,
        "train.val_tokens": min(config.train.val_tokens, VALIDATION_TOKENS),
        "train.sample_tokens": 0,
        "profile.steps": None,  # they may be after the last
        "checkpoint.every": 0,
        "log.every": max(1, steps // 20),
    }


def judge(lr: float, run: CellRun) -> LRCell:
    """Turn a run into a result."""
    logged = [event for event in run.events if isinstance(event, StepLogged)]
    losses = tuple(loss for event in logged for loss in event.losses)
    speed = statistics.median(event.tokens_per_s for event in logged) if logged else None
    diverged = any(not math.isfinite(loss) for loss in losses)
    if run.failed and not diverged:
        return LRCell(lr, failure(run), losses=losses, tokens_per_s=speed)
    final, _ = mean_of_last(losses)
    if diverged or final is None or (len(losses) > 1 and final > losses[0]):
        return LRCell(lr, "diverged", losses=losses, tokens_per_s=speed)
    validated = [event.loss for event in run.events if isinstance(event, Validated)]
    return LRCell(lr, "ok", validated[-1] if validated else final, bool(validated), losses, speed)


def sweep_learning_rates(
    rates: Sequence[float], config: RunConfig, words: Sequence[str], keys: Mapping[str, Any], steps: int,
    seconds: float, folder: Path,
) -> int:  # fmt: skip
    """Run all rates and write sweep.jsonl, sweep.md and learning-rates.svg. words: the `tercet train` command; keys:
    the configuration keys that all rates share."""
    rates = sorted(set(rates))
    print(f"{plural(len(rates), 'learning rate')}, {steps} steps each, at most {seconds:g} s each, into {folder}")
    cells = []
    with (folder / "sweep.jsonl").open("w", encoding="utf-8") as log:
        for i, lr in enumerate(rates, 1):
            cells.append(judge(lr, run_cell(words, {**keys, **settings(config, lr, steps)}, seconds)))
            log.write(json.dumps(asdict(cells[-1])) + "\n")
            log.flush()
            print(f"{i}/{len(rates)}  lr {lr:g}: {shown(cells[-1])}", flush=True)
    worked = [cell for cell in cells if cell.loss is not None]
    best = min(worked, key=lambda cell: cell.loss or 0.0, default=None)
    table = render(cells, best)
    (folder / "sweep.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n" + "\n".join(table))
    if worked and (picture := plot(cells, folder / "learning-rates.svg")) is not None:
        print(f"plot: {picture}")
    record = best and {key: value for key, value in asdict(best).items() if key != "losses"}
    print(json.dumps({"cells": len(cells), "ok": len(worked), "best": record}))
    return 0 if worked else 1


def shown(cell: LRCell) -> str:
    if cell.loss is None:
        return cell.outcome
    return f"{'validation' if cell.validated else 'training'} loss {cell.loss:.4f}"


def render(cells: Sequence[LRCell], best: LRCell | None) -> list[str]:
    """Markdown: one row per rate, and what to do next."""
    lines = ["| learning rate | loss | tokens/s |", "|---|---|---|"]
    for cell in cells:
        speed = "" if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}"
        mark = " (best)" if cell is best else ""
        lines.append(f"| {cell.lr:g}{mark} | {shown(cell)} | {speed} |")
    if best is None:
        diverged = any(cell.outcome == "diverged" for cell in cells)
        return [*lines, "", "no learning rate worked: try smaller ones" if diverged else "no run ended; see the table"]
    place = cells.index(best)
    advice = f"train with --train.lr {best.lr:g}"
    if len(cells) > 1 and place == 0:
        advice += f", or try smaller learning rates: the best is the smallest one, add --lrs {best.lr / 3:.2g}"
    elif len(cells) > 1 and place == len(cells) - 1:
        advice += f", or try larger learning rates: the best is the largest one, add --lrs {best.lr * 3:.2g}"
    return [*lines, "", advice, "Longer runs usually need a slightly smaller learning rate."]


def plot(cells: Sequence[LRCell], path: Path) -> Path | None:
    """Final loss by learning rate, and the smoothed loss of each run; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    figure, (final, curves) = svg_figure(5.4, 6.4, rows=2)  # one above the other, for narrow screens
    worked = [cell for cell in cells if cell.loss is not None]
    final.plot([c.lr for c in worked], [c.loss for c in worked], color="0.6", linewidth=1, zorder=1)
    colours = matplotlib.colormaps["viridis"]
    tops = []
    for i, cell in enumerate(cells):
        colour = colours(0.9 * i / max(1, len(cells) - 1))
        if cell.loss is not None:
            final.plot(cell.lr, cell.loss, "o", color=colour)
        smooth = smoothed(cell.losses)
        curves.plot(range(1, len(smooth) + 1), smooth, color=colour, linewidth=1.2, label=f"{cell.lr:g}")
        tops += smooth[:1]
    for cell in cells:
        if cell.loss is None:
            final.axvline(cell.lr, color="#b03030", linewidth=1, linestyle=":")
            final.text(cell.lr, 0.97, cell.outcome[:24], rotation=90, va="top", ha="right", fontsize=7, color="#b03030",
                       transform=final.get_xaxis_transform())  # fmt: skip
    if worked:
        best = min(worked, key=lambda c: c.loss or 0.0)
        final.annotate(f"{best.lr:g}", (best.lr, best.loss or 0.0), (0, 8), textcoords="offset points", ha="center")
        lowest = min(x for c in worked for x in smoothed(c.losses))
        curves.set_ylim(lowest - 0.05 * (max(tops) - lowest), max(tops) * 1.05)
    kind = "validation loss" if any(c.validated for c in worked) else "training loss, smoothed"
    final.set(xscale="log", xlabel="learning rate", ylabel=f"{kind} (nats per token)")
    curves.set(xlabel="step", ylabel="training loss, smoothed")
    curves.legend(title="learning rate", fontsize=8, frameon=False)
    for axis in (final, curves):
        axis.grid(alpha=0.3)
    save_svg(figure, path)
    return path


def smoothed(losses: Sequence[float]) -> list[float]:
    """Mean of the last losses up to each step, until the first one that is not finite."""
    finite = list(itertools.takewhile(math.isfinite, losses))
    window = smoothing_window(len(finite))
    return [sum(part) / len(part) for i in range(len(finite)) if (part := finite[max(0, i + 1 - window) : i + 1])]

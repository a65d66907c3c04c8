"""`tercet sweep --lrs …`: short runs that differ in the learning rate only, and their losses. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tercet.bench.cells import Ended
from tercet.errors import UsageError
from tercet.telemetry.events import Event, StepLogged, Validated
from tercet.telemetry.sinks import mean_of_last

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


def check(rates: Sequence[float], base: RunConfig, combinations: int) -> None:
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


def keys(base: RunConfig, lr: float, steps: int) -> dict[str, Any]:
    """The settings of a run: warm-up takes at most a tenth of it, and it validates at the end only."""
    return {
        "train.lr": lr, "train.steps": steps, "log.every": max(1, steps // 20),
        "train.warmup_steps": min(base.train.warmup_steps, max(1, steps // 10)),
        "train.val_every": 0, "train.val_tokens": min(base.train.val_tokens, VALIDATION_TOKENS),
    }  # fmt: skip


def judge(lr: float, ended: Ended, events: Sequence[Event]) -> LRCell:
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


def best(cells: Sequence[LRCell]) -> LRCell | None:
    return min((cell for cell in cells if cell.loss is not None), key=lambda cell: cell.loss or 0.0, default=None)


def shown(cell: LRCell) -> str:
    if cell.loss is None:
        return cell.outcome
    return f"{'validation' if cell.validated else 'training'} loss {cell.loss:.4f}"


def render(cells: Sequence[LRCell]) -> list[str]:
    """Markdown: one row per rate, and what to do next."""
    found = best(cells)
    lines = ["| learning rate | loss | tokens/s |", "|---|---|---|"]
    for cell in cells:
        speed = "" if cell.tokens_per_s is None else f"{cell.tokens_per_s:,.0f}"
        lines.append(f"| {cell.lr:g}{' (best)' if cell is found else ''} | {shown(cell)} | {speed} |")
    if found is None:
        diverged = any(cell.outcome == "diverged" for cell in cells)
        return [*lines, "", "no learning rate worked: try smaller ones" if diverged else "no run ended; see the table"]
    advice = f"train with --train.lr {found.lr:g}"
    if len(cells) > 1 and found is cells[0]:
        advice += f", or try smaller learning rates: the best is the smallest one, add --lrs {found.lr / 3:.2g}"
    elif len(cells) > 1 and found is cells[-1]:
        advice += f", or try larger learning rates: the best is the largest one, add --lrs {found.lr * 3:.2g}"
    return [*lines, "", advice, "Longer runs usually need a slightly smaller learning rate."]

"""metrics.json: the run in a few figures, read from its events. Works on a crashed or running run too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from tercet.telemetry.events import CheckpointSaved, Event, RunEnded, RunStarted, StepLogged, StepsSkipped, Validated


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """Figures of a whole run, over all its processes."""
    events = list(events)
    steps = [e for e in events if isinstance(e, StepLogged)]
    validations = [e for e in events if isinstance(e, Validated)]
    started = [e for e in events if isinstance(e, RunStarted)]
    ended = [e for e in events if isinstance(e, RunEnded)]
    checkpoints = [e for e in events if isinstance(e, CheckpointSaved)]
    last = steps[-1] if steps else None
    best = min(validations, key=lambda e: e.loss, default=None)
    return {
        "outcome": ended[-1].outcome if ended and events[-1] is ended[-1] else "unknown",
        "reason": ended[-1].reason if ended and events[-1] is ended[-1] else None,
        "step": last.step if last else 0,
        "steps": started[-1].steps if started else None,
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "first_loss": steps[0].losses[0] if steps else None,
        "val_loss": validations[-1].loss if validations else None,
        "best_val_loss": best.loss if best else None,
        "best_val_step": best.step if best else None,
        "tokens_per_s": statistics.median(e.tokens_per_s for e in steps) if steps else None,
        "mfu": last.mfu if last else None,
        "memory_gib": max(e.memory_gib for e in steps) if steps else None,
        "data_wait_share": _data_wait(steps),
        "skipped_steps": sum(len(e.steps) for e in events if isinstance(e, StepsSkipped)),
        "processes": len(started),
        "resumes": sum(e.resumed_from is not None for e in started),
        "checkpoints": len(checkpoints),
        "checkpoint_seconds": max((e.seconds for e in checkpoints), default=None),
        "seconds": sum(e.seconds for e in ended),
        "parameters": started[-1].parameters if started else None,
    }


def _data_wait(steps: list[StepLogged]) -> float | None:
    total = sum(e.step_seconds * len(e.losses) for e in steps)
    return sum(e.data_seconds * len(e.losses) for e in steps) / total if total else None

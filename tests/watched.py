"""Small real runs with full telemetry, for tests of telemetry and reports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runs import small
from tercet.data.loader import Loader
from tercet.errors import TercetError
from tercet.report.gates import Thresholds
from tercet.report.read import Run, read_run
from tercet.report.verdict import Verdict, judge
from tercet.train.state import Interval
from tercet.train.trainer import train

# The defaults with fewer steps: a run of 500 would take too long for a test.
FEW = Thresholds(min_steps=40, checkpoint_blocked=1.0)
SENTENCE = "the quick brown fox jumps over the lazy dog; a needle in a haystack, found again and again. "


def corpus(folder: Path) -> Path:
    """Learnable text, as JSON lines."""
    path = folder / "corpus.jsonl"
    if not path.exists():
        lines = [json.dumps({"text": SENTENCE[i % 37 :] + SENTENCE * (3 + i % 4)}) for i in range(400)]
        path.write_text("\n".join(lines) + "\n")
    return path


def settings(folder: Path, data: Path, **changes: Any) -> Any:
    """A small run that learns, logs every other step, saves, validates, and has blocks to choose from."""
    base = {
        "run__dir": str(folder),
        "model__nsa__select_count": 5,
        # 16 blocks: among the 8 of a shorter sequence so small a model does settle on two, and is rightly told of.
        "data__seq_len": 128,
        "train__micro_batch": 1,
        "data__source": "jsonl",
        "data__path": (str(data),),
        "data__validation_fraction": 0.1,
        "train__steps": 40,
        "train__lr": 1e-2,
        "train__warmup_steps": 4,
        "train__val_every": 20,
        "train__val_tokens": 256,
        "checkpoint__every": 20,
        "log__every": 2,
        "log__heartbeat_seconds": 0.1,
    }
    return small(**(base | changes))


@contextmanager
def even_clock() -> Iterator[None]:
    """Steps appear to take 20 ms and never wait for data, whatever else runs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interval, "seconds_per_step", lambda self: 0.02)
        patch.setattr(Loader, "wait_seconds", property(lambda self: 0.0, lambda self, seconds: None), raising=False)
        yield


def run(folder: Path, data: Path, *, resume: str | None = None, **changes: Any) -> tuple[Run, int | str]:
    """Train; returns the run folder, and the exit code or the error message."""
    try:
        result: int | str = train(settings(folder, data, **changes), origins={}, resume=resume)
    except TercetError as error:
        result = str(error)
    return read_run(folder), result


def verdict(run: Run, **more: Any) -> Verdict:
    return judge(run, limits=FEW, **more)


def gate(judged: Verdict, name: str) -> Any:
    return next(g for g in judged.gates if g.name == name)


def rules(run: Run) -> set[str]:
    """Health rules that fired during the run."""
    from tercet.telemetry.events import HealthFired

    return {e.rule for rank in run.events for e in run.of(HealthFired, rank)}


Lines = list[dict[str, Any]]


def each(kind: str, **changes: Any) -> Callable[[Lines], None]:
    """Changes the fields of all events of a kind; a function is applied to the old value."""

    def change(lines: Lines) -> None:
        for line in lines:
            if line["kind"] == kind:
                line |= {name: new(line[name]) if callable(new) else new for name, new in changes.items()}

    return change


def without(kind: str) -> Callable[[Lines], None]:
    """Removes all events of a kind."""

    def change(lines: Lines) -> None:
        lines[:] = [line for line in lines if line["kind"] != kind]

    return change


def copy(run: Run, target: Path, *changes: Callable[[Lines], Any]) -> Run:
    """A copy of the run folder with modified events."""
    shutil.copytree(run.folder, target)
    path = target / "events_rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for change in changes:
        change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(target)


def dense_baseline(run: Run, target: Path, *changes: Callable[[Lines], Any]) -> Run:
    """A copy of the run folder as a dense model would have written it."""

    def all_layers(value: str) -> Callable[[list[str]], list[str]]:
        return lambda old: [value] * len(old)

    routes = {"branch": all_layers("dense"), "route": all_layers("sdpa"), "reason": all_layers("")}
    copy(run, target, each("routes", **routes), *changes)
    config = target / "config.toml"
    config.write_text(config.read_text().replace('attention = "nsa"', 'attention = "dense"'))
    return read_run(target)

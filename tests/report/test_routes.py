"""Every forward pass of every step is counted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tercet.train.step as step_module
from runs import rows
from tercet.report.read import read_run
from tercet.telemetry.events import RoutesCounted
from tercet.telemetry.progress import Screen
from watched import run

# Log lines, saves and stops fall on different steps; two passes per step.
APART = {"train__steps": 12, "log__every": 5, "checkpoint__every": 0, "train__tokens_per_step": 256}
APART |= {"train__val_tokens": 0}
BRANCHES = 2 * 3  # layers × branches


def signalled_after(step: int, patch: pytest.MonkeyPatch) -> None:
    def advance(self: Screen, made: int) -> None:
        if made == step:
            signal.raise_signal(signal.SIGTERM)

    patch.setattr(Screen, "advance", advance)


def counted(folder: Path) -> list[str]:
    return [row["calls"] for row in rows(folder / "fallback_counters.csv")]


def test_passes_between_the_last_log_line_and_a_stop_are_counted(tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch:
        signalled_after(7, patch)
        found, code = run(tmp_path / "run", data, **APART)
    assert code == 128 + signal.SIGTERM
    assert list(found.route_counts.values()) == [14] * BRANCHES

    found, code = run(tmp_path / "run", data, resume="auto", **APART)
    assert code == 0
    assert list(found.route_counts.values()) == [24] * BRANCHES
    assert counted(tmp_path / "run") == ["24"] * BRANCHES  # of both processes


def test_a_step_that_fails_is_not_counted_and_those_before_it_are(tmp_path, data, monkeypatch):
    true, passes = step_module.loss_sum, 0

    def failing(model, batch):
        nonlocal passes
        passes += 1
        if passes == 18:  # the second of step 9
            raise RuntimeError("a cable was pulled")
        return true(model, batch)

    config = APART | {"checkpoint__every": 7}
    monkeypatch.setattr(step_module, "loss_sum", failing)
    with pytest.raises(RuntimeError, match="a cable was pulled"):
        run(tmp_path / "run", data, **config)
    failed = read_run(tmp_path / "run")
    assert list(failed.route_counts.values()) == [16] * BRANCHES
    # Resumes from step 7, so step 8 is redone.
    found, code = run(tmp_path / "run", data, resume="auto", **config)
    assert code == 0
    assert [e.calls[0] for e in found.of(RoutesCounted)] == [14, 10]  # totals: the last of each process
    assert list(found.route_counts.values()) == [24] * BRANCHES
    assert counted(tmp_path / "run") == ["24"] * BRANCHES

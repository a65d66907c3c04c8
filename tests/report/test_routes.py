"""Every forward pass of every step is counted, and the report shows when some are missing from the log."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import pytest

import tercet.train.step as step_module
from tercet.report.read import Run, expected_passes, read_run, unlogged_passes
from tercet.telemetry.events import RoutesCounted
from tercet.telemetry.progress import Screen
from watched import copy, each, gate, run, verdict

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
    with (folder / "fallback_counters.csv").open() as stream:
        return [row["calls"] for row in csv.DictReader(stream)]


def test_passes_between_the_last_log_line_and_a_stop_are_counted(tmp_path, data, monkeypatch):
    with monkeypatch.context() as patch:
        signalled_after(7, patch)
        found, code = run(tmp_path / "run", data, **APART)
    assert code == 128 + signal.SIGTERM
    assert list(found.route_counts.values()) == [14] * BRANCHES
    assert unlogged_passes(found) == ""

    found, code = run(tmp_path / "run", data, resume="auto", **APART)
    assert code == 0
    assert list(found.route_counts.values()) == [24] * BRANCHES
    assert (expected_passes(found), unlogged_passes(found)) == (24 * BRANCHES, "")
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
    assert unlogged_passes(failed) == ""
    # Resumes from step 7, so step 8 is redone.
    found, code = run(tmp_path / "run", data, resume="auto", **config)
    assert code == 0
    assert [e.calls[0] for e in found.of(RoutesCounted)] == [10, 14, 6, 10]
    assert list(found.route_counts.values()) == [24] * BRANCHES
    assert counted(tmp_path / "run") == ["24"] * BRANCHES


ON_A_KERNEL = (each("run_started", device="NVIDIA H200"), each("routes", route=lambda old: ["triton"] * len(old)))


def without_the_last_count(lines):
    del lines[max(i for i, line in enumerate(lines) if line["kind"] == "routes")]


def test_passes_missing_from_the_log_are_reported_with_the_verdict(healthy: Run, tmp_path):
    whole = verdict(copy(healthy, tmp_path / "whole", *ON_A_KERNEL))
    assert gate(whole, "fallbacks").sentence == "none in 360 passes"
    assert gate(whole, "routing").sentence == "2 layers, all branches on their kernels"
    told = verdict(copy(healthy, tmp_path / "cut", *ON_A_KERNEL, without_the_last_count))
    missing = unlogged_passes(copy(healthy, tmp_path / "missing", without_the_last_count))
    assert missing.startswith("348 of 360 passes logged, ")
    for name, sentence in (
        ("fallbacks", f"none in {missing}"),
        ("routing", f"2 layers, all branches on their kernels; {missing}"),
    ):
        assert gate(told, name).sentence == sentence
        assert ("not counted", missing) in gate(told, name).evidence
        assert gate(told, name).verdict == gate(whole, name).verdict


def test_redone_steps_are_expected_once(healthy: Run, tmp_path):
    """Started at 0, resumed at 20, then at 40 (whose record is lost), and finally at 20 again."""

    def changed(lines):
        began = [i for i, line in enumerate(lines) if line["kind"] == "run_started"]
        assert [lines[i]["step"] for i in began] == [0, 20]
        lines.insert(began[1], lines[began[1]] | {"step": 40})

    assert expected_passes(copy(healthy, tmp_path / "run", changed)) == 60 * BRANCHES


def test_a_run_without_steps_has_no_missing_passes(tmp_path, data, monkeypatch):
    monkeypatch.setattr(Screen, "begin", lambda *_: signal.raise_signal(signal.SIGTERM))
    found, _ = run(tmp_path / "run", data, **APART)
    assert (expected_passes(found), unlogged_passes(found)) == (0, "")

"""Files of a run folder: present, with headers, and correct."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal

import pytest
import torch

from runs import rows
from tercet.config.sections import ProfileConfig
from tercet.report.read import read_run
from tercet.telemetry.events import Noted
from tercet.telemetry.measure import Profiler
from watched import corpus, run, settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    data = corpus(tmp_path_factory.mktemp("corpus"))
    folder = tmp_path_factory.mktemp("runs") / "run"
    found, code = run(folder, data, train__steps=10, profile__steps="3:4")
    assert code == 0
    return found


def test_layer_statistics_of_all_layers_at_every_log_line(finished):
    table = rows(finished.folder / "k_stats.csv")
    assert [(r["step"], r["layer"]) for r in table] == [(str(s), str(i)) for s in (2, 4, 6, 8, 10) for i in (0, 1)]
    for row in table:
        shares = [float(row[f"gate_share_{b}"]) for b in ("compressed", "selected", "window")]
        assert sum(shares) == pytest.approx(1)
    # 8 blocks, 5 of them selected: the c-th block's queries select min(5, c + 1).
    assert float(table[0]["selected_blocks"]) <= 5


def test_optimizer_state_and_types(finished):
    parameters = finished.started[0].parameters
    assert float((finished.folder / "opt_state_mb.txt").read_text()) == pytest.approx(
        2 * 4 * parameters / 2**20, rel=0.05
    )
    lines = (finished.folder / "dtypes_report.txt").read_text().splitlines()
    assert f"parameters: float32 {parameters}" in lines
    assert f"gradients: float32 {parameters}" in lines
    assert f"optimizer: float32 {2 * parameters}" in lines


def test_memory_by_part(finished):
    record = json.loads((finished.folder / "mem_step1.json").read_text())
    # Gradients of a fused projection share one storage, which may be larger than its parts.
    assert 1 <= record["gradients_mib"] / record["parameters_mib"] < 1.25
    assert record["optimizer_mib"] == pytest.approx(2 * record["parameters_mib"], rel=0.05)
    assert record["host_total_gib"] > record["host_gib"] > 0


def test_the_phases_of_a_step_add_up(finished):
    for used, logged in zip(finished.resources, finished.steps, strict=True):
        parts = [used.forward_seconds, used.backward_seconds, used.optimizer_seconds, used.other_seconds]
        assert min(parts) >= 0
        assert used.forward_seconds > 0
        assert used.backward_seconds > 0
        assert sum(parts) + used.data_seconds + used.communication_seconds == pytest.approx(
            logged.step_seconds, rel=0.05
        )


def test_a_profile_is_written_for_the_requested_steps(finished):
    trace = finished.folder / "profile" / "trace_rank0_steps3-4.json.gz"
    with gzip.open(trace, "rt") as stream:
        names = [e.get("name") for e in json.load(stream)["traceEvents"]]
    for phase in ("forward", "backward", "optimizer"):
        assert names.count(phase) == 2  # balanced: one for each of steps 3 and 4
    assert "Self CPU" in (finished.folder / "profile" / "kernels_rank0_steps3-4.txt").read_text()
    assert any("profile:" in e.text for e in finished.of(Noted))


def test_steps_to_profile_that_are_over_are_a_warning(tmp_path):
    config, cpu = ProfileConfig(steps="3:4"), torch.device("cpu")
    profiler = Profiler(tmp_path, 0, config, cpu)
    assert profiler.before_step(2) == ""
    assert "profile.steps=3:4 traces nothing: this is step 5" in profiler.before_step(5)
    assert profiler.before_step(6) == ""
    (tmp_path / "profile").mkdir()  # of an earlier process
    assert Profiler(tmp_path, 0, config, cpu).before_step(5) == ""


def test_a_killed_run_loses_at_most_its_last_interval(tmp_path, fork_server):
    data = corpus(tmp_path)
    config = settings(tmp_path / "run", data, train__steps=5000, checkpoint__every=0, train__val_tokens=0)
    child = fork_server.start(config)
    child.until("step   20/5000", seconds=120)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    found = read_run(tmp_path / "run")
    assert found.state == "gone"
    shown = max(int(n) for n in re.findall(r"step +(\d+)/5000", child.output))
    assert found.step >= shown  # what was printed is on disk
    assert found.problems == ()

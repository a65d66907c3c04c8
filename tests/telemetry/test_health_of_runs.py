"""Every health rule, triggered by a run with the fault. A healthy run has no findings (tests/report)."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tercet.train.step as step_module
from runs import step_logged
from tercet.model.compression import Compression
from tercet.report.gates import Thresholds
from tercet.report.verdict import judge
from tercet.telemetry import health
from tercet.telemetry.events import HealthFired, LayersObserved
from tercet.telemetry.health import HealthMonitor
from tercet.telemetry.observer import LayerProbe
from watched import corpus, even_clock, gate, rules, run, verdict

SHORT = {"train__steps": 12, "train__val_tokens": 0, "checkpoint__every": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


def replace_loss(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Train on `change(n, loss)` in the n-th forward pass."""
    counter = itertools.count(1)
    true = step_module.loss_sum
    monkeypatch.setattr(step_module, "loss_sum", lambda model, batch: change(next(counter), true(model, batch)))


def gate_bias(monkeypatch: pytest.MonkeyPatch, *bias: float) -> None:
    """Initialise every layer's gate logits to these instead of zero."""
    from tercet.model.attention import Gate

    @torch.no_grad()
    def init(self):
        nn.init.zeros_(self.proj.weight)
        self.proj.bias.copy_(torch.tensor(bias).repeat(self.proj.out_features // 3))

    monkeypatch.setattr(Gate, "init_weights", init)


def run_evenly(folder: Path, data: Path, **changes):
    """A short run whose steps all take as long."""
    with even_clock():
        return run(folder, data, **SHORT | changes)


def test_a_closed_gate_of_an_import_is_a_finding_only_after_it_has_opened(monkeypatch):
    monkeypatch.setattr(health, "PATIENCE", 1)
    monitor = HealthMonitor(init_from="out/model.safetensors")
    layers = {f.name: [None] for f in dataclasses.fields(LayersObserved) if f.default is dataclasses.MISSING}
    counts = [
        len(monitor.observe(LayersObserved(**{**layers, "step": step, "gate_share_window": [share]})))
        for step, share in enumerate([0.001, 0.2, 0.001, 0.2, float("nan")])
    ]
    assert counts == [0, 0, 1, 0, 1]


def dead_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead φ scores every block the same, so the first blocks are always selected."""
    alive = Compression.forward
    monkeypatch.setattr(Compression, "forward", lambda self, *given: alive(self, *given) * 0)


def on_losses(change):
    return lambda monkeypatch: replace_loss(monkeypatch, change)


def gates_at(*bias):
    return lambda monkeypatch: gate_bias(monkeypatch, *bias)


DEAD = [(6, f"layer {i}: the selected branch") for i in (0, 1)]
# fault -> the rules that fire, (step, start of the sentence) of each finding, and the gate that fails
FAULTS = {
    "a dead branch": (gates_at(0.0, -9.0, 0.0), {"dead_branch"}, DEAD, "selection health"),
    "collapsed gates": (
        gates_at(8.0, -8.0, -8.0), {"dead_branch", "gate_collapse"},
        [*((6, f"layer {i}: one gate has over 95%") for i in (0, 1)), *DEAD,
         *((6, f"layer {i}: the window branch") for i in (0, 1))], "selection health",
    ),
    "the same blocks for every token": (
        dead_compression, {"selection_stuck"}, [(6, "layer 0: 100.00%"), (6, "layer 1: 100.00%")], "selection health",
    ),
    "a NaN": (
        on_losses(lambda n, loss: loss * float("nan") if n in (5, 6) else loss), {"nonfinite"},
        [(6, "loss or gradients were not")], "numerics",
    ),
    "no gradients": (
        on_losses(lambda n, loss: loss * 0 + 100.0), {"zero_grad"}, [(2, "gradient norm was zero")], "numerics",
    ),
    "a lasting spike": (  # reported once, at the first log line after it
        on_losses(lambda n, loss: loss * 5 if n > 14 else loss), {"loss_spike"}, [(16, "loss ")], "stability",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_fails_the_verdict(tmp_path, data, monkeypatch, fault):
    provoke, expected, sentences, name = FAULTS[fault]
    provoke(monkeypatch)
    found, code = run_evenly(tmp_path / "run", data, train__steps=24 if fault == "a lasting spike" else 12)
    fired = found.of(HealthFired)
    assert (code, rules(found)) == (0, expected)
    assert [(f.step, f.sentence[: len(words)]) for f, (_, words) in zip(fired, sentences, strict=True)] == sentences
    assert gate(verdict(found), name).verdict == "NO-GO"


def test_a_rule_set_to_halt_stops_the_run(tmp_path, data, monkeypatch):
    replace_loss(monkeypatch, lambda n, loss: loss * 5 if n > 14 else loss)
    found, error = run_evenly(tmp_path / "run", data, train__steps=24, health__halt=("loss_spike",))
    assert "stopped by health.halt=loss_spike after step 16" in str(error)
    assert found.ended is not None
    assert found.ended.outcome == "halted"
    assert gate(verdict(found), "stability").verdict == "NO-GO"


def test_a_starved_loader_is_found(tmp_path, data, monkeypatch):
    import tercet.data.loader as loader

    slow = loader.pack

    def dripping(*args, **kwargs):
        for packed in slow(*args, **kwargs):
            time.sleep(0.06)
            yield packed

    monkeypatch.setattr(loader, "pack", dripping)
    monkeypatch.setattr("tercet.train.state.Interval.seconds_per_step", lambda self: 0.08)
    found, _ = run(tmp_path / "run", data, **SHORT, data__prefetch=0)
    assert "data_starvation" in rules(found)
    assert gate(verdict(found), "data").verdict == "NO-GO"


def test_a_throughput_drop_is_found(tmp_path, data, monkeypatch):
    # A fake clock: on a busy machine real timings could hide the drop.
    now = [0.0]
    monkeypatch.setattr("tercet.train.state.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def throttled(n, loss):
        now[0] += 0.32 if n > 14 else 0.02
        return loss

    replace_loss(monkeypatch, throttled)
    found, _ = run(tmp_path / "run", data, **SHORT | {"train__steps": 22})
    fired = [f for f in found.of(HealthFired) if f.rule == "throughput_drop"]
    assert [f.step for f in fired] == [20]  # once, at the third slow interval in a row
    assert fired[0].sentence.startswith("400 tokens/s up to step 20")
    assert "6,400" in fired[0].sentence
    # On a shared CPU a drop is no fault of the run, unless a target was stated.
    told = gate(verdict(found), "throughput")
    assert (told.verdict, dict(told.evidence)["drops"][:1]) == ("NOT APPLICABLE", "1")
    told = gate(judge(found, limits=Thresholds(tokens_per_s=1.0)), "throughput")
    assert (told.verdict, fired[0].sentence in told.sentence) == ("NO-GO", True)


def test_a_fallback_is_counted_and_fails_the_verdict(tmp_path, data, monkeypatch):
    # The layers run on the reference backend; pretend that the device could run the kernels.
    monkeypatch.setattr(LayerProbe, "on_gpu", staticmethod(lambda layer: True))
    found, _ = run_evenly(tmp_path / "run", data)
    assert rules(found) == {"fallback"}
    judged = verdict(found)
    assert gate(judged, "fallbacks").verdict == "NO-GO"
    assert dict(gate(judged, "fallbacks").evidence)["fallbacks"] == "72 of 72 passes"  # 12 steps, 2 layers, 3 branches
    rows = (found.folder / "fallback_counters.csv").read_text().splitlines()
    assert rows[0] == "layer,branch,route,reason,fallback,calls"
    assert all(row.endswith(",True,12") for row in rows[1:])


@pytest.mark.gpu
def test_a_model_the_kernels_do_not_support_falls_back_on_a_gpu(tmp_path, data):
    found, _ = run(tmp_path / "run", data, **SHORT, run__device="cuda", train__compile="off")
    assert "fallback" in rules(found)
    judged = verdict(found)
    assert gate(judged, "routing").verdict == gate(judged, "fallbacks").verdict == "NO-GO"
    assert "select_block=8 is not within 16" in gate(judged, "fallbacks").sentence


def test_a_rule_fires_once_per_episode():
    monitor = HealthMonitor()
    event, well = step_logged(1, grad_norms=[0.0]), step_logged(1, grad_norms=[0.5])
    counts = [len(monitor.observe(e)) for e in (event, event, well, event)]
    assert counts == [1, 0, 0, 1]

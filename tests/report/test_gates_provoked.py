"""Gates without a health rule behind them fail when the fault they watch for is provoked."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import tercet.train.step as step_module
from tercet.report.attention_gates import selection_gate
from tercet.report.gates import Thresholds, checkpoint_gate, data_gate, stability_gate
from tercet.report.read import read_run
from tercet.report.verdict import judge
from tercet.telemetry.events import (
    CheckpointFailed,
    HealthFired,
    SelectorsObserved,
    StepLogged,
)
from tercet.train import manifest
from watched import FEW, copy, dense_baseline, each, even_clock, gate, run, verdict, without

PLAIN = {"train__val_tokens": 0, "checkpoint__every": 0}
PARITY = {"check": "kernel parity", "verdict": "ok", "finding": "bfloat16: forward 2e-3", "fix": ""}


def assert_no_go(found, name, sentence):
    told = gate(verdict(found), name)
    assert (told.verdict, sentence in told.sentence) == ("NO-GO", True)


def test_memory_that_grows_is_no_go(tmp_path, data, monkeypatch):
    kept = []
    true = step_module.loss_sum

    def leaky(model, batch):
        kept.append(torch.ones(6 * 2**20))  # leak 24 MiB
        return true(model, batch)

    monkeypatch.setattr(step_module, "loss_sum", leaky)
    with even_clock():
        found, _ = run(tmp_path / "run", data, train__steps=40, **PLAIN)
    assert_no_go(found, "memory", "memory grew from")


@pytest.mark.parametrize("failing", [0, 1])
def test_saves_that_fail_are_no_go_unless_a_later_one_succeeds(tmp_path, data, monkeypatch, failing):
    true, calls = manifest.publish, itertools.count()

    def full(*given):
        if next(calls) == failing:
            raise OSError(28, "No space left on device")
        return true(*given)

    monkeypatch.setattr(manifest, "publish", full)
    with even_clock():
        changes = PLAIN | {"train__steps": 8, "checkpoint__every": 4, "checkpoint__failures_allowed": 3}
        found, code = run(tmp_path / "run", data, **changes)
    assert (code == 0) == (failing == 0)
    assert len(found.of(CheckpointFailed)) == 1
    if failing == 1:
        assert_no_go(found, "checkpoint and resume", "No space left")
        return
    judged = verdict(found)
    ((told, _, names),) = judged.warnings()
    assert (gate(judged, "checkpoint and resume").verdict, names) == ("NOT TESTED", ["checkpoint and resume"])
    assert "No space left" in told
    assert "a later save succeeded" in told


def test_bad_records_are_no_go(tmp_path, data):
    broken = tmp_path / "broken.jsonl"
    lines = data.read_text().splitlines()
    broken.write_text("\n".join(line if i % 5 else "{broken" for i, line in enumerate(lines)) + "\n")
    with even_clock():
        found, code = run(tmp_path / "run", broken, train__steps=8, **PLAIN, data__bad_records="skip")
    assert code == 0
    assert_no_go(found, "data", "bad records")


def with_losses(healthy, losses, **config):
    """The run as if its steps had these losses and there were no others."""
    left = iter(losses)
    steps = [dataclasses.replace(e, losses=[*itertools.islice(left, len(e.losses))]) for e in healthy.steps]
    others = [e for e in healthy.events[0] if not isinstance(e, StepLogged)]
    events = {0: [*others, *(e for e in steps if e.losses)]}
    return dataclasses.replace(healthy, events=events, config={**healthy.config, **config})


def test_the_loss_need_not_fall_where_only_selectors_learn(healthy):
    rising = [3 + 0.01 * i for i in range(60)]
    assert stability_gate(with_losses(healthy, rising), [], Thresholds(40)).verdict == "NO-GO"
    told = stability_gate(with_losses(healthy, rising, **{"train.selector.only": True}), [], Thresholds(40))
    assert told.verdict == "GO"
    assert "only the selectors learn" in told.sentence
    assert "loss fell" not in told.sentence
    assert "decreasing loss" not in told.threshold


def spike(step, threshold):
    return HealthFired(step=step, rule="loss_spike", action="warn", sentence="", value=9.0, threshold=threshold)


def test_a_loss_may_spike_once_if_it_recovers(healthy):
    def verdict_of(*spikes):
        return stability_gate(healthy, list(spikes), Thresholds(40)).verdict

    assert verdict_of(spike(30, 99.0)) == "GO"
    assert verdict_of(spike(30, 0.001)) == "NO-GO"  # the loss at the end is above the threshold
    assert verdict_of(spike(30, 99.0), spike(40, 99.0)) == "NO-GO"


def test_a_spike_soon_after_a_resume_is_no_go(healthy):
    (resumed,) = (e.step for e in healthy.started if e.resumed_from is not None)
    for step, expected in ((resumed, "GO"), (resumed + 10, "NO-GO"), (resumed + 11, "GO")):
        limits = Thresholds(40, checkpoint_blocked=1.0)
        assert checkpoint_gate(healthy, [spike(step, 99.0)], limits).verdict == expected


def on_gpu(healthy, folder: Path):
    """The record as a GPU run would have left it."""
    checked = {name: lambda old, value=value: [*old, value] for name, value in PARITY.items()}
    kernels = [each("run_started", device="NVIDIA H200"), routed("triton", ""), each("doctor", **checked)]
    found = copy(healthy, folder, *kernels)
    written("mem_boot.json", '{"device_total_gib": 139.8}')(folder)
    return read_run(found.folder)


def written(name: str, text: str):
    """Changes a file of the run folder."""
    return lambda folder: (folder / name).write_text(text)


def routed(route: str, reason: str, fallback: bool = False):
    values = {"route": route, "reason": reason, "fallback": fallback}
    return each("routes", **{name: lambda old, value=value: [value] * len(old) for name, value in values.items()})


def last_is(**fields):
    return lambda lines: lines[-1].update(fields)


STALL = {"doing": "saving", "for_seconds": 90, "limit_seconds": 30, "dump": "stacks.txt", "over": False}
TOO_BIG = '{"device_total_gib": 0.1}'
# fault -> the gate that sees it, its verdict, what it says, and what happens to the events or the folder of a GPU run
FAULTS = {
    "does not fit": ("memory", "NO-GO", "of the device's memory", written("mem_boot.json", TOO_BIG)),
    "failed": ("stability", "NO-GO", "disk full", last_is(outcome="failed", reason="disk full")),
    "halted": ("stability", "NO-GO", "halted", last_is(outcome="halted", reason="loss_spike")),
    "stalled": (
        "stability", "NO-GO", "stalled 1 time (rank 0, step 8, while saving)",
        lambda lines: lines.insert(-1, lines[-1] | {"kind": "stall", "step": 7} | STALL),
    ),
    "off its kernels": ("routing", "NO-GO", "asked for", routed("reference", "asked for")),
    "slow, but requested": ("fallbacks", "GO", "", routed("reference", "asked for")),
    "fell back": ("routing", "NO-GO", "head_dim=7", routed("reference", "head_dim=7", True)),
    "fell back silently": ("fallbacks", "NO-GO", "head_dim=7", routed("reference", "head_dim=7", True)),
    "unchecked kernels": ("numerics", "NOT TESTED", "were not compared", without("doctor")),
    "wrong kernels": ("numerics", "NO-GO", "do not match", each("doctor", verdict=lambda old: [*old[:-1], "failed"])),
    "skipped check": ("numerics", "NOT TESTED", "compared", each("doctor", verdict=lambda v: [*v[:-1], "not tested"])),
    "half precision": ("numerics", "NO-GO", "bfloat16", written("dtypes_report.txt", "kind:\nparameters: bfloat16 9")),
    "validation": ("numerics", "NO-GO", "validation loss is not finite", each("validation", loss="nan")),
    "gradients": ("numerics", "NO-GO", "gradient norms not finite", each("step", grad_norms=["inf"])),
    "gates": ("selection health", "NO-GO", "gates are not finite", each("layers", gate_entropy=["nan", 0.5])),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_by_its_gate(healthy, tmp_path, fault):
    name, expected, words, change = FAULTS[fault]
    found = on_gpu(healthy, tmp_path / "run")
    assert gate(verdict(found), name).verdict == "GO" or name == "fallbacks"
    if fault in ("does not fit", "half precision"):
        change(found.folder)
    else:
        found = copy(found, tmp_path / "changed", change)
    told = gate(verdict(read_run(found.folder)), name)
    assert (told.verdict, words in told.sentence) == (expected, True), told.sentence


def test_synthetic_data_is_not_tested(healthy):
    made_up = dataclasses.replace(healthy, config={**healthy.config, "data.source": "synthetic"})
    told = data_gate(made_up, [], Thresholds(40))
    assert (told.verdict, "synthetic data" in told.sentence, "--data.source" in told.fix) == ("NOT TESTED", True, True)


def test_everything_tested_and_well_is_go(healthy, tmp_path):
    judged = judge(on_gpu(healthy, tmp_path / "run"), limits=Thresholds(40, checkpoint_blocked=1.0, tokens_per_s=1.0))
    assert (judged.verdict, judged.exit_code) == ("GO", 0), judged.sentence
    assert "All 10 gates passed." in judged.sentence


def first_end_is(outcome):
    """Changes how the first process ended; "died": without an end event."""

    def change(lines):
        end = next(line for line in lines if line["kind"] == "run_ended")
        end |= {"outcome": outcome, "reason": "DataError: record 7"}
        if outcome == "died":
            lines.remove(end)

    return change


@pytest.mark.parametrize("outcome", ["died", "failed", "halted"])
def test_a_failure_that_a_later_process_recovered_from_is_a_warning(healthy, tmp_path, outcome):
    found = copy(healthy, tmp_path / "run", first_end_is(outcome))
    judged = verdict(found)
    assert (gate(judged, "stability").verdict, gate(verdict(healthy), "stability").warnings) == ("GO", [])
    ((told, _, names),) = judged.warnings()
    assert names == ["stability"]
    assert f"{outcome} once" in told
    assert "the run was resumed" in told
    assert ("DataError: record 7" in told) == (outcome != "died")
    unverified = dataclasses.replace(found, config=found.config | {"checkpoint.verify": False})
    assert gate(verdict(unverified), "stability").verdict == "NO-GO"
    started_again = copy(found, tmp_path / "again", each("run_started", resumed_from=None))
    assert "started again without a checkpoint" in verdict(started_again).warnings()[0][0]


def test_dense_may_be_faster_on_a_cpu_and_below_8k(healthy, tmp_path):
    ran, faster = on_gpu(healthy, tmp_path / "gpu"), each("step", tokens_per_s=lambda speed: 2 * speed)
    baselines = {run.on_gpu: dense_baseline(run, tmp_path / f"dense-{run.on_gpu}", faster) for run in (healthy, ran)}

    def throughput(run, length, **limits):
        run, dense = (
            dataclasses.replace(r, config={**r.config, "data.seq_len": length}) for r in (run, baselines[run.on_gpu])
        )
        return gate(judge(run, dense, Thresholds(40, **limits)), "throughput")

    assert throughput(healthy, 8192).verdict == "NOT APPLICABLE"
    assert "0.50× dense, but ran on a CPU" in throughput(healthy, 8192).sentence
    assert throughput(ran, 4096).verdict == "NOT APPLICABLE"
    assert throughput(ran, 8192).verdict == "NO-GO"
    assert "0.50× dense" in throughput(ran, 8192).sentence
    assert throughput(ran, 4096, tokens_per_s=1e9).verdict == "NO-GO"  # a stated target counts at any length
    long = dataclasses.replace(ran, config={**ran.config, "data.seq_len": 8192})
    assert [gate(verdict(r), "throughput").verdict for r in (ran, long)] == ["NOT APPLICABLE", "NOT TESTED"]
    dense = verdict(baselines[True])
    assert gate(dense, "throughput").sentence == "this run is dense itself"
    assert gate(dense, "selection health").verdict == "NOT APPLICABLE"


def test_a_dense_baseline_on_a_slow_backend_proves_nothing(healthy, tmp_path):
    one_slow_layer = each("routes", route=lambda r: [*r[:-1], "reference"], reason=lambda r: [*r[:-1], "asked for"])
    told = gate(judge(healthy, dense_baseline(healthy, tmp_path / "slow", one_slow_layer), FEW), "throughput")
    assert told.verdict == "NOT TESTED"
    assert "the dense baseline ran on reference (asked for)" in told.sentence
    told = gate(judge(healthy, dense_baseline(healthy, tmp_path / "uncounted", without("routes")), FEW), "throughput")
    assert told.verdict == "NOT TESTED"


def test_a_few_layers_with_a_dead_branch_are_go_and_many_are_no_go(healthy, tmp_path):
    ran = on_gpu(healthy, tmp_path / "run")  # of two layers

    def told(allowed, *layers, rule="dead_branch"):
        fired = {"rule": rule, "action": "warn", "sentence": "the compressed branch gets 0.94%", "value": 0}
        findings = [HealthFired(step=30, threshold=0.01, layer=layer, **fired) for layer in layers]
        return selection_gate(ran, findings, Thresholds(40, lone_branch_layers=allowed))

    assert told(0.5, 0, 0).verdict == "GO"  # a layer with two problems counts once
    assert "1 of 2 layers" in told(0.5, 0).sentence
    assert ("dead branch", "the compressed branch gets 0.94% from step 30 on: 1 of 2 layers") in told(0.5, 0).evidence
    assert "all 2 layers" in told(0.5).sentence
    assert "not: layer 0, 1 (allowed in 100%" in told(1.0, 1, 0).sentence
    for gate_of in (told(0.5, 0, 1), told(0, 0), told(0.5, None), told(1.0, 0, rule="selection_stuck")):
        assert gate_of.verdict == "NO-GO"


def test_selectors_that_choose_at_random_are_no_go(healthy, tmp_path):
    ran = on_gpu(healthy, tmp_path / "run")

    def gate_of(*mass, kl=0.1, best=0.7, steps=40):
        event = SelectorsObserved(step=60, layer=[0, 1], kl=[kl] * 2, mass=[*mass], best=[best] * 2, random=[0.3, 0.3])
        others = [e for e in ran.events[0] if not isinstance(e, SelectorsObserved)]
        run = dataclasses.replace(ran, events={0: [*others, event]})
        return selection_gate(run, [], Thresholds(steps, lone_branch_layers=1.0))

    assert gate_of(0.6, 0.5).verdict == "GO"
    assert gate_of(0.6, 0.31).verdict == "NO-GO"
    assert "layers 1 are no better than a random choice" in gate_of(0.6, 0.31).sentence
    assert gate_of(0.6, 0.31, steps=500).verdict == "GO"  # selectors start at random
    assert gate_of(0.6, 0.31, kl=None).verdict == "GO"  # not learned
    assert gate_of(0.3, 0.3, best=0.3).verdict == "GO"  # all blocks fit: nothing to choose


def test_selection_is_not_applicable_if_every_query_reads_all_blocks(healthy):
    def told(findings=(), **config):
        ran = dataclasses.replace(healthy, config={**healthy.config, "model.gate": "none", **config})
        return selection_gate(ran, list(findings), Thresholds(40))

    assert told().sentence == "no stuck selection in 2 layers"
    one = {"model.attention": ["nsa", "dense"]}
    assert told(**one).sentence == "no stuck selection in 1 layer"
    short = {"data.seq_len": 40}  # 5 blocks of 8 tokens
    stuck = HealthFired(step=9, rule="selection_stuck", action="warn", sentence="", value=1, threshold=1, layer=0)
    assert told([stuck]).verdict == "NO-GO"
    for found in (told(**short), told([stuck], **short), told(**{"model.dense_below": 128})):
        assert found.verdict == "NOT APPLICABLE"
        assert "nothing to choose: every query reads all" in found.sentence
    gated = told(**short, **{"model.gate": "sigmoid"})  # its gates are judged
    assert gated.verdict == "GO"
    assert gated.sentence.startswith("all 2 layers use all branches; nothing to choose")

"""Gates without a health rule behind them fail when the fault they watch for is provoked."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch

import tercet.telemetry.memory as memory
import tercet.train.step as step_module
from tercet.report.attention_gates import selection_gate
from tercet.report.gates import Thresholds
from tercet.report.read import read_run
from tercet.report.training_gates import checkpoint_gate, data_gate, numerics_gate, stability_gate
from tercet.report.verdict import judge
from tercet.telemetry.events import (
    CheckpointFailed,
    HealthFired,
    LayersObserved,
    SelectorsObserved,
    Stalled,
    StepLogged,
    Validated,
)
from tercet.train import manifest
from watched import FEW, copy, dense_baseline, each, even_clock, gate, run, verdict, without

PLAIN = {"train__val_tokens": 0, "checkpoint__every": 0}
PARITY = {"check": "kernel parity", "verdict": "ok", "finding": "bfloat16: forward 2e-3", "mend": ""}


def assert_no_go(found, name, sentence):
    told = gate(verdict(found), name)
    assert told.verdict == "NO-GO"
    assert sentence in told.sentence


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


def test_memory_that_does_not_fit_is_no_go(tmp_path, data, monkeypatch):
    monkeypatch.setattr(memory, "host_total_gib", lambda: 0.1)  # less memory than the process uses
    with even_clock():
        found, _ = run(tmp_path / "run", data, train__steps=4, **PLAIN)
    assert_no_go(found, "memory", "of the device's memory")


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


def test_synthetic_data_is_not_tested(tmp_path, data):
    with even_clock():
        found, _ = run(tmp_path / "run", data, train__steps=2, **PLAIN, data__source="synthetic", data__path=())
    assert "synthetic data" in gate(verdict(found), "data").sentence


def test_a_loss_that_does_not_fall_is_no_go(tmp_path, data, monkeypatch):
    true, counter = step_module.loss_sum, itertools.count(1)
    monkeypatch.setattr(step_module, "loss_sum", lambda model, batch: true(model, batch) * (1 + 0.02 * next(counter)))
    with even_clock():
        found, _ = run(tmp_path / "run", data, **PLAIN, train__steps=24, train__lr=1e-9)
    assert_no_go(found, "stability", "the loss did not fall")


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


def test_losses_are_compared_only_if_they_are_of_different_steps(healthy):
    def told(*losses):
        return stability_gate(with_losses(healthy, losses), [], Thresholds(40)).sentence

    assert told(3.0).endswith("; training loss 3.000 (one step)")
    assert "; training loss 2.500 (mean of the last 4 steps)" in told(4.0, 3.0, 2.0, 1.0)
    falling = [3 - 0.1 * i for i in range(10)]
    assert "fell from 2.800 (mean of the first 5 steps) to 2.300 (mean of the last 5 steps)" in told(*falling)
    assert "went from 2.300" in told(*falling[::-1])  # too few steps for a verdict


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


def test_stalls_of_any_rank_are_no_go(healthy):
    stall = Stalled(step=7, rank=1, doing="waiting for data", for_seconds=90, limit_seconds=30, dump="stacks.txt")
    events = {**healthy.events, 1: [stall, dataclasses.replace(stall, over=True)]}
    told = stability_gate(dataclasses.replace(healthy, events=events), [], Thresholds(40))
    assert told.verdict == "NO-GO"
    assert "stalled 1 time (rank 1, step 8, while waiting for data)" in told.sentence
    assert "stacks.txt" in told.fix


def test_a_silent_process_is_no_go(healthy):
    told = stability_gate(dataclasses.replace(healthy, state="silent"), [], Thresholds(40))
    assert (told.verdict, "heartbeat stopped" in told.sentence) == ("NO-GO", True)


def on_gpu(healthy, folder: Path, route="triton", reason="", fallback=False):
    """The record as a GPU run would have left it."""
    routes = {"route": route, "reason": reason, "fallback": fallback}
    found = copy(
        healthy,
        folder,
        each("run_started", device="NVIDIA H200"),
        each("routes", **{name: lambda old, value=value: [value] * len(old) for name, value in routes.items()}),
        each("doctor", **{name: lambda old, value=value: [*old, value] for name, value in PARITY.items()}),
    )
    (folder / "mem_boot.json").write_text('{"device_total_gib": 139.8}')
    return read_run(found.folder)


def test_everything_tested_and_well_is_go(healthy, tmp_path):
    judged = judge(on_gpu(healthy, tmp_path / "run"), limits=Thresholds(40, checkpoint_blocked=1.0, tokens_per_s=1.0))
    assert (judged.verdict, judged.exit_code) == ("GO", 0), judged.sentence
    # What one device cannot test is shown, but is not part of the verdict.
    assert [names for _, _, names in judged.untested()] == [["several devices"]]
    assert "not part of the verdict: several devices" in judged.sentence
    told = judged.as_dict(healthy)
    assert [(g["name"], g["verdict"]) for g in told["beyond"]] == [("several devices", "NOT TESTED")]


def test_a_process_that_died_and_was_resumed_is_a_warning(healthy, tmp_path):
    def without_first_end(lines):
        lines.remove(next(line for line in lines if line["kind"] == "run_ended"))

    found = copy(healthy, tmp_path / "run", without_first_end)
    judged = verdict(found)
    stability = gate(judged, "stability")
    assert (stability.verdict, gate(verdict(healthy), "stability").warnings) == ("GO", ())
    ((told, _, names),) = judged.warnings()
    assert (names, "died once" in told) == (["stability"], True)
    assert "Warnings: stability." in judged.sentence
    (saved,) = (g for g in judged.as_dict(found)["gates"] if g["warnings"])
    assert saved["name"] == "stability"
    assert "the run was resumed" in told

    def and_without_a_checkpoint(lines):
        without_first_end(lines)
        [line for line in lines if line["kind"] == "run_started"][1]["resumed_from"] = None

    ((told, *_),) = verdict(copy(healthy, tmp_path / "again", and_without_a_checkpoint)).warnings()
    assert "started again without a checkpoint" in told
    unverified = dataclasses.replace(found, config=found.config | {"checkpoint.verify": False})
    assert gate(verdict(unverified), "stability").verdict == "NO-GO"


def test_a_process_that_died_after_its_last_step_is_a_warning_once_resumed(healthy, tmp_path):
    def resumed_at_the_end(lines):
        end = next(line for line in reversed(lines) if line["kind"] == "run_ended")
        start = next(line for line in reversed(lines) if line["kind"] == "run_started")
        lines.remove(end)
        lines += [start | {"step": start["steps"], "time": end["time"]}, end]

    judged = verdict(copy(healthy, tmp_path / "run", resumed_at_the_end))
    assert gate(judged, "stability").verdict == "GO"
    assert [names for _, _, names in judged.warnings()] == [["stability"]]


@pytest.mark.parametrize("outcome", ["failed", "halted"])
def test_a_failure_that_a_later_process_recovered_from_is_a_warning_with_its_reason(healthy, tmp_path, outcome):
    def failed_twice(lines):
        end = next(line for line in lines if line["kind"] == "run_ended")
        end |= {"outcome": outcome, "reason": "DataError: record 7"}
        start = next(line for line in reversed(lines) if line["kind"] == "run_started")
        at = lines.index(start)
        lines[at:at] = [dict(start), end | {"time": start["time"]}]  # the first resume fails in the same way

    found = copy(healthy, tmp_path / "run", failed_twice)
    judged = verdict(found)
    assert gate(judged, "stability").verdict == "GO"
    ((told, _, names),) = judged.warnings()
    assert names == ["stability"]
    assert f"{outcome} twice (DataError: record 7), and the run was resumed" in told
    unverified = dataclasses.replace(found, config=found.config | {"checkpoint.verify": False})
    ((told, _),) = gate(verdict(unverified), "stability").reasons  # once, not for each process
    assert told == f"an earlier process {outcome}: DataError: record 7"

    def last_failed(lines):
        next(line for line in reversed(lines) if line["kind"] == "run_ended").update(
            outcome=outcome, reason="disk full"
        )

    assert gate(verdict(copy(healthy, tmp_path / "last", last_failed)), "stability").verdict == "NO-GO"


def test_branches_off_their_kernels_are_no_go(healthy, tmp_path):
    asked = verdict(on_gpu(healthy, tmp_path / "a", route="reference", reason="asked for"))
    assert gate(asked, "routing").verdict == "NO-GO"
    assert gate(asked, "fallbacks").verdict == "GO"  # slow, but requested
    fell = verdict(on_gpu(healthy, tmp_path / "b", route="reference", reason="head_dim=7", fallback=True))
    assert gate(fell, "routing").verdict == gate(fell, "fallbacks").verdict == "NO-GO"
    assert "head_dim=7" in gate(fell, "fallbacks").sentence


def test_a_run_slower_than_its_dense_baseline_is_no_go(healthy, tmp_path):
    baseline = dense_baseline(healthy, tmp_path / "baseline")
    told = gate(judge(healthy, baseline, Thresholds(min_steps=40, dense_ratio=1.5)), "throughput")
    assert told.verdict == "NO-GO"
    assert "1.00× dense, below 1.5×" in told.sentence
    assert gate(judge(healthy, baseline, FEW), "throughput").verdict == "GO"


def test_dense_may_be_faster_on_a_cpu_and_below_8k(healthy, tmp_path):
    def throughput(run, length=None, **limits):
        config = {**run.config, "data.seq_len": length or run.config["data.seq_len"]}
        run, dense = (dataclasses.replace(r, config=config | {"model.attention": r.config["model.attention"]})
                      for r in (run, baseline(run)))  # fmt: skip
        return gate(judge(run, dense, Thresholds(40, **limits)), "throughput")

    def keep_first_step(lines):
        first = next(line for line in lines if line["kind"] == "step")
        lines[:] = [line for line in lines if line["kind"] != "step" or line is first]

    def baseline(run):
        faster = each("step", tokens_per_s=lambda speed: 2 * speed)
        return dense_baseline(run, tmp_path / f"{run.folder.name}-dense-{next(names)}", faster)

    names = itertools.count()
    on_cpu = throughput(healthy)
    assert on_cpu.verdict == "NOT APPLICABLE"
    assert "0.50× dense, but ran on a CPU" in on_cpu.sentence
    short = dense_baseline(healthy, tmp_path / "short", keep_first_step)
    assert gate(judge(healthy, short, FEW), "throughput").verdict == "NOT APPLICABLE"
    ran = on_gpu(healthy, tmp_path / "gpu")
    assert throughput(ran, 4096).verdict == "NOT APPLICABLE"
    assert throughput(ran, 8192).verdict == "NO-GO"
    assert throughput(ran, 4096, dense_ratio=0.9).verdict == "NO-GO"  # a stated ratio counts at any length
    assert gate(verdict(ran), "throughput").verdict == "NOT APPLICABLE"  # without a baseline
    long = dataclasses.replace(ran, config={**ran.config, "data.seq_len": 8192})
    assert gate(verdict(long), "throughput").verdict == "NOT TESTED"
    dense = dense_baseline(ran, tmp_path / "dense")
    assert gate(verdict(dense), "throughput").sentence == "this run is dense itself"
    assert gate(verdict(dense), "selection health").verdict == "NOT APPLICABLE"


def test_a_dense_baseline_on_a_slow_backend_proves_nothing(healthy, tmp_path):
    one_slow_layer = each("routes", route=lambda r: [*r[:-1], "reference"], reason=lambda r: [*r[:-1], "asked for"])
    told = gate(judge(healthy, dense_baseline(healthy, tmp_path / "slow", one_slow_layer), FEW), "throughput")
    assert told.verdict == "NOT TESTED"
    assert "the dense baseline ran on reference (asked for)" in told.sentence
    told = gate(judge(healthy, dense_baseline(healthy, tmp_path / "uncounted", without("routes")), FEW), "throughput")
    assert told.verdict == "NOT TESTED"


def test_unchecked_kernels_are_not_tested_and_wrong_ones_are_no_go(healthy, tmp_path):
    found = on_gpu(healthy, tmp_path / "run")
    disagree = each("doctor", verdict=lambda verdicts: [*verdicts[:-1], "failed"])
    assert gate(verdict(copy(found, tmp_path / "a", without("doctor"))), "numerics").verdict == "NOT TESTED"
    assert gate(verdict(copy(found, tmp_path / "b", disagree)), "numerics").verdict == "NO-GO"
    skipped = each("doctor", verdict=lambda verdicts: [*verdicts[:-1], "not tested"])
    assert gate(verdict(copy(found, tmp_path / "c", skipped)), "numerics").verdict == "NOT TESTED"


def test_weights_stored_in_half_precision_are_no_go(healthy, tmp_path):
    found = copy(healthy, tmp_path / "run")
    report = found.folder / "dtypes_report.txt"
    report.write_text(report.read_text().replace("parameters: float32", "parameters: bfloat16"))
    assert gate(verdict(read_run(found.folder)), "numerics").verdict == "NO-GO"


def test_numbers_that_are_not_finite_are_no_go(healthy, tmp_path):
    def changed(kind, **fields):
        events = [dataclasses.replace(e, **fields) if isinstance(e, kind) else e for e in ran.events[0]]
        return dataclasses.replace(ran, events={0: events})

    ran = on_gpu(healthy, tmp_path / "run")
    assert numerics_gate(ran, [], Thresholds(40)).verdict == "GO"
    for kind, fields, words in (
        (Validated, {"loss": math.nan}, "validation loss is not finite"),
        (StepLogged, {"grad_norms": [math.inf]}, "gradient norms not finite"),
    ):
        told = numerics_gate(changed(kind, **fields), [], Thresholds(40))
        assert (told.verdict, words in told.sentence) == ("NO-GO", True)
    told = selection_gate(changed(LayersObserved, gate_entropy=[math.nan, 0.5]), [], Thresholds(40))
    assert (told.verdict, "gates are not finite" in told.sentence) == ("NO-GO", True)


def test_a_few_layers_with_a_dead_branch_are_go_and_many_are_no_go(healthy, tmp_path):
    ran = on_gpu(healthy, tmp_path / "run")
    layers = ran.config["model.layers"]

    def dead(layer):
        sentence = f"layer {layer}: the compressed branch gets 0.94% of the gates"
        return HealthFired(
            step=30, rule="dead_branch", action="warn", sentence=sentence, value=0.0094, threshold=0.01, layer=layer
        )

    one_in_all = Thresholds(40, lone_branch_layers=1 / layers)
    told = selection_gate(ran, [dead(0)], one_in_all)
    assert told.verdict == "GO"
    assert layers == 2
    assert "1 of 2 layers" in told.sentence
    assert "layer 0 does not (allowed in 50%" in told.sentence
    assert "all 2 layers" in selection_gate(ran, [], one_in_all).sentence
    everywhere = selection_gate(ran, [dead(1), dead(0)], Thresholds(40, lone_branch_layers=1.0))
    assert "0 of 2 layers" in everywhere.sentence
    assert "layers 0, 1 do not (allowed in 100%" in everywhere.sentence
    assert ("dead branch", f"{dead(0).sentence} from step 30 on: 1 of {layers} layers") in told.evidence
    assert selection_gate(ran, [dead(0), dead(1)], one_in_all).verdict == "NO-GO"
    assert selection_gate(ran, [dead(0)], Thresholds(40, lone_branch_layers=0)).verdict == "NO-GO"


def test_a_layer_with_two_problems_counts_once_and_a_stuck_selection_is_always_no_go(healthy, tmp_path):
    ran = on_gpu(healthy, tmp_path / "run")
    one_in_all = Thresholds(40, lone_branch_layers=1 / ran.config["model.layers"])

    def fired(rule, layer):
        return HealthFired(
            step=30, rule=rule, action="warn", sentence=f"layer {layer}: {rule}", value=0, threshold=0, layer=layer
        )

    assert selection_gate(ran, [fired("dead_branch", 0), fired("gate_collapse", 0)], one_in_all).verdict == "GO"
    assert selection_gate(ran, [fired("dead_branch", 0), fired("gate_collapse", 1)], one_in_all).verdict == "NO-GO"
    assert selection_gate(ran, [fired("dead_branch", None)], one_in_all).verdict == "NO-GO"
    assert selection_gate(ran, [fired("selection_stuck", 0)], one_in_all).verdict == "NO-GO"
    assert selection_gate(ran, [fired("selection_stuck", 0)], Thresholds(40, lone_branch_layers=1.0)).verdict == "NO-GO"


def test_selectors_that_choose_at_random_are_no_go(healthy, tmp_path):
    ran, limits = on_gpu(healthy, tmp_path / "run"), Thresholds(40, lone_branch_layers=1.0)

    def gate_of(*mass, kl=0.1, best=0.7):
        event = SelectorsObserved(step=60, layer=[0, 1], kl=[kl] * 2, mass=[*mass], best=[best] * 2, random=[0.3, 0.3])
        others = [e for e in ran.events[0] if not isinstance(e, SelectorsObserved)]
        return selection_gate(dataclasses.replace(ran, events={0: [*others, event]}), [], limits)

    assert gate_of(0.6, 0.5).verdict == "GO"
    told = gate_of(0.6, 0.31)
    assert told.verdict == "NO-GO"
    assert "layers 1 are no better than a random choice" in told.sentence
    limits = Thresholds(500, lone_branch_layers=1.0)
    assert gate_of(0.6, 0.31).verdict == "NOT TESTED"  # selectors start at random: a short run cannot fail by it
    limits = Thresholds(40, lone_branch_layers=1.0)
    not_learned = gate_of(0.6, 0.31, kl=None)
    assert not_learned.verdict == "GO"
    assert any("at random 30% to 30%" in value for _, value in not_learned.evidence)
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


def test_waiting_for_the_first_batch_is_not_starvation(healthy):
    def data_gate_of(*waiting):
        waits = iter(waiting)
        events = [
            dataclasses.replace(e, data_seconds=next(waits) * e.step_seconds) if isinstance(e, StepLogged) else e
            for e in healthy.events[0]
        ]
        return data_gate(dataclasses.replace(healthy, events={0: events}), [], Thresholds(40))

    intervals = len(healthy.steps)
    assert intervals > 2
    assert data_gate_of(0.9, *[0.05] * (intervals - 1)).verdict == "GO"
    assert "20% of the time was spent waiting" in data_gate_of(0.9, *[0.2] * (intervals - 1)).sentence

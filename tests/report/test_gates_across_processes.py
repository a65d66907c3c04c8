"""Gates and health rules of runs that were resumed, on other numbers of ranks, or in stages. The events are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs import step_logged
from tercet.report import read
from tercet.report.gates import Thresholds, checkpoint_gate, data_gate, memory_gate
from tercet.report.plots import step_series
from tercet.report.read import RankLog, Run
from tercet.telemetry.events import (
    Event,
    LayersObserved,
    ResourcesObserved,
    RunEnded,
    RunStarted,
    StageStarted,
    StepLogged,
    encode,
)
from tercet.telemetry.health import health_findings


def started(step: int, world_size: int = 1) -> RunStarted:
    return RunStarted(
        step=step, name="run", steps=1000, world_size=world_size, strategy="fsdp", device="NVIDIA H200", parameters=1,
        tokens_per_step=100, accumulation=1, resumed_from=f"checkpoints/step-{step:08d}" if step else None,
    )  # fmt: skip


def stage(number: int, begin: int = 0) -> StageStarted:
    return StageStarted(
        step=begin, stage=number, stages=2, last_step=1000, seq_len=128 * number, micro_batch=1, tokens_per_step=100,
        accumulation=1, rope_theta=1e4, later_steps=0,
    )  # fmt: skip


def logged(first: int, last: int, loss: Callable[[int], float] = lambda step: 3.0, **changes: Any) -> StepLogged:
    losses = [loss(step) for step in range(first, last + 1)]
    values = {"tokens_per_s": 100.0, "step_seconds": 1.0, "memory_gib": 1.0, "grad_norms": [1.0] * len(losses)}
    return step_logged(last, **{"loss": losses[-1], "losses": losses, "first_step": first, **values, **changes})


def memory(step: int, gib: float) -> ResourcesObserved:
    times = ("data", "forward", "backward", "optimizer", "communication", "other")
    counts = ("documents", "real_tokens", "padding", "bad_records", "left_out")
    return ResourcesObserved(
        step=step, allocated_gib=gib, reserved_gib=gib, peak_gib=gib, host_gib=gib,
        **{f"{name}_seconds": 0.0 for name in times}, **dict.fromkeys(counts, 0),
    )  # fmt: skip


def make_run(events: list[Event]) -> Run:
    boot = {"host_total_gib": 64.0, "device_total_gib": 80.0}
    return Run(
        folder=Path("nowhere"), events={0: events}, problems=(), config={"data.source": "text"}, origins={},
        environment={}, memory={"boot": boot}, dtypes={}, logs={}, state="ended",
    )  # fmt: skip


@pytest.mark.parametrize("in_a_stage", [False, True])
@pytest.mark.parametrize("every", [10, 50])
def test_a_loss_that_jumps_after_a_resume_is_found(every: int, in_a_stage: bool) -> None:
    def loss(step: int) -> float:
        return max(2.0, 6 - 0.01 * step) + 0.01 * (step % 7) + (4.0 if 500 < step <= 540 else 0.0)

    events: list[Event] = []
    for begin in (0, 500):
        events += [started(begin), *([stage(1)] if in_a_stage else [])]
        events += [logged(first, first + every - 1, loss) for first in range(begin + 1, begin + 501, every)]
        events.append(RunEnded(step=begin + 500, outcome="interrupted", reason="SIGTERM", seconds=1.0))
    gate = checkpoint_gate(make_run(events), health_findings(events), Thresholds())
    assert any("the loss jumped after a resume" in sentence for sentence, _ in gate.reasons)


@pytest.mark.parametrize("change", [[started(300, world_size=1)], [stage(2, 300)]], ids=["ranks", "stage"])
def test_memory_of_other_ranks_or_lengths_is_not_growth(change: list[Event]) -> None:
    events: list[Event] = [started(0, world_size=2), stage(1)]
    for first in range(1, 601, 10):
        events += change if first == 301 else []
        events += [logged(first, first + 9), memory(first + 9, 10.0 if first < 301 else 20.0)]
    assert memory_gate(make_run(events), Thresholds()).verdict == "GO"
    events += [event for step in range(601, 1201, 10) for event in (logged(step, step + 9), memory(step, step / 20))]
    assert "memory grew from" in memory_gate(make_run(events), Thresholds()).sentence


@pytest.mark.parametrize("resumed", [90, 95])
def test_the_first_wait_for_data_of_a_process_does_not_count(resumed: int) -> None:
    events: list[Event] = [started(0), *(logged(first, first + 9) for first in range(1, 91, 10)), started(resumed)]
    events.append(logged(91, 100, data_seconds=9.0, step_seconds=10.0))
    events += [logged(first, first + 9) for first in range(101, 201, 10)]
    gate = data_gate(make_run(events), [], Thresholds())
    assert not [sentence for sentence, _ in gate.reasons if "waiting for data" in sentence]
    events += [logged(first, first + 9, data_seconds=5.0, step_seconds=10.0) for first in range(201, 251, 10)]
    assert "waiting for data" in data_gate(make_run(events), [], Thresholds()).sentence


def test_a_throughput_drop_is_counted_within_one_process() -> None:
    def process(begin: int, speeds: list[float]) -> list[Event]:
        steps = range(begin, begin + 10 * len(speeds), 10)
        return [started(begin), *(logged(s + 1, s + 10, tokens_per_s=v) for s, v in zip(steps, speeds, strict=True))]

    once = process(0, [100.0] * 10 + [30.0] * 2) + process(120, [100.0] * 4 + [30.0] + [100.0] * 3)
    assert health_findings(once) == []
    lasting = process(0, [100.0] * 10 + [30.0] * 4) + process(140, [100.0] * 4 + [30.0] * 20)
    assert [f.rule for f in health_findings(lasting)] == ["throughput_drop"] * 2


def layers(step: int, collapse: float = 0.0) -> LayersObserved:
    half: list[float | None] = [0.5, 0.5]
    return LayersObserved(
        step=step, attention=["nsa"] * 2, gate_share_compressed=half, gate_share_selected=half, gate_share_window=half,
        gate_entropy=half, gate_max_share=half, gate_collapse=[0.0, collapse], selected_blocks=half,
        selected_distance=half, selected_forced=half, selected_overlap=half, distances=[[1], [1]],
    )  # fmt: skip


def write_log(folder: Path, rank: int, events: list[Event]) -> Path:
    path = folder / f"events_rank{rank}.jsonl"
    path.write_text("".join(encode(dataclasses.replace(event, rank=rank)) for event in events))
    return path


def test_layer_statistics_of_a_long_run_are_thinned_but_keep_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "LAYER_SAMPLES", 20)
    collapse = {333: 0.999, 334: 0.99, 335: 0.99, 336: 0.99, 337: 0.99}
    events = [started(0), *(layers(step, collapse.get(step, 0.0)) for step in range(1, 1001))]
    log = RankLog(write_log(tmp_path, 0, events), 0, None)
    kept = [e.step for e in log.events if isinstance(e, LayersObserved)]
    assert kept == list(range(1, 1001, 51))
    assert [f.sentence for f in log.findings] == [f.sentence for f in health_findings(events)] != []


def test_intervals_of_other_ranks_are_checked_without_keeping_them(tmp_path: Path) -> None:
    waits = {40: 0.9, 41: 0.9, 42: 0.9}
    steps = [logged(s, s, data_seconds=waits.get(s, 0.0), memory_gib=s / 10) for s in range(1, 101)]
    steps[49] = logged(50, 50, lambda _: float("nan"))
    log = RankLog(write_log(tmp_path, 1, [started(0), *steps]), 1, None)
    assert log.steps == list(range(1, 101))
    assert log.memory_gib == 10.0
    assert [f.rule for f in log.findings] == ["data_starvation"]
    assert (len(log.events), log.problems) == (1, [])


def test_a_page_of_a_long_run_is_small_and_shows_its_extremes() -> None:
    spike = 1234
    run = make_run([started(0), *(logged(s, s, lambda s: 9.0 if s == spike else 3.0) for s in range(1, 3001))])
    rows = step_series(run, "losses")
    assert len(rows) <= 500
    assert max(high for *_, high in rows) == 9.0
    assert run.tokens_per_s == 100.0

"""A run with stages: one trajectory over several sequence lengths, resumed to the same bits from any step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fork_server import ForkServer
from runs import assert_same_run, events_of, losses, rows, small
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import load_tokenizer
from tercet.inference.load import load_model
from tercet.interop.huggingface.export import as_transformers_model
from tercet.model.cost import flops_per_token
from tercet.parallel.strategy import Single
from tercet.report.pages import key_figures
from tercet.report.plots import loss_plot
from tercet.report.read import read_run
from tercet.report.verdict import record_gaps
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import StageStarted, StepLogged, Validated
from tercet.train.manifest import complete_checkpoints
from tercet.train.state import build_state, start_stage
from tercet.train.trainer import train
from tercet.train.validate import Validation

# 4, 3 and 2 steps; the second stage has another RoPE base, the third another step size
STAGES = "32:4,64:3:rope_theta=50000,128:2:tokens_per_step=256"


def config_of(folder: Path, stages: str = STAGES, steps: int = 9, **changes: object) -> RunConfig:
    changes = {"checkpoint__every": 1, "checkpoint__keep": 0, "data__synthetic__length": 50} | changes
    return small(run__dir=str(folder), train__stages=stages, train__steps=steps, **changes)


@pytest.fixture(scope="module")
def straight(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with shuffled sequences, saved at every step."""
    folder = tmp_path_factory.mktemp("stages") / "run"
    child = fork_server.run(config_of(folder, data__shuffle_sequences=5, train__val_tokens=128, log__every=5))
    assert child.code == 0, child.output
    assert "stage 2/3, steps 5 to 7: sequences of 64 (was 32), rope_theta 50000 (was 10000)" in child.output
    return folder


@pytest.mark.parametrize("step", [4, 5, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 7))])
def test_a_kill_within_and_between_stages_resumes_to_the_same_bits(
    step: int, straight: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder, symlinks=True)
    for path in complete_checkpoints(folder / "checkpoints")[step:]:
        shutil.rmtree(path)
    config = config_of(folder, data__shuffle_sequences=5, train__val_tokens=128, log__every=5)
    child = fork_server.run(config, resume="auto")
    assert child.code == 0, child.output
    assert_same_run(straight, folder)


def test_steps_and_tokens_count_over_the_whole_run(straight: Path) -> None:
    events = list(read_events(events_file(straight)))
    stages = [e for e in events if isinstance(e, StageStarted)]
    assert [(e.step, e.last_step, e.seq_len, e.micro_batch, e.tokens_per_step) for e in stages] == [
        (0, 4, 32, 4, 128), (4, 7, 64, 2, 128), (7, 9, 128, 1, 256),
    ]  # fmt: skip
    logged = [e for e in events if isinstance(e, StepLogged)]
    assert [(e.first_step, e.step, e.tokens) for e in logged] == [(1, 4, 512), (5, 5, 640), (6, 7, 896), (8, 9, 1408)]
    assert [(e.step, e.seq_len) for e in events if isinstance(e, Validated)] == [(4, 32), (7, 64), (9, 128)]
    assert [int(r["step"]) for r in rows(straight / "val.csv")] == [4, 7, 9]


def test_a_model_has_the_length_and_rope_theta_it_was_last_trained_with(straight: Path) -> None:
    """At the end of a stage: that stage's. In the middle of one: those of the running stage, as the weights need."""
    found = {}
    for step in (1, 4, 5, 7, 9):
        model = load_model(straight / "checkpoints" / f"step-{step:08d}", device="cpu")
        found[step] = model.context, model.config.rope_theta, model.rotary.theta
    assert found == {
        1: (32, 1e4, 1e4), 4: (32, 1e4, 1e4), 5: (64, 5e4, 5e4), 7: (64, 5e4, 5e4), 9: (128, 5e4, 5e4),
    }  # fmt: skip
    exported = as_transformers_model(load_model(straight, device="cpu")).config
    assert (exported.max_position_embeddings, exported.tercet["rope_theta"]) == (128, 5e4)


def test_other_stages_are_refused_but_a_finished_run_can_be_given_another(
    straight: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight, folder, symlinks=True)
    longer = {"stages": f"{STAGES},64:2:rope_theta=50000", "steps": 11, "data__shuffle_sequences": 5}
    child = fork_server.run(config_of(folder, **longer), resume="auto")
    assert child.code != 0
    assert "train.stages was '32:4 64:3:rope_theta=50000 128:2:tokens_per_step=256', now" in child.output
    assert "--checkpoint.allow_config_change" in child.output
    child = fork_server.run(config_of(folder, checkpoint__allow_config_change=True, **longer), resume="auto")
    assert child.code == 0, child.output
    assert "stage 4/4, steps 10 to 11: sequences of 64" in child.output
    events = events_of(folder, StageStarted)
    assert [e.stage for e in events] == [1, 2, 3, 4]


def test_the_report_takes_each_stage_into_account(straight: Path) -> None:
    run = read_run(straight)
    assert record_gaps(run) == []
    assert [stage.seq_len for stage in run.stages] == [32, 64, 128]
    figures = {figure.name: figure for figure in key_figures(run)}
    assert figures["sequence length"].value == "32 → 64 → 128"
    assert figures["validation loss"].note.endswith("at step 9")  # the only one at this length
    plot = loss_plot(run, [])
    assert plot is not None
    assert "Stages of 32 → 64 → 128 tokens" in plot.caption
    assert "next stage" in plot.svg


@pytest.mark.parametrize(
    ("moved", "lengths"),
    [
        ({"step": 6}, [32, 64, 128]),  # the stage before it got shorter
        ({"stage": 4, "stages": 4}, [32, 64, 128]),  # a stage before it was split in two
        ({"step": 4, "stage": 2, "seq_len": 64}, [32, 64]),  # the stage before it got longer, and is not over
    ],
)
def test_the_report_counts_a_stage_that_was_moved_on_resume_once(
    moved: dict[str, int], lengths: list[int], straight: Path
) -> None:
    run = read_run(straight)
    run = replace(run, events={0: [*run.events[0], replace(run.stages[-1], **moved)]})
    assert [stage.seq_len for stage in run.stages] == lengths


def test_validation_reads_sequences_of_the_length_of_its_stage(straight: Path) -> None:
    logged = {e.step: e.loss for e in read_events(events_file(straight)) if isinstance(e, Validated)}
    config = config_of(straight, train__val_tokens=128)
    model = load_model(straight / "checkpoints" / "step-00000007", device="cpu")
    at_length = {}
    for stage in config.stages:
        validation = Validation(stage, Single(), load_tokenizer("byte", ""))
        at_length[stage.data.seq_len] = validation.loss(model, torch.device("cpu"))[0]
    assert at_length[64] == pytest.approx(logged[7], abs=1e-6)
    assert abs(at_length[32] - logged[7]) > 1e-4


def test_a_stage_trains_with_its_rope_theta(tmp_path: Path) -> None:
    told = []
    for stages in ("64:2,64:2", "64:2,64:2:rope_theta=50"):
        folder = tmp_path / stages
        assert train(config_of(folder, stages, 4)) == 0
        told.append(losses(folder))
    assert [told[0][step] == told[1][step] for step in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_stage_sets_every_rope_base_and_the_weight_of_selectors(tmp_path: Path) -> None:
    learned = {"model__selector": "learned", "train__selector__every": 16}
    config = config_of(tmp_path, "64:2,64:2:rope_theta=50:tokens_per_step=512", 4, **learned)
    state = build_state(config, torch.device("cpu"), Single(), None)
    model = state.model
    for stage, theta, accumulation in zip(config.stages, (1e4, 50), (1, 4), strict=True):
        start_stage(state, stage)
        layers = model.attention_layers()
        rotaries = [model.rotary, *(layer.rotary for layer in layers), *(layer.selector.rotary for layer in layers)]
        assert {rotary.theta for rotary in rotaries} == {model.config.rope_theta} == {theta}
        assert {layer.selector.weight for layer in layers} == {1.0 / accumulation}
        assert model.selector_every == 16


def test_model_flops_are_those_of_the_stages_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.train.trainer.peak_flops", lambda name: 1e9)
    config = config_of(tmp_path, "32:1,64:1", 2, train__precision="bf16")
    assert train(config) == 0
    for logged, stage in zip(events_of(tmp_path, StepLogged), config.stages, strict=True):
        flops = flops_per_token(stage.model, stage.data.seq_len)
        assert logged.mfu == pytest.approx(flops * logged.tokens_per_s / 1e9)


def test_selectors_learn_in_stages_whose_steps_are_shorter_than_one_pass_at_the_configured_length(
    tmp_path: Path,
) -> None:
    learned = {"model__selector": "learned", "train__selector__every": 4, "train__tokens_per_step": 32}
    assert train(config_of(tmp_path, "16:1,32:1", 2, **learned)) == 0

"""Whole runs, in this process."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runs import events_of, losses, newest, rows, small, tensors, train_small
from tercet import cli
from tercet.errors import TercetError
from tercet.hints import program
from tercet.parallel.strategy import Single
from tercet.report.read import read_run
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import RunEnded, Sampled, SelectorsObserved, StepsSkipped, Validated
from tercet.train.manifest import complete_checkpoints, read_json
from tercet.train.state import build_state
from tercet.train.trainer import train


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with every feature enabled."""
    folder = tmp_path_factory.mktemp("done") / "run"
    torch.set_num_threads(1)
    assert train_small(
        folder, train__val_tokens=256, train__val_every=3, train__sample_tokens=4, train__sample_every=3,
        log__tensorboard=True,
    ) == 0  # fmt: skip
    return folder


def test_files_of_a_run_hold_what_is_documented(done: Path) -> None:
    assert list((done / "tb").iterdir())
    assert {"step", "loss", "lr", "tokens_per_s", "grad_norm"} <= rows(done / "training.csv")[0].keys()
    assert json.loads((done / "env.json").read_text())["packages"]["torch"]
    beats = [json.loads(line) for line in (done / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert (beats[-1]["doing"], beats[-1]["step"]) == ("ended", 6)


def test_validation_samples_and_the_end_are_events(done: Path) -> None:
    told = list(read_events(events_file(done)))
    assert [e.step for e in told if isinstance(e, Validated)] == [3, 6]
    assert [e.step for e in told if isinstance(e, Sampled)] == [3, 6]
    assert isinstance(told[-1], RunEnded)
    assert told[-1].outcome == "completed"
    metrics = json.loads((done / "metrics.json").read_text())
    assert metrics["outcome"] == "completed"
    assert metrics["step"] == metrics["steps"] == 6
    assert repr(metrics["val_loss"]) == rows(done / "val.csv")[-1]["loss"]
    last = [e for e in told if isinstance(e, Validated)][-1]
    assert last.bytes is not None
    assert 0 < last.bytes <= last.tokens  # a token is a byte; the end of a document has no text
    assert metrics["val_bits_per_byte"] == pytest.approx(last.loss * last.tokens / last.bytes / math.log(2))


def test_a_sample_that_takes_long_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def writing(*_: Any, agree: Callable[[Callable[[], int]], int], **__: Any) -> str:
        return "x" * next(n for n in range(99) if agree(lambda: 1) != 1)

    seconds = itertools.count()
    clock = SimpleNamespace(time=time.time, perf_counter=time.perf_counter, monotonic=lambda: next(seconds))
    monkeypatch.setattr("tercet.train.trainer.sample_text", writing)
    monkeypatch.setattr("tercet.train.trainer.time", clock)
    assert train_small(tmp_path / "run", train__steps=1, train__sample_tokens=64) == 0
    said = capsys.readouterr().out
    assert "\nthe sample was cut after 30 s: 30 of 64 tokens\n" in said
    assert f"| {'x' * 30}\n" in said


def test_validation_and_samples_do_not_change_training(done: Path, tmp_path: Path) -> None:
    assert train_small(tmp_path / "run") == 0
    assert losses(tmp_path / "run") == losses(done)


@pytest.mark.parametrize("every", [1, 10])
def test_too_many_nonfinite_steps_stop_the_run(tmp_path: Path, every: int) -> None:
    folder = tmp_path / "run"
    with pytest.raises(TercetError, match="were not finite") as error:
        train_small(
            folder, train__steps=30, train__lr=1e25, train__warmup_steps=0, train__clip=0.0,
            train__max_skipped=2, log__every=every,
        )  # fmt: skip
    told = list(read_events(events_file(folder)))
    skipped = next(e for e in told if isinstance(e, StepsSkipped))
    first = skipped.steps[0]
    assert first >= 2
    assert f"up to step {first + 2} " in str(error.value)
    assert "not finite in 3 steps of the run (train.max_skipped=2), 3 of them in a row" in str(error.value)
    assert isinstance(told[-1], RunEnded)
    assert told[-1].outcome == "halted"


def test_steps_after_the_weights_froze_are_never_saved(tmp_path: Path) -> None:
    """Saves are due long before the log line that notices."""
    explosive: dict[str, Any] = {"train__lr": 1e25, "train__warmup_steps": 0, "train__clip": 0.0}
    with pytest.raises(TercetError, match="were not finite"):
        train_small(
            tmp_path / "run", train__steps=30, train__max_skipped=0, log__every=30, checkpoint__every=1,
            **explosive,
        )  # fmt: skip
    skipped = events_of(tmp_path / "run", StepsSkipped)[0]
    assert len(skipped.steps) == 1
    assert newest(tmp_path / "run").name == f"step-{skipped.steps[0] - 1:08d}"


def test_a_run_can_start_from_the_weights_of_another(done: Path, tmp_path: Path) -> None:
    frozen = {"train__steps": 1, "train__lr": 1e-30, "train__warmup_steps": 0, "train__weight_decay": 0.0}
    expected = tensors(done, "model.")
    weights = tmp_path / "weights.safetensors"
    save_file({k.removeprefix("model."): v.clone() for k, v in expected.items()}, weights)
    for source in (newest(done), done, weights):
        folder = tmp_path / f"from-{source.name}"
        assert train_small(folder, train__init_from=str(source), **frozen) == 0
        got = tensors(folder, "model.")
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[k], expected[k]) for k in expected)
        assert read_json(newest(folder) / "run.json")["step"] == 1
        assert list(losses(folder)) == [1]


def test_a_run_on_longer_sequences_starts_from_weights_and_moments(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "longer"
    assert train_small(
        folder, data__seq_len=256, train__tokens_per_step=512, model__rope_scaling=4.0, train__init_from=str(done),
        train__init_state="optimizer", train__steps=2,
    ) == 0  # fmt: skip
    updates = {k: float(v) for k, v in tensors(folder, "optimizer.").items() if k.endswith(".step")}
    assert set(updates.values()) == {8.0}  # six before, two now
    state = read_json(newest(folder) / "run.json")
    assert (state["step"], state["tokens"]) == (2, 1024)
    assert (state["parent"]["step"], state["parent"]["path"]) == (6, str(newest(done)))


@pytest.mark.parametrize(
    ("source", "state", "said"),
    [
        ("nowhere", "weights", "neither a checkpoint folder"),
        ("nowhere.safetensors", "weights", "cannot be read"),
        ("text.safetensors", "weights", "damaged, copy it again"),
        ("text.safetensors", "optimizer", "holds weights only"),
    ],
)
def test_a_missing_or_damaged_init_from_is_one_line(tmp_path: Path, source: str, state: str, said: str) -> None:
    (tmp_path / "text.safetensors").write_bytes(b"these are no weights")
    with pytest.raises(TercetError, match=said) as told:
        train_small(tmp_path / "run", train__init_from=str(tmp_path / source), train__init_state=state)
    assert str(told.value).startswith(f"train.init_from={tmp_path / source}")
    assert "\n" not in str(told.value)
    assert "--resume" not in str(told.value)


def test_selectors_cannot_start_from_some_that_rotate_other_channels(tmp_path: Path) -> None:
    first = small(run__dir=str(tmp_path / "first"), model__selector="learned", model__selector_rotary=0, train__steps=1)
    assert train(first) == 0
    with pytest.raises(TercetError, match=r"rotate 16 channels, and .* with 0: use --model.selector_rotary 0"):
        train_small(tmp_path / "second", model__selector="learned", train__init_from=first.run.dir)


def test_deterministic_mode_trains_to_the_same_numbers(done: Path, tmp_path: Path) -> None:
    try:
        assert train_small(tmp_path / "run", run__deterministic=True) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(tmp_path / "run") == losses(done)


def test_the_end_of_the_data_ends_the_run(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text(f"document {i} " * 20)
    assert train_small(
        tmp_path / "run", data__source="text", data__path=(str(texts),), data__exhaustion="stop",
        data__validation_fraction=0.3, train__steps=1000, log__every=4, checkpoint__every=1000,
        train__val_tokens=1024, train__val_every=1, train__sample_tokens=1,
    ) == 0  # fmt: skip
    *_, told = found = list(read_events(events_file(tmp_path / "run")))
    for kind in ("validation", "sample"):  # the last step has one of each
        assert [event.step for event in found if event.kind == kind][-2:].count(told.step) == 1
    assert isinstance(told, RunEnded)
    assert (told.outcome, told.reason) == ("completed", "the data ended")
    assert 0 < told.step < 1000
    assert max(losses(tmp_path / "run")) == told.step
    assert newest(tmp_path / "run").name == f"step-{told.step:08d}"


@pytest.mark.parametrize("ended", ["by its last step", "by the end of its data"])
def test_resuming_a_finished_run_prints_how_to_train_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ended: str
) -> None:
    (tmp_path / "text.txt").write_text("a few words, " * 30)
    run = tmp_path / "run"
    by_data = {
        "data__source": "text",
        "data__path": (str(tmp_path / "text.txt"),),
        "data__exhaustion": "stop",
        "data__validation_fraction": 0.0,
    }
    assert train_small(run, train__steps=5, **by_data if "data" in ended else {}) == 0
    assert "nothing left" not in capsys.readouterr().out
    made = len(losses(run))
    before, speed = losses(run), read_run(run).tokens_per_s
    assert speed

    assert cli.main(["train", "--resume", "auto", "--run.dir", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    last = said[-1]
    assert len(said) == 2 or "data" in ended  # where only reading on shows that there is no more
    assert last.startswith(f"nothing left to do: {made} of 5 steps are done")
    assert ("and the data ended" in last) == ("data" in ended)
    assert losses(run) == before
    assert read_run(run).tokens_per_s == speed

    if "data" not in ended:
        saved = (run / "config.toml").read_text()
        assert cli.main(["train", "--resume", "auto", "--run.dir", str(run), "--train.steps", "3"]) == 2
        assert "--train.steps 3 is less than the 5 steps" in capsys.readouterr().err
        assert (run / "config.toml").read_text() == saved

    further = last.partition(f"train longer with: {program()} ")[2]
    assert cli.main(shlex.split(further)) == 0
    assert "nothing left" not in capsys.readouterr().out
    assert len(losses(run)) > made


def test_skipped_records_are_counted_in_every_log_line_and_named_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"text": f"document {i} " * 20}) for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("\n".join([lines[0], "{rubbish", *lines[1:]]) + "\n")
    assert train_small(
        tmp_path / "run", data__source="jsonl", data__path=(str(tmp_path / "texts.jsonl"),),
        data__bad_records="skip", data__validation_fraction=0.0, train__steps=3,
    ) == 0  # fmt: skip
    assert int(rows(tmp_path / "run" / "training.csv")[-1]["bad_records"]) >= 1
    out = capsys.readouterr().out
    assert "bad records were skipped" in out
    assert "texts.jsonl" in out


def resumed_exactly(tmp_path: Path, **changes: Any) -> tuple[Path, Path]:
    """A run of four steps, and one resumed from its second: the same losses, weights and moments."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_small(whole, train__steps=4, **changes)
    train_small(resumed, train__steps=4, **changes, resume=str(whole / "checkpoints" / "step-00000002"))
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 2}
    expected, got = tensors(whole), tensors(resumed)
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    return whole, resumed


def test_a_run_with_a_learned_selector_reports_its_choice_and_resumes_exactly(tmp_path: Path) -> None:
    learned = {"model__selector": "learned", "model__selector_dim": 8, "train__selector__every": 8}
    teacher = {"train__selector__teacher": "selected", "train__selector__all_until": 3}
    observed = events_of(resumed_exactly(tmp_path, **learned, **teacher)[0], SelectorsObserved)
    assert [e.layer for e in observed] == [[0, 1]] * 4
    assert all(0 <= mass <= best <= 1 for e in observed for mass, best in zip(e.mass, e.best, strict=True))
    assert all(kl is not None for e in observed for kl in e.kl)


def test_a_run_with_muon_resumes_exactly(tmp_path: Path) -> None:
    _, resumed = resumed_exactly(tmp_path, train__optimizer="muon", train__muon__lr=1e-3)
    for row in rows(resumed / "training.csv"):
        assert float(row["muon_lr"]) == pytest.approx(float(row["lr"]) * 1e-3 / small().train.lr)
    assert "optimizer.state.blocks.0.attention.kv_proj.weight.momentum_buffer" in tensors(resumed)
    assert "optimizer.state.blocks.0.attention.kv_proj.weight.exp_avg" not in tensors(resumed)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        pytest.param("none", {}, marks=pytest.mark.slow),
        ("full", {"model__gate": "none", "model__attention": "dense,nsa", "model__dense_below": 20}),
        pytest.param(
            "selective",
            {"model__gate": "none", "train__stages": "32:1,64:2", "train__optimizer": "muon"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_selectors_learn_alone_while_no_other_bit_changes_and_all_learn_after(
    tmp_path: Path, mode: str, changes: dict[str, Any]
) -> None:
    learned = {"model__selector": "learned", "model__selector_dim": 8, "train__selector__every": 4}
    changes = {**learned, "model__init_std": 0.3, "train__activation_checkpointing": mode, "train__steps": 3, **changes}
    whole, resumed, after = (tmp_path / name for name in ("whole", "resumed", "after"))
    config = small(run__dir=str(whole), train__selector__only=True, **changes)
    before = build_state(config, torch.device("cpu"), Single(), None).model.state_dict()
    train(config)
    trained = {name.removeprefix("model."): tensor for name, tensor in tensors(whole, "model.").items()}
    selectors = {name for name in before if ".selector." in name}
    assert {name for name in before if not torch.equal(before[name], trained[name])} == selectors
    moments = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in tensors(whole, "optimizer.")}
    assert moments == selectors
    assert float(rows(whole / "training.csv")[-1]["grad_norm"]) > 0
    middle = complete_checkpoints(whole / "checkpoints")[0]
    config = small(run__dir=str(resumed), train__selector__only=True, **changes)
    train(config, origins={}, resume=str(middle))
    assert all(torch.equal(tensor, tensors(resumed)[name]) for name, tensor in tensors(whole).items())
    train_small(after, **changes, train__init_from=str(whole))
    assert not any(torch.equal(tensor, tensors(after)[f"model.{name}"]) for name, tensor in trained.items())
    with pytest.raises(TercetError, match=r"lacks optimizer.*trained other parameters.*train\.init_from"):
        train_small(whole, **changes, checkpoint__allow_config_change=True, resume="auto")


@pytest.mark.parametrize(
    ("mode", "gate"),
    [pytest.param("none", "sigmoid", marks=pytest.mark.slow), ("selective", "sigmoid"), ("full", "none")],
)
def test_statistics_measure_the_compressed_keys_choice_and_change_no_weight(
    tmp_path: Path, mode: str, gate: str
) -> None:
    changes = {"model__layers": 3, "model__attention": "window,nsa,dense", "train__activation_checkpointing": mode}
    changes |= {"train__steps": 3, "checkpoint__every": 0}
    if gate == "none":  # block-sparse
        changes |= {"model__gate": "none", "model__branches": ("selected",)}
        changes |= {"model__shared_kv": True, "model__compression": "mean"}
    often, never = tmp_path / "often", tmp_path / "never"
    train_small(often, log__every=1, **changes)
    train_small(never, log__every=3, **changes)
    assert losses(often)[3] == losses(never)[3]
    observed = events_of(often, SelectorsObserved)
    assert len(observed) == 3
    for e in observed:
        assert (e.layer, e.kl) == ([1], [None])
        assert 0 < e.random[0] < e.best[0] <= 1
        assert 0 <= e.mass[0] <= e.best[0]


def test_init_state_optimizer_takes_muons_momentum(tmp_path: Path) -> None:
    muon = {"train__optimizer": "muon", "train__warmup_steps": 0}
    first, fresh, continued = (tmp_path / name for name in ("first", "fresh", "continued"))
    train_small(first, train__steps=2, **muon)
    for folder, state in ((fresh, "weights"), (continued, "optimizer")):
        taken = {"train__init_from": str(first), "train__init_state": state, "train__steps": 1}
        train_small(folder, **taken, **muon)
    name = "optimizer.state.blocks.1.ffn.down.weight.momentum_buffer"
    before, without, with_it = (tensors(folder)[name] for folder in (first, fresh, continued))
    assert torch.allclose(with_it, without + 0.95 * before, atol=1e-8)


def test_the_optimizer_of_a_checkpoint_cannot_be_exchanged(tmp_path: Path) -> None:
    train_small(tmp_path / "run", train__steps=2)
    muon: dict[str, Any] = {"train__steps": 4, "train__optimizer": "muon", "checkpoint__allow_config_change": True}
    with pytest.raises(TercetError, match=r"lacks optimizer.*saved by a run with another optimizer.*train.init_from"):
        train_small(tmp_path / "run", **muon, resume="auto")
    moments = {"train__init_from": str(tmp_path / "run"), "train__init_state": "optimizer"}
    with pytest.raises(TercetError, match=r"lacks optimizer.*saved by a run with another optimizer"):
        train_small(tmp_path / "new", **muon, **moments)

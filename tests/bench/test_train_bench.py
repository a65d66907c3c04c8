"""`tercet bench train`: whole steps through the trainer, and no ratio for a wrong result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.bench import commands, settings, train, train_cell
from tercet.config.load import load
from tercet.doctor.machine import FAILED, Finding
from tercet.errors import TercetError
from tercet.interop.options import ImportOptions, attention_options
from tercet.model.config import ModelConfig

CPU = {"run.device": "cpu", "model.layers": 1}


def cell(kind: str, speed: float, loss: float = 5.5, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "batch": 1, "length": 64, "checkpointing": "none", "packed": False, "outcome": "ok",
        "tokens_per_s": speed, "ms": 1.0, "peak_gib": 2.0, "first_loss": loss, **more,
    }  # fmt: skip


def asked(*kinds: str, packed: tuple[str, ...] = (), **settings: Any) -> list[dict[str, Any]]:
    return train.cells_of("tiny", kinds, [(2, 64)], ("none",), packed, CPU | settings)


def checked(correct: bool | None, kind: str = "nsa") -> dict[str, Any]:
    return {"check": kind, "device": "a GPU", "torch": "2", "found": "1e-3", "correct": correct}


def test_a_cell_trains_with_the_trainers_step_and_reports_the_models_first_loss(monkeypatch: pytest.MonkeyPatch):
    (one,) = asked("nsa")
    found = train_cell.measure(one, steps=2, repeats=1)
    assert found["outcome"] == "ok"
    assert found["first_loss"] == pytest.approx(found["uncompiled_loss"], rel=1e-5)
    assert found["last_loss"] < found["first_loss"]  # it memorises its one batch
    assert found["tokens_per_s"] == pytest.approx(128 / (found["ms"] / 1e3))
    assert found["routes"] == ["reference"]
    monkeypatch.setattr(train_cell, "_uncompiled_loss", lambda _: 9.0)
    assert train_cell.measure(one, steps=1, repeats=0)["outcome"].startswith("wrong loss")


def test_packed_and_plain_batches_hold_the_same_sequences():
    plain, packed = asked("dense", packed=("dense",))
    losses = [train_cell.measure(one, steps=1, repeats=0)["first_loss"] for one in (plain, packed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_trained_weights_read_training_data(tmp_path: Path, packed: bool):
    (tmp_path / "text.txt").write_text("the same line again and again\n" * 500)
    data = {"train.init_from": "run", "data.source": "text", "data.path": str(tmp_path / "text.txt")}
    batch = train_cell._batch(train_cell.configured(asked("nsa", **data)[0]), torch.device("cpu"), packed=packed)
    assert batch.tokens.shape == ((1, 128) if packed else (2, 64))
    for tokens, targets in zip(batch.tokens.view(2, 64), batch.targets.view(2, 64), strict=True):
        assert b"again and again" in bytes(tokens.tolist())
        assert torch.equal(tokens[1:], targets[:-1])


def test_an_expected_error_in_a_cell_is_reported_in_full(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    message = f"{'x' * 200}: fix it"

    def fails(*_: Any) -> None:
        raise TercetError(message)

    monkeypatch.setattr(train_cell, "measure", fails)
    train_cell.main([json.dumps({"cells": [{}], "steps": 1, "repeats": 0})])
    assert json.loads(capsys.readouterr().out)["outcome"] == f"failed: {message}"


def test_kinds_of_a_shape_are_measured_in_a_row():
    found = train.cells_of("m7c", ("nsa", "dense"), [(32, 2048), (8, 8192)], ("none",), ("nsa",), {})
    assert [(c["kind"], c["batch"], c["length"], c["packed"], c["preset"]) for c in found] == [
        ("nsa", 32, 2048, True, "m7c"), ("dense", 32, 2048, False, "m7c-dense"),
        ("nsa", 8, 8192, True, "m7c"), ("dense", 8, 8192, False, "m7c-dense"),
    ]  # fmt: skip


@pytest.mark.parametrize("selector", ["compressed", "learned"])
def test_the_block_sparse_kind_is_what_an_import_gives(selector: str) -> None:
    (one,) = train.cells_of("m7c", ("block-sparse",), [(1, 64)], ("none",), (), {"model.selector": selector})
    dense = load(preset="m7c-dense", flags={"model.compress_selected_keys": False}).config.model.model_dump()
    options = attention_options(ImportOptions(attention="block-sparse", selector=selector))
    own = {*options, "shared_kv", "branches", "compression"}
    imported = {key: value for key, value in dense.items() if key not in own}
    wanted = ModelConfig.model_validate(imported | options)
    assert train_cell.configured(one).model == wanted


@pytest.mark.parametrize(
    ("correct", "loss", "ratio"), [(True, 5.5, 0.8), (None, 5.5, 0.8), (False, 5.5, None), (True, 4.0, None)]
)
def test_a_wrong_result_gets_no_ratio(correct: bool | None, loss: float, ratio: float | None):
    done = [cell("nsa", 80.0, loss), cell("dense", 90.0), cell("dense", 100.0, packed=True)]
    row, *_ = train.compared(done, [checked(correct)])
    assert row["times_dense"] == ratio  # to the faster dense
    assert ("wrong" in row) == (ratio is None)


def test_kernels_are_checked_as_the_doctor_does(monkeypatch: pytest.MonkeyPatch):
    (one,) = asked("nsa", packed=("nsa",))
    assert train_cell.check_kernels(one)["correct"] is None  # a CPU has none
    seen: dict[str, Any] = {}
    monkeypatch.setattr(train_cell, "pick_device", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(train_cell, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(train_cell, "parity", lambda _, **how: seen.update(how) or Finding("", FAILED, "5e-1"))
    assert train_cell.check_kernels(one)["correct"] is False
    assert (seen["packed"], seen["seq_len"]) == (True, 64)


@pytest.mark.parametrize(
    ("done", "correct"),
    [
        ([cell("nsa", 80.0), cell("dense", 100.0)], True),
        ([cell("nsa", 80.0, outcome="wrong loss: 9.0"), cell("dense", 100.0)], False),
        ([cell("nsa", 80.0, outcome="failed: no kernel"), cell("dense", 100.0)], False),
        ([cell("nsa", 80.0, outcome="out of memory"), cell("dense", 100.0)], True),
    ],
)
def test_a_wrong_cell_is_not_called_correct(monkeypatch: pytest.MonkeyPatch, capsys: Any, done: Any, correct: bool):
    monkeypatch.setattr(train, "measured", lambda *_: ([checked(True)], done))
    assert train.main(asked("nsa", "dense"), steps=1, repeats=1, seconds=1) == (not correct)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["correct"] == correct
    assert any(done[0]["outcome"].replace("ok", "0.80") in line for line in lines[:-1])


def test_without_kernels_results_are_not_called_correct(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    done = [cell("nsa", 80.0, routes=["reference"]), cell("dense", 100.0, routes=["sdpa"])]
    monkeypatch.setattr(train, "measured", lambda *_: ([checked(None)], done))
    assert train.main(asked("nsa", "dense"), steps=1, repeats=1, seconds=1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("no kernels on this device: times are of reference, sdpa") for line in lines)
    assert json.loads(lines[-1])["correct"] is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": "train.tokens_per_step=8192"}, "this benchmark sets train.tokens_per_step itself; use --tokens"),
        ({"settings": "model.gate=none", "kinds": ("block-sparse",)}, "--kinds block-sparse sets model.gate"),
        ({"preset": "tiny-dense"}, "--kinds nsa with model.attention=dense"),
        ({"settings": "model.nsa.windw=48"}, r"unknown key model\.nsa\.windw"),
        ({"tokens": 100}, "--tokens 100 is not a multiple of length 64"),
    ],
)
def test_what_would_not_be_measured_as_named_is_refused(options: dict[str, Any], said: str):
    with pytest.raises(TercetError, match=said):
        commands.train(**{"preset": "tiny", "lengths": (64,), "tokens": 64, "device": "cpu"} | options)


def test_settings_reach_every_cell():
    settings = {"model.selector": "learned", "model.branches": ("selected", "window"), "train.clip": "2"}
    for one in asked("nsa", packed=("nsa",), **settings):
        config = train_cell.configured(one)
        assert (config.model.branches, config.train.clip) == (("selected", "window"), 2.0)


def replace_process(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run this script in place of the subprocess that measures."""
    real = settings.subprocess.Popen
    monkeypatch.setattr(settings.subprocess, "Popen", lambda words, **k: real([words[0], "-c", script, words[-1]], **k))


FIGURES = "{'tokens_per_s': 1.0, 'ms': 1.0, 'peak_gib': 1.0, 'first_loss': 1}"


@pytest.mark.parametrize(
    ("fails", "outcome"),
    [
        ("sys.exit('CUDA out of memory, said the driver')", "out of memory"),
        ("sys.exit('no such kernel')", "failed: no such kernel"),
        ("time.sleep(60)", "too slow (1 s)"),
    ],
)
def test_a_process_that_dies_loses_only_its_current_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, fails: str, outcome: str
):
    """A stand-in for the subprocess fails at the second cell."""
    script = (
        "import json, sys, time\nfor i, c in enumerate(json.loads(sys.argv[-1])['cells']):\n"
        f"    if c['length'] == 2: {fails}\n"
        f"    print(json.dumps({{**c, 'outcome': 'ok', **{FIGURES}}}), flush=True)\n"
    )
    replace_process(monkeypatch, script)
    todo = [{"kind": "dense", "batch": 1, "length": length, "packed": False} for length in (1, 2, 3)]
    _, done = train.measured(todo, 1, 1, 0.6)
    assert [c["outcome"] for c in done] == ["ok", outcome, "ok"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[f"{i}/3", "dense"] for i in (1, 2, 3)]


def test_a_check_that_dies_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch):
    replace_process(monkeypatch, "import sys; sys.exit('no kernels')")
    with pytest.raises(TercetError, match="could not compare the kernels with the reference: no kernels"):
        train.measured(asked("nsa"), 1, 1, 60)

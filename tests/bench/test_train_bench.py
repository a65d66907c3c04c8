"""`tercet bench train`: whole steps through the trainer, and no ratio for a wrong result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tercet.attention.config import NSAConfig
from tercet.bench import attention, commands, plots, train, train_cell
from tercet.bench.telemetry import _DrawnOnDevice
from tercet.config.load import load
from tercet.errors import TercetError


def cell(kind: str, batch: int, length: int, speed: float, loss: float = 5.5, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind, "batch": batch, "length": length, "checkpointing": "none", "packed": False, "outcome": "ok",
        "tokens_per_s": speed, "ms": 1.0, "peak_gib": 2.0, "first_loss": loss, **more,
    }  # fmt: skip


def test_a_cell_trains_with_the_trainer_and_reports_the_models_first_loss():
    asked = train.cells_of("tiny", ("nsa",), (64,), 128, (), 64, "none", ())
    asked[0]["flags"] = {"run.device": "cpu", "model.layers": 1}
    found = train_cell.measure(asked[0], steps=2, repeats=1)
    assert found["outcome"] == "ok"
    assert found["first_loss"] == pytest.approx(found["uncompiled_loss"], rel=1e-5)
    assert found["last_loss"] < found["first_loss"]  # it memorises its one batch
    assert found["tokens_per_s"] == pytest.approx(128 / (found["ms"] / 1e3))
    assert found["routes"] == ["reference"]


def test_initial_weights_are_drawn_on_the_device():
    built = _DrawnOnDevice().build_model(lambda: torch.nn.Linear(2, 2), torch.device("meta"))
    assert built.weight.is_meta


@pytest.mark.parametrize("packed", [False, True])
def test_trained_weights_read_training_data(tmp_path: Path, packed: bool):
    (tmp_path / "text.txt").write_text("the same line again and again\n" * 500)
    asked = train.cells_of("tiny", ("nsa",), (64,), 128, (), 64, "none", ())[0]
    asked["flags"] = {"train.init_from": "run", "data.source": "text", "data.path": str(tmp_path / "text.txt")}
    batch = train_cell._batch(train_cell.configured(asked, 2), torch.device("cpu"), packed=packed)
    assert batch.tokens.shape == ((1, 128) if packed else (2, 64))
    rows = zip(batch.tokens.view(2, 64), batch.targets.view(2, 64), strict=True)
    for tokens, targets in rows:
        assert b"again and again" in bytes(tokens.tolist())
        assert torch.equal(tokens[1:], targets[:-1])


def test_an_expected_error_in_a_cell_is_reported_in_full(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    message = f"{'x' * 200}: fix it"

    def fails(*_: Any) -> None:
        raise TercetError(message)

    monkeypatch.setattr(train_cell, "measure", fails)
    train_cell.main([json.dumps({"cells": [{}], "steps": 1, "repeats": 0})])
    assert json.loads(capsys.readouterr().out)["outcome"] == f"failed: {message}"


def test_packed_and_plain_batches_hold_the_same_sequences():
    plain, packed = (
        train.cells_of("tiny", ("dense",), (64,), 128, (), 64, "none", asked)[0] for asked in ((), ("dense",))
    )
    losses = []
    for asked in (plain, packed):
        asked["flags"] = {"run.device": "cpu", "model.layers": 1}
        losses.append(train_cell.measure(asked, steps=1, repeats=0)["first_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"cuda_graph": "on"}, 2, "--cuda-graph on needs a GPU"),
        ({"cuda_graph": "on", "device": "cpu"}, 2, "--cuda-graph on needs a GPU"),
        ({"device": "cuda"}, 1, "--device cuda, but torch sees no CUDA device"),
    ],
)
def test_settings_that_no_cell_can_run_fail_at_once(monkeypatch, capsys, options, code, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(TercetError) as caught:
        commands.train(preset="tiny", lengths=(64,), tokens=64, **options)
    assert (caught.value.exit_code, capsys.readouterr().out) == (code, "")
    assert str(caught.value).startswith(message)


def test_cuda_graphs_are_accepted_on_a_gpu_and_rejected_for_a_cpu_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for flags in ({"train.cuda_graph": "on"}, {"run.device": "cuda"}, {"train.cuda_graph": "auto"}):
        train.check_device(load(preset="tiny", flags=flags).config)
    with pytest.raises(TercetError, match="--cuda-graph on needs a GPU"):
        train.check_device(load(preset="tiny", flags={"train.cuda_graph": "on", "run.device": "cpu"}).config)


def test_lengths_share_their_tokens_and_batches_their_length():
    cells = train.cells_of("m7c", ("nsa", "dense"), (2048, 8192), 65536, (1, 32, 64), 2048, "none", ())
    assert [(c["kind"], c["batch"], c["length"]) for c in cells] == [
        ("nsa", 32, 2048), ("dense", 32, 2048), ("nsa", 8, 8192), ("dense", 8, 8192),
        ("nsa", 1, 2048), ("dense", 1, 2048), ("nsa", 64, 2048), ("dense", 64, 2048),
    ]  # fmt: skip
    assert [c["preset"] for c in cells[:2]] == ["m7c", "m7c-dense"]


def test_packed_and_plain_cells_of_a_kind_are_measured_side_by_side():
    asked = train.cells_of("m7c", ("nsa", "dense"), (64,), 64, (), 64, "none", ("nsa",), ("nsa",))
    assert [(c["kind"], c["packed"]) for c in asked] == [("nsa", True), ("nsa", False), ("dense", False)]
    speeds = (80.0, 90.0, 100.0)
    cells = [cell(c["kind"], 1, 64, speed, packed=c["packed"]) for c, speed in zip(asked, speeds, strict=True)]
    rows = train.compared(cells, True)
    assert [(r["packed"], r["times_dense"]) for r in rows] == [(True, 0.8), (False, 0.9)]
    assert [line.split(" | ")[2] for line in train.table(rows)[2:]] == ["packed", "rows"]
    assert train.cliffs(rows, 64) == []  # two cells of one batch size are not a cliff


@pytest.mark.parametrize(("correct", "loss", "ratio"), [(True, 5.5, 0.8), (False, 5.5, None), (True, 4.0, None)])
def test_a_wrong_result_gets_no_ratio(correct: bool, loss: float, ratio: float | None):
    cells = [cell("nsa", 8, 8192, 80.0, loss), cell("dense", 8, 8192, 100.0)]
    assert train.compared(cells, correct)[0]["times_dense"] == ratio


def test_a_cell_that_ran_out_of_memory_is_shown():
    lost = {**cell("dense", 1, 64, 0.0), "outcome": "out of memory"}
    rows = train.compared([cell("nsa", 1, 64, 80.0), lost], correct=True)
    assert rows[0]["times_dense"] is None
    assert "out of memory" in train.table(rows)[-1]


def test_a_larger_batch_that_is_slower_is_reported():
    cells = [cell("nsa", b, 64, speed) for b, speed in ((1, 100.0), (2, 150.0), (4, 140.0), (8, 139.0))]
    assert train.cliffs(train.compared(cells, True), 64) == ["nsa at length 64: batch 2 -> 4 falls to 93%"]


def replace_process(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Run this script in place of the subprocess that measures."""
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda c, **k: real([sys.executable, "-c", script, c[-1]], **k))


def test_a_process_that_dies_loses_only_its_current_cell(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    """A stand-in for the subprocess fails at the second cell."""
    script = (
        "import json, sys\nfor i, c in enumerate(json.loads(sys.argv[-1])['cells']):\n"
        "    if c['length'] == 2: sys.exit('CUDA out of memory, said the driver')\n"
        "    figures = {'tokens_per_s': 1.0, 'ms': 1.0, 'peak_gib': 1.0, 'first_loss': 1}\n"
        "    print(json.dumps({**c, 'outcome': 'ok', **figures}), flush=True)\n"
    )
    replace_process(monkeypatch, script)
    asked = [{"kind": "nsa", "batch": 1, "length": length} for length in (1, 2, 3)]
    seen: list[dict[str, Any]] = []
    _, done = train.measured(asked, 1, 1, 60, None, on_line=seen.append)
    assert [c["outcome"] for c in done] == ["ok", "out of memory", "ok"]
    assert seen == done
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1/3", "2/3", "3/3"]
    assert lines[1].split() == ["2/3", "nsa", "1", "x", "2", "out", "of", "memory"]


def test_a_cells_name_is_printed_when_it_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A stand-in for the subprocess waits until the name of its cell is printed, and fails without it."""
    named = tmp_path / "named"
    script = (
        "import json, os, sys, time\n"
        "cell, until = json.loads(sys.argv[-1])['cells'][0], time.monotonic() + 5\n"
        f"while not os.path.exists({str(named)!r}):\n"
        "    if time.monotonic() > until: sys.exit('the name was not printed')\n"
        "    time.sleep(0.01)\n"
        "figures = {'tokens_per_s': 1.0, 'ms': 1.0, 'peak_gib': 1.0, 'first_loss': 1}\n"
        "print(json.dumps({**cell, 'outcome': 'ok', **figures}), flush=True)\n"
    )

    def watch(text: str, **_: Any) -> None:
        if text.split() == ["1/1", "nsa", "3", "x", "64"]:
            named.touch()

    replace_process(monkeypatch, script)
    monkeypatch.setattr(train, "print", watch, raising=False)
    _, done = train.measured([{"kind": "nsa", "batch": 3, "length": 64}], 1, 1, 60, None)
    assert [c["outcome"] for c in done] == ["ok"]


@pytest.mark.parametrize("packed", [False, True])
def test_packed_gradients_are_checked_with_cu_seqlens(monkeypatch: pytest.MonkeyPatch, packed: bool):
    seen = []
    real = attention.nsa_attention
    monkeypatch.setattr(attention, "nsa_attention", lambda *a, **k: seen.append(k["cu_seqlens"]) or real(*a, **k))
    shape, here = attention.Shape(1, 256, 4, 2, 16), {"backend": "reference", "device": "cpu"}
    config = NSAConfig(select_block=32, select_count=4, window=64)
    errors = attention.check_gradients(shape, config, "random", 0.0, packed=packed, **here)
    assert 0 < max(errors.values()) < 1e-2
    assert len(seen) == 2
    assert all((bounds is not None) == packed for bounds in seen)
    if packed:
        assert seen[0].tolist() == [0, 31, 95, 256]


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_of_a_block_sparse_model_are_checked(monkeypatch: pytest.MonkeyPatch, packed: bool):
    shape, here = attention.Shape(1, 256, 4, 2, 16), {"backend": "reference", "device": "cpu"}
    config = NSAConfig(select_block=32, select_count=4)
    errors = attention.check_gradients(shape, config, "random", 0.0, packed=packed, block_sparse=True, **here)
    assert errors.keys() == {"out", "dq", "dk", "dv"}
    assert 0 < max(errors.values()) < 1e-2

    def check(*_: Any, block_sparse: bool, **__: Any) -> dict[str, float]:
        return {"out": 1.0 if block_sparse else 0.0}

    on_gpu(monkeypatch, check)
    assert train_cell.parity("tiny", {}, packed)["correct"]
    assert not train_cell.parity("tiny", {"model.gate": "none"}, packed)["correct"]


def on_gpu(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    """Pretend that there are kernels, whose errors `check` returns."""
    monkeypatch.setattr(train_cell, "pick_device", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(train_cell, "device_name", lambda _: "a GPU")
    monkeypatch.setattr(train_cell, "check_gradients", check)


@pytest.mark.parametrize(("packed", "asked"), [((), False), (("nsa", "dense"), True), (("dense",), False)])
def test_the_kernel_check_uses_packed_documents_if_the_cells_do(
    monkeypatch: pytest.MonkeyPatch, packed: tuple[str, ...], asked: bool
):
    cpu = {"run.device": "cpu"}
    parities = []
    done = [cell("nsa", 1, 64, 80.0), cell("dense", 1, 64, 100.0)]
    bench(monkeypatch, done, packed=packed, flags=cpu, parities=parities)
    assert parities == [["tiny", cpu, asked]]
    found = train_cell.parity(*parities[0])
    assert found["packed"] == asked

    def check(*_: Any, packed: bool, block_sparse: bool) -> dict[str, float]:
        return {"out": 1.0 if packed else 0.0}

    on_gpu(monkeypatch, check)
    found = train_cell.parity(*parities[0])
    assert found["correct"] != asked
    assert ("packed documents" in train._parity_line(found)) == asked


def test_an_unchecked_loss_is_reported(monkeypatch: pytest.MonkeyPatch):
    asked = train.cells_of("tiny", ("dense",), (64,), 128, (), 64, "none", ())[0]
    asked["flags"] = {"run.device": "cpu", "model.layers": 1}
    checked = train_cell.measure(asked, steps=1, repeats=0)
    monkeypatch.setattr(train_cell, "_CHECKED_TOKENS", 127)
    unchecked = train_cell.measure(asked, steps=1, repeats=0)
    assert unchecked["outcome"] == "ok"
    assert "loss not checked" not in train._figures({**asked, **checked})
    assert "loss not checked" in train._figures({**asked, **unchecked})


def bench(monkeypatch: pytest.MonkeyPatch, done: list[dict[str, Any]], **more: Any) -> int:
    """The command with given cell results."""
    parities, checked = more.get("parities", []), {"correct": more.get("correct", True)}
    monkeypatch.setattr(train, "measured", lambda *asked: parities.append(asked[-1]) or (checked, done))
    return train.main(
        preset="tiny", kinds=("nsa", "dense"), lengths=(64,), tokens=64, batches=(), batch_length=64, steps=1,
        repeats=1, checkpointing="none", packed=more.get("packed", ()), plain=(), statistics=True,
        flags=more.get("flags", {}), seconds=1, out=more.get("out"), picture=more.get("picture"),
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "correct"), [(5.5, None), (4.0, False)])
def test_without_kernels_results_are_not_called_correct(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, loss: float, correct: bool | None
):
    checked = train_cell.parity("tiny", {"run.device": "cpu"}, False)
    assert (checked["parity"], checked["correct"]) == (None, None)
    assert re.search("not checked.*for a dry run: --preset tiny", train._parity_line(checked))
    done = [cell("nsa", 1, 64, 80.0, loss, routes=["reference"]), cell("dense", 1, 64, 100.0, routes=["sdpa"])]
    done = [c | {"batch": 1024} for c in done]
    code = bench(monkeypatch, done, correct=checked["correct"])
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert (found["correct"], code) == (correct, correct is False)  # losses that differ are wrong even without kernels
    assert found["results"][0]["times_dense"] == (0.8 if correct is None else None)
    assert any(line.startswith("no kernels on this device: times are of reference, sdpa") for line in lines)
    bench(monkeypatch, done, correct=True)
    assert "no kernels on this device" not in capsys.readouterr().out


def test_the_work_ahead_and_its_time_limit_are_printed_first(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def measured(*_: Any) -> Any:
        assert capsys.readouterr().out == (
            "2 kinds x 2 shapes, at most 600 s each (--seconds): nsa packed, dense at 2 x 64, 1 x 128 tokens; "
            "3 x 10 steps after warm-up\n"
        )
        raise InterruptedError

    monkeypatch.setattr(train, "measured", measured)
    with pytest.raises(InterruptedError):
        commands.train(preset="tiny", lengths=(64, 128), tokens=128, packed=("nsa",), device="cpu")


@pytest.mark.parametrize("outcome", ["ok", "wrong loss: 9.0 at the first step, 5.5 uncompiled", "failed: no kernel"])
def test_a_wrong_cell_is_not_called_correct(monkeypatch: pytest.MonkeyPatch, capsys: Any, outcome: str):
    done = [cell("nsa", 1, 64, 80.0, outcome=outcome), cell("dense", 1, 64, 100.0)]
    code = bench(monkeypatch, done)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["correct"] == (outcome == "ok")
    assert code == (outcome != "ok")


def test_results_are_printed_before_a_failing_write(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path):
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    done = [cell("nsa", 1, 64, 80.0), cell("dense", 1, 64, 100.0)]
    assert bench(monkeypatch, done, out=tmp_path / "results.json") == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "results.json").read_text() == line + "\n"
    monkeypatch.setattr(train, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        bench(monkeypatch, done, out=tmp_path / "results.json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["correct"]


def test_heat_maps_are_plotted_from_a_results_file(tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib")
    from tercet.bench.commands import train as command

    rows = train.compared([cell("nsa", 1, 64, 80.0), cell("dense", 1, 64, 100.0), cell("nsa", 2, 128, 90.0)], True)
    (tmp_path / "results.json").write_text(json.dumps({"bench": "train", "results": rows}))
    picture = tmp_path / "map.svg"
    assert command(plot=str(tmp_path / "results.json"), picture=str(picture)) == 0
    assert "0.80" in picture.read_text() or picture.stat().st_size > 5000
    assert plots.heat_maps({"results": rows}, tmp_path / "map.png")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keep text searchable
        for correct, marked in ((True, False), (None, True)):
            plots.heat_maps({"results": rows, "checked": {"correct": correct}}, picture)
            assert ("× dense (no kernels)" in picture.read_text()) == marked
    with pytest.raises(TercetError, match="--picture"):
        command(plot=str(tmp_path / "results.json"))


def test_settings_reach_every_cell_and_unknown_keys_fail(monkeypatch: pytest.MonkeyPatch):
    models: list[Any] = []

    def measured(cells: list[dict[str, Any]], *_: Any) -> tuple[None, list[dict[str, Any]]]:
        models.extend(train_cell.configured(c, 2).model for c in cells)
        return None, [cell(c["kind"], 1, 64, 80.0) for c in cells]

    monkeypatch.setattr(train, "measured", measured)
    one = {"preset": "tiny", "lengths": (64,), "tokens": 64, "device": "cpu"}
    commands.train(**one, settings="model.nsa.window=48, train.clip=2")
    assert [model.nsa.window for model in models] == [48, 48]
    lists = "model.selector=learned,model.branches=selected,window,model.attention=window,nsa,train.clip=2"
    commands.train(**one, kinds=("nsa",), settings=lists)
    assert models[-1].branches == ("selected", "window")
    assert models[-1].attention == "window,nsa"
    with pytest.raises(TercetError, match=r"unknown key model\.nsa\.windw"):
        commands.train(**one, settings="model.nsa.windw=48")
    with pytest.raises(TercetError, match="--settings window: expected KEY=VALUE"):
        commands.train(**one, settings="window")

"""TensorBoard, Weights & Biases, background sinks, and the table of exchanges between ranks."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from tercet.errors import TercetError
from tercet.telemetry.events import Noted, RunEnded, Validated
from tercet.telemetry.sinks import BackgroundSink, TensorBoardSink
from tercet.train.trainer import train
from watched import corpus, even_clock, run, settings


def test_tensorboard_has_training_and_layer_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with even_clock():
        found, code = run(tmp_path / "run", corpus(tmp_path), train__steps=4, log__tensorboard=True)
    assert code == 0
    board = EventAccumulator(str(found.folder / "tb"))
    board.Reload()
    names = board.Tags()["scalars"]
    assert {"train/loss", "train/grad_norm", "layers/gate_share_window/1", "resources/backward_seconds"} <= set(names)
    assert [e.step for e in board.Scalars("layers/gate_entropy/0")] == [2, 4]
    assert board.Scalars("train/loss")[-1].value == pytest.approx(found.steps[-1].loss, rel=1e-6)


def test_weights_and_biases_gets_the_same_scalars(tmp_path, monkeypatch):
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[int] = []
    double = SimpleNamespace(
        log=lambda values, step: logged.append((step, values)), finish=lambda exit_code: ended.append(exit_code)
    )
    given: dict[str, object] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: given.update(options) or double))
    with even_clock():
        found, code = run(tmp_path / "run", corpus(tmp_path), train__steps=4, log__wandb=True)
    assert code == 0
    losses = {step: values["train/loss"] for step, values in logged if "train/loss" in values}
    assert losses == {e.step: e.loss for e in found.steps}
    assert any("layers/gate_share_selected/0" in values for _, values in logged)
    assert ended == [0]
    assert given["id"] == "run"


@pytest.mark.parametrize(
    ("module", "option", "fix"),
    [
        ("torch.utils.tensorboard", {"log__tensorboard": True}, r"--log\.no_tensorboard"),
        ("wandb", {"log__wandb": True}, "drop --log.wandb"),
    ],
)
def test_a_run_that_failed_for_a_missing_package_can_be_retried_in_its_folder(
    tmp_path, monkeypatch, module, option, fix
):
    folder, data = tmp_path / "run", corpus(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        with pytest.raises(TercetError, match=fix):
            train(settings(folder, data, train__steps=1, **option))
    assert not folder.exists()
    folder.mkdir()
    for name in ("env.json", "events_rank0.jsonl"):  # as left by a run killed before its first event
        (folder / name).touch()
    with even_clock():
        assert run(folder, data, train__steps=1)[1] == 0


def test_without_tensorboard_a_run_notes_it_once_and_has_no_tb_folder(tmp_path, monkeypatch, capsys):
    folder, data = tmp_path / "run", corpus(tmp_path)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for steps, noted in ((1, 1), (2, 0)):  # a new run, then its resume
        config = settings(folder, data, train__steps=steps, log__tensorboard="auto")
        assert train(config, resume="auto") == 0
        assert capsys.readouterr().out.count("TensorBoard is not installed") == noted
    assert not (folder / "tb").exists()


def test_a_slow_sink_does_not_block_and_a_failed_one_is_reported():
    entered, release, seen, warnings = threading.Event(), threading.Event(), [], []

    def slow(event):
        entered.set()
        release.wait(20)
        if event.text == "break":
            raise OSError("no room")
        seen.append(event.text)

    sink = BackgroundSink("TensorBoard", slow, warnings.append)
    for text in ("one", "two", "break", "never"):
        sink(Noted(step=1, text=text))  # returns although nothing has been written yet
    assert entered.wait(20)
    assert seen == []
    release.set()
    sink.close()
    assert seen == ["one", "two"]
    assert len(warnings) == 1
    assert "TensorBoard stopped (OSError: no room)" in warnings[0]


def test_tensorboard_ignores_events_after_the_end(tmp_path):
    sink = TensorBoardSink(tmp_path, 0)
    sink(Validated(step=1, loss=1.0, tokens=5, seconds=0.1))
    sink(RunEnded(step=1, outcome="completed", reason="all steps made", seconds=1.0))
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    sink(Validated(step=2, loss=1.0, tokens=5, seconds=0.1))
    sink(RunEnded(step=2, outcome="failed", reason="", seconds=1.0))
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before

"""The run folder: locking, cleaning up after a refused run, and keeping it apart from data."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runs import small, train_small
from tercet.errors import TercetError, UsageError
from tercet.train import run_folder as module
from tercet.train.run_folder import LOCK, RunFolder
from tercet.train.trainer import Trainer, train


def test_an_unused_folder_is_removed_with_what_was_created_for_it_and_nothing_else(tmp_path: Path):
    RunFolder(tmp_path / "runs" / "lock").close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    RunFolder(tmp_path / "runs").close()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "notes"]
    folder = RunFolder(tmp_path / "used")
    (tmp_path / "used" / "config.toml").write_text("")
    folder.close()
    assert sorted(p.name for p in (tmp_path / "used").iterdir()) == ["checkpoints", "config.toml", LOCK]


def test_refused_ranks_leave_nothing_in_any_order(tmp_path: Path):
    for first, second in ((0, 1), (1, 0)):
        ranks = [RunFolder(tmp_path / "run", lock=True), RunFolder(tmp_path / "run", lock=False)]
        ranks[first].close()
        ranks[second].close()
        assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The holder removes the lock file between our open and our lock; a third process must not get in."""
    refused = RunFolder(tmp_path / "run")
    flock = module.fcntl.flock

    def after_the_other_has_gone(handle: int, how: int) -> None:
        monkeypatch.undo()
        refused.close()
        flock(handle, how)

    monkeypatch.setattr(module.fcntl, "flock", after_the_other_has_gone)
    second = RunFolder(tmp_path / "run")
    assert os.path.samestat(os.stat(tmp_path / "run" / LOCK), os.fstat(second._lock))
    with pytest.raises(TercetError, match="is in use by another process"):
        RunFolder(tmp_path / "run")
    second.close()


def test_a_run_in_its_data_folder_does_not_read_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.txt").write_text("some text " * 1000)
    monkeypatch.chdir(tmp_path)
    config = {"data__source": "text", "data__validation_fraction": 0.0, "log__tensorboard": True}
    for path, folder in ((".", "runs/folder"), ("**/*.txt", "runs/glob")):
        assert train(small(**config, data__path=[path], run__dir=folder, train__steps=4)) == 0
        assert train(small(**config, data__path=[path], run__dir=folder, train__steps=6), resume="auto") == 0


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_folder_with_other_files_is_not_used_for_a_run(tmp_path: Path, resume: str | None):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UsageError, match=f"{tmp_path} holds a.txt, .*--run.dir"):
        train_small(tmp_path, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("write", range(4))
def test_a_start_killed_while_it_writes_can_be_repeated(tmp_path: Path, monkeypatch, write: int):
    """Nothing is cleaned up then: the file stays half-written under its temporary name."""
    whole, started = os.replace, []

    def killed(source, target) -> None:
        started.append(Path(target).name)
        if len(started) > write:
            os.link(source, tmp_path / "left")
            raise KeyboardInterrupt
        whole(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train_small(tmp_path / "run", train__steps=1)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "left").rename(tmp_path / "run" / f"{started[-1]}.partial")
    assert train_small(tmp_path / "run", train__steps=1, resume="auto") == 0


def test_a_new_run_may_find_logs_and_what_other_ranks_and_a_failed_start_left(tmp_path: Path):
    for name in ("train.log", "slurm-7.out", "log", LOCK, "flight_recorder/0_rank_0", "checkpoints/.writing-1"):
        (tmp_path / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / name).touch()
    (tmp_path / "failed").mkdir()
    for name in ("env.json", "training.csv"):
        (tmp_path / "failed" / name).touch()
    for folder in ("new", "failed"):
        assert train_small(tmp_path / folder, train__steps=1) == 0


def test_a_run_stopped_before_its_first_step_does_not_block_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def interrupted(self: Trainer) -> tuple[list[object], None]:
        os.kill(os.getpid(), signal.SIGINT)
        return [], None

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_next_batches", interrupted)
        assert train_small(tmp_path / "run", train__steps=2) == 130
    assert "the same command starts again" in capsys.readouterr().out
    assert train_small(tmp_path / "run", train__steps=2) == 0
    with pytest.raises(UsageError, match="already holds a run"):
        train_small(tmp_path / "run", train__steps=2)

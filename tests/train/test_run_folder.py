"""The run folder: what a run that is refused leaves of it, and who holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tercet.errors import TercetError
from tercet.train import run_folder as module
from tercet.train.run_folder import LOCK, RunFolder


def test_a_folder_that_nothing_was_written_into_goes_away_with_the_parents_that_were_made_for_it(tmp_path: Path):
    RunFolder(tmp_path / "runs" / "lock").close()
    assert list(tmp_path.iterdir()) == []


def test_only_what_the_run_made_goes_away(tmp_path: Path):
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    RunFolder(tmp_path / "runs").close()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "runs", tmp_path / "runs" / "notes"]


def test_a_folder_that_was_written_into_stays_as_it_is(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("")
    folder.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints", "config.toml", LOCK]


def test_ranks_that_are_refused_together_leave_nothing_whoever_is_first(tmp_path: Path):
    for first, second in ((0, 1), (1, 0)):
        ranks = [RunFolder(tmp_path / "run", lock=True), RunFolder(tmp_path / "run", lock=False)]
        ranks[first].close()
        ranks[second].close()
        assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_taken_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Between opening and locking, the run that held the lock is refused and goes; a third one must not get in too."""
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

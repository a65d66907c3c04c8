"""Flight records: what is written when a collective fails, and that `torchfrtrace` reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel.world import run_ranks
from tercet.parallel import failure
from tercet.parallel.failure import FailureMonitor, write_flight_record
from tercet.parallel.launch import flight_recorder_settings

READER = "from torch.distributed.flight_recorder.fr_trace import main; main()"


def test_torchfrtrace_names_the_rank_that_others_wait_for(fork_server, tmp_path: Path):
    run_ranks(fork_server, 2, "flight_ranks", str(tmp_path))
    command = [sys.executable, "-c", READER, str(tmp_path / "flight_recorder")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "missing ranks: {1}" in done.stdout + done.stderr


def test_a_record_has_the_collectives_of_nccl_and_of_other_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """NCCL keeps a separate record; the record of an unused backend has no entries key."""
    import torch._C._distributed_c10d as c10d

    entry = {"profiling_name": "nccl:all_reduce"}
    records = {"_dump_fr_trace": {"version": "2.10"}, "_dump_nccl_trace": {"version": "2.10", "entries": [entry]}}
    for name, record in records.items():
        monkeypatch.setattr(c10d, name, lambda record=record: pickle.dumps(record), raising=False)
    path = write_flight_record(tmp_path, 3)
    assert path == tmp_path / "flight_recorder" / "rank_3"
    assert pickle.loads(path.read_bytes())["entries"] == [entry]


def test_records_of_earlier_processes_are_moved_aside_by_rank_0(tmp_path: Path):
    folder = tmp_path / "flight_recorder"
    folder.mkdir()
    for rank in (0, 5):
        (folder / f"rank_{rank}").touch()
        os.utime(folder / f"rank_{rank}", (1000, 1000))
    flight_recorder_settings(tmp_path, 1)
    assert len(list(folder.iterdir())) == 2
    flight_recorder_settings(tmp_path, 0)
    assert not list(folder.iterdir())
    assert len(list((tmp_path / "flight_recorder-19700101-001640").iterdir())) == 2


def test_a_failing_flight_record_does_not_hide_why_the_run_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def broken(*given: object) -> None:
        asked.append(given)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failure, "write_flight_record", broken)
    monitor = object.__new__(FailureMonitor)  # without its heartbeat thread
    monitor._world, monitor._rank, monitor.status = SimpleNamespace(folder=str(tmp_path)), 1, lambda: (3, "training")
    error = monitor._peer_failed("rank 0 is gone", "RuntimeError: gloo", reported_elsewhere=False)
    assert str(error).startswith("rank 0 is gone; rank 1 waited for it in step 3 (training: RuntimeError: gloo)")
    assert asked == [(tmp_path, 1)]

"""When a rank freezes, another rank names it."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from parallel.world import RankedRun, flags, free_port, start_ranks
from runs import SMALL
from tercet.cli import main
from tercet.parallel import failure
from tercet.parallel.failure import FailureMonitor, PeerFailed
from tercet.report.read import read_run
from tercet.telemetry.events import Stalled
from tercet.train.checkpoint import HashingFile

FLAGS = {
    "parallel.strategy": "ddp", "train.tokens_per_step": 256, "train.steps": 100000, "checkpoint.every": 0,
    "log.every": 2, "log.heartbeat_seconds": 0.1, "log.tensorboard": False, "health.stall_seconds": 3.0,
}  # fmt: skip


def test_a_waiting_rank_names_the_frozen_one(tmp_path, fork_server):
    folder = tmp_path / "run"
    command = ["--preset", "tiny", *flags(SMALL | FLAGS | {"run.dir": str(folder)})]
    with RankedRun(fork_server, tmp_path / "out", 2, *command) as run:
        run.until("step      4/100000")
        os.kill(run.pid(1), signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not (stalls := read_run(folder).of(Stalled)):
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
    dump = (folder / stalls[0].dump).read_text()
    assert stalls[0].rank == 0
    lines = {line.split(":")[0]: line for line in dump.splitlines() if line.startswith("rank ")}
    assert "frozen or gone" in lines["rank 1"]
    assert "frozen or gone" not in lines["rank 0"]
    assert "-- events_rank1.jsonl" in dump
    assert "thread MainThread" in dump


@pytest.fixture
def ranks(monkeypatch):
    """The failure monitors of three ranks, in this process."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(failure, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    members = [{"pid": os.getpid(), "host": "elsewhere", "device": "cpu"}] * 3
    worlds = [
        SimpleNamespace(launch=SimpleNamespace(rank=rank, world_size=3), members=members, id="1", nccl=False)
        for rank in range(3)
    ]
    monkeypatch.setattr(failure, "GRACE_SECONDS", 60)
    monitors = [FailureMonitor(world, lambda: (7, "saving"), 0.5) for world in worlds]
    store.wait([f"tercet/1/beat/{rank}" for rank in range(3)])
    yield monitors
    for monitor in reversed(monitors):
        monitor.close()
    del store


def test_a_rank_that_freezes_during_a_save_is_named_within_the_limit(ranks):
    deadline = time.monotonic() + 20

    def save_completes(seconds: float) -> bool:
        time.sleep(seconds)
        return time.monotonic() > deadline

    ranks[2]._stop.set()  # its heartbeat stops
    with pytest.raises(PeerFailed, match=r"^rank 2 .* does not answer, last seen in step 7 \(saving\)") as first:
        ranks[0].wait_for(save_completes)
    with pytest.raises(PeerFailed) as second:
        ranks[1].wait_for(save_completes)
    assert [e.value.reported_elsewhere for e in (first, second)] == [False, True]


def test_a_slow_save_is_waited_for(ranks):
    polls = iter([False] * 20 + [True])

    def next_poll(seconds: float) -> bool:
        beats = [rank._count + 2 for rank in ranks]
        while any(rank._count < count for rank, count in zip(ranks, beats, strict=True)):
            time.sleep(seconds)
        return next(polls)

    ranks[0].wait_for(next_poll)
    assert next(polls, None) is None


def test_a_failure_ends_ranks_that_wait_but_not_one_that_ends_in_order(ranks, monkeypatch, capsys):
    ended: list[int] = []
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    monkeypatch.setattr(failure, "GRACE_SECONDS", 0.2)
    mine = ValueError("a reason")
    assert ranks[0].explain(mine) is mine  # and it goes on to close its files
    deadline = time.monotonic() + 20
    while len(ended) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert ended == [1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert "failed in step 7 (saving): ValueError: a reason" in line


def train_and_freeze_in_a_save() -> int:
    """On each rank: `tercet train`, but rank 1 stops while it writes its first checkpoint."""

    def freeze(*_: object) -> None:
        time.sleep(1.5 * failure.HEARTBEAT_SECONDS)  # so that a heartbeat says that it is saving
        os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ["RANK"] == "1":
        HashingFile._write_part = freeze
    return main(sys.argv[1:])


@pytest.mark.slow
def test_a_rank_frozen_in_a_save_ends_the_run_with_its_name(tmp_path, fork_server):
    changes = {
        "checkpoint.every": 4,
        "checkpoint.async_save": False,
        "parallel.timeout_seconds": 4,
        "run.dir": str(tmp_path / "run"),
    }
    command = ["train", "--preset", "tiny", *flags(SMALL | FLAGS | changes)]
    function = "telemetry.test_frozen_rank:train_and_freeze_in_a_save"
    first, frozen = start_ranks(fork_server, 2, function, *command)
    try:
        assert first.wait(60) == 1
        assert f"error: rank 1 (pid {frozen.pid} on " in first.output
        assert "is stopped (SIGSTOP), last seen in step 4 (saving)" in first.output
    finally:
        frozen.signal(signal.SIGKILL)
        frozen.wait()

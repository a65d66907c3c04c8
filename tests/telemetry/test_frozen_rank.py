"""When a rank freezes, another rank's dump names it."""

from __future__ import annotations

import os
import signal
import time

from parallel.world import RankedRun, flags
from runs import SMALL
from tercet.report.read import read_run
from tercet.telemetry.events import Stalled

FLAGS = {
    "parallel.strategy": "ddp",
    "train.tokens_per_step": 256,
    "train.steps": 100000,
    "checkpoint.every": 0,
    "log.every": 2,
    "log.heartbeat_seconds": 0.1,
    "log.tensorboard": False,
    "health.stall_seconds": 3.0,
    "health.stall_start_seconds": 120.0,
}


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

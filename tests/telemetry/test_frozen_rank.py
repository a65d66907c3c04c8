"""When a rank freezes, another rank's dump names it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from parallel.world import Run, flags
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


def test_a_waiting_rank_names_the_frozen_one(tmp_path):
    folder = tmp_path / "run"
    run = Run(tmp_path / "out", 2, "--preset", "tiny", *flags(SMALL | FLAGS | {"run.dir": str(folder)}))
    frozen = 0
    try:
        run.until("step      4/100000")
        frozen = run.pid(1)
        os.kill(frozen, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not (stalls := read_run(folder).of(Stalled)):
            assert time.monotonic() < deadline, run.text
            time.sleep(0.1)
    finally:
        for pid in (frozen, run.pid(0), run.process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait(timeout=30)
    dump = (folder / stalls[0].dump).read_text()
    assert stalls[0].rank == 0
    lines = {line.split(":")[0]: line for line in dump.splitlines() if line.startswith("rank ")}
    assert "frozen or gone" in lines["rank 1"]
    assert "frozen or gone" not in lines["rank 0"]
    assert "-- events_rank1.jsonl" in dump
    assert "thread MainThread" in dump

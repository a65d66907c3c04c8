"""The watchdog adapts to a run's pace, and dumps its state when there is no progress."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import tercet.report.read as read_module
from runs import step_logged
from tercet.config.sections import HealthConfig
from tercet.report.commands import watch
from tercet.report.read import read_run
from tercet.telemetry import watchdog
from tercet.telemetry.event_log import EventLog, read_events
from tercet.telemetry.events import Stalled, StepLogged
from tercet.telemetry.watchdog import STALLED_EXIT, Watchdog
from watched import corpus, gate, settings, verdict


def step_event(seconds: float) -> StepLogged:
    return step_logged(10, step_seconds=seconds, first_step=1, losses=[1.0] * 10, grad_norms=[1.0] * 10)


@pytest.fixture
def log(tmp_path: Path):
    log = EventLog(tmp_path)
    yield log
    log.close()


def watchdog_of(log: EventLog, **config) -> Watchdog:
    return Watchdog(log.path.parent, 0, HealthConfig(**config), log, 0.05)


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stalls(log: EventLog) -> list[Stalled]:
    return [e for e in read_events(log.path) if isinstance(e, Stalled)]


def test_the_limit_follows_the_pace_of_the_run(log):
    dog = watchdog_of(log)
    assert dog.limit() == 900  # before the first log line, which may include compilation
    dog.observe(step_event(0.1))
    assert dog.limit() == 180  # 1 s between log lines: the minimum
    for _ in range(3):
        dog.observe(step_event(60.0))
    assert dog.limit() == 3000  # 600 s between log lines


def test_a_stall_dumps_the_stack_and_its_end_is_logged(log, monkeypatch):
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.2)

    def the_step_that_hangs() -> None:
        wait_for(lambda: stalls(log))

    with watchdog_of(log, stall_seconds=0.2) as dog:
        dog.at(7, "training")
        the_step_that_hangs()
        dog.at(8, "training")
        wait_for(lambda: len(stalls(log)) == 2)
    first, second, *_ = stalls(log)  # a busy machine may stall it again
    assert (first.step, first.doing, first.over, second.over) == (6, "training", False, True)
    text = (log.path.parent / first.dump).read_text()
    assert "the_step_that_hangs" in text
    assert "thread MainThread" in text
    assert "rank 0: step 7, training" in text  # the heartbeats of every rank
    assert "no CUDA device in use" in text


def test_sigusr1_writes_stacks_and_training_continues(log, monkeypatch):
    folder, received = log.path.parent, []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with watchdog_of(log):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert "test_sigusr1_writes_stacks" in (folder / "stack_rank0_signal.txt").read_text()
        assert stalls(log) == []
        os.kill(os.getpid(), signal.SIGUSR1)  # the handler of before is there again
        assert received == [1]
        (folder / "stack_rank0_signal.txt").unlink()
        with watchdog_of(log):
            pass
        assert not list(folder.glob("stack_*"))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_frozen_process_is_distinguished_from_a_dead_one(tmp_path, monkeypatch, fork_server, capsys):
    monkeypatch.setattr(read_module, "FRESH_SECONDS", 0.5)
    data = corpus(tmp_path)
    folder = tmp_path / "run"
    config = settings(
        folder, data, train__steps=100000, train__val_tokens=0, checkpoint__every=0, log__heartbeat_seconds=0.05
    )
    child = fork_server.start(config)
    child.until("step     20/100000", seconds=120)
    assert read_run(folder).state == "running"
    assert gate(verdict(read_run(folder)), "stability").verdict == "NOT TESTED"
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: read_run(folder).state == "silent")
    judged = verdict(read_run(folder))
    assert gate(judged, "stability").verdict == "NO-GO"
    assert "alive but its heartbeat stopped" in gate(judged, "stability").sentence
    watch(folder, once=True)
    assert "frozen or gone" in capsys.readouterr().out.splitlines()[-1]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert read_run(folder).state == "gone"


def test_a_stalled_process_can_exit(tmp_path, fork_server):
    # It really hangs, in a print to a pipe that is not read. Neither the dump nor the exit may need that output.
    pipe, folder = tmp_path / "output", tmp_path / "run"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)  # full after thirty steps rather than five hundred
    config = settings(
        folder, corpus(tmp_path), train__steps=100000, train__val_tokens=0, checkpoint__every=0, log__every=1,
        health__stall="end", health__stall_seconds=2.0,
    )  # fmt: skip
    child = fork_server.start(config, output=pipe)
    output = b""

    def the_first_steps() -> bool:
        nonlocal output
        with contextlib.suppress(BlockingIOError):
            output += os.read(reader, 65536)
        return b"step      5/100000" in output

    wait_for(the_first_steps, seconds=120)
    rescue = threading.Timer(120, os.kill, (child.pid, signal.SIGKILL))  # a watchdog that fails must not hang the test
    rescue.start()
    code = child.wait()
    rescue.cancel()
    os.close(reader)
    found = read_run(folder)
    assert code == STALLED_EXIT
    assert [e.over for e in found.of(Stalled)] == [False]
    assert "progress.py" in (folder / found.of(Stalled)[0].dump).read_text()  # where it hangs
    assert found.state == "gone"
    assert gate(verdict(found), "stability").verdict == "NO-GO"
    assert "stalled 1 time " in gate(verdict(found), "stability").sentence

"""A run that is killed and resumed has the same losses and weights as an uninterrupted run, to the bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from fork_server import Child, ForkServer
from runs import assert_same_run, events_of, losses, small
from tercet.config.schema import RunConfig
from tercet.telemetry.events import StepLogged
from tercet.train.manifest import complete_checkpoints, verify


def config_of(folder: Path, **changes: object) -> RunConfig:
    """Saves every step and accumulates, so that kills hit saves and fall between micro-batches."""
    changes = {"train__steps": 7, "train__tokens_per_step": 256, "checkpoint__every": 1} | changes
    return small(run__dir=str(folder), **changes)


@pytest.fixture(scope="module")
def straight(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    child = fork_server.run(config_of(folder))
    assert child.code == 0, child.output
    assert len(losses(folder)) == 7
    return folder


def kill_until_done(fork_server: ForkServer, config: RunConfig, delays: list[float], counts: Counter[str]) -> Child:
    """Kill a run after each delay and resume it, until it completes. Returns the last process, which is not killed."""
    checkpoints = Path(str(config.run.dir)) / "checkpoints"
    for delay in [*delays, None]:
        child = fork_server.start(config, resume="auto")
        if delay is not None:
            time.sleep(delay)
            child.signal(signal.SIGKILL)
        if child.wait() == 0:
            break
        assert child.code == -signal.SIGKILL, child.output
        counts["kills"] += 1
        counts["during a save"] += bool(list(checkpoints.glob(".writing-*")))
        counts["before the first step"] += "first step after" not in child.output
        for path in complete_checkpoints(checkpoints):
            verify(path)  # what bears a checkpoint's name is whole, whenever the kill came
    assert child.code == 0, child.output
    return child


# What the kill matrix runs, 14 steps each. The first saves every step, so that kills hit saves; the others differ in
# data, saving and logging.
KILLED = {
    "saves every step": {},
    "synchronous saves, shuffled sequences, validation": {
        "checkpoint__async_save": False,
        "checkpoint__every": 3,
        "data__shuffle_sequences": 8,
        "train__val_tokens": 128,
        "train__val_every": 4,
    },
    "text files, one log line per 5 steps": {"data__source": "python-source", "checkpoint__every": 2, "log__every": 5},
    "stages of other lengths, shuffled sequences": {
        "train__stages": "32:5,64:5:rope_theta=50000,128:4",
        "data__synthetic__length": 50,
        "data__shuffle_sequences": 7,
        "train__val_tokens": 128,
    },
}


@pytest.mark.slow
def test_kills_at_random_times_lose_nothing(fork_server: ForkServer, tmp_path: Path, matrix_counts: list[str]) -> None:
    """TERCET_KILLS sets the number of kills, of up to 10 per run."""
    wanted, started = int(os.environ.get("TERCET_KILLS", "500")), time.monotonic()
    draw = random.Random(21)
    references: dict[str, float] = {}  # seconds of the uninterrupted run
    for name, changes in KILLED.items():
        begun = time.perf_counter()
        assert fork_server.run(config_of(tmp_path / name, train__steps=14, **changes)).code == 0
        references[name] = time.perf_counter() - begun
    runs, counts = 0, Counter[str]()
    while counts["kills"] < wanted:
        name = list(KILLED)[runs % len(KILLED)]
        folder = tmp_path / "killed"
        delays = [draw.uniform(0, references[name]) for _ in range(10)]
        kill_until_done(fork_server, config_of(folder, train__steps=14, **KILLED[name]), delays, counts)
        assert_same_run(tmp_path / name, folder)
        shutil.rmtree(folder)
        runs += 1
    found = ", ".join(f"{count} {what}" for what, count in counts.items())
    matrix_counts.append(f"{found}; all {runs} runs ended with the same bits ({time.monotonic() - started:.0f} s)")


def test_a_kill_during_a_save_loses_only_that_save(fork_server: ForkServer, straight: Path, tmp_path: Path) -> None:
    """Kill as soon as a .writing- folder appears."""
    folder = tmp_path / "run"
    config = config_of(folder)
    caught = 0
    for _ in range(40):
        child = fork_server.start(config, resume="auto")
        seen = set(complete_checkpoints(folder / "checkpoints"))
        while not list((folder / "checkpoints").glob(".writing-*")):
            if (folder / "metrics.json").exists():
                break
            time.sleep(0.0005)
        child.signal(signal.SIGKILL)
        if child.wait() == 0:
            break
        left = list((folder / "checkpoints").glob(".writing-*"))
        caught += bool(left)
        kept = complete_checkpoints(folder / "checkpoints")
        assert not seen or kept
        # Let it make progress past the save it was killed in, or this would never end.
        if caught >= 3:
            break
    assert caught >= 3
    assert fork_server.run(config, resume="auto").code == 0
    assert not list((folder / "checkpoints").glob(".writing-*"))
    assert_same_run(straight, folder)


def test_a_log_interval_that_spans_a_resume_is_logged_whole(fork_server: ForkServer, tmp_path: Path) -> None:
    """Checkpoints at 3, 6, 9, …, log lines at 5, 10, …: steps between a save and a log line are not lost."""
    runs = {}
    for name in ("straight", "stopped"):
        config = config_of(tmp_path / name, checkpoint__every=3, log__every=5, train__steps=12)
        if name == "stopped":
            first = config_of(tmp_path / name, checkpoint__every=3, log__every=5, train__steps=12, log__progress="off")
            child = fork_server.start(first)
            while not (tmp_path / name / "checkpoints" / "step-00000006").exists():
                time.sleep(0.001)
            child.signal(signal.SIGKILL)
            child.wait()
        child = fork_server.run(config, resume="auto" if name == "stopped" else None)
        assert child.code == 0, child.output
        logged = events_of(tmp_path / name, StepLogged)
        runs[name] = [(e.step, e.first_step, e.losses, e.grad_norms) for e in logged]
    assert [r[:2] for r in runs["straight"]] == [(5, 1), (10, 6), (12, 11)]
    assert runs["stopped"] == runs["straight"]

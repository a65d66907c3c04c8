"""Whole runs on several ranks: launch, resume on a different number of ranks, and failures."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from fork_server import Child
from parallel.world import (
    ForkedTorchrunRun,
    RankedRun,
    TorchrunRun,
    flags,
    free_port,
    listening_addresses,
    rank_environment,
    start_ranks,
)
from runs import SMALL, losses, tensors
from tercet.cli import main
from tercet.config.load import ConfigError, load
from tercet.data import loader, paths, stream
from tercet.data.stream import DataError
from tercet.parallel import launch
from tercet.report.read import read_run
from tercet.report.verdict import record_gaps
from tercet.train.manifest import complete_checkpoints, step_of
from tercet.train.trainer import train

# A constant learning rate, so that a shorter run equals the start of a longer one.
SETTINGS = SMALL | {
    "data.source": "text", "data.path": str(Path(__file__).parent / "*.py"), "train.schedule": "constant",
    "train.lr": 0.003, "train.tokens_per_step": 256, "train.micro_batch": 2, "train.steps": 6, "checkpoint.every": 2,
    "log.every": 1,
}  # fmt: skip


def arguments(folder: Path, **changes: object) -> list[str]:
    settings = {k.replace("__", "."): v for k, v in changes.items()}
    return ["--preset", "tiny", *flags(SETTINGS | {"run.dir": str(folder)} | settings)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, float]:
    """The losses of the same run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert train(load("tiny", flags=SETTINGS | {"run.dir": str(folder)}).config) == 0
    return {step: float(loss) for step, loss in losses(folder).items()}


def assert_same(folder: Path, alone: dict[int, float], tolerance: float = 1e-5) -> None:
    got = {step: float(loss) for step, loss in losses(folder).items()}
    assert got.keys() == alone.keys()
    assert max(abs(got[step] - alone[step]) for step in got) < tolerance


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "started"])
def test_a_killed_rank_stops_all_is_named_and_torchrun_resumes_from_the_newest_checkpoint(
    forked, fork_server, tmp_path, alone
):
    folder = tmp_path / "run"
    torchrun = partial(ForkedTorchrunRun, fork_server) if forked else TorchrunRun
    command = arguments(folder, parallel__strategy="fsdp", checkpoint__async_save=False)
    restart = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "1")
    with torchrun(tmp_path / "out", 2, *command, options=restart) as run:
        run.until("step 3/6")
        victim = run.pid(1)
        os.kill(victim, signal.SIGKILL)
        assert run.wait() == 0, run.text
        text = run.text
    assert f"error: rank 1 (pid {victim} on " in text
    assert "is gone (killed, or out of memory: see dmesg), last seen in step" in text
    assert text.count("error: rank 1") == 1  # one rank reports for all
    assert "restart 1" in text
    assert "resuming from" in text
    assert_same(folder, alone)


def test_checkpoints_of_two_ranks_resume_on_one_and_then_on_four(fork_server, tmp_path, alone):
    folder = tmp_path / "run"
    command = arguments(folder, parallel__strategy="fsdp", train__steps=2, train__warmup_steps=2)
    with RankedRun(fork_server, tmp_path / "out", 2, *command, env={"NSA_ACCUM": "4"}) as run:
        assert run.wait() == 0, run.text
    # only rank 0 prints the header, notes and warnings
    for text in ("strategy  ", "warmup_steps=2 covers all 2 steps", "warning: not read: NSA_ACCUM"):
        assert run.text.count(text) == 1, run.text
    one = load("tiny", flags=SETTINGS | {"train.steps": 4, "run.dir": str(folder)}).config
    assert train(one, resume="auto") == 0
    command = arguments(folder, parallel__strategy="ddp", train__micro_batch=1)
    with RankedRun(fork_server, tmp_path / "out", 4, *command, "--resume", "auto") as run:
        assert run.wait() == 0, run.text
    assert_same(folder, alone)
    # ranks 2 and 3 logged nothing before step 5, and rank 1 nothing of steps 3 and 4
    assert record_gaps(read_run(folder)) == []


def test_sharded_ranks_start_from_a_file_of_weights(fork_server, tmp_path):
    first, one, two = (tmp_path / name for name in ("first", "one", "two"))
    assert train(load("tiny", flags=SETTINGS | {"run.dir": str(first), "train.steps": 4, "train.lr": 0.03}).config) == 0
    weights = tmp_path / "weights.safetensors"
    save_file({name.removeprefix("model."): x.clone() for name, x in tensors(first, "model.").items()}, weights)
    more = {"train.init_from": str(weights), "train.steps": 2}
    assert train(load("tiny", flags=SETTINGS | more | {"run.dir": str(one)}).config) == 0
    command = arguments(two, parallel__strategy="fsdp", **more)
    with RankedRun(fork_server, tmp_path / "out", 2, *command) as run:
        assert run.wait() == 0, run.text
    assert_same(two, {step: float(loss) for step, loss in losses(one).items()})
    assert float(losses(one)[1]) < float(losses(first)[1]) - 0.01  # else it would not show that they were loaded


def train_with_broken_data() -> int:
    """On each rank: `tercet train`, but on rank 1 the data of step 4 fails, or hangs until the run is stopped."""
    how, *arguments = sys.argv[1:]
    pack = loader.pack

    def broken(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(pack(*args)):
            if number == 3 and how == "fails":
                raise DataError("the disk is gone")
            if number == 3:
                threading.Event().wait()
            yield batch

    stream.POLL_SECONDS = stream.GRACE_SECONDS = stream.CLOSE_SECONDS = 0.1
    if os.environ["RANK"] == "1":
        loader.pack = broken
    sys.argv = ["tercet", *arguments]
    return main()


def train_as_on_another_machine() -> int:
    """On each rank: `tercet train`, but rank 1 has other files, or another version."""
    difference, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1" and difference == "data":
        paths.FileSet.contents = property(lambda _: "other")  # type: ignore[assignment]
    elif os.environ["RANK"] == "1":
        launch.__version__ = "9.9"
    sys.argv = ["tercet", *arguments]
    return main()


@pytest.mark.parametrize(
    ("difference", "told"),
    [("data", "reads other data than rank 0 (contents)"), ("code", "has tercet 9.9 (code ")],
)
def test_ranks_with_other_data_or_code_are_refused_in_one_line(difference, told, fork_server, tmp_path):
    command = ["train", *arguments(tmp_path / "run", parallel__strategy="ddp")]
    function = "parallel.test_ranks_in_runs:train_as_on_another_machine"
    ranks = start_ranks(fork_server, 2, function, difference, *command, output=tmp_path / "out")
    assert [rank.wait(60) for rank in ranks] == [2, 2]
    errors = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"rank 1 on {socket.gethostname()} {told}" in errors[0]


@pytest.mark.parametrize("how", ["fails", pytest.param("hangs", marks=pytest.mark.slow)])
def test_all_ranks_save_when_the_data_of_one_rank_fails_or_hangs(how, fork_server, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "out"
    command = arguments(folder, parallel__strategy="ddp", checkpoint__every=0)
    function = "parallel.test_ranks_in_runs:train_with_broken_data"
    ranks = start_ranks(fork_server, 2, function, how, "train", *command, output=output)
    if how == "hangs":
        ranks[0].until("step 3/6")
        for rank in ranks:
            rank.signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == ([1, 1] if how == "fails" else [143, 143]), output.read_text()
    assert output.read_text().count("error: ") == (1 if how == "fails" else 0)
    assert [step_of(path) for path in complete_checkpoints(folder / "checkpoints")] == [3]


def test_ranks_that_share_a_sequence_train_like_one(fork_server, tmp_path, alone):
    folder = tmp_path / "run"
    command = arguments(folder, parallel__strategy="cp", checkpoint__every=0, log__every=3)
    with RankedRun(fork_server, tmp_path / "out", 2, *command) as run:
        run.until("strategy  ")
        if sys.platform == "linux":  # ranks of one machine are not reachable from others
            addresses = set().union(*(listening_addresses(child.pid) for child in run.children))
            assert addresses
            assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
        assert run.wait() == 0, run.text
    got = {step: float(loss) for step, loss in losses(folder).items()}
    assert got.keys() == {3, 6}
    assert max(abs(got[step] - alone[step]) for step in got) < 1e-5


def test_a_number_of_ranks_that_does_not_divide_a_step_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"set it to 384 or 768, or use a smaller train.micro_batch or fewer ranks"):
        load(
            "tiny",
            flags=SETTINGS | {"parallel.strategy": "ddp", "parallel.world_size": 3, "train.tokens_per_step": 512},
        )


@pytest.mark.slow
def test_a_stopped_rank_is_waited_for_until_the_limit_and_then_named(fork_server, tmp_path):
    command = arguments(
        tmp_path / "run",
        parallel__strategy="ddp",
        parallel__timeout_seconds=8,
        train__steps=9999,
        checkpoint__every=0,
    )
    with RankedRun(fork_server, tmp_path / "out", 2, *command) as run:
        run.until(" 2/9999")
        victim = run.pid(1)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(2)
        os.kill(victim, signal.SIGCONT)  # slow is not dead
        steps = run.text.count("step ")
        deadline = time.monotonic() + 60
        while run.text.count("step ") < steps + 3:
            assert time.monotonic() < deadline, run.text
            time.sleep(0.05)
        os.kill(victim, signal.SIGSTOP)
        try:
            run.until("is stopped (SIGSTOP)", seconds=60)
        finally:
            os.kill(victim, signal.SIGCONT)
        assert run.wait() != 0
    assert f"error: rank 1 (pid {victim} on " in run.text


@pytest.fixture
def start_rank(fork_server, tmp_path) -> Callable[..., Child]:
    """Start one rank of two."""
    port = free_port()

    def start(rank: int, *extra: str) -> Child:
        command = ["train", *arguments(tmp_path / "run", parallel__strategy="ddp"), *extra]
        return fork_server.call("tercet.cli:main", *command, env=rank_environment(rank, 2, port))

    return start


def test_ranks_with_different_settings_are_refused_with_the_difference(start_rank):
    ranks = [start_rank(0), start_rank(1, "--train.lr", "0.5")]
    assert [rank.wait(120) for rank in ranks] == [2, 2]
    output = ranks[0].output + ranks[1].output
    assert "has a different configuration: train.lr is 0.5 there, 0.003 on rank 0" in output


def test_a_rank_that_does_not_arrive_is_named(start_rank):
    first = start_rank(0, "--parallel.timeout_seconds", "2")
    assert first.wait(120) == 1
    assert "error: rank 1 did not arrive within 2 s (1 of 2 are here" in first.output


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["save", "restart"])
def test_a_rank_killed_in_a_save_or_in_a_restart_loses_nothing(moment, tmp_path, alone):
    folder = tmp_path / "run"
    restart = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "3")
    with TorchrunRun(tmp_path / "out", 2, *arguments(folder, parallel__strategy="fsdp"), options=restart) as run:
        run.until("step 3/6" if moment == "restart" else "step 1/6")
        if moment == "save":
            while not list((folder / "checkpoints").glob(".writing-*")):
                assert run.poll() is None, run.text
        first = run.pid(0)
        os.kill(run.pid(1), signal.SIGKILL)
        if moment == "restart":
            run.until("restart 1")
            while run.pid(0) == first:
                assert run.poll() is None, run.text
                time.sleep(0.005)
            os.kill(run.pid(0), signal.SIGKILL)
        assert run.wait(400) == 0, run.text
    assert_same(folder, alone)

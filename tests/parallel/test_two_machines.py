"""Two torchrun agents on loopback as two machines: one is lost, comes back, and the run ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel.test_ranks_in_runs import alone, arguments, assert_same  # noqa: F401  (a fixture)
from parallel.world import Run, environment, free_port

# Torchrun's agents share their store with the ranks, and publish its address in their first round only: an agent that
# joins later waits for it in vain (torch 2.11 to 2.13). Told not to share, they publish one in every round.
SEPARATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Machine(Run):
    """An agent with one rank; what it starts dies with it, as on a machine that is lost."""

    def __init__(self, output: Path, number: int, port: int, *command: str) -> None:
        self.output = output
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "pair"),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(number == 0)}"),
            *("-m", "tercet", "train", *command, "--resume", "auto"),
        ]
        with output.open("w") as stream:
            self.process = subprocess.Popen(agent, stdout=stream, stderr=subprocess.STDOUT, env=environment(SEPARATE))

    def lose(self, rank: int) -> None:
        self.process.kill()
        os.kill(self.pid(rank), signal.SIGKILL)
        self.process.wait()


def until(machines: list[Machine], said: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not any(said in machine.text for machine in machines):
        told = "\n".join(machine.text for machine in machines)
        assert all(machine.process.poll() is None for machine in machines), told
        assert time.monotonic() < deadline, told
        time.sleep(0.005)


@pytest.mark.slow
def test_a_machine_that_is_lost_rejoins_when_it_is_started_again(tmp_path, alone):  # noqa: F811
    port = free_port()
    command = arguments(tmp_path / "run", parallel__strategy="fsdp", checkpoint__async_save=False)
    with Machine(tmp_path / "0", 0, port, *command) as first, Machine(tmp_path / "1", 1, port, *command) as second:
        until([first, second], "step 3/6")
        rank = 1 if "rank 1 of 2" in second.text else 0
        victim = second.pid(rank)
        second.lose(rank)
        with Machine(tmp_path / "1 again", 1, port, *command) as again:
            assert first.wait() == 0, first.text + again.text
            assert again.wait() == 0, again.text
    assert f"error: rank {rank} (pid {victim} on " in first.text
    assert "is gone (killed, or out of memory: see dmesg)" in first.text
    said = first.text + again.text
    assert ", restart 1" in said
    assert "resuming from" in said
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_when_the_machine_that_all_meet_at_is_lost_all_are_started_again(tmp_path, alone):  # noqa: F811
    port = free_port()
    command = arguments(tmp_path / "run", parallel__strategy="fsdp", checkpoint__async_save=False)
    with Machine(tmp_path / "0", 0, port, *command) as first, Machine(tmp_path / "1", 1, port, *command) as second:
        until([first, second], "step 3/6")
        rank = 0 if "rank 0 of 2" in first.text else 1
        first.lose(rank)
        assert second.wait() != 0
    assert f"error: rank {rank} (pid " in second.text
    again = [Machine(tmp_path / f"{i} again", i, port, *command) for i in range(2)]
    with again[0], again[1]:
        assert [machine.wait() for machine in again] == [0, 0], again[0].text + again[1].text
    assert_same(tmp_path / "run", alone)

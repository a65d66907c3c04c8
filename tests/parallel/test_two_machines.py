"""Two torchrun agents on loopback as two machines: one is lost and comes back, and the run ends the same."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.test_ranks_in_runs import alone, arguments, assert_same  # noqa: F401  (a fixture)
from parallel.world import TorchrunRun, free_port

# Torchrun's agents share their store with the ranks and publish its address in the first round only, so an agent that
# joins later waits forever (torch 2.11 to 2.13). With separate stores they publish an address in every round.
SEPARATE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Machine(TorchrunRun):
    """An agent with one rank."""

    def __init__(
        self,
        output: Path,
        number: int,
        port: int,
        *command: str,
        host: str = "127.0.0.1",
        local: str = "127.0.0.1",
        within: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        agent = [
            *within,
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "pair", "--local-addr", local),
            *("--rdzv-endpoint", f"{host}:{port}", "--rdzv-conf", f"is_host={int(number == 0)}"),
            *("-m", "tercet", "train", *command, "--resume", "auto"),
        ]
        self.start(output, agent, SEPARATE | (env or {}))

    def lose(self, rank: int) -> None:
        """Kill the agent and its rank at once."""
        self.process.kill()
        os.kill(self.pid(rank), signal.SIGKILL)
        self.process.wait()


def starter(folder: Path) -> Callable[[str, int], Machine]:
    """Starts one of the two machines of a run; what it prints goes to a file of the given name."""
    port = free_port()
    command = arguments(folder / "run", parallel__strategy="fsdp", checkpoint__async_save=False)
    return lambda name, number: Machine(folder / name, number, port, *command)


def until(machines: list[Machine], said: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not any(said in machine.text for machine in machines):
        told = "\n".join(machine.text for machine in machines)
        assert all(machine.process.poll() is None for machine in machines), told
        assert time.monotonic() < deadline, told
        time.sleep(0.005)


@pytest.mark.slow
def test_a_lost_machine_rejoins_when_it_is_started_again(tmp_path, alone):  # noqa: F811
    start = starter(tmp_path)
    with start("0", 0) as first, start("1", 1) as second:
        until([first, second], "step 3/6")
        rank = 1 if "rank 1 of 2" in second.text else 0
        victim = second.pid(rank)
        second.lose(rank)
        with start("1 again", 1) as again:
            assert first.wait() == 0, first.text + again.text
            assert again.wait() == 0, again.text
    assert f"error: rank {rank} (pid {victim} on " in first.text
    assert "is gone (killed, or out of memory: see dmesg)" in first.text
    said = first.text + again.text
    assert ", restart 1" in said
    assert "resuming from" in said
    assert_same(tmp_path / "run", alone)


@pytest.mark.slow
def test_after_the_loss_of_the_rendezvous_host_all_are_started_again(tmp_path, alone):  # noqa: F811
    start = starter(tmp_path)
    with start("0", 0) as first, start("1", 1) as second:
        until([first, second], "step 3/6")
        rank = 0 if "rank 0 of 2" in first.text else 1
        first.lose(rank)
        assert second.wait() != 0
    assert f"error: rank {rank} (pid " in second.text
    again = [start(f"{i} again", i) for i in range(2)]
    with again[0], again[1]:
        assert [machine.wait() for machine in again] == [0, 0], again[0].text + again[1].text
    assert_same(tmp_path / "run", alone)

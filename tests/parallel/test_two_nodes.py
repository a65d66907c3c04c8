"""Two machines, each a network namespace with an address of its own: a run starts, loses one, and continues without."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.test_ranks_in_runs import alone, arguments, assert_same  # noqa: F401  (a fixture)
from parallel.test_two_machines import Machine, until
from tercet.cli import main

LINKS = [(f"tercet{os.getpid()}{end}"[-15:], address) for end, address in (("a", "10.77.0.1"), ("b", "10.77.0.2"))]
TIMEOUT = 15  # parallel.timeout_seconds


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_no_namespaces() -> str | None:
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (Debian: iproute2)"
    return None if os.geteuid() == 0 else "network namespaces need root"


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two namespaces joined by one link."""
    names = [f"tercet-{os.getpid()}-{i}" for i in range(2)]
    (one, _), (two, _) = LINKS
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", one, "netns", names[0], "type", "veth", "peer", "name", two, "netns", names[1])
        for name, (link, address) in zip(names, LINKS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            for device in ("lo", link):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(folder: Path, nodes: list[str], number: int) -> Machine:
    """A node's agent with one rank. The nodes' names have no address here, so gloo is told the interface."""
    link, address = LINKS[number]
    settings = {"parallel__strategy": "fsdp", "checkpoint__async_save": False, "parallel__timeout_seconds": TIMEOUT}
    return Machine(
        folder / str(number), number, 29500, *arguments(folder / "run", **settings), host=LINKS[0][1], local=address,
        within=("ip", "netns", "exec", nodes[number]), env={"GLOO_SOCKET_IFNAME": link},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(why_no_namespaces() is not None, reason=str(why_no_namespaces()))
@pytest.mark.parametrize("loss", ["killed", "cut off"])
def test_a_lost_node_is_named_in_time_and_the_run_continues_on_the_other(tmp_path, nodes, alone, loss):  # noqa: F811
    with start(tmp_path, nodes, 0) as first, start(tmp_path, nodes, 1) as second:
        until([first, second], "step 3/6")
        began = time.monotonic()
        if loss == "killed":
            second.lose(1 if "rank 1 of 2" in second.text else 0)
        else:  # nothing ends, and nothing arrives
            ip("-n", nodes[1], "link", "set", LINKS[1][0], "down")
        until([first], "error: rank ", seconds=4 * TIMEOUT)
        assert time.monotonic() - began < TIMEOUT + 15, first.text
        while loss == "cut off" and "error: rank " not in second.text:  # its agent may have ended: no rendezvous
            assert time.monotonic() - began < 4 * TIMEOUT, second.text
            time.sleep(0.1)
        for machine in (first, second):
            machine.process.kill()
    assert main(["train", *arguments(tmp_path / "run"), "--resume", "auto"]) == 0
    assert_same(tmp_path / "run", alone)

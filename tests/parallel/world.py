"""Launch several ranks on this machine for tests, over gloo.

`run_ranks` and `RankedRun` fork ranks from the test session's fork server: no start-up time. `ForkedTorchrunRun` does
so under torchrun, for restarts. `run_torchrun` and `TorchrunRun` start torchrun as users do, about 9 s per launch.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch

import tercet
from fork_server import Child, ForkServer
from tercet.parallel.launch import NCCL_SHARES, nccl_version

HERE = Path(__file__).parent
RESULT = "RESULT "
GPUS = torch.cuda.device_count()


def over() -> pytest.MarkDecorator:
    """Run a test over NCCL on GPUs, which ranks share if there are too few, and over gloo on CPUs."""
    gpus = [pytest.mark.gpu, pytest.mark.multi_gpu]
    return pytest.mark.parametrize(
        "backend", [pytest.param("nccl", marks=gpus), pytest.param("gloo", marks=pytest.mark.slow)]
    )


def sharing_environment() -> dict[str, str]:
    """What ranks need in their environment to share a GPU over NCCL: a library that can, unless one is loaded."""
    if not GPUS:
        pytest.fail("NCCL needs a CUDA device: over gloo, on CPUs, make test-slow runs these tests", pytrace=False)
    if nccl_version() >= NCCL_SHARES:
        return {}
    found = [path for folder in sys.path if (path := Path(folder) / "nvidia/nccl/lib/libnccl.so.2").exists()]
    ask = "import ctypes as c, sys; n = c.c_int(); c.CDLL(sys.argv[1]).ncclGetVersion(c.byref(n)); print(n.value)"
    for path in found:
        number = int(subprocess.run([sys.executable, "-c", ask, path], capture_output=True, text=True).stdout or 0)
        if number >= NCCL_SHARES[0] * 10000 + NCCL_SHARES[1] * 100:
            return {"LD_PRELOAD": str(path)}
    pytest.fail("ranks share a GPU over NCCL 2.30 or newer: pip install --no-deps --target DIR nvidia-nccl-cu13, and "
                "add DIR to PYTHONPATH", pytrace=False)  # fmt: skip


class Rows:
    """Rows of the table that a session prints at its end (tests/conftest.py)."""

    def __init__(self, record: Callable[[str, object], None], path: str | None) -> None:
        self._record, self._path = record, path

    def add(self, *, output: str = "", **row: Any) -> None:
        """output: what a failed case printed, which goes to the file only."""
        self._record("row", json.dumps(row))
        if self._path:  # at once: a session that is cut short keeps what it found
            with Path(self._path).open("a") as stream:
                stream.write(json.dumps(row | ({"output": output} if output else {})) + "\n")


def report(**values: Any) -> None:
    """In a rank: pass a result to the test."""
    sys.stdout.write(RESULT + json.dumps(values) + "\n")  # in one piece: other ranks write to the same file
    sys.stdout.flush()


def _results(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(RESULT)) for line in output.splitlines() if line.startswith(RESULT)]


def assert_below(results: list[dict[str, Any]], **limits: float) -> None:
    """The differences of these names are below their limits in every result."""
    for result in results:
        assert all(result[name] < limit for name, limit in limits.items()), (limits, result)


def run_ranks(server: ForkServer, ranks: int, script: str, *arguments: str, seconds: float = 120) -> list[dict]:
    """Run `main` of tests/parallel/SCRIPT.py on forked ranks. Returns what rank 0 reported, in order."""
    children = start_ranks(server, ranks, f"parallel.{script}:main", *arguments)
    code = wait_for_all(children, seconds)
    assert code == 0, "\n".join(child.output for child in children)
    return _results(children[0].output)


def wait_for_all(children: list[Child], seconds: float) -> int:
    """0 if all ranks succeed in time; once one has failed, the others have half a minute."""
    deadline = time.monotonic() + seconds
    while None in (codes := [child.poll() for child in children]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + 30)
        time.sleep(0.02)
    for child, code in zip(children, codes, strict=True):
        if code is None:
            child.signal(signal.SIGKILL)
            child.wait()
    return next((code for code in codes if code), -1 if None in codes else 0)


def start_ranks(
    server: ForkServer,
    ranks: int,
    function: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    output: Path | None = None,
) -> list[Child]:
    """Fork ranks with the environment variables that torchrun would set."""
    port = free_port()
    return [
        server.call(function, *arguments, env=rank_environment(rank, ranks, port) | (env or {}), output=output)
        for rank in range(ranks)
    ]


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def listening_addresses(pid: int) -> set[str]:
    """The IPv4 and IPv6 addresses that a process listens on, from Linux's /proc."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:  # listening
                words = [bytes.fromhex(local[i : i + 8])[::-1] for i in range(0, local.index(":"), 8)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    # the existing PYTHONPATH stays: some machines provide packages through it
    paths = [str(HERE.parent), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


class RunInBackground:
    """`tercet train` on several ranks in the background, with the output of all ranks in one file."""

    output: Path

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def pid(self, rank: int) -> int:
        """The process of a rank, from its first line of output; after a restart, the newest."""
        return int(re.findall(rf"^rank {rank} of .* pid (\d+)", self.text, re.MULTILINE)[-1])

    def until(self, *texts: str, seconds: float = 120) -> None:
        """Wait until the output contains one of `texts`."""
        deadline = time.monotonic() + seconds
        while not any(text in self.text for text in texts):
            assert self.poll() is None, self.text
            assert time.monotonic() < deadline, f"{texts} never came:\n{self.text}"
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self


class RankedRun(RunInBackground):
    """On forked ranks."""

    def __init__(
        self, server: ForkServer, output: Path, ranks: int, *arguments: str, env: dict[str, str] | None = None
    ) -> None:
        self.output = output
        output.unlink(missing_ok=True)
        self.children = start_ranks(server, ranks, "tercet.cli:main", "train", *arguments, env=env, output=output)

    def poll(self) -> int | None:
        codes = [child.poll() for child in self.children]
        return next((code for code in codes if code), None if None in codes else 0)

    def wait(self, seconds: float = 180) -> int:
        """0 if all ranks succeed."""
        return wait_for_all(self.children, seconds)

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            if child.poll() is None:
                child.signal(9)
                child.wait()


class ForkedTorchrunRun(RunInBackground):
    """Under torchrun, which is forked from the fork server and forks its ranks."""

    def __init__(
        self, server: ForkServer, output: Path, ranks: int, *arguments: str, options: tuple[str, ...] = ()
    ) -> None:
        self.output = output
        program = str(Path(tercet.__file__).with_name("__main__.py"))
        command = ["--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1", *options, "--start-method", "fork"]
        command += ["--run-path", program, "train", *arguments]
        self.child = server.call("torch.distributed.run:main", *command, output=output)

    def poll(self) -> int | None:
        return self.child.poll()

    def wait(self, seconds: float = 180) -> int:
        return self.child.wait(seconds)

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.signal(signal.SIGTERM)
            self.child.wait(60)


class TorchrunRun(RunInBackground):
    """Under torchrun."""

    def __init__(
        self,
        output: Path,
        ranks: int,
        *arguments: str,
        program: tuple[str, ...] = ("-m", "tercet", "train"),
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--local-addr", "127.0.0.1"),  # without a name server, a machine may not know its own name
            *(options or ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")),
            *(*program, *arguments),
        ]
        self.start(output, command, env)

    def start(self, output: Path, command: list[str], env: dict[str, str] | None = None) -> None:
        self.output = output
        with output.open("w") as stream:
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=torchrun_environment(env)
            )

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float = 180) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text}") from None

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def run_torchrun(ranks: int, script: str, *arguments: str, seconds: float = 120, env: dict[str, str] | None = None):
    """As `run_ranks`, under torchrun."""
    program = (str(HERE / f"{script}.py"),)
    with (
        tempfile.TemporaryDirectory() as folder,
        TorchrunRun(Path(folder) / "output", ranks, *arguments, program=program, env=env) as run,
    ):
        assert run.wait(seconds) == 0, run.text
        return _results(run.text)


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as command-line flags."""
    found = []
    for key, value in settings.items():
        if isinstance(value, bool):
            section, name = key.rsplit(".", 1)
            found.append(f"--{key}" if value else f"--{section}.no_{name}")
        else:
            found += [f"--{key}", str(value)]
    return found

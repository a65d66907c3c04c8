"""Real processes with a gloo process group on this machine, for tests: each runs one function of a test module."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GRACE_SECONDS = 40.0  # torchrun itself gives its ranks 30


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun(
    ranks: int, *arguments: str, timeout: float = 120, env: dict[str, str] | None = None, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone` with this interpreter, to its end. What it says is passed on line by line: of a run that
    is cut off, or whose ranks crash, what came before can be read. Cut off means subprocess.TimeoutExpired."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"),
        *(*options, *arguments),
    ]
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(env))
        late = threading.Event()

        def end() -> None:
            late.set()
            process.terminate()  # torchrun then ends its ranks
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

        limit = threading.Timer(timeout, end)
        limit.start()
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                said.append(line)
                print(line, end="", flush=True)
        code = process.wait()
        limit.cancel()
        errors.seek(0)
        if late.is_set():
            raise subprocess.TimeoutExpired(command, timeout, "".join(said), errors.read())
        return subprocess.CompletedProcess(command, code, "".join(said), errors.read())


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    # what else is on the path stays there: a machine's own packages may come through it
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def together(
    ranks: int, script: str, *arguments: str, timeout: float = 120, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run tests/parallel/SCRIPT on so many ranks; what each `tell` of rank 0 said, in order. A failure is the test's."""
    done = torchrun(ranks, str(HERE / script), *arguments, timeout=timeout, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


def tell(**what: Any) -> None:
    print("TOLD " + json.dumps(what), flush=True)


class Run:
    """`tercet train` under torchrun, in the background, its output in a file."""

    def __init__(
        self,
        output: Path,
        ranks: int,
        *arguments: str,
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.output = output
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--local-addr", "127.0.0.1"),  # a machine without a name server may not know its own name
            *(options or ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")),
            *("-m", "tercet", "train", *arguments),
        ]
        with output.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment(env))

    @property
    def text(self) -> str:
        return self.output.read_text()

    def pid(self, rank: int) -> int:
        """The process of a rank, as it said itself; after a restart, of the newest."""
        return int(re.findall(rf"^rank {rank} of .* pid (\d+)", self.text, re.MULTILINE)[-1])

    def until(self, *said: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not any(part in self.text for part in said):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, f"{said} never came:\n{self.text}"
            time.sleep(0.005)

    def wait(self, seconds: float = 180) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text}") from None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def flags(settings: dict[str, Any]) -> list[str]:
    """Keys and values as a command line."""
    found = []
    for key, value in settings.items():
        if isinstance(value, bool):
            section, name = key.rsplit(".", 1)
            found.append(f"--{key}" if value else f"--{section}.no_{name}")
        else:
            found += [f"--{key}", str(value)]
    return found

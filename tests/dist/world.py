"""Real processes with a gloo process group on this machine, for tests: each runs one function of a test module."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def torchrun(
    ranks: int, *arguments: str, timeout: float = 120, env: dict[str, str] | None = None, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone` with this interpreter, to its end."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *options, *arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(env), check=False)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def together(ranks: int, script: str, *arguments: str, timeout: float = 120) -> list[dict[str, Any]]:
    """Run tests/dist/SCRIPT on so many ranks; what each `tell` of rank 0 said, in order. A failure is the test's."""
    done = torchrun(ranks, str(HERE / script), *arguments, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


def tell(**what: Any) -> None:
    print("TOLD " + json.dumps(what), flush=True)

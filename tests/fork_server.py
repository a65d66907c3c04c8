"""Child processes without start-up time, forked from a server that has imported torch and Tercet.

The server computes nothing, so its children start clean and can be killed at any time. Forking from the test process
would copy torch's thread pools in an unknown state.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from pathlib import Path
from typing import Any, Self

from tercet.config.schema import RunConfig


class ForkServer:
    """Starts children on request. Those still alive at the end are killed."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._children = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # torch would ask CUDA for the number of GPUs, and no child could use CUDA then
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                **(env or {}),
            },
        )
        self._read_reply()

    def start(self, config: RunConfig, resume: str | None = None, output: Path | None = None) -> Child:
        """Start a training run. Its output goes to a new file, or to `output`."""
        arguments = [json.dumps(config.model_dump(mode="json")), *([] if resume is None else [resume])]
        return self.call("fork_server:_train", *arguments, output=output)

    def run(self, config: RunConfig, resume: str | None = None) -> Child:
        """Run training to its end."""
        child = self.start(config, resume)
        child.wait()
        return child

    def call(
        self, function: str, *arguments: str, env: dict[str, str] | None = None, output: Path | None = None
    ) -> Child:
        """Start `module:function`, called without arguments, with `arguments` in sys.argv. It returns the exit code.

        Output is appended to `output`, so that several children can share a file.
        """
        self._children += 1
        output = output or Path(self._outputs.name) / f"{self._children}.txt"
        order = {"call": function, "arguments": arguments, "env": env or {}, "output": str(output)}
        return Child(self, int(self.request(order)["pid"]), output)

    def request(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read_reply()

    def _read_reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server died"
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._outputs.cleanup()


class Child:
    """A process that the server forked."""

    def __init__(self, server: ForkServer, pid: int, output: Path) -> None:
        self._server, self.pid, self._output = server, pid, output
        self.code: int | None = None

    @property
    def output(self) -> str:
        """stdout and stderr so far."""
        return self._output.read_text() if self._output.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        if self.code is None:
            self.code = self._server.request({"wait": self.pid, "seconds": 0})["code"]
        return self.code

    def wait(self, seconds: float = 600) -> int:
        """Wait for the exit code; negative if a signal killed it."""
        if self.code is None:
            self.code = self._server.request({"wait": self.pid, "seconds": seconds})["code"]
        assert self.code is not None, f"still running after {seconds} s:\n{self.output}"
        return self.code

    def until(self, text: str, seconds: float = 30) -> None:
        """Wait until the output contains `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} never came:\n{self.output}"
            time.sleep(0.002)


def _train() -> int:
    """In a child: train with the configuration in sys.argv, and resume from the checkpoint named after it."""
    from tercet.errors import TercetError
    from tercet.train.trainer import train

    config, *resume = sys.argv[1:]
    try:
        return train(RunConfig.model_validate_json(config), resume=resume[0] if resume else None)
    except TercetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _main_on_terminal() -> int:
    """In a child: `tercet` in a new session, on the terminal in sys.argv, with the arguments after it."""
    from tercet.cli import main

    terminal, *arguments = sys.argv[1:]
    os.setsid()
    handle = os.open(terminal, os.O_RDWR)
    fcntl.ioctl(handle, termios.TIOCSCTTY, 0)
    for stream in range(3):
        os.dup2(handle, stream)
    os.close(handle)
    sys.argv = ["tercet", *arguments]
    return main()


def _run_child(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup
    handle = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(order["env"])
    module, function = order["call"].split(":")
    sys.argv = [module, *order["arguments"]]
    code = 3
    try:
        code = getattr(importlib.import_module(module), function)() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.002)


def _serve() -> None:
    import torch._dynamo  # noqa: F401  # which every optimizer imports

    import tercet.cli
    import tercet.train.trainer  # noqa: F401

    os.environ.pop("LD_PRELOAD", None)  # loaded: what children start does not need it
    print("{}", flush=True)
    running: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            code = _wait(order["wait"], order["seconds"])
            if code is not None:
                running.discard(order["wait"])
            print(json.dumps({"code": code}), flush=True)
            continue
        pid = os.fork()
        if not pid:
            _run_child(order)
        running.add(pid)
        print(json.dumps({"pid": pid}), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # nothing to clean up, and torch takes seconds to unload


if __name__ == "__main__":
    _serve()

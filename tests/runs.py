"""Runs small enough for tests: a model of a few thousand weights, and a nursery whose children are real processes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from tercet.config.load import load
from tercet.config.schema import RunConfig

# Selection really selects at this size: 8 blocks of 8 tokens, 4 of them read (one of free choice), a window of 8.
SMALL: dict[str, Any] = {
    "model.dim": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 8,
    "model.ffn_dim": 32,
    "model.vocab_size": 256,
    "model.nsa.compress_block": 4,
    "model.nsa.compress_stride": 2,
    "model.nsa.select_block": 8,
    "model.nsa.select_count": 4,
    "model.nsa.window": 8,
    "data.source": "synthetic",
    "data.seq_len": 64,
    "data.shuffle_sequences": 0,  # whatever the preset: tiny's block is read whole before its first step
    "train.steps": 6,
    "train.micro_batch": 2,
    "train.tokens_per_step": 128,
    "train.warmup_steps": 2,
    "train.val_tokens": 0,
    "train.sample_tokens": 0,
    "checkpoint.every": 2,
    "log.every": 1,
    "log.tensorboard": False,
    "run.device": "cpu",
    "run.threads": 1,
}


# The smallest sizes that the kernels take, for runs on a GPU: in fp32 most of such a test is compilation.
GPU_SIZES: dict[str, Any] = {
    "model__dim": 64,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__head_dim": 16,
    "model__ffn_dim": 128,
    "model__nsa__compress_block": 8,
    "model__nsa__compress_stride": 4,
    "model__nsa__select_block": 16,
    "model__nsa__select_count": 4,
    "model__nsa__window": 32,
    "data__seq_len": 512,
    "run__device": "cuda",
}


def small(**changes: Any) -> RunConfig:
    """A small run; `train__steps=9` changes train.steps."""
    return load(flags=SMALL | {k.replace("__", "."): v for k, v in changes.items()}).config


def rows(path: Path) -> list[dict[str, str]]:
    """A CSV file as dictionaries, text as written."""
    with path.open() as stream:
        return list(csv.DictReader(stream))


def losses(run: Path) -> dict[int, str]:
    """step -> loss, all digits, as written in training.csv. A step told twice is an error."""
    told = rows(run / "training.csv")
    assert len({r["step"] for r in told}) == len(told)
    return {int(r["step"]): r["loss"] for r in told}


class Nursery:
    """Children forked from a process that has imported torch and computed nothing: no start-up, and safe to kill.

    Forking from the test's own process would copy torch's thread pools in an unknown state.
    """

    def __init__(self) -> None:
        self._outputs = tempfile.TemporaryDirectory()
        self._children = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def start(self, config: RunConfig, resume: str | None = None, output: Path | None = None) -> Child:
        """Begin a run in a child; what it prints goes to a file of its own, or to `output`."""
        self._children += 1
        output = output or Path(self._outputs.name) / f"{self._children}.txt"
        order = {"config": config.model_dump(mode="json"), "resume": resume, "output": str(output)}
        return Child(self, int(self._ask(order)["pid"]), output)

    def run(self, config: RunConfig, resume: str | None = None) -> Child:
        """A run, to its end."""
        child = self.start(config, resume)
        child.wait()
        return child

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._outputs.cleanup()


class Child:
    """A run in a process of its own."""

    def __init__(self, nursery: Nursery, pid: int, output: Path) -> None:
        self._nursery, self.pid, self._output = nursery, pid, output
        self.code: int | None = None

    @property
    def output(self) -> str:
        """What it printed, errors included."""
        return self._output.read_text() if self._output.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Exit code; negative for the signal that killed it."""
        self.code = int(self._nursery._ask({"wait": self.pid})["code"])
        return self.code

    def until(self, said: str, seconds: float = 30) -> None:
        """Wait for a piece of output."""
        deadline = time.monotonic() + seconds
        while said not in self.output:
            assert time.monotonic() < deadline, f"{said!r} never came:\n{self.output}"
            time.sleep(0.002)


def _serve() -> None:
    from tercet.errors import TercetError
    from tercet.train.trainer import train

    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(json.dumps({"pid": pid}), flush=True)
            continue
        handle = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = 3
        try:
            code = train(RunConfig.model_validate(order["config"]), resume=order["resume"])
        except TercetError as error:
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    _serve()

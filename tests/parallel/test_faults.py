"""Fifty ways for a rank to fail: the others end in time, and one names the rank, the step and what it was doing."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fork_server import Child, ForkServer
from parallel.world import Rows, flags, over, start_ranks, wait_for_all
from runs import SMALL, losses
from tercet.cli import main
from tercet.model.transformer import Block
from tercet.parallel.strategy import Distributed
from tercet.train import hooks, trainer
from tercet.train.checkpoint import HashingFile
from tercet.train.manifest import complete_checkpoints, step_of
from tercet.train.validate import Validation

KINDS = ("SIGKILL", "SIGSTOP", "exception", "memory")
MOMENTS = {"start": "starting", "forward": "training", "backward": "training", "collective": "training",
           "save": "saving", "validation": "validating"}  # fmt: skip
TIMEOUT, LATER = 15, 15  # parallel.timeout_seconds, and how much later everyone has ended
STEP = 3
SETTINGS = SMALL | {
    "model.attention": "dense", "model.backend": "reference", "train.tokens_per_step": 256, "train.lr": 0.003,
    "train.schedule": "constant", "train.compile": "off", "train.val_tokens": 256, "train.val_every": 3,
    "checkpoint.every": 3, "checkpoint.async_save": False, "parallel.timeout_seconds": TIMEOUT,
}  # fmt: skip


def fail(how: str) -> None:
    time.sleep(1.3)  # so that a heartbeat says where this rank is, and the others wait for it
    print(f"FAULT {time.time()}", file=sys.stderr, flush=True)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    elif how == "memory":
        torch.empty(1 << 45, device="cuda" if torch.cuda.is_initialized() else "cpu")
    else:
        raise RuntimeError("injected")


def train_with_fault() -> int:
    """On each rank: `tercet train`, but rank 1 fails, as and when sys.argv says."""
    how, moment, *arguments = sys.argv[1:]
    sys.argv = ["tercet", *arguments]
    if os.environ["RANK"] == "1":
        inject(partial(fail, how), how, moment)
    return main()


def inject(fault: Callable[[], None], how: str, moment: str) -> None:
    calls = 0

    def replace(owner: Any, name: str, number: int, around: Callable[[Callable[[], Any]], Any]) -> None:
        """At a call of a function, call `around` with that call."""
        original = getattr(owner, name)

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            call = partial(original, *args, **kwargs)
            return around(call) if calls == number else call()

        setattr(owner, name, broken)

    def before(call: Callable[[], Any]) -> Any:
        fault()
        return call()

    def backward(call: Callable[[], Any]) -> Any:
        output = call()
        output.register_hook(lambda _: fault())
        return output

    def collective(call: Callable[[], Any]) -> Any:
        if not how.startswith("SIG"):
            call()
            return fault()
        threading.Thread(target=fault).start()
        time.sleep(1.29)
        return call()

    first_block, first_sum = SETTINGS["model.layers"] * (STEP - 1) + 1, 2 * (STEP - 1) + 1
    match moment:
        case "arrival":
            replace(hooks, "join", 1, before)
        case "start":
            replace(trainer, "build_state", 1, before)
        case "forward":
            replace(Block, "forward", first_block, before)
        case "backward":
            replace(Block, "forward", first_block, backward)
        case "collective":
            replace(Distributed, "all_sum", first_sum, collective)
        case "save":
            replace(HashingFile, "_write_part", 1, before)
        case "validation":
            replace(Validation, "loss", 1, before)


@dataclass
class Fault:
    """A run of two ranks, of which the second fails."""

    server: ForkServer
    folder: Path
    strategy: str
    how: str
    moment: str
    device: str
    ranks: list[Child] = field(default_factory=list)
    seconds: float = 0.0
    outcome: str = ""

    @property
    def command(self) -> list[str]:
        share = {"parallel.share_gpus": torch.cuda.device_count() < 2} if self.device == "cuda" else {}
        run = {"run.dir": str(self.folder / "run"), "run.device": self.device, "parallel.strategy": self.strategy}
        return ["train", "--preset", "tiny", *flags(SETTINGS | share | run)]

    def start(self) -> None:
        self.folder.mkdir()
        function = "parallel.test_faults:train_with_fault"
        arguments = (self.how, self.moment, *self.command)
        self.ranks = start_ranks(self.server, 2, function, *arguments, output=self.folder / "out")
        self.started = time.time()

    @property
    def text(self) -> str:
        return (self.folder / "out").read_text()

    def over(self) -> bool:
        """Whether rank 0 has ended, in time or not."""
        codes = [rank.poll() for rank in self.ranks]
        now, began = time.time(), re.search(r"^FAULT (\S+)", self.text, re.MULTILINE)
        limit = 150 if began is None else TIMEOUT + LATER
        self.seconds = now - (float(began[1]) if began else self.started)
        if codes[0] is None and self.seconds < limit:
            return False
        for rank in self.ranks:
            if rank.poll() is None:
                rank.signal(signal.SIGKILL)
                rank.wait()
        self.outcome = "hung" if codes[0] is None else self.judge(codes[0], began is not None)
        return True

    def judge(self, code: int, injected: bool) -> str:
        """`ok`, or what is wrong."""
        if not injected:
            return "ended before its fault"
        saved = [step_of(path) for path in complete_checkpoints(self.folder / "run" / "checkpoints")]
        if self.moment == "arrival":
            expected = "rank 1 did not arrive within"
        elif self.moment == "save" and not self.how.startswith("SIG"):
            expected = rf"error: checkpoint of step {STEP} could not be written .*\(rank 1: "
        else:
            step = {"start": 0}.get(self.moment, STEP)
            told = {"SIGKILL": "is gone", "SIGSTOP": "is stopped (SIGSTOP)"}.get(self.how, "failed in")
            expected = (
                rf"rank 1 \(pid {self.ranks[1].pid} on .*{re.escape(told)}.* step {step} \({MOMENTS[self.moment]}"
            )
        if code == 0 or not re.search(expected, self.text):
            return f"exit code {code}, and not said: {expected}"
        alone = self.how.startswith("SIG") or self.moment == "save"  # else rank 1 reports its own error too
        if alone and self.moment != "arrival" and self.text.count("error: ") != 1:
            return "reported more than once"
        record = re.search(r"its last collectives: (.+?)\)", self.text)
        written = record is not None and Path(record[1]).stat().st_size > 0
        if self.device == "cuda" and self.how.startswith("SIG") and self.moment == "collective" and not written:
            return "no flight record"
        # what was saved before validation is complete; what was being saved is not there
        return "ok" if saved == [] else f"saved {saved}"


FAULTS = [(how, moment) for moment in MOMENTS for how in KINDS]
RESUMED = {("SIGKILL", "save"), ("SIGSTOP", "collective"), ("exception", "backward"), ("memory", "validation")}


@over()
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_fails_is_named_in_time(rank_server, tmp_path, backend, strategy, rows: Rows):
    device = "cuda" if backend == "nccl" else "cpu"
    chosen = [*FAULTS, ("SIGKILL" if strategy == "ddp" else "exception", "arrival")]
    if backend == "gloo":  # each takes seconds to start on two cores
        chosen = [fault for i, fault in enumerate(chosen) if fault in RESUMED or i % 4 == (strategy == "fsdp")]
    waiting = [
        Fault(rank_server, tmp_path / f"{how} {moment}", strategy, how, moment, device) for how, moment in chosen
    ]
    whole = Fault(rank_server, tmp_path / "whole", strategy, "none", "none", device)
    waiting.insert(0, whole)
    running: list[Fault] = []
    done: list[Fault] = []
    while waiting or running:
        while waiting and len(running) < (7 if device == "cuda" else 2):
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(0.1)
        for fault in [fault for fault in running if fault.over()]:
            running.remove(fault)
            done.append(fault)
            if fault is not whole:
                rows.add(
                    case=f"{fault.how} in {fault.moment}", on=f"{backend} {strategy}", outcome=fault.outcome,
                    seconds=round(fault.seconds, 1), output="" if fault.outcome == "ok" else fault.text[-4000:],
                )  # fmt: skip
    assert whole.ranks[0].code == 0, whole.text
    expected = losses(whole.folder / "run")
    wrong = [f for f in done if f is not whole and f.outcome != "ok"]
    resumed = [f for f in done if (f.how, f.moment) in RESUMED and f not in wrong]
    again = {}
    for fault in resumed:
        command, output = ("tercet.cli:main", *fault.command, "--resume", "auto"), fault.folder / "resumed"
        again[fault.folder] = start_ranks(rank_server, 2, *command, output=output)
    for fault in resumed:
        assert wait_for_all(again[fault.folder], 150) == 0, again[fault.folder][0].output
        got = losses(fault.folder / "run")
        apart = max(abs(float(got[step]) - float(expected[step])) for step in expected)
        rows.add(case=f"{fault.how} in {fault.moment}, resumed", on=f"{backend} {strategy}", relative=apart)
        assert apart < 1e-5
    assert not wrong, "\n\n".join(
        f"{f.how} in {f.moment}: {f.outcome} after {f.seconds:.1f} s\n{f.text}" for f in wrong
    )

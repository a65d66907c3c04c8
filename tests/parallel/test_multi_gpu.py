"""Several ranks train like one, survive a kill and resume on another number of ranks.

The same tests run over NCCL on two or more GPUs (`make test-multi-gpu`), over gloo on one GPU that two ranks share
(`make test-gpu`), and over gloo on CPUs (`make test-slow`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.world import TorchrunRun, assert_below, flags, run_torchrun
from runs import GPU_SIZES, SMALL, losses
from tercet.config.load import load
from tercet.train.trainer import train

GPUS = torch.cuda.device_count()
RESTART = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "1")


def over(ranks: int = 2) -> pytest.MarkDecorator:
    """Run a test over NCCL, if there are as many GPUs as ranks, and over gloo; two ranks also on a shared GPU."""
    too_few = f"NCCL needs one GPU per rank: {ranks} ranks, and this machine has {GPUS} GPU{'s' * (GPUS != 1)}"
    enough = pytest.mark.skipif(ranks > GPUS, reason=too_few)
    gpus = [pytest.mark.gpu, pytest.mark.multi_gpu, pytest.mark.serial, enough]
    alone = pytest.mark.skipif(GPUS > 1, reason="where each rank can have its own GPU, sharing one is refused")
    shared = [pytest.param("shared", marks=[pytest.mark.gpu, pytest.mark.serial, alone])] if ranks == 2 else []
    return pytest.mark.parametrize(
        "backend", [pytest.param("nccl", marks=gpus), pytest.param("gloo", marks=pytest.mark.slow), *shared]
    )


LIMITS = {
    "nccl": {"loss": 1e-5, "gradient": 1e-4, "losses": 1e-3, "stats": 1e-9},
    "gloo": {"loss": 1e-5, "gradient": 1e-4, "losses": 1e-3, "stats": 1e-9},
    "shared": {"loss": 1e-6, "gradient": 1e-5, "losses": 1e-4, "stats": 1e-9},
}


def compare(backend: str, ranks: int, steps: int, cases: list[str]) -> list[dict[str, Any]]:
    """Differences between each strategy and one process."""
    where = {"nccl": ["--cuda", "--nccl"], "shared": ["--cuda"], "gloo": []}[backend]
    results = run_torchrun(ranks, "strategies_ranks", *where, *(f"{steps}:{case}" for case in cases), seconds=900)
    assert [t["case"] for t in results] == cases
    assert backend == "gloo" or all(t["routes"] == ["triton"] for t in results), results
    return results


@over()
@pytest.mark.parametrize(
    "cases",
    [
        ["ddp", "ddp, accumulated, recomputed"],
        ["fsdp", "fsdp, grad_op"],
        ["cp", "cp full 1", "cp, accumulated, recomputed"],
    ],
    ids=["ddp", "fsdp", "cp"],
)
def test_two_ranks_train_like_one(backend: str, cases: list[str]):
    assert_below(compare(backend, 2, 20, cases), **LIMITS[backend])


@over(4)
def test_four_ranks_train_like_one_with_hsdp_and_with_data_parallel_sequences(backend: str):
    results = compare(backend, 4, 20, ["hsdp, plain", "cp with data"])
    assert_below(results, loss=1e-5, gradient=1e-4, losses=1e-3)


@over()
def test_two_ranks_train_like_one_in_bf16(backend: str):
    assert_below(compare(backend, 2, 3, ["ddp, bf16", "fsdp, bf16", "cp, bf16"]), loss=1e-2, gradient=5e-2)


@pytest.mark.gpu
def test_one_rank_on_nccl_trains_like_one_process():
    """What one GPU can show of NCCL: groups, mixed transports, sharding."""
    results = run_torchrun(1, "strategies_ranks", "--cuda", "--nccl", "3:ddp", "3:fsdp", seconds=300)
    assert_below(results, loss=1e-5, gradient=1e-4)


def settings(backend: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of twelve steps that two ranks can share."""
    run = SMALL | {
        "run.dir": str(folder),
        "data.source": "python-source",
        "train.schedule": "constant",  # so that a shorter run equals the start of a longer one
        "train.lr": 0.003,
        "train.tokens_per_step": 256,
        "train.steps": 12,
        "train.precision": "fp32",
        "train.compile": "off",
    }
    if backend != "gloo":
        run |= {key.replace("__", "."): value for key, value in GPU_SIZES.items()} | {"train.tokens_per_step": 2048}
    return run | {key.replace("__", "."): value for key, value in changes.items()}


def train_alone(backend: str, folder: Path, **changes: Any) -> None:
    """Train in this process, on one device."""
    config = load("tiny", flags=settings(backend, folder, parallel__allow_single_rank=True, **changes)).config
    assert train(config, resume="auto" if folder.exists() else None) == 0


def command(backend: str, folder: Path, strategy: str, **changes: Any) -> list[str]:
    on = {"parallel__strategy": strategy, "parallel__timeout_seconds": 60, "parallel__share_gpus": backend == "shared"}
    return ["--preset", "tiny", *flags(settings(backend, folder, **on, **changes))]


def assert_same_losses(folder: Path, alone: Path) -> None:
    got, expected = losses(folder), losses(alone)
    assert got.keys() == expected.keys()
    assert max(abs(float(got[step]) - float(expected[step])) for step in got) < 1e-4


@over()
def test_a_killed_rank_is_named_and_the_run_resumes(tmp_path: Path, backend: str):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train_alone(backend, alone)
    words = command(backend, folder, "fsdp", checkpoint__async_save=False)
    with TorchrunRun(tmp_path / "out", 2, *words, options=RESTART) as run:
        run.until(" 3/12")
        victim = run.pid(1)
        os.kill(victim, signal.SIGKILL)
        assert run.wait(400) == 0, run.text
    assert f"error: rank 1 (pid {victim} on " in run.text
    assert "resuming from" in run.text
    assert ("1 GPU share GPUs (parallel.share_gpus)" in run.text) == (backend == "shared")
    assert_same_losses(folder, alone)


@over()
def test_a_run_resumes_on_one_rank_and_then_on_two(tmp_path: Path, backend: str):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    train_alone(backend, alone)
    with TorchrunRun(tmp_path / "out", 2, *command(backend, folder, "fsdp", train__steps=4)) as run:
        assert run.wait(400) == 0, run.text
    train_alone(backend, folder, train__steps=8)
    with TorchrunRun(tmp_path / "out", 2, *command(backend, folder, "ddp"), "--resume", "auto") as run:
        assert run.wait(400) == 0, run.text
    assert_same_losses(folder, alone)

"""Two ranks on one GPU, through gloo: the strategies agree with one process, on the kernels, and runs survive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from parallel.world import TorchrunRun, assert_below, flags, run_torchrun
from runs import GPU_SIZES, SMALL, losses
from tercet.config.load import load
from tercet.train.trainer import train

pytestmark = pytest.mark.gpu

CASES = {
    "ddp": ["ddp", "ddp, accumulated, recomputed"],
    "fsdp": ["fsdp", "fsdp, grad_op"],
    "cp": ["cp", "cp full 1", "cp, accumulated, recomputed"],
}
BF16 = ["ddp, bf16", "fsdp, bf16", "cp, bf16"]


def results_of(cases: list[str], steps: int) -> list[dict[str, object]]:
    results = run_torchrun(2, "strategies_ranks", "--cuda", *(f"{steps}:{case}" for case in cases), seconds=500)
    assert [t["case"] for t in results] == cases
    for t in results:
        assert t["routes"] == ["triton"], t
    return results


@pytest.mark.parametrize("strategy", CASES)
def test_two_ranks_on_one_gpu_train_like_one(strategy: str):
    assert_below(results_of(CASES[strategy], 20), loss=1e-6, gradient=1e-5, losses=1e-4, stats=1e-9)


def test_two_ranks_on_one_gpu_train_like_one_in_bf16():
    assert_below(results_of(BF16, 3), loss=1e-2, gradient=5e-2)


def test_one_rank_on_nccl_trains_like_one_process_and_keeps_a_record_of_its_collectives():
    """What one GPU can show of NCCL: groups, mixed transports, sharding, the flight recorder."""
    results = run_torchrun(1, "strategies_ranks", "--cuda", "--nccl", "3:ddp", "3:fsdp", seconds=300)
    assert_below(results[:2], loss=1e-5, gradient=1e-4)
    assert results[2]["recorded"] > 0
    assert any(kind.startswith("nccl:") for kind in results[2]["kinds"])


SETTINGS = (
    SMALL
    | {key.replace("__", "."): value for key, value in GPU_SIZES.items()}
    | {
        "data.source": "python-source",
        "train.schedule": "constant",
        "train.lr": 0.003,
        "train.tokens_per_step": 2048,
        "train.precision": "fp32",
        "train.compile": "off",
        "train.steps": 24,
    }
)
TWO_ON_ONE = {"parallel.strategy": "fsdp", "parallel.share_gpus": True, "checkpoint.async_save": False}


@pytest.mark.serial
def test_a_rank_killed_on_a_gpu_is_replaced_and_one_rank_goes_on_with_what_two_have_saved(tmp_path: Path):
    alone, folder = tmp_path / "alone", tmp_path / "run"
    assert train(load("tiny", flags=SETTINGS | {"run.dir": str(alone)}).config) == 0
    command = ["--preset", "tiny", *flags(SETTINGS | TWO_ON_ONE | {"train.steps": 20, "run.dir": str(folder)})]
    restart = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "1")
    with TorchrunRun(tmp_path / "out", 2, *command, options=restart) as run:
        run.until(" 3/20")
        victim = run.pid(1)
        os.kill(victim, signal.SIGKILL)
        assert run.wait() == 0, run.text
        print(run.text)
    assert f"error: rank 1 (pid {victim} on " in run.text
    assert "2 ranks on a machine with 1 GPU share GPUs (parallel.share_gpus)" in run.text
    assert "resuming from" in run.text
    assert train(load("tiny", flags=SETTINGS | {"run.dir": str(folder)}).config, resume="auto") == 0
    got, expected = losses(folder), losses(alone)
    assert got.keys() == expected.keys()
    assert max(abs(float(got[step]) - float(expected[step])) for step in got) < 1e-4

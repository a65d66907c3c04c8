"""Several ranks train like one, save for any number of ranks, and communicate while they compute.

Over NCCL on GPUs (`make test-multi-gpu`), which ranks share if there are too few; what can be, over gloo on CPUs too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from parallel.world import GPUS, RankedRun, Rows, assert_below, flags, over, run_ranks, start_ranks, wait_for_all
from runs import GPU_SIZES, SMALL, losses
from tercet.train.manifest import complete_checkpoints, step_of

# Name of a launch: (ranks, its cases of strategies_ranks.py)
LAUNCHES = {
    "ddp": (2, ["ddp", "ddp, accumulated, recomputed", "ddp, muon", "ddp, bf16 gradients"]),
    "fsdp": (2, ["fsdp", "fsdp, grad_op", "fsdp, accumulated", "fsdp, muon"]),
    "cp": (2, ["cp", "cp full 1", "cp, accumulated, recomputed", "cp, muon"]),
    "four ranks": (4, ["hsdp, plain", "hsdp, muon", "cp", "cp with data", "cp with data, muon"]),
    "bf16": (2, ["ddp, bf16", "fsdp, bf16", "cp, bf16"]),
    "two-branch": (2, ["ddp, form two-branch", "fsdp, form two-branch", "cp, form two-branch"]),
    "own": (2, ["ddp, form own", "fsdp, form own", "cp, form own"]),
    "learned": (2, ["ddp, form learned", "fsdp, form learned", "cp, form learned"]),
    "dense": (2, ["ddp, form dense", "fsdp, form dense", "cp, form dense"]),
    "compiled": (2, ["ddp, compiled", "fsdp, compiled"]),
}
STEPS = 20


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["nccl"])  # over gloo: test_strategies.py
@pytest.mark.parametrize("launch", LAUNCHES)
def test_ranks_train_like_one_process(rank_server: ForkServer, launch: str, rows: Rows):
    ranks, cases = LAUNCHES[launch]
    try:
        words = ["--cuda", *(f"{STEPS}:{case}" for case in cases)]
        results = run_ranks(rank_server, ranks, "strategies_ranks", *words, seconds=280)
    except AssertionError as error:
        rows.add(case=launch, outcome="failed", output=str(error)[-6000:])
        raise
    for result in results:
        low = "bf16" in result["case"]
        # losses of 20 steps relative to one process; of the first step: gradients
        limits = {"relative": 2e-2, "gradient": 5e-2} if low else {"relative": LIMIT, "gradient": 1e-5, "stats": 1e-9}
        seconds = round(result["alone_s"] + result["together_s"], 1)
        shown = {key: result[key] for key in ("case", "relative", "gradient", "parameter", "equal", "routes")}
        rows.add(**shown, ranks=ranks, on="nccl", limit=limits["relative"], seconds=seconds)
    assert [result["case"] for result in results] == cases
    assert all(result["equal"] for result in results), results
    for result in results:
        assert_below([result], **limits)


# Over 20 steps the ranks' other order of sums grows: with accumulation most.
LIMIT = 2e-6


def settings(backend: str, folder: Path, **changes: Any) -> list[str]:
    """The command line of a run of sixteen steps that one, two or four ranks can share."""
    run = SMALL | {
        "run.dir": str(folder),
        "data.source": "text",
        "data.path": str(Path(__file__).parent / "*.py"),
        "train.schedule": "constant",  # so that a shorter run equals the start of a longer one
        "train.lr": 0.003,
        "train.tokens_per_step": 512,
        "train.steps": 16,
        "train.precision": "fp32",
        "train.compile": "off",
        "log.every": 1,
        "checkpoint.every": 2,
    }
    if backend == "nccl":
        run |= {key.replace("__", "."): value for key, value in GPU_SIZES.items()} | {"train.tokens_per_step": 4096}
    return ["--preset", "tiny", *flags(run | {key.replace("__", "."): value for key, value in changes.items()})]


# steps up to which these ranks train, and how they save: ranks, strategy, asynchronously
LEGS = {
    4: (2, "fsdp", True),
    8: (4, "hsdp", False),
    10: (2, "ddp", True),
    12: (1, "single", True),
    16: (2, "fsdp", False),
}


@over()
def test_a_run_continues_on_any_number_of_ranks_and_from_nccl_to_gloo(
    rank_server: ForkServer, tmp_path: Path, backend: str, rows: Rows
):
    def run(folder: Path, ranks: int, on: str, *more: str, **changes: Any) -> None:
        few = {"parallel__share_gpus": ranks > GPUS} if on == "nccl" and ranks > 1 else {}
        device = {"run__device": "cuda" if on == "nccl" else "cpu"}
        words = [*settings(backend, folder, **few, **device, **changes), *more]
        words += ["--parallel.allow_single_rank"] if ranks == 1 else []
        with RankedRun(rank_server, tmp_path / "out", ranks, *words) as started:
            assert started.wait(300) == 0, started.text

    alone, folder = tmp_path / "alone", tmp_path / "run"
    run(alone, 1, backend)
    for steps, (ranks, strategy, asynchronous) in LEGS.items():
        sharded = {"parallel__shard_ranks": 2} if strategy == "hsdp" else {}
        on = "gloo" if steps == 16 else backend  # the last leg is on CPUs
        more = {"parallel__strategy": strategy, "train__steps": steps, "checkpoint__async_save": asynchronous}
        run(folder, ranks, on, *(["--resume", "auto"] if steps > 4 else []), **more, **sharded)
        assert step_of(complete_checkpoints(folder / "checkpoints")[-1]) == steps
        got, expected = losses(folder), losses(alone)
        assert len(got) == steps
        apart = max(abs(float(got[s]) - float(expected[s])) / float(expected[s]) for s in got)
        saved = "async" if asynchronous else "sync"
        rows.add(case=f"to step {steps} with {strategy}, {saved} saves", on=on, ranks=ranks, relative=apart, limit=1e-4)
        assert apart < 1e-4


# Large enough that a bucket of gradients takes as long as the backward pass of a block
LARGE = {
    "model.dim": 1024, "model.layers": 6, "model.heads": 8, "model.kv_heads": 2, "model.head_dim": 128,
    "model.ffn_dim": 4096, "model.attention": "dense", "run.device": "cuda", "train.compile": "off",
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["nccl"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_communicated_during_the_backward_pass(rank_server: ForkServer, strategy: str, rows: Rows):
    parallel = {"parallel.strategy": strategy, "parallel.world_size": 2, "parallel.share_gpus": GPUS < 2}
    cell = {"preset": "tiny", "flags": LARGE | parallel, "strategy": strategy, "ranks": 2, "steps": 3}
    words = json.dumps(cell | {"batch": 4, "length": 2048})
    ranks = start_ranks(rank_server, 2, "tercet.bench.scaling:rank_main", words)
    assert wait_for_all(ranks, 200) == 0, "".join(rank.output for rank in ranks)
    result = json.loads(next(line for line in ranks[0].output.splitlines() if line.startswith("{")))
    share = 1 - result["exposed_ms"] / result["nccl_ms"]
    rows.add(case=f"{strategy}: share of NCCL's time beside other kernels", on="nccl", ranks=2, overlap=share)
    assert share > 0.2, result

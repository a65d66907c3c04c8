"""Launches that are refused before anything is allocated, each with the command to use instead."""

from __future__ import annotations

import re

import pytest
import torch

from parallel.world import start_ranks
from tercet.config.load import load
from tercet.config.sections import ParallelConfig
from tercet.hints import program
from tercet.parallel.launch import Launch, LaunchError, backend_of, check_launch, disagreement
from tercet.train import hooks

ALONE = Launch()


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.argv", ["tercet", "train", "--preset", "m7c"])


@pytest.mark.parametrize(
    ("parallel", "gpus", "problem", "asked"),
    [
        ({}, 2, "2 GPUs but one process was started: 1 would be idle", "2 -m {} --parallel.strategy ddp"),
        ({"strategy": "fsdp", "world_size": 4}, 4, r"parallel\.world_size=4, but 1 rank was launched", "4 -m {}"),
        # no --parallel.strategy: the preset or the file sets it already
        *(
            ({"strategy": strategy}, gpus, f"strategy={strategy} needs torchrun", f"{ranks} -m {{}}")
            for strategy in ("ddp", "fsdp", "hsdp", "cp")
            for gpus, ranks in ((0, "N"), (1, "N"), (4, "4"))
        ),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_with_the_torchrun_command(parallel, gpus, problem, asked):
    with pytest.raises(LaunchError, match=problem) as error:
        check_launch(ParallelConfig(**parallel), ALONE, "cuda" if gpus else "cpu", gpus)
    line = f"{program('torchrun')} --standalone --nproc-per-node={asked.format('tercet train --preset m7c')}"
    assert line in str(error.value).splitlines()[1]
    assert ("--parallel.allow_single_rank" in str(error.value)) == (not parallel)


def test_one_process_is_allowed_on_request_warned_about_in_ci_and_fine_on_a_cpu(monkeypatch):
    assert check_launch(ParallelConfig(allow_single_rank=True), ALONE, "cuda", 8) == []
    assert check_launch(ParallelConfig(), ALONE, "cuda", 1) == []
    assert check_launch(ParallelConfig(), ALONE, "cpu", 0) == []
    monkeypatch.setenv("CI", "1")
    assert "7 would be idle" in check_launch(ParallelConfig(), ALONE, "cuda", 8)[0]


def test_ranks_share_a_gpu_only_on_request_and_with_a_warning(monkeypatch):
    launch = Launch(0, 0, 2, 2, by_torchrun=True)
    with pytest.raises(LaunchError, match="2 ranks on a machine with 1 GPU: each rank needs its own GPU; start 1, or"):
        check_launch(ParallelConfig(strategy="ddp", world_size=2), launch, "cuda", 1)
    shared = ParallelConfig(strategy="ddp", world_size=2, share_gpus=True)
    (warning,) = check_launch(shared, launch, "cuda", 1)
    assert warning.startswith("2 ranks on a machine with 1 GPU share GPUs (parallel.share_gpus)")
    assert backend_of(shared, "cuda") == "gloo"
    with pytest.raises(LaunchError, match="every rank has its own GPU"):
        check_launch(shared, launch, "cuda", 2)
    monkeypatch.setattr("tercet.parallel.launch.nccl_version", lambda: (2, 30, 1))
    assert "over NCCL 2.30.1" in check_launch(shared, launch, "cuda", 1)[0]
    assert backend_of(shared, "cuda") == "nccl"


def test_several_gpus_need_a_torch_with_nccl(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(LaunchError, match=r"communicate over NCCL, and torch .* was built without it"):
        check_launch(ParallelConfig(strategy="ddp", world_size=2), Launch(0, 0, 2, 2, by_torchrun=True), "cuda", 2)


def test_launch_warnings_are_printed_once_per_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hooks, "check_launch", lambda *_: ["a problem of this machine"])
    config = load("tiny", flags={"run.dir": str(tmp_path / "run")}).config
    for process, count in ((Launch(rank=2, local_rank=0), 1), (Launch(rank=3, local_rank=1), 0)):
        hooks.join_run(config, None, process, torch.device("cpu"))
        assert capsys.readouterr().err.count("warning: a problem of this machine") == count


def test_ranks_with_different_versions_or_world_sizes_are_named_with_both_values():
    def member(**changes):
        return {"world_size": 2, "host": "a", "versions": {"torch": "2.13.0"}, "config": {"train.lr": 1.0}} | changes

    assert disagreement({0: member(), 1: member()}) is None
    other = disagreement({0: member(), 1: member(host="b", versions={"torch": "2.11.0"})})
    assert other == "rank 1 on b has torch 2.11.0 and rank 0 on a 2.13.0: install the same version everywhere"
    assert disagreement({0: member(), 1: member(world_size=4)}) == "rank 1 was started with 4 ranks and rank 0 with 2"
    device = disagreement({0: member(versions={"device": "H100"}), 1: member(versions={"device": "A100"})})
    assert device == "rank 1 on a has device A100 and rank 0 on a H100: use equal devices everywhere"
    same = disagreement({rank: member(gpu="GPU-1", device="cuda:0") for rank in range(2)})
    assert same is not None
    assert "ranks 0 and 1 on a use the same GPU, cuda:0" in same
    missing = disagreement({0: member(), 1: member(config={})})
    assert missing is not None
    assert "train.lr is None there, 1.0 on rank 0" in missing


def test_the_doctor_measures_the_ranks(fork_server, tmp_path):
    ranks = start_ranks(fork_server, 2, "tercet.cli:main", "doctor", "--distributed", "--folder", str(tmp_path))
    assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].output + ranks[1].output
    assert "2 ranks on 1 hosts (cpu)" in ranks[0].output
    assert len(re.findall(r"all-reduce of \d+ KiB: \S+ ms, \d+\.\d+ GB/s", ranks[0].output)) == 3
    assert f"all ranks see {tmp_path}" in ranks[0].output
    assert list(tmp_path.iterdir()) == []

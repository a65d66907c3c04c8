"""Launches that are refused before anything is allocated, each with the command to use instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dist.world import torchrun
from tercet.config.load import load
from tercet.config.sections import ParallelConfig
from tercet.parallel import launch
from tercet.parallel.launch import Launch, LaunchError, backend_of, check_launch, disagreement
from tercet.train import ranks
from tercet.typed import typed

ALONE = Launch()


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("sys.argv", ["tercet", "train", "--preset", "m7c"])


def test_one_process_on_a_machine_with_several_gpus_is_refused_with_the_line_to_use():
    with pytest.raises(
        LaunchError, match="this machine has 2 GPUs and one process was started: 1 would stand idle"
    ) as told:
        check_launch(ParallelConfig(), ALONE, "cuda", 2)
    line = "torchrun --standalone --nproc-per-node=2 -m tercet train --preset m7c --parallel.strategy ddp"
    assert line in str(told.value)
    assert "--allow-single-rank" in str(told.value)


def test_it_is_allowed_when_meant_and_a_warning_in_ci_and_no_matter_on_a_cpu(monkeypatch):
    assert check_launch(ParallelConfig(allow_single_rank=True), ALONE, "cuda", 8) == []
    assert check_launch(ParallelConfig(), ALONE, "cuda", 1) == []
    assert check_launch(ParallelConfig(), ALONE, "cpu", 0) == []
    monkeypatch.setenv("CI", "1")
    assert "7 would stand idle" in check_launch(ParallelConfig(), ALONE, "cuda", 8)[0]


def test_several_ranks_without_torchrun_are_refused_with_the_line_to_use():
    with pytest.raises(LaunchError, match=r"parallel\.world_size=4, but 1 rank was launched") as told:
        check_launch(ParallelConfig(strategy="fsdp", world_size=4), ALONE, "cuda", 4)
    assert "torchrun --standalone --nproc-per-node=4 -m tercet train" in str(told.value)


def test_where_no_gpus_are_counted_the_line_starts_all_ranks_on_one_machine():
    with pytest.raises(LaunchError) as told:
        check_launch(ParallelConfig(strategy="ddp", world_size=2), ALONE, "cpu", 0)
    assert "torchrun --standalone --nproc-per-node=2 -m tercet train" in str(told.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "cp"])
@pytest.mark.parametrize(("gpus", "ranks"), [(0, "N"), (1, "N"), (4, "4")])
def test_a_strategy_of_ranks_in_one_process_is_refused_with_the_line_to_use(strategy, gpus, ranks):
    with pytest.raises(LaunchError, match=f"strategy={strategy} needs torchrun") as told:
        check_launch(ParallelConfig(strategy=strategy), ALONE, "cuda" if gpus else "cpu", gpus)
    # the preset or the file says the strategy already
    line = f"{typed('torchrun')} --standalone --nproc-per-node={ranks} -m tercet train --preset m7c"
    assert str(told.value).endswith(f"\n  {line}")


def test_ranks_share_a_gpu_only_when_told_to_and_say_so():
    launch = Launch(0, 0, 2, 2, by_torchrun=True)
    for transport in ("auto", "gloo"):
        with pytest.raises(LaunchError, match="2 ranks on a machine with 1 GPU: each needs its own; start 1, or"):
            check_launch(ParallelConfig(strategy="ddp", world_size=2, backend=transport), launch, "cuda", 1)
    shared = ParallelConfig(strategy="ddp", world_size=2, share_gpus=True)
    (said,) = check_launch(shared, launch, "cuda", 1)
    assert said.startswith("2 ranks on a machine with 1 GPU share it (parallel.share_gpus): what they exchange goes")
    assert backend_of(shared, "cuda") == "gloo"
    with pytest.raises(LaunchError, match="nothing is to be shared, drop it"):
        check_launch(shared, launch, "cuda", 2)
    with pytest.raises(ValueError, match="NCCL needs a GPU for each rank"):
        ParallelConfig(strategy="ddp", world_size=2, share_gpus=True, backend="nccl")


def test_what_a_launch_warns_of_is_said_once_on_each_machine(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "check_launch", lambda *_: ["a sentence about this machine"])
    config = load("tiny", flags={"run.dir": str(tmp_path / "run")}).config
    for process, said in ((Launch(rank=2, local_rank=0), 1), (Launch(rank=3, local_rank=1), 0)):
        ranks.enter(config, None, process, torch.device("cpu"))
        assert capsys.readouterr().err.count("warning: a sentence about this machine") == said


def test_ranks_of_other_versions_or_worlds_are_named_with_both_values():
    def member(**changes):
        return {"world_size": 2, "host": "a", "versions": {"torch": "2.13.0"}, "config": {"train.lr": 1.0}} | changes

    assert disagreement({0: member(), 1: member()}) is None
    other = disagreement({0: member(), 1: member(host="b", versions={"torch": "2.11.0"})})
    assert other == "rank 1 on b has torch 2.11.0 and rank 0 on a 2.13.0: install the same everywhere"
    assert disagreement({0: member(), 1: member(world_size=4)}) == "rank 1 was told of 4 ranks and rank 0 of 2"
    missing = disagreement({0: member(), 1: member(config={})})
    assert missing is not None
    assert "train.lr is None there, 1.0 on rank 0" in missing


def test_a_verdict_of_an_older_rank_0_keeps_its_words(monkeypatch):
    older = {"error": "rank 1 on b has tercet 0.2.0 and rank 0 on a 0.1.0", "folder": None, "members": [], "call": "x"}
    monkeypatch.setattr(launch, "_store", lambda *_: None)
    monkeypatch.setattr(launch, "_answer_call", lambda *_: older)
    with pytest.raises(LaunchError, match=r"has tercet 0\.2\.0 and rank 0 on a 0\.1\.0$"):
        launch.join(Launch(rank=1, world_size=2), ParallelConfig(), torch.device("cpu"), {}, lambda _: Path())


def test_the_doctor_measures_the_ranks_of_torchrun(tmp_path):
    done = torchrun(2, "-m", "tercet", "doctor", "--distributed", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["ranks"], found["cannot_see_folder"]) == (2, [])
    assert 0 <= found["clock_seconds"] < 1
    assert all(one["bus_bytes_per_s"] > 0 for one in found["all_reduce"])
    assert list(tmp_path.iterdir()) == []

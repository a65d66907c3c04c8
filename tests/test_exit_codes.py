"""What a script learns from the exit code: that a command failed, or that it can only be refused again."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runs import small
from tercet import cli
from tercet.data.stream import DataUsageError
from tercet.errors import EXIT_FAILURE, EXIT_USAGE, TercetError, UsageError
from tercet.parallel.failure import PeerFailed
from tercet.parallel.launch import WrongLaunch
from tercet.train.hooks import rank_context
from tercet.train.resume import find_start
from tercet.train.run_folder import RunFolder


@pytest.fixture(autouse=True)
def a_folder_to_stand_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.txt").write_text("a few words\n" * 200)
    Path("full").mkdir()
    Path("full/file").write_text("")
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/events_rank0.jsonl").write_text("told\n")
    Path("hf-model").mkdir()
    Path("hf-model/config.json").write_text("{}")


WRONG = """
config shwo  unknown command config shwo: did you mean show?
plan --config nowhere.toml                                                config file nowhere.toml cannot be read
train --preset tiny --data.source text --data.path nowhere --run.dir new  nowhere matches no file
train --preset tiny --data.source shards --data.path empty --run.dir new  empty has no manifest.json
train --preset tiny --data.tokenizer ./no.json --run.dir new              tokenizer=./no.json: no.json does not exist
train --preset tiny --run.dir run                                         run already holds a run
train --preset tiny --run.dir text.txt/new  cannot be written (Not a directory): pick another --run.dir
train --preset tiny --resume nowhere --run.dir deep/er/new                nowhere is neither a checkpoint folder
train --preset tiny --train.init_from hf-model --run.dir new              import hf hf-model OUT`
train --preset tiny --resume ""                                           --resume '' is not a folder: give auto
train --preset tiny --run.device cpu --train.cuda_graph on --run.dir new  train.cuda_graph=on on a cpu
report empty                                                              empty has no events
watch empty --every 0                                                     every=0 must be a positive number
doctor --distributed                                                      --nproc-per-node=N -m tercet doctor
generate empty --prompt x                                                 empty has no checkpoint
data prepare --out full --data.source text --data.path text.txt           out=full contains file, but no prepare.json
data train-tokenizer --out t --data.source text --data.path text.txt      vocab_size=8192 is too large
data inspect --data.source text --data.path text.txt --sequences 0        sequences=0 is below 1
eval ruler empty                                                          empty has no checkpoint
export hf empty full                                                      full exists and is not empty
import hf empty out                                                       empty/config.json is missing
sweep --preset tiny                                                       --lrs is empty
bench train --preset tiny --settings train.cuda_graph=on                  use --cuda-graph
bench decode --steps 0                                                    steps=0 must be at least 1
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines(), ids=lambda line: re.split(" {2,}", line)[0])
def test_what_would_be_refused_again_is_exit_code_2(capsys, line):
    command, said = re.split(" {2,}", line)
    if command.split()[1:2] == ["hf"]:
        pytest.importorskip("transformers")
    before = sorted(Path().rglob("*"))
    code = cli.main(shlex.split(command))
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (EXIT_USAGE, 1)
    assert err.startswith("error: ")
    assert said in err
    assert sorted(Path().rglob("*")) == before  # what was refused leaves nothing behind


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("data inspect --data.source shards --data.path damaged --verify", "the file is damaged"),
        ("bench attention", "needs a CUDA device"),
        ("train --preset tiny --run.device cuda --run.dir new", "torch sees no CUDA device"),
    ],
)
def test_what_went_wrong_on_the_way_is_exit_code_1(capsys, monkeypatch, command, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if "damaged" in command:
        prepared = "data prepare --out damaged --data.source text --data.path text.txt"
        assert cli.main(prepared.split()) == 0
        shard = next(Path("damaged").glob("*.tokens.npy"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    code = cli.main(command.split())
    assert code == EXIT_FAILURE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("path", "said"), [("empty", "empty has no text files"), ("none.txt", "no document has any")])
def test_data_without_a_document_has_its_own_exit_code(capsys, path, said):
    Path("none.txt").write_text("")
    assert (
        cli.main(["train", "--preset", "tiny", "--data.source", "text", "--data.path", path, "--run.dir", "new"]) == 65
    )
    assert said in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_wrong_launch_is_wrong_use_although_other_launch_errors_are_failures(capsys):
    code = cli.main(["train", "--preset", "tiny", "--parallel.strategy", "ddp", "--run.dir", "new"])
    assert code == EXIT_USAGE
    assert "needs torchrun" in capsys.readouterr().err
    assert (WrongLaunch.exit_code, DataUsageError.exit_code) == (EXIT_USAGE, EXIT_USAGE)
    assert not Path("new").exists()


def test_a_full_disk_is_reported_before_a_run_folder_is_created(capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=2**20, used=2**20, free=5))
    code = cli.main(["train", "--preset", "tiny", "--run.device", "cpu", "--run.dir", "new"])
    assert code == EXIT_FAILURE
    assert "doctor: disk: 0.0 MiB free in new" in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_kernels_without_a_gpu_are_wrong_use(capsys):
    flags = "--model.backend triton --data.source text --data.path text.txt --data.separator s --train.val_tokens 0"
    code = cli.main(["train", "--preset", "tiny", *flags.split(), "--data.shuffle_sequences", "0", "--run.dir", "new"])
    assert code == EXIT_USAGE
    assert 'error: backend="triton" cannot run here: ' in capsys.readouterr().err


def test_an_event_log_that_a_rank_cannot_write_is_reported_first():
    Path("split/events_rank1.jsonl").mkdir(parents=True)
    two = small(parallel__strategy="ddp", parallel__world_size=2, train__micro_batch=1)
    with (
        closing(RunFolder(Path("split"))) as folder,
        pytest.raises(UsageError, match=r"events_rank1\.jsonl is not a file"),
    ):
        find_start(two, None, folder)
    assert [str(p) for p in Path("split").rglob("*")] == ["split/events_rank1.jsonl"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("refused"), EXIT_USAGE, "error: refused\n"),
        (TercetError("failed"), EXIT_FAILURE, "error: failed\n"),
        (PeerFailed("rank 1 is gone", reported_elsewhere=True), EXIT_FAILURE, ""),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt\n"),
        (ValueError("a bug"), EXIT_FAILURE, "ValueError: a bug\n"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_ends_with_the_code_that_one_process_would(monkeypatch, capsys, error, code, said, rank):
    left = []
    monkeypatch.setattr("os._exit", left.append)
    ranks = SimpleNamespace(world_size=2, rank=rank, explain=lambda e: e, close=lambda: None)
    with rank_context(ranks):
        raise error
    assert left == [code]
    err = capsys.readouterr().err
    assert err.endswith(said) if said else err == ""

"""The warning about lengths beyond training ends with a valid command that trains at that length."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from runs import small
from tercet.cli import main
from tercet.config.load import load, write_config
from tercet.inference.arguments import extend_context_command


@pytest.fixture(autouse=True)
def a_folder_to_stand_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tercet.hints.program", lambda name="tercet": name)


def kept(folder: str, **changes: object) -> Path:
    """A run folder without its weights: batches of 2 sequences of 64 tokens, unless changed."""
    Path(folder).mkdir(parents=True)
    write_config(small(run__dir=folder, **changes), {}, Path(folder))
    return Path(folder)


def test_the_command_in_the_warning_runs(capsys):
    kept("asked", train__steps=1)
    assert main(["train", "--config", "asked/config.toml", "--run.dir", "a run"]) == 0
    assert main(["eval", "perplexity", "a run", "--sequences", "1", "--seq-len", "96"]) == 0
    out, err = capsys.readouterr()
    warning = next(line for line in err.splitlines() if line.startswith("warning: --seq-len 96"))
    assert warning == f"warning: {json.loads(out.splitlines()[-1])['warning']}"

    tercet, *arguments = shlex.split(warning.partition("train it at this length: ")[2])
    assert tercet == "tercet"
    assert main(arguments) == 0
    now = load(file="NEW/config.toml").config
    assert (now.data.seq_len, now.train.micro_batch, now.train.tokens_per_step) == (96, 1, 192)
    assert now.train.init_from == str(Path("a run").resolve())


@pytest.mark.parametrize(
    ("length", "changes", "sizes"),
    [
        (96, {}, (1, 192)),
        (512, {}, (1, 512)),
        (128, {"train__micro_batch": 4, "train__tokens_per_step": 768}, (2, 768)),
        (128, {"train__micro_batch": 7, "train__tokens_per_step": 64 * 14}, (3, 384 * 3)),
    ],
)
def test_batches_keep_about_their_size(length, changes, sizes):
    file = kept("run", **changes) / "config.toml"
    words = shlex.split(extend_context_command(Path("run"), length))
    given = dict(zip([flag[2:] for flag in words[2::2]], words[3::2], strict=True))
    train = load(file=file, flags={k: v for k, v in given.items() if k != "config"}).config.train
    assert (train.micro_batch, train.tokens_per_step) == sizes
    assert given["train.init_from"] == "run"


def test_a_run_with_stages_continues_like_its_last_one():
    kept("run", train__stages="32:4,64:3:rope_theta=50000:tokens_per_step=256", train__steps=7)
    words = shlex.split(extend_context_command(Path("run"), 128))
    given = dict(zip([flag[2:] for flag in words[2::2]], words[3::2], strict=True))
    assert (given["train.stages"], given["train.steps"], float(given["model.rope_theta"])) == ("none", "3", 50000)
    assert given["train.tokens_per_step"] == "256"


def test_a_checkpoint_uses_its_run_config_and_a_weights_folder_its_own():
    checkpoint = kept("run") / "checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    said = shlex.split(extend_context_command(checkpoint, 128))
    assert said[:4] == ["tercet", "train", "--config", str(Path("run/config.toml").resolve())]
    assert said[said.index("--train.init_from") + 1] == str(checkpoint)

    (kept("imported") / "model.safetensors").touch()
    said = shlex.split(extend_context_command(Path("imported"), 128))
    assert said[said.index("--train.init_from") + 1] == "imported/model.safetensors"


def test_without_a_valid_command_the_keys_are_listed():
    Path("copied/step-00000003").mkdir(parents=True)
    said = "train with its configuration, train.init_from=copied/step-00000003, data.seq_len=128, and a"
    assert extend_context_command(Path("copied/step-00000003"), 128).startswith(said)
    kept("run", parallel__strategy="cp", parallel__world_size=2)
    assert extend_context_command(Path("run"), 127).startswith(
        "train with its configuration, train.init_from=run, data.seq_len=127"
    )

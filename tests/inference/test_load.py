"""Loading a model from a run, a checkpoint or a folder of weights; everything else is a one-line error."""

from __future__ import annotations

import json
import re

import pytest
import torch

import tercet
from inference.models import trained
from tercet.cli import main
from tercet.errors import TercetError
from tercet.inference import load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run") / "run", train__steps=4)


def test_a_run_gives_its_newest_checkpoint(run):
    model = tercet.load_model(run)
    assert model.step == 4
    assert model.context == 64
    assert not model.training
    assert model.tokenizer.decode([97]) == "a"


def test_a_checkpoint_gives_itself(run):
    early, late = (tercet.load_model(run / "checkpoints" / f"step-0000000{n}") for n in (2, 4))
    assert (early.step, late.step) == (2, 4)
    assert not torch.equal(early.embedding.weight, late.embedding.weight)
    newest = tercet.load_model(run / "checkpoints")
    assert torch.equal(newest.embedding.weight, late.embedding.weight)


def test_a_missing_gpu_names_the_flag(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TercetError, match=r"^--device cuda, but torch sees no CUDA device: use --device cpu"):
        tercet.load_model(run, device="cuda")


@pytest.mark.parametrize(
    ("precision", "device", "loaded"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("bf16", "cuda", torch.bfloat16),
        ("fp32", "cuda", torch.float32),
        ("auto", "cpu", torch.float32),
    ],
)
def test_auto_dtype_follows_the_training_precision(run, precision, device, loaded):
    config = tercet.load_model(run).run
    config = config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})
    assert load._pick_dtype("auto", config, torch.device(device)) == loaded


def test_a_damaged_checkpoint_is_skipped_in_a_run_and_refused_by_name(tmp_path):
    run = trained(tmp_path / "run", train__steps=4)
    shard = next((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert tercet.load_model(run).step == 2
    with pytest.raises(TercetError, match="does not match its SHA-256"):
        tercet.load_model(run / "checkpoints" / "step-00000004")


def test_a_folder_without_a_model_raises_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "checkpoints" / ".writing-step-00000002").mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    for name, said in {
        "nowhere": "does not exist",
        "empty": "has no checkpoint",
        "half": "is unfinished",
        "theirs": "tercet import hf",
    }.items():
        with pytest.raises(TercetError) as caught:
            tercet.load_model(tmp_path / name)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_command_writes_what_the_function_writes(run, capsys):
    assert main(["generate", str(run), "--prompt", "abc", "--max-new-tokens", "9", "--temperature", "0"]) == 0
    said = capsys.readouterr()
    model = tercet.load_model(run)
    made = tercet.generate(model, "abc", max_new_tokens=9, temperature=0)
    assert said.out == f"abc{made.text}\n"
    assert re.search(rf"tokens/s .* checkpoint of step {model.step}\b", said.err)  # the run may still be training


def test_a_batch_and_json_on_the_command_line(run, capsys):
    flags = ["--max-new-tokens", "5", "--temperature", "0", "--json", "--stop", "zz"]
    assert main(["generate", str(run), "--prompt", "abc", "--prompt", "defghi", *flags]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["prompt"] for a in answers] == ["abc", "defghi"]
    assert [bytes(a["prompt_tokens"]) for a in answers] == [b"abc", b"defghi"]
    assert all(len(a["tokens"]) == 5 for a in answers)


def test_a_selection_map_ends_with_one_line_of_json(run, tmp_path, capsys):
    assert main(["eval", "selection-map", str(run), str(tmp_path / "m.html"), "--prompt", "x" * 60]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["blocks"].keys() == {"layer_0", "layer_1"}

"""A run holds its tokenizer: it can be moved, and its original may be overwritten or deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

import tercet
from runs import SMALL, losses
from tercet.cli import main
from tercet.config.data import DataConfig
from tercet.config.load import load, write_config
from tercet.data.prepare import train_bpe
from tercet.data.stream import DataUsageError
from tercet.train.manifest import CheckpointError, complete_checkpoints

TEXT = "sparse attention reads few blocks"
FLAGS = [f"--{k}={str(v).lower()}" for k, v in SMALL.items() if k not in ("model.vocab_size", "data.source")]
RELATIVE = ["--data.source", "text", "--data.path", "corpus", "--data.tokenizer", "tokenizer.json"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A corpus, a tokenizer of 300 tokens, and a run that was started here with relative paths."""
    place = tmp_path_factory.mktemp("place")
    (place / "corpus").mkdir()
    for i in range(100):
        (place / "corpus" / f"{i}.txt").write_text(f"{i}: {TEXT} and says which of them matter {i * i}")
    train_bpe(DataConfig(source="text", path=str(place / "corpus")), place / "tokenizer.json", vocab_size=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "--preset", "tiny", *FLAGS, *RELATIVE, "--run.dir", "run"]) == 0
    return place


@pytest.fixture
def moved(place, tmp_path, monkeypatch) -> Path:
    """The run, moved; the original tokenizer is overwritten with another one during the test."""
    shutil.copytree(place / "run", tmp_path / "moved", symlinks=True)
    original = (place / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(original.replace('"a"', '"<"', 1))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "moved"
    (place / "tokenizer.json").write_text(original)


def test_the_vocabulary_size_is_the_tokenizers_unless_the_user_sets_one(place):
    assert tercet.load_model(place / "run").config.vocab_size == 320  # 300, rounded up to 64
    assert load(file=place / "run" / "config.toml").config.model.vocab_size == 320


@pytest.mark.parametrize("which", ["", "checkpoints/step-00000002"])
def test_a_moved_run_reads_its_own_tokenizer(place, moved, which):
    original = tercet.load_model(place / "run").tokenizer
    copy = tercet.load_model(moved / which).tokenizer
    assert copy.decode(copy.encode(TEXT)) == TEXT
    assert copy.fingerprint == original.fingerprint


@pytest.mark.parametrize("repeated", [False, True], ids=["resume alone", "all flags repeated"])
def test_it_generates_and_resumes_from_another_folder(place, moved, repeated, monkeypatch):
    command = ["train", "--resume", "auto", "--run.dir", str(moved), "--train.steps", "7"]
    if repeated:  # as in a start script
        monkeypatch.chdir(place)
        (place / "tokenizer.json").unlink()
        command = ["train", "--preset", "tiny", *FLAGS, *RELATIVE, *command[1:]]
    before = json.loads((moved / "origins.json").read_text())
    assert {before["train.lr"], before["data.path"], before["model.vocab_size"]} == {"preset tiny", "flag", "tokenizer"}
    assert main(["generate", str(moved), "--prompt", TEXT, "--max_new_tokens", "2"]) == 0
    assert main(command) == 0
    assert sorted(losses(moved)) == list(range(1, 8))
    assert json.loads((moved / "origins.json").read_text()) == before


def test_a_changed_copy_is_refused(moved):
    newest = complete_checkpoints(moved / "checkpoints")[-1]
    (newest / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json .*changed"):
        _ = tercet.load_model(newest, verify=False).tokenizer


def test_a_run_without_a_copy_reads_the_original(place, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(place / "run" / "checkpoints" / "step-00000002", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["tokenizer.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tokenizer.json").unlink()
    assert tercet.load_model(folder).tokenizer.name == str(place / "tokenizer.json")


def test_a_moved_folder_of_weights_reads_its_own_tokenizer(place, tmp_path):
    """As `tercet import hf` writes it."""
    model = tercet.load_model(place / "run")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    write_config(load(file=place / "run" / "config.toml", flags={"data.tokenizer": "/gone.json"}).config, {}, tmp_path)
    shutil.copy(place / "tokenizer.json", tmp_path)
    assert tercet.load_model(tmp_path).tokenizer.fingerprint == model.tokenizer.fingerprint


def test_weights_of_another_tokenizer_are_refused_unless_on_purpose(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = load(file=place / "run" / "config.toml").config
    (tmp_path / "a.txt").write_text("quite other words, jumping over lazy foxes " * 50)
    train_bpe(DataConfig(source="text", path=str(tmp_path)), tmp_path / "other.json", vocab_size=280)
    (tmp_path / "in").mkdir()
    save_file(tercet.load_model(place / "run").state_dict(), tmp_path / "in" / "model.safetensors")
    write_config(own, {}, tmp_path / "in")
    shutil.copy(place / "run" / "tokenizer.json", tmp_path / "in")

    def start(tokenizer, source, *more):
        words = ["--config", place / "run" / "config.toml", "--data.tokenizer", tokenizer, "--train.init_from", source]
        result = main(["train", *map(str, words), "--train.steps", "1", "--run.dir", "new", *more])
        shutil.rmtree("new", ignore_errors=True)
        return result, "".join(capsys.readouterr())

    for source in (place / "run", tmp_path / "in" / "model.safetensors"):
        code, said = start("other.json", source)
        assert code == 2
        assert f"trained with the tokenizer {place}/tokenizer.json, and data.tokenizer={tmp_path}/other.json" in said
        assert "--checkpoint.allow_config_change" in said
        assert start("byte", source)[0] == 2
    assert start(place / "run" / "tokenizer.json", source)[0] == 0  # another copy
    assert start("other.json", place / "run", "--checkpoint.allow_config_change")[0] == 0
    (tmp_path / "in" / "config.toml").unlink()
    code, said = start("other.json", source)
    assert (code, "its tokenizer was not compared" in said) == (0, True)


def test_a_tokenizer_is_not_overwritten_without_force(place, tmp_path):
    data, out = DataConfig(source="text", path=str(place / "corpus")), tmp_path / "tokenizer.json"
    out.write_text("mine")
    with pytest.raises(DataUsageError, match=r"tokenizer.json exists: .*--force"):
        train_bpe(data, out, vocab_size=290)
    assert out.read_text() == "mine"
    train_bpe(data, out, vocab_size=290, force=True)
    assert out.read_text() != "mine"

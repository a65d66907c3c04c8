"""Runs that validate: what is refused before the first step, and what a failed validation may cost."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runs import losses, small, train_small
from tercet.config.data import DataConfig
from tercet.data.prepare import prepare
from tercet.data.stream import DataError, document_hash
from tercet.data.tokenizers import load_tokenizer
from tercet.errors import UsageError
from tercet.model.transformer import Transformer
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import RunEnded, Validated
from tercet.train import trainer as loop
from tercet.train.manifest import complete_checkpoints
from tercet.train.trainer import train
from tercet.train.validate import Validation, check_validation_data, sample_text

VALIDATES = {"train__val_tokens": 128}


def corpus(path: Path, documents: int, first: str = "") -> Path:
    lines = [json.dumps({"text": f"document {i} " * 20}) for i in range(documents)]
    path.write_text("\n".join([*([first] if first else []), *lines]) + "\n")
    return path


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Three documents, of which none is among the lowest millionth of hashes."""
    return corpus(tmp_path / "few.jsonl", 3)


def sources(few: Path) -> dict[str, dict[str, Any]]:
    made = {"data__validation_fraction": 1e-6}
    part = {"source": "jsonl", "path": [str(few)]}
    return {
        "jsonl": {**made, "data__source": "jsonl", "data__path": (str(few),)},
        "shards": {**made, "data__source": "shards", "data__path": (str(few.parent / "shards"),)},
        "a part": made
        | {"data__source": "mixture", "data__mixture": [{"source": "synthetic"}, {**part, "name": "poems"}]},
        "no fraction": {"data__source": "jsonl", "data__path": (str(few),), "data__validation_fraction": 0.0},
    }


def saved_steps(folder: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in complete_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("jsonl", "jsonl: no document for validation with validation_fraction=1e-06: change that"),
        ("shards", "none of the 3 documents in"),
        ("a part", "poems: no document for validation with validation_fraction=1e-06"),
        ("no fraction", "validation_fraction=0 keeps no document for validation: raise it"),
    ],
)
def test_data_without_a_validation_document_is_refused_before_anything_is_written(
    few: Path, tmp_path: Path, which: str, said: str
) -> None:
    if which == "shards":
        prepare(DataConfig(source="jsonl", path=(str(few),)), few.parent / "shards")
    with pytest.raises(UsageError) as caught:
        train_small(tmp_path / "run", **VALIDATES, **sources(few)[which])
    told = str(caught.value)
    assert told.startswith("train.val_tokens=128, but the data has nothing to validate on: ")
    assert said in told
    assert told.endswith("; turn validation off with --train.val_tokens 0")
    assert "\n" not in told
    assert not (tmp_path / "run").exists()


def test_data_with_only_bad_records_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "bin.txt").write_bytes(b"caf\xe9 and more text of the same file")
    data = {"data__source": "text", "data__path": (str(tmp_path / "bin.txt"),), "data__bad_records": "skip"}
    with pytest.raises(DataError, match=r"text: every record .* as bad \(the first: .*bin.txt: is not UTF-8"):
        train_small(tmp_path / "run", **VALIDATES, **data)
    with pytest.raises(DataError, match=r"1 bad records skipped, .*: is not UTF-8 \([^:]*\)\): there is nothing"):
        prepare(small(**data).data, tmp_path / "shards")


def test_checking_validation_data_reads_few_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, true = 0, document_hash

    def counting(document: bytes) -> int:
        nonlocal read
        read += 1
        return true(document)

    monkeypatch.setattr("tercet.data.sources.document_hash", counting)
    path = corpus(tmp_path / "many.jsonl", 20_000)
    config = small(data__source="jsonl", data__path=(str(path),), **VALIDATES)
    check_validation_data(config, load_tokenizer("byte"))
    assert 0 < read < 1000


def test_an_error_from_a_bad_record_can_be_pickled_for_other_ranks(tmp_path: Path) -> None:
    path = corpus(tmp_path / "bad.jsonl", 3, first="{rubbish")
    config = small(data__source="jsonl", data__path=(str(path),), **VALIDATES)
    with pytest.raises(DataError, match=r"record 1 of .*--data.bad_records skip") as caught:
        check_validation_data(config, load_tokenizer("byte"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def failing(*_: Any) -> tuple[float, int]:
    raise RuntimeError("no memory for a validation")


def test_a_failed_final_validation_loses_no_step_and_is_repeated_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = small(run__dir=str(folder), train__steps=5, checkpoint__every=2, **VALIDATES)
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "loss", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            train(config)
    assert saved_steps(folder)[-1] == 5
    assert train(config, origins={}, resume="auto") == 0
    told = list(read_events(events_file(folder)))
    assert [e.step for e in told if isinstance(e, Validated)] == [5]
    assert isinstance(told[-1], RunEnded)
    assert told[-1].outcome == "completed"


@pytest.mark.parametrize("what", ["validation", "sample"])
def test_a_failure_between_two_steps_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    both = {"train__val_every": 3, "train__sample_every": 3, "train__sample_tokens": 2, **VALIDATES}
    config = {"train__steps": 5, "checkpoint__every": 2, "log__every": 2, **both}
    with monkeypatch.context() as patch:
        if what == "validation":
            patch.setattr(Validation, "loss", failing)
        else:
            patch.setattr(loop, "sample_text", lambda *_, **__: failing())
        with pytest.raises(RuntimeError, match="no memory"):
            train_small(folder, **config)
    assert saved_steps(folder) == [2, 3]
    assert train_small(folder, **config, resume="auto") == 0
    assert train_small(straight, **config) == 0
    assert losses(folder) == losses(straight)


def test_a_failing_save_does_not_hide_a_failed_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> tuple[float, int]:
        shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
        (tmp_path / "run" / "checkpoints").write_text("no folder")
        return failing()

    monkeypatch.setattr(Validation, "loss", full)
    with pytest.raises(RuntimeError, match="no memory for a validation"):
        train_small(tmp_path / "run", train__val_every=3, checkpoint__every=0, **VALIDATES)
    assert "warning: " in capsys.readouterr().out


class Reciting(nn.Module):
    """A model that recites a text, whatever it reads."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.left, self.read = list(text), []

    def forward(self, tokens: torch.Tensor, cache: None) -> torch.Tensor:
        assert not self.training
        self.read.append(bytes(tokens[0].tolist()))
        return F.one_hot(torch.tensor([[self.left.pop(0)]]), 256).float() * 100


@pytest.mark.parametrize(
    ("prompt", "tokens", "text", "read"),
    [
        ("ab", 3, "xyz", [b"ab", b"abx", b"bxy"]),
        ("ab", 9, "xyzw", [b"ab", b"abx", b"bxy", b"xyz", b"yzw"]),  # until end of document
        ("", 2, "xy", [b"\0", b"\0x"]),
    ],
)
def test_a_sample_ends_with_its_document_and_reads_the_last_tokens(
    prompt: str, tokens: int, text: str, read: list[bytes]
) -> None:
    model, tokenizer, cpu = Reciting(b"xyzw\0"), load_tokenizer("byte", ""), torch.device("cpu")
    options = {"temperature": 1.0, "context": 3, "device": cpu, "precision": "fp32", "seed": 0}
    assert sample_text(model, tokenizer, prompt, tokens, **options) == text
    assert model.read == read
    assert model.training


def test_a_cached_sample_equals_an_uncached_one_also_past_its_context() -> None:
    model, tokenizer = Transformer(small().model), load_tokenizer("byte", "")
    options = {"temperature": 1.0, "context": 12, "device": torch.device("cpu"), "precision": "fp32", "seed": 3}
    texts = [sample_text(model, tokenizer, "def ", 20, cached=cached, **options) for cached in (True, False)]
    assert texts[0] == texts[1] != ""

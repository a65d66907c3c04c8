"""Python sources, FineWeb-Edu, mixtures, the data commands and loader speed."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from tercet.config.data import DataConfig
from tercet.data.files import python_files
from tercet.data.loader import build_loader
from tercet.data.stream import BadRecordError, DataError


def test_shards_are_one_folder(shards, read):
    with pytest.raises(DataError, match="2 paths: give one folder"):
        read(DataConfig(source="shards", path=(str(shards), str(shards))), 1)


def test_python_source_is_the_standard_library_by_default():
    stdlib = python_files("stdlib")
    assert any(name.endswith("stdlib/json/decoder.py") for name in stdlib.names)
    excluded = ("site-packages", "_sysconfigdata", "pydoc_data")
    assert not any(part in name for name in stdlib.names for part in excluded)
    both = python_files("site-packages")
    assert set(stdlib.names) < set(both.names)
    assert any(name.startswith("site-packages/numpy/") for name in both.names)


def test_python_source_reads_python_and_skips_nothing(read):
    data = DataConfig(seq_len=4096)
    batches = read(data, 20, sequences=16)
    text = b"".join(bytes(b.tokens.flatten().tolist()) for b in batches)
    assert text.count(b"def ") > 1000
    assert batches[-1].stats.skipped == 0
    validation = read(data, split="validation", sequences=16)
    assert 100_000 < validation[-1].stats.tokens < 3_000_000


def test_a_fineweb_folder_gives_the_texts_of_its_parquet_files(configs, read, documents_of, texts):
    data = configs["fineweb"].model_copy(update={"validation_fraction": 0.0, "exhaustion": "stop"})
    assert sorted(d.decode() for d in documents_of(read(data))) == sorted(texts)


def test_fineweb_bad_rows_and_broken_files_are_named(tmp_path, read):
    pq.write_table(pa.table({"text": ["one", None, "three"]}), tmp_path / "a.parquet")
    data = DataConfig(
        source="fineweb-edu", path=str(tmp_path), seq_len=8, validation_fraction=0, exhaustion="stop", shuffle=False
    )
    with pytest.raises(BadRecordError, match=r"record 2 of .*a.parquet.*: its text is NoneType"):
        read(data)
    assert read(data.model_copy(update={"bad_records": "skip"}))[-1].stats.skipped == 1
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"stream over 1 files .*a.parquet .*failed after record 0"):
        read(data)


def test_hub_files_are_pinned_to_a_commit(monkeypatch):
    import huggingface_hub

    from tercet.data.hub import hub_records

    names = ["README.md", "sample/10BT/001.parquet", "sample/10BT/000.parquet", "data/CC/x.parquet"]

    def info(self, dataset, revision, timeout):
        return SimpleNamespace(sha="abc123", siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    records = hub_records("HuggingFaceFW/fineweb-edu", "sample/10BT", "main", "text", None)
    root = "hf://datasets/HuggingFaceFW/fineweb-edu@abc123/sample/10BT"
    assert records._urls == [f"{root}/000.parquet", f"{root}/001.parquet"]
    assert records.identity()["revision"] == "abc123"
    with pytest.raises(DataError, match=r"hub_folder='sample/1BT': pick one of data/CC, sample/10BT"):
        hub_records("HuggingFaceFW/fineweb-edu", "sample/1BT", "main", "text", None)


def test_a_mixture_keeps_its_token_shares_from_the_start(tmp_path, read):
    for letter, length in (("a", 300), ("b", 7), ("c", 60)):
        lines = [json.dumps({"text": letter * (length + i % 3)}) for i in range(200)]
        (tmp_path / f"{letter}.jsonl").write_text("\n".join(lines) + "\n")
    weights = {"a": 2.0, "b": 1.0, "c": 0.5}
    parts = tuple(
        {"name": name, "source": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
        for name, weight in weights.items()
    )
    data = DataConfig(source="mixture", mixture=parts, seq_len=64, validation_fraction=0)
    tokens = np.concatenate([b.tokens.flatten() for b in read(data, 60)])
    ends = np.flatnonzero(tokens == 0)
    tokens[ends] = tokens[ends - 1]  # an EOS belongs to its document
    for seen in range(500, len(tokens), 500):
        counts = {name: int((tokens[:seen] == ord(name)).sum()) for name in weights}
        for name, weight in weights.items():
            assert abs(counts[name] - seen * weight / 3.5) <= 303, "never off by more than one document"


def test_parts_of_a_mixture_over_the_same_files_have_different_orders(corpus, read, documents_of):
    part = {"source": "jsonl", "path": str(corpus["jsonl"])}
    data = DataConfig(
        source="mixture", mixture=({"name": "a", **part}, {"name": "b", **part}), seq_len=64, validation_fraction=0
    )
    documents = documents_of(read(data, 40))
    assert len(set(documents[:20])) > 12


def test_a_mixture_with_exhaustion_stop_ends_with_its_first_part(configs, read):
    data = configs["mixture"].model_copy(update={"exhaustion": "stop"})
    batches = read(data)
    assert 0 < len(batches) < 1000
    assert batches[-1].stats.padding > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "jsonl"}, "source=jsonl has no path"),
        ({"path": "x"}, "is not used by source=python-source"),
        ({"source": "text", "path": "x", "prompt_field": "q"}, "only jsonl and parquet have fields"),
        ({"source": "jsonl", "path": "x", "separator": "-"}, "only text files are split"),
        ({"source": "mixture"}, "source=mixture has no parts"),
        ({"mixture": ({"source": "synthetic"},)}, "set source=mixture or drop them"),
        ({"source": "mixture", "mixture": ({"source": "synthetic"},) * 2}, "two parts of the mixture are called"),
        ({"source": "mixture", "mixture": ({"source": "mixture"},)}, "source=mixture inside a mixture"),
        ({"source": "synthetic", "retrieval": 0.5}, "retrieval=0.5 is not used by source=synthetic"),
        ({"source": "mixture", "retrieval": 0.5}, "retrieval=0.5 is not used by source=mixture"),
        ({"source": "text", "path": "x", "loss_on": "assistant"}, "only jsonl and parquet have conversations"),
        ({"source": "shards", "path": "x", "special_tokens": True}, "shards keep the special_tokens"),
        ({"source": "jsonl", "path": "x", "loss_on": "assistant", "retrieval": 0.5}, "drop one of them"),
        ({"synthetic": {"queries": 9}}, "queries=9 is more than pairs=8"),
        ({"sorce": "text"}, "sorce"),
    ],
)
def test_contradictory_settings_are_rejected(values, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**values)


def test_the_data_commands_work(corpus, tmp_path, capsys):
    from tercet.data import commands

    data = DataConfig(source="text", path=str(corpus["text"]), seq_len=128)
    assert commands.prepare(data, tmp_path / "shards") == 0
    assert f"--data.source shards --data.path {tmp_path / 'shards'} --data.tokenizer byte" in capsys.readouterr().out
    assert commands.train_tokenizer(data, tmp_path / "t.json", vocab_size=280) == 0
    assert "280 tokens, EOS 0" in capsys.readouterr().out
    shards = DataConfig(source="shards", path=str(tmp_path / "shards"), seq_len=128)
    assert commands.inspect(shards, sequences=2, verify=True) == 0
    shown = capsys.readouterr().out
    assert "all checksums match" in shown
    assert "sequence 1" in shown


def test_one_core_loads_millions_of_tokens_per_second():
    """CPU time, not wall time, so that a busy machine does not matter. Measured: 40M; training on one GPU needs well
    below 1M."""
    with build_loader(DataConfig(seq_len=2048, prefetch=0), seed=0, batch_sequences=16) as loader:
        next(loader)
        begin = time.process_time()
        for _ in range(400):
            next(loader)
        spent = time.process_time() - begin
    assert 400 * 16 * 2048 / spent > 8e6

"""Python sources, FineWeb-Edu, mixtures, the data commands and loader speed."""

from __future__ import annotations

import io
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from tercet.config.data import DataConfig
from tercet.data.loader import build_loader
from tercet.data.paths import python_files
from tercet.data.stream import DataError


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


@pytest.fixture
def hub(monkeypatch, corpus):
    """A hub with the corpus's files as sample/10BT; returns the URLs that are read."""
    import huggingface_hub

    names = ["README.md", *(f"sample/10BT/{n:03d}_00000.parquet" for n in (2, 1, 0)), "data/CC/x.parquet"]
    opened = []

    class FileSystem:
        def open(self, url, mode, block_size):
            opened.append(url)
            return open(corpus["fineweb"] / url.rpartition("/")[2], mode)

    def info(self, dataset, revision, timeout):
        return SimpleNamespace(sha="abc123", siblings=[SimpleNamespace(rfilename=name) for name in names])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", FileSystem)
    return opened


def test_a_dataset_of_the_hub_is_read_at_a_pinned_commit(hub, configs, read, assert_resumes):
    data = configs["fineweb"].model_copy(update={"path": ()})
    batches = assert_resumes(data, 40, every=8)
    assert {batch.state["identity"]["revision"] for batch in batches} == {"abc123"}
    root = "hf://datasets/HuggingFaceFW/fineweb-edu@abc123/sample/10BT"
    assert set(hub) == {f"{root}/{n:03d}_00000.parquet" for n in range(3)}
    local = read(configs["fineweb"], 40, sequences=8)
    assert all(one.tokens.equal(other.tokens) for one, other in zip(batches, local, strict=True))
    with pytest.raises(DataError, match=r"hub_folder='sample/1BT': pick one of data/CC, sample/10BT"):
        read(data.model_copy(update={"hub_folder": "sample/1BT"}), 1)


@pytest.mark.parametrize("error", [ConnectionError("reset by peer"), ValueError("bad answer")])
def test_a_hub_that_stops_answering_is_an_error_and_no_bad_record(error, hub, configs, monkeypatch, corpus, read):
    class Failing(io.FileIO):
        def read(self, size=-1):
            if self.tell() < 2000:
                raise error
            return super().read(size)

    import huggingface_hub

    def fail(self, url, mode, block_size):
        return Failing(corpus["fineweb"] / url.rpartition("/")[2])

    monkeypatch.setattr(huggingface_hub.HfFileSystem, "open", fail)
    data = configs["fineweb"].model_copy(update={"path": (), "bad_records": "skip"})
    with pytest.raises(
        DataError, match=rf"parquet cannot be read \({type(error).__name__}: {error}\): .*--resume auto"
    ):
        read(data)


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

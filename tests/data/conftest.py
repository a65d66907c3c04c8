"""Small corpora with the same documents in every format."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import Batch, build_loader

WORDS = ["sparse", "attention", "reads", "few", "blocks", "of", "a", "long", "text", "and", "says", "which"]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Distinct texts of very different lengths; some longer than any sequence in these tests."""
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) + " é" for i in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(90)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> dict[str, Path]:
    """`texts` as text files, jsonl, jsonl.gz, jsonl.zst, parquet and FineWeb-Edu parquet, in three files each."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    root = tmp_path_factory.mktemp("corpus")
    folders = {name: root / name for name in ("text", "jsonl", "gz", "zst", "parquet", "fineweb")}
    for folder in folders.values():
        folder.mkdir()
    for i, text in enumerate(texts):
        (folders["text"] / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    for part in range(3):
        mine = texts[part::3]
        lines = [(json.dumps({"text": text, "n": part}) + "\n").encode() for text in mine]
        (folders["jsonl"] / f"{part}.jsonl").write_bytes(b"".join(lines))
        with gzip.open(folders["gz"] / f"{part}.jsonl.gz", "wb") as file:
            file.writelines(lines)
        # Two frames in one file, as parallel compressors write: a careless reader stops after the first.
        compress = zstandard.ZstdCompressor().compress
        half = len(lines) // 2
        packed = compress(b"".join(lines[:half])) + compress(b"".join(lines[half:]))
        (folders["zst"] / f"{part}.jsonl.zst").write_bytes(packed)
        pq.write_table(pa.table({"text": mine}), folders["parquet"] / f"{part}.parquet", row_group_size=7)
        fineweb = pa.table({"id": [f"<urn:uuid:{part}>"] * len(mine), "text": mine, "score": [3.1] * len(mine)})
        pq.write_table(fineweb, folders["fineweb"] / f"{part:03d}_00000.parquet", row_group_size=7)
    return folders


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Path:
    from tercet.data.prepare import prepare

    out = tmp_path_factory.mktemp("shards") / "byte"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tercet.data.prepare.CHUNK_BYTES", 600)
        prepare(DataConfig(source="jsonl", path=str(corpus["jsonl"])), out, shard_tokens=4000)
    assert (out / "shard-00003.json").is_file()
    return out


@pytest.fixture(scope="session")
def configs(corpus: dict[str, Path], shards: Path) -> dict[str, DataConfig]:
    """One configuration per kind of source, over the same documents where it has documents."""
    base: dict[str, Any] = {"seq_len": 64, "validation_fraction": 0.1, "shuffle_block": 8, "prefetch": 2}
    recall = {"task": "recall", "length": 200, "pairs": 4, "queries": 2, "min_distance": 80}
    return {
        "text": DataConfig(source="text", path=str(corpus["text"]), **base),
        "jsonl": DataConfig(source="jsonl", path=str(corpus["jsonl"]), **base),
        "gz": DataConfig(source="jsonl", path=str(corpus["gz"]), **base),
        "zst": DataConfig(source="jsonl", path=str(corpus["zst"]), **base),
        "parquet": DataConfig(source="parquet", path=str(corpus["parquet"]), **base),
        "fineweb": DataConfig(source="fineweb-edu", path=str(corpus["fineweb"]), **base),
        "shards": DataConfig(source="shards", path=str(shards), **base),
        "recall": DataConfig(source="synthetic", synthetic=recall, **base),
        "mixture": DataConfig(
            source="mixture",
            mixture=(
                {"source": "jsonl", "path": str(corpus["jsonl"]), "weight": 2.0},
                {"source": "shards", "path": str(shards), "weight": 1.0},
                {"source": "synthetic", "synthetic": recall, "weight": 0.5},
            ),
            **base,
        ),
    }


Read = Callable[..., list[Batch]]


@pytest.fixture(scope="session")
def read() -> Read:
    """The first `count` batches of a loader, or all of them."""

    def read_batches(data: DataConfig, count: int | None = None, *, sequences: int = 4, **kwargs: Any) -> list[Batch]:
        batches: list[Batch] = []
        with build_loader(data, **({"seed": 7, "batch_sequences": sequences} | kwargs)) as loader:
            while count is None or len(batches) < count:
                batch = next(loader, None)
                if batch is None:
                    break
                batches.append(batch)
        return batches

    return read_batches


def same_batch(one: Batch, other: Batch) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.targets, other.targets)
        and np.array_equal(one.cu_seqlens, other.cu_seqlens)
        and one.state == other.state
        and one.stats == other.stats
    )


@pytest.fixture(scope="session")
def same() -> Callable[[Batch, Batch], bool]:
    return same_batch


@pytest.fixture(scope="session")
def assert_resumes(read: Read) -> Callable[..., list[Batch]]:
    """Resuming after any of the batches, or any `every`th, gives those that follow; returns them all."""

    def check(data: DataConfig, count: int, *, sequences: int = 8, every: int = 1) -> list[Batch]:
        straight = read(data, count, sequences=sequences)
        for k in range(0, count - 3, every):
            state = json.loads(json.dumps(straight[k].state))
            resumed = read(data, 3, sequences=sequences, state=state)
            assert all(map(same_batch, straight[k + 1 : k + 4], resumed)), f"after batch {k}"
            assert len(resumed) == 3
        return straight

    return check


@pytest.fixture(scope="session")
def assert_ranks_share(read: Read) -> Callable[[DataConfig, int], None]:
    """Ranks together read what one rank reads."""

    def check(data: DataConfig, world: int) -> None:
        ranks = [read(data, 8, sequences=8, rank=rank, world_size=world) for rank in range(world)]
        for step, batch in enumerate(read(data, 8, sequences=8)):
            shares = [rank[step] for rank in ranks]
            assert np.array_equal(np.concatenate([s.tokens for s in shares]), batch.tokens)
            assert np.array_equal(np.concatenate([s.targets for s in shares]), batch.targets)
            assert all(s.state == batch.state and s.stats == batch.stats for s in shares)
            size = shares[0].tokens.numel()
            bounds = sorted({b + r * size for r, s in enumerate(shares) for b in s.cu_seqlens.tolist()})
            assert bounds == batch.cu_seqlens.tolist()

    return check


@pytest.fixture(scope="session")
def documents_of() -> Callable[[list[Batch]], list[bytes]]:
    """Reassemble byte documents from batches of one rank, without EOS and without an incomplete last one."""

    def reassemble(batches: list[Batch]) -> list[bytes]:
        documents, current = [], b""
        for batch in batches:
            tokens = batch.tokens.flatten().tolist()
            bounds = batch.cu_seqlens.tolist()
            for begin, end in pairwise(bounds):
                segment = bytes(tokens[begin:end])
                if set(segment) == {0} and not current:
                    continue  # padding
                current += segment
                if current.endswith(b"\0"):
                    documents.append(current[:-1])
                    current = b""
        return documents

    return reassemble


@pytest.fixture(scope="session")
def small_bpe(tmp_path_factory: pytest.TempPathFactory, corpus: dict[str, Path]) -> Path:
    """A tokenizer.json trained on the corpus."""
    from tercet.data.prepare import train_bpe

    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(DataConfig(source="text", path=str(corpus["text"])), path, vocab_size=300)
    return path

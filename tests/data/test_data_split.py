"""Training and validation share no documents; at the end of the data comes the next epoch or a stop."""

from __future__ import annotations

import json

import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import build_loader
from tercet.data.prepare import prepare
from tercet.data.stream import DataError, document_hash

KINDS = ["text", "jsonl", "gz", "zst", "parquet", "fineweb", "shards"]


def both_splits(data, read, documents_of, **kwargs):
    data = data.model_copy(update={"exhaustion": "stop"})
    return [documents_of(read(data, split=split, **kwargs)) for split in ("train", "validation")]


def test_the_split_is_the_same_for_every_format_seed_and_order(configs, read, documents_of, texts):
    splits = {tuple(map(frozenset, both_splits(configs[kind], read, documents_of, seed=seed)))
             for kind in KINDS for seed in (1, 2)}  # fmt: skip
    unshuffled = configs["jsonl"].model_copy(update={"shuffle": False})
    splits.add(tuple(map(frozenset, both_splits(unshuffled, read, documents_of))))
    ((train, validation),) = splits
    assert sorted(d.decode() for d in [*train, *validation]) == sorted(texts)
    assert 0 < len(validation) < 25


def test_the_split_has_the_requested_fraction(tmp_path, configs, read, documents_of):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"d{i}"}) + "\n" for i in range(4000)))
    for fraction in (0.05, 0.5):
        data = configs["jsonl"].model_copy(update={"path": (str(tmp_path),), "validation_fraction": fraction})
        _, validation = both_splits(data, read, documents_of)
        assert abs(len(validation) / 4000 - fraction) < 4 * (fraction * (1 - fraction) / 4000) ** 0.5


def test_validation_is_one_pass_even_if_training_repeats(configs, read, documents_of):
    for kind in ("jsonl", "shards"):
        passes = [documents_of(read(configs[kind], split="validation")) for _ in range(2)]
        assert passes[0] == passes[1]
        assert len(set(passes[0])) == len(passes[0]) > 0


def test_stop_ends_with_a_padded_batch_and_repeat_counts_epochs(configs, read):
    for kind in ("jsonl", "shards"):
        stop = read(configs[kind].model_copy(update={"exhaustion": "stop"}))
        assert stop[-1].stats.padding > 0
        assert all(batch.stats.padding == 0 for batch in stop[:-1])
        assert read(configs[kind].model_copy(update={"exhaustion": "stop"}), state=stop[-1].state) == []
        on = read(configs[kind], len(stop) + 40)
        assert len(on) == len(stop) + 40
        assert on[-1].stats.epoch >= 1
        assert on[-1].stats.padding == 0
        # A stopped run can be resumed with exhaustion=repeat, and continues with the second epoch.
        further = read(configs[kind], 5, state=stop[-1].state)
        assert further[-1].stats.epoch == 1


def test_an_empty_split_is_an_error(tmp_path, configs, read):
    (tmp_path / "a.jsonl").write_text('{"text": "the only one"}\n' * 3)
    data = configs["jsonl"].model_copy(update={"path": (str(tmp_path),), "validation_fraction": 1e-9})
    with pytest.raises(DataError, match="no document for validation with validation_fraction=1e-09"):
        read(data, split="validation")
    none = configs["shards"].model_copy(update={"validation_fraction": 0.0})
    with pytest.raises(DataError, match="validation_fraction=0 keeps no document for validation"):
        read(none, split="validation")
    with pytest.raises(DataError, match=r"none of the 90 documents in .* is for validation"):
        read(configs["shards"].model_copy(update={"validation_fraction": 1e-9}), split="validation")


def lines_in(files: int) -> list[str]:
    """A text in this many files, none of which is for validation at a fraction of 0.03."""
    for word in "abcdefghijklmnopqrstuvwxyz":
        lines = [f"{i}: the quick brown {word} é\n" for i in range(400)]
        parts = ["".join(lines[len(lines) // files * i :][: len(lines) // files]) for i in range(files)]
        if min(document_hash(part.encode()) for part in parts) > 0.03 * 2**64:
            return parts
    raise AssertionError("one of them should do")


@pytest.mark.parametrize(("kind", "files"), [("text", 1), ("text", 40), ("shards", 1)])
def test_too_few_documents_hold_out_the_end_of_the_text(tmp_path, kind, files, read):
    (tmp_path / "corpus").mkdir()
    for i, part in enumerate(parts := lines_in(files)):
        (tmp_path / "corpus" / f"{i:02}.txt").write_text(part, encoding="utf-8")
    text = "".join(parts).encode()
    data = DataConfig(source="text", path=str(tmp_path / "corpus"), seq_len=64, validation_fraction=0.03, shuffle=False)
    if kind == "shards":
        prepare(data, tmp_path / "shards")
        data = data.model_copy(update={"source": "shards", "path": (str(tmp_path / "shards"),)})
    stop = data.model_copy(update={"exhaustion": "stop"})
    train, held_out = (
        bytes(t for batch in read(stop, split=split) for t in batch.tokens.flatten().tolist() if t)
        for split in ("train", "validation")
    )
    assert 0.8 < len(held_out) / len(text) / 0.03 < 1.2
    assert text.endswith(held_out)
    assert len(train) + len(held_out) == len(text)
    with build_loader(data, seed=7, batch_sequences=1) as loader:
        assert "too few to hold out whole ones" in loader.stream.notes.held_out[0]
    batches = read(data, 4)
    assert read(data, 1, state=batches[2].state)[0].tokens.tolist() == batches[3].tokens.tolist()


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_less_than_16_bytes_are_not_held_out(tmp_path, kind, read):
    (tmp_path / "a.txt").write_text("x" * 34)
    data = DataConfig(source="text", path=str(tmp_path / "a.txt"), seq_len=64, exhaustion="stop")
    if kind == "shards":
        prepare(data, tmp_path / "shards")
        data = data.model_copy(update={"source": "shards", "path": (str(tmp_path / "shards"),)})
    with pytest.raises(DataError, match=r"for validation with validation_fraction=0.02: change"):
        read(data, split="validation")
    assert read(data)
    enough = data.model_copy(update={"validation_fraction": 0.48})
    assert read(enough, split="validation")


def test_a_long_line_is_held_out_in_whole_characters(tmp_path, read):
    text = "x" + "é" * 1000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = DataConfig(source="text", path=str(tmp_path), seq_len=64, exhaustion="stop", validation_fraction=0.0305)
    assert int(0.0305 * len(text.encode())) % 2  # the cut is inside a character
    train, held_out = (
        bytes(t for batch in read(data, split=split) for t in batch.tokens.flatten().tolist() if t).decode()
        for split in ("train", "validation")
    )
    assert train + held_out == text
    assert held_out


def test_a_run_that_read_everything_continues_to(tmp_path, read):
    """Version 0.1 held nothing out of a single document."""
    (tmp_path / "input.txt").write_text(lines_in(1)[0], encoding="utf-8")
    data = DataConfig(source="text", path=str(tmp_path), seq_len=64, validation_fraction=0.05)
    state = read(data, 1)[0].state
    assert state["identity"].pop("held_out")
    resumed = read(data.model_copy(update={"exhaustion": "stop"}), state=state)
    assert resumed[-1].state["cursor"]["epoch"] == 1
    assert b"399: the quick" in bytes(t for batch in resumed for t in batch.tokens.flatten().tolist())


def test_empty_documents_are_skipped_and_counted(tmp_path, configs, read, documents_of):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "full"}\n\n   \n{"text": ""}\n')
    data = configs["jsonl"].model_copy(
        update={"path": (str(tmp_path),), "validation_fraction": 0.0, "exhaustion": "stop"}
    )
    batches = read(data)
    assert documents_of(batches) == [b"full"]
    assert batches[-1].stats.left_out == 2
    assert batches[-1].stats.skipped == 0

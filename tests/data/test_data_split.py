"""Training and validation share no documents; at the end of the data comes the next epoch or a stop."""

from __future__ import annotations

import json

import pytest

from tercet.data.stream import DataError

KINDS = ["text", "jsonl", "gz", "zst", "parquet", "fineweb", "shards"]


def both_splits(data, read, documents_of, **kwargs):
    data = data.model_copy(update={"exhaustion": "stop"})
    return [documents_of(read(data, split=split, **kwargs)) for split in ("train", "validation")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_in_exactly_one_split(kind, configs, read, documents_of, texts):
    train, validation = both_splits(configs[kind], read, documents_of)
    assert sorted(d.decode() for d in train + validation) == sorted(texts)
    assert not set(train) & set(validation)
    assert 0 < len(validation) < 25


def test_the_split_is_the_same_for_every_format_seed_and_order(configs, read, documents_of):
    splits = {tuple(map(frozenset, both_splits(configs[kind], read, documents_of, seed=seed)))
             for kind in KINDS for seed in (1, 2)}  # fmt: skip
    unshuffled = configs["jsonl"].model_copy(update={"shuffle": False})
    splits.add(tuple(map(frozenset, both_splits(unshuffled, read, documents_of))))
    assert len(splits) == 1


def test_copies_of_a_document_are_in_the_same_split(tmp_path, configs, read, documents_of):
    for part in range(6):
        lines = [json.dumps({"text": f"document number {i}"}) for i in range(200)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    data = configs["jsonl"].model_copy(update={"path": (str(tmp_path),)})
    train, validation = both_splits(data, read, documents_of)
    assert len(train) + len(validation) == 1200
    assert not set(train) & set(validation)


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


def test_empty_documents_are_skipped_and_counted(tmp_path, configs, read, documents_of):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "full"}\n\n   \n{"text": ""}\n')
    data = configs["jsonl"].model_copy(
        update={"path": (str(tmp_path),), "validation_fraction": 0.0, "exhaustion": "stop"}
    )
    batches = read(data)
    assert documents_of(batches) == [b"full"]
    assert batches[-1].stats.left_out == 2
    assert batches[-1].stats.skipped == 0

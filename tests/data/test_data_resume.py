"""Documents have one global order, and runs resume in it exactly, at any world size."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import build_loader
from tercet.data.paths import save_file_lists
from tercet.data.stream import DataError

# zst differs from gz in the module that decompresses.
KINDS = ["text", "jsonl", "gz", "parquet", "shards", "recall", "mixture", pytest.param("zst", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_after_any_batch_is_exact(kind, configs, assert_resumes):
    straight = assert_resumes(configs[kind], 72, every=2)
    assert kind == "recall" or straight[-4].stats.epoch >= 1, "the positions include a change of epoch"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_read_what_one_rank_reads(kind, configs, assert_ranks_share):
    assert_ranks_share(configs[kind], 4 if kind == "mixture" else 2)


@pytest.mark.parametrize("kind", ["jsonl", "shards", "mixture"])
def test_a_run_resumes_at_another_world_size(kind, configs, read):
    straight = read(configs[kind], 9)
    on_two = [read(configs[kind], 3, rank=r, world_size=2) for r in range(2)]
    on_four = [read(configs[kind], 3, rank=r, world_size=4, state=on_two[1][-1].state) for r in range(4)]
    on_one = read(configs[kind], 3, state=on_four[2][-1].state)
    whole = [np.concatenate([rank[i].tokens for rank in ranks]) for ranks in (on_two, on_four) for i in range(3)]
    whole += [batch.tokens.numpy() for batch in on_one]
    assert all(np.array_equal(a, b.tokens) for a, b in zip(whole, straight, strict=True))


def test_a_run_resumes_at_another_length_and_batch_size_without_losing_a_token(configs, read):
    data = configs["jsonl"]
    straight = np.concatenate([b.tokens.flatten() for b in read(data, 30)])
    first = read(data, 5)
    longer = data.model_copy(update={"seq_len": 160})
    then = read(longer, 4, sequences=3, state=first[-1].state)
    joined = np.concatenate([b.tokens.flatten() for b in first + then])
    assert np.array_equal(joined, straight[: len(joined)])
    assert then[-1].stats.tokens == len(joined)


def test_each_epoch_reads_every_document_once_in_a_new_order(configs, read, documents_of, texts):
    for kind in ("text", "jsonl", "zst", "parquet", "fineweb", "shards"):
        data = configs[kind].model_copy(update={"validation_fraction": 0.0})
        documents = [d.decode() for d in documents_of(read(data, 300))]
        epochs = [documents[i : i + len(texts)] for i in range(0, len(documents) - len(texts), len(texts))]
        assert len(epochs) > 2
        assert all(sorted(epoch) == sorted(texts) for epoch in epochs), kind
        assert epochs[0] != epochs[1] != epochs[2], kind


def test_the_seed_decides_the_order_and_shuffle_false_keeps_file_order(configs, read, documents_of, texts):
    data = configs["jsonl"].model_copy(update={"validation_fraction": 0.0, "exhaustion": "stop"})
    orders = [documents_of(read(data, seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    plain = data.model_copy(update={"shuffle": False})
    in_files = [text for part in range(3) for text in texts[part::3]]
    assert [d.decode() for d in documents_of(read(plain))] == in_files


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"validation_fraction": 0.2}, "validation_fraction was 0.1 and is 0.2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"shuffle_block": 9}, "shuffle_block was 8 and is 9"),
    ],
)
def test_a_cursor_of_other_data_is_rejected_with_the_changed_setting(change, named, configs, read):
    state = read(configs["jsonl"], 2)[-1].state
    seed = change.get("seed", 7)
    data = configs["jsonl"].model_copy(update={k: v for k, v in change.items() if k != "seed"})
    with pytest.raises(DataError, match=named):
        read(data, 1, seed=seed, state=state)


def corpus_of(folder, configs, **files: str):
    """A folder of jsonl files, and a configuration that reads it."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.jsonl").write_text(text)
    return configs["jsonl"].model_copy(update={"path": (str(folder),), "validation_fraction": 0.0})


def saved(data, lists):
    """A state in the middle of `data`, with its file lists."""
    with build_loader(data, seed=7, batch_sequences=4) as loader:
        save_file_lists(lists, loader.stream.notes.files)
        next(loader)
        return next(loader).state


LINES = '{"text": "one two three four five six"}\n' * 40


@pytest.mark.parametrize("shuffled", [0, 6])
def test_files_that_changed_are_named_and_read_as_they_are_if_accepted(shuffled, tmp_path, configs, read):
    data = corpus_of(tmp_path / "corpus", configs, a=LINES, b=LINES, c=LINES)
    data = data.model_copy(update={"shuffle_sequences": shuffled})
    state = saved(data, tmp_path / "lists")
    folder = (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    data = data.model_copy(update={"path": (str(folder),)})
    assert read(data, 1, state=state), "a moved folder has the same files"
    (folder / "a.jsonl").write_text(LINES.replace("one", "two"))  # of the same size
    (folder / "b.jsonl").unlink()
    (folder / "d.jsonl").write_text(LINES)
    named = r"added d.jsonl, removed b.jsonl, changed a.jsonl: restore .*--data.accept_changes"
    with pytest.raises(DataError, match=f"data changed since the checkpoint: jsonl: {named}"):
        read(data, 1, state=state, file_lists=tmp_path / "lists")
    with pytest.raises(DataError, match="list was not saved"):
        read(data, 1, state=state)
    accepting = data.model_copy(update={"accept_changes": True})
    with build_loader(accepting, seed=7, batch_sequences=4, state=state, file_lists=tmp_path / "lists") as loader:
        assert loader.changes == ["jsonl: added d.jsonl, removed b.jsonl, changed a.jsonl"]
        after = [next(loader) for _ in range(30)]
    assert after[-1].stats.epoch > 1
    assert read(data, 1, state=after[-1].state), "the new files are now those of the run"


def test_a_cursor_past_the_end_of_a_shortened_file_continues_if_accepted(tmp_path, configs, read):
    data = corpus_of(tmp_path / "corpus", configs, a=LINES)
    state = saved(data, tmp_path / "lists")
    assert state["offset"] > 0
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "one"}\n')
    assert len(read(data.model_copy(update={"accept_changes": True}), 3, state=state)) == 3


def test_documents_keep_their_order_when_a_bad_record_is_repaired(tmp_path, configs, documents_of, read):
    lines = [json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)]
    data = corpus_of(tmp_path / "corpus", configs, a="".join(lines[:47]) + "{damaged\n" + "".join(lines[48:]))
    data = data.model_copy(update={"exhaustion": "stop", "accept_changes": True})
    batches = []
    with build_loader(data, seed=7, batch_sequences=1) as loader, pytest.raises(DataError, match="record 48"):
        batches += iter(loader)
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(lines))
    rest = read(data, sequences=1, state=batches[-1].state)
    assert documents_of(batches + rest) == documents_of(read(data, sequences=1))


def test_changed_shards_and_parts_of_a_mixture_are_named(tmp_path, configs, shards, read):
    data = corpus_of(tmp_path / "corpus", configs, a=LINES)
    copied = shutil.copytree(shards, tmp_path / "shards")
    parts = ({"source": "jsonl", "path": data.path}, {"source": "shards", "name": "web", "path": str(copied)})
    data = DataConfig(source="mixture", mixture=parts, seq_len=64)
    state = saved(data, tmp_path / "lists")
    tokens = copied / "shard-00001.tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"x\0")
    with pytest.raises(DataError, match=r"checkpoint: web: changed shard-00001.tokens.npy: restore"):
        read(data, 1, state=state, file_lists=tmp_path / "lists")


@pytest.mark.parametrize("kind", ["jsonl", "shards", "mixture", "fineweb"])
def test_a_cursor_of_version_0_1_has_no_file_contents_and_resumes(kind, configs, read, same):
    straight = read(configs[kind], 4)
    state = json.loads(json.dumps(straight[1].state))
    for identity in (state["identity"], *(v for v in state["identity"].values() if isinstance(v, dict))):
        identity.pop("contents", None)
    resumed = read(configs[kind], 2, state=state)
    assert all(same(a, b) for a, b in zip(straight[2:], resumed, strict=True))


@pytest.mark.parametrize("batch", [3, 9, 21])
def test_a_cursor_of_version_0_2_counts_the_rows_of_fineweb(batch, configs, read, same):
    straight = read(configs["fineweb"], batch + 3)
    state = json.loads(json.dumps(straight[batch].state))
    done, row = state["cursor"]["place"]
    state["cursor"]["place"] = {"state": {}, "read": 30 * done + row, "batch": 16}
    assert all(map(same, read(configs["fineweb"], 2, state=state), straight[batch + 1 :]))


def test_a_damaged_cursor_is_one_line(configs, read):
    state = read(configs["jsonl"], 1)[-1].state
    wrong = {"identity": {"source": {}, "contents": []}}, {"identity": 5}, {"cursor": 7}, {"format": 2}
    for damage in wrong:
        with pytest.raises(DataError, match=r"damaged|changed|cursor has format 2, this version reads 1"):
            read(configs["jsonl"], 1, state=state | damage)


def test_a_cursor_past_the_end_of_its_block_is_rejected(configs, read):
    state = read(configs["jsonl"], 1)[-1].state
    with pytest.raises(DataError, match="cursor is at document 99 of a block that now has"):
        read(configs["jsonl"], 1, state=state | {"cursor": state["cursor"] | {"at": 99}, "offset": 0})


def test_an_indivisible_batch_is_rejected(configs):
    with pytest.raises(DataError, match="batch_sequences=6 is not a multiple of world_size=4: use 8"):
        build_loader(configs["jsonl"], seed=1, batch_sequences=6, world_size=4)
    with pytest.raises(DataError, match="rank=4 is not in 0 … 3"):
        build_loader(configs["jsonl"], seed=1, batch_sequences=8, world_size=4, rank=4)

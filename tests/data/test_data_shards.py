"""`tercet data prepare`: shards contain exactly the documents of their source, also after interruptions."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import islice

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.data.loader import build_loader
from tercet.data.prepare import prepare
from tercet.data.shards import verify_shards
from tercet.data.stream import DataError, DataUsageError


@pytest.fixture
def source(corpus) -> DataConfig:
    return DataConfig(source="jsonl", path=str(corpus["jsonl"]))


def contents(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name.startswith(("shard-", "manifest"))}


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr("tercet.data.prepare.CHUNK_BYTES", 600)


def test_a_token_outside_the_vocabulary_is_named(source, tmp_path):
    prepare(source, tmp_path / "shards")
    path = next((tmp_path / "shards").glob("*.tokens.npy"))
    tokens = np.load(path).astype("<u4")
    tokens[len(tokens) // 2] = 4_000_000_000
    np.save(path, tokens)
    manifest = tmp_path / "shards" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"][0]["files"]["tokens"]["bytes"] = path.stat().st_size
    manifest.write_text(json.dumps(content))
    config = DataConfig(source="shards", path=str(tmp_path / "shards"), validation_fraction=0, seq_len=64, prefetch=0)
    with (
        pytest.raises(DataError, match=r"token 4000000000 in shard 0 is not below .* vocabulary of 256"),
        build_loader(config, seed=0, batch_sequences=1) as loader,
    ):
        list(islice(loader, 1000))


def test_an_interrupted_preparation_continues_and_gives_the_same_bytes(source, tmp_path, small_chunks):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    prepare(source, straight, shard_tokens=1500)

    import tercet.data.prepare as module

    def slowly(*args):
        time.sleep(0.02)
        return write(*args)

    write = module.write_shard
    for delay in (0.0, 0.011, 0.023):  # after the next shard exists: before, during or after another write
        done = len(list(broken.glob("shard-*.json")))
        child = os.fork()
        if child == 0:
            try:
                module.write_shard = slowly
                prepare(source, broken, shard_tokens=1500)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not (broken / f"shard-{done:05d}.json").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "killed, not finished"
        assert not (broken / "manifest.json").exists()
        (broken / "shard-00099.tokens.npy.partial").write_bytes(b"left by a killed process")
    prepare(source, broken, shard_tokens=1500)
    assert contents(broken) == contents(straight)
    verify_shards(broken)


def test_shards_of_another_tokenizer_are_rejected(shards, read, small_bpe):
    with pytest.raises(DataError, match=r"was tokenized with byte, not with tokenizer=.*: set data.tokenizer to byte"):
        read(DataConfig(source="shards", path=str(shards), tokenizer=str(small_bpe), seq_len=16), 1)


def test_shards_whose_documents_end_with_another_token_say_which(source, tmp_path, small_bpe, read):
    prepare(source.model_copy(update={"tokenizer": str(small_bpe)}), tmp_path / "bpe")
    other = next(token for token, id_ in json.loads(small_bpe.read_text())["model"]["vocab"].items() if id_ > 50)
    data = DataConfig(source="shards", path=str(tmp_path / "bpe"), tokenizer=str(small_bpe), eos_token=other)
    with pytest.raises(DataError, match=r"set data.tokenizer to .* and data.eos_token to its token 0, or prepare"):
        read(data, 1)


def test_shards_accept_a_tokenizer_that_encodes_alike(source, tmp_path, small_bpe, read):
    out, other = tmp_path / "bpe", tmp_path / "other.json"
    prepare(source.model_copy(update={"tokenizer": str(small_bpe)}), out)
    data = DataConfig(source="shards", path=str(out), tokenizer=str(other), seq_len=32)
    parts = json.loads(small_bpe.read_text())
    # as transformers saves it
    sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    added = {"type": "TemplateProcessing", "single": sequences[:1], "pair": sequences, "special_tokens": {}}
    other.write_text(json.dumps(parts | {"post_processor": added}))
    assert read(data, 1)[0].tokens.equal(read(data.model_copy(update={"tokenizer": str(out)}), 1)[0].tokens)
    for change in ({"normalizer": {"type": "Lowercase"}}, {"model": parts["model"] | {"merges": []}}):
        other.write_text(json.dumps(parts | change))
        with pytest.raises(DataError, match=r"was tokenized with .*, not with tokenizer=.*other\.json"):
            read(data, 1)
    other.write_text(json.dumps(parts | {"post_processor": added}))
    (out / "tokenizer.json").write_text(json.dumps(parts | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(DataError, match="was tokenized with"):  # the copy in the folder is not what tokenized it
        read(data, 1)


def test_shards_include_their_tokenizer_and_decode_to_the_text(source, tmp_path, texts, small_bpe, read):
    out = tmp_path / "bpe"
    prepare(source.model_copy(update={"tokenizer": str(small_bpe)}), out)
    from tercet.data.tokenizers import load_tokenizer

    data = DataConfig(
        source="shards", path=str(out), tokenizer=str(out), seq_len=32, validation_fraction=0, exhaustion="stop"
    )
    tokenizer = load_tokenizer(str(out))
    tokens = np.concatenate([b.tokens.flatten() for b in read(data)])
    ends = np.flatnonzero(tokens == tokenizer.eos_id)
    found = [tokenizer.decode(part.tolist()) for part in np.split(tokens, ends + 1)]
    assert sorted(t for t in found if t) == sorted(texts)


def test_prompts_in_shards_do_not_count_in_the_loss(tmp_path, read):
    (tmp_path / "a.jsonl").write_text('{"q": "2+2=", "text": "four"}\n{"q": "1+1=", "text": "two"}\n')
    text = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), prompt_field="q")
    prepare(text, tmp_path / "out")
    settings = {"seq_len": 17, "validation_fraction": 0, "exhaustion": "stop", "shuffle": False}
    data = DataConfig(source="shards", path=str(tmp_path / "out"), **settings)
    (batch,) = read(data, sequences=1)
    (expected,) = read(text.model_copy(update=settings), sequences=1)
    assert np.array_equal(batch.targets, expected.targets)
    assert (batch.targets == -100).sum() == 3 + 1 + 3 + 1


def test_a_damaged_or_missing_shard_is_named(source, tmp_path, small_chunks, read):
    out = tmp_path / "out"
    prepare(source, out, shard_tokens=3000)
    data = DataConfig(source="shards", path=str(out), seq_len=16)
    path = out / "shard-00001.tokens.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-7] + bytes([good[-7] ^ 1]) + good[-6:])
    with pytest.raises(DataError, match=r"shard-00001.tokens.npy has sha256"):
        verify_shards(out)
    path.write_bytes(good[:-1])
    with pytest.raises(DataError, match=rf"shard-00001.tokens.npy is {len(good) - 1} bytes long"):
        read(data, 1)
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00001.tokens.npy is missing"):
        read(data, 1)


def test_an_incomplete_folder_is_rejected(source, tmp_path, read):
    out = tmp_path / "out"

    def stop(now):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, shard_tokens=100, report=stop)
    (out / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(DataError, match="was interrupted; run it again"):
        read(DataConfig(source="shards", path=str(out)), 1)
    with pytest.raises(DataError, match=r"was not written by `tercet data prepare`"):
        read(DataConfig(source="shards", path=str(tmp_path)), 1)


def test_a_folder_started_with_another_source_names_the_difference(tmp_path, corpus):
    jsonl = DataConfig(source="jsonl", path=str(corpus["jsonl"]))
    prepare(jsonl, tmp_path / "out")
    for changes, difference in (
        ({"path": (str(corpus["gz"]),)}, "other files (by name and size)"),
        ({"prompt_field": "n"}, "source.prompt_field=, now source.prompt_field=n"),
    ):
        with pytest.raises(DataUsageError) as caught:
            prepare(jsonl.model_copy(update=changes), tmp_path / "out")
        assert f"was started with {difference}: choose another folder" in str(caught.value)


def test_a_preparation_stopped_by_a_bad_record_continues_with_skip(tmp_path, small_chunks):
    lines = [json.dumps({"text": f"document {n} " + "x" * 60}) for n in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:70], "{broken", *lines[70:]]) + "\n")
    strict = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"))
    lenient = strict.model_copy(update={"bad_records": "skip"})
    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(DataError, match=r"with --data\.bad_records skip"):
        prepare(strict, out, shard_tokens=100)
    assert any(out.glob("shard-*.json"))
    prepare(lenient, out, shard_tokens=100)
    manifest = prepare(lenient, whole, shard_tokens=100)
    assert (manifest["documents"], manifest["skipped"]) == (80, 1)
    assert any("record 71 of" in message for shard in manifest["shards"] for message in shard["bad_records"])
    for file in whole.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    with pytest.raises(DataError, match="was started with bad_records=skip, now bad_records=error"):
        prepare(strict, out, shard_tokens=100)


def test_a_folder_can_only_be_prepared_by_one_process(source, tmp_path):
    def second(now):
        with pytest.raises(DataError, match="is being written by another process"):
            prepare(source, tmp_path / "out")

    prepare(source, tmp_path / "out", report=second)

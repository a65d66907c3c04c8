"""Tokenizers round-trip text and never parse an EOS out of it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tercet.config.data import DataConfig
from tercet.data import tokenizers
from tercet.data.prepare import prepare, train_bpe
from tercet.data.stream import DataError, DataUsageError
from tercet.data.tokenizers import load_tokenizer

TEXT = "def f(x):\n\treturn x ** 2  # naïve – 日本語 🎉 <|endoftext|>\r\n"


def test_byte_tokens_are_the_bytes():
    byte = load_tokenizer("byte")
    assert byte.encode(TEXT) == list(TEXT.encode())
    assert byte.decode(byte.encode(TEXT)) == TEXT
    assert math.log(byte.vocab_size) == math.log(256)
    assert byte.eos_id == 0
    assert byte.decode([97, 300, 98]) == "a\ufffdb", "a model may have more tokens than bytes"
    with pytest.raises(DataError, match="zero byte at 1"):
        byte.encode("a\0b")


def test_a_trained_tokenizer_round_trips_everything(small_bpe):
    bpe = load_tokenizer(str(small_bpe))
    assert bpe.vocab_size == 300
    assert bpe.decode(bpe.encode(TEXT)) == TEXT
    assert bpe.eos_id not in bpe.encode(TEXT), "an EOS written in a document is text"
    assert load_tokenizer(str(small_bpe.parent)).fingerprint == bpe.fingerprint, "a folder works too"
    (tokens,) = bpe.encode_documents([TEXT.encode()])
    assert tokens.tolist() == [*bpe.encode(TEXT), bpe.eos_id]
    assert tokens.dtype == np.uint16


@pytest.fixture
def two_letters(tmp_path) -> str:
    """A tokenizer that knows only a and b, and drops the rest."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    Tokenizer(BPE({"a": 0, "b": 1, "<eos>": 2}, [])).save(str(tmp_path / "ab.json"))
    return str(tmp_path / "ab.json")


def test_a_tokenizer_that_loses_text_is_refused_unless_the_loss_is_accepted(two_letters, corpus, read, tmp_path):
    data = DataConfig(source="text", path=str(corpus["text"]), tokenizer=two_letters, seq_len=64)
    message = r"ab.json loses 8\d\.\d% of the characters in the first documents \(such as .*--data.max_lost_text"
    with pytest.raises(DataError, match=message):
        read(data, 1)
    with pytest.raises(DataError, match=message):
        prepare(data, tmp_path / "shards")
    assert read(data.model_copy(update={"max_lost_text": 1.0}), 1)


def test_training_excludes_validation_documents_and_is_repeatable(tmp_path, corpus):
    data = DataConfig(source="text", path=str(corpus["text"]))
    prints = {train_bpe(data, tmp_path / f"{i}.json", vocab_size=290).fingerprint for i in range(2)}
    assert len(prints) == 1
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"zq{i}zq"}) + "\n" for i in range(300)))
    from tercet.data.prepare import _texts

    fraction = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), validation_fraction=0.3)
    seen = set(_texts(fraction, 1 << 20))
    assert 150 < len(seen) < 260
    everything = set(_texts(fraction.model_copy(update={"validation_fraction": 0.0}), 1 << 20))
    assert seen < everything
    assert len(everything) == 300


def test_only_bad_records_are_no_text_to_train_on(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n[]\n")
    data = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), bad_records="skip")
    with pytest.raises(DataUsageError, match=r"no text is left .*: 2 bad records, the first: .*a\.jsonl"):
        train_bpe(data, tmp_path / "out.json", vocab_size=300)


def test_truncation_and_padding_in_a_tokenizer_json_are_ignored(small_bpe, tmp_path):
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(small_bpe))
    library.enable_truncation(5)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    cut = load_tokenizer(str(tmp_path))
    whole = load_tokenizer(str(small_bpe))
    assert len(whole.encode(TEXT)) > 5
    assert cut.encode(TEXT) == whole.encode(TEXT)
    assert cut.fingerprint == whole.fingerprint


def test_the_eos_token_is_detected_or_must_be_named(small_bpe, tmp_path):
    text = small_bpe.read_text().replace("<|endoftext|>", "<done>")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"name it with --data.eos_token; its special tokens: <done>"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), "<done>").eos_id == 0
    with pytest.raises(DataError, match=r"eos_token='<x>' is not in the vocabulary"):
        load_tokenizer(str(tmp_path), "<x>")
    with pytest.raises(DataError, match="its EOS is byte 0"):
        load_tokenizer("byte", "</s>")


def test_a_missing_tokenizer_is_a_clear_error(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path))

    def offline(model, name):
        raise OSError("Name or service not known")

    monkeypatch.setattr("tercet.data.tokenizers.fetch_model_file", offline)
    with pytest.raises(DataError, match=r"gpt2 is not a local file and cannot be fetched .*not known.*train-tokenizer"):
        load_tokenizer("gpt2")
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"tokenizer=corpus: this local folder has no tokenizer\.json"):
        load_tokenizer("corpus")
    monkeypatch.setattr("tercet.data.tokenizers.fetch_model_file", lambda model, name: str(tmp_path / name))
    with pytest.raises(DataError, match=r"tokenizer=gpt2: .* is not a readable tokenizer\.json"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return x  # né\n" * 400, "one line without an end " * 500, "x" * 9000, "attentionreads" * 700],
)
def test_a_long_text_has_the_same_tokens_in_pieces(text, small_bpe, monkeypatch):
    tokenizer = load_tokenizer(str(small_bpe))
    texts = [b"short", text.encode(), b"end"]
    whole = tokenizer.encode_documents(texts)
    asked = []
    ids = tokenizer._ids
    monkeypatch.setattr(tokenizer, "_ids", lambda part, specials: asked.append(len(part)) or ids(part, specials))
    monkeypatch.setattr(tokenizers, "ENCODED_AT_ONCE", 2000)
    monkeypatch.setattr(tokenizers, "CONTEXT", 200)
    found = tokenizer.encode_documents(texts)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in whole]
    assert max(asked) <= 2200 or " " not in text

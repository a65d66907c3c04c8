"""Evaluations count what they should, compared with models whose answers are known."""

from __future__ import annotations

import itertools
import json
import math
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from inference.models import language_model, trained
from tercet import terminal
from tercet.cli import main
from tercet.config.data import DataConfig
from tercet.config.load import write_config
from tercet.data.prepare import prepare, train_bpe
from tercet.data.tokenizers import ByteTokenizer, LibraryTokenizer, text_bytes
from tercet.errors import TercetError
from tercet.inference.load import load_model
from tercet.inference.perplexity import (
    by_position,
    gain,
    held_out,
    loss_with_context,
    overall,
    within_documents,
)
from tercet.inference.selection_map import record_selections, selection_page


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """An untrained model, as a folder that the commands read."""
    folder, model = tmp_path_factory.mktemp("model"), language_model()
    write_config(model.run, {}, folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def test_loss_by_position_adds_up_to_the_loss_of_the_batch():
    model = language_model(data__source="python-source")
    batches = list(held_out(model, sequences=4, batch=2))
    found = by_position(model, iter(batches))
    loss = [model(b.tokens.reshape(1, -1), b.cu_seqlens, b.targets.reshape(1, -1)) for b in batches]
    whole = overall(found)
    assert whole.tokens == sum(int(part.tokens) for part in loss)
    assert whole.nats == pytest.approx(sum(part.total.item() for part in loss), rel=1e-5)
    assert [s.first for s in found] == [0, 1, 2, 4, 8, 16, 32, 64][: len(found)]


@pytest.mark.parametrize("cross", [False, True])
def test_exactly_the_given_number_of_sequences_is_read(cross):
    model = language_model(data__synthetic__length=50, data__cross_document_attention=cross)
    one_by_one = list(held_out(model, sequences=5))
    expected = by_position(model, iter(one_by_one))
    for batch in (2, 3, 5, 8):
        batches = list(held_out(model, sequences=5, batch=batch))
        assert torch.equal(torch.cat([b.tokens for b in batches]), torch.cat([b.tokens for b in one_by_one]))
        found = by_position(model, iter(batches))
        assert [(b.first, b.last, b.tokens) for b in found] == [(b.first, b.last, b.tokens) for b in expected]
        assert [b.nats for b in found] == pytest.approx([b.nats for b in expected], rel=1e-5)


@pytest.mark.parametrize("cross", [False, True])
def test_sequences_within_one_document_do_not_cross_its_end(cross):
    model = language_model(data__synthetic__length=50, data__cross_document_attention=cross)
    (batch,) = within_documents(model, length=16, sequences=1)
    assert batch.cu_seqlens.tolist() == [0, 16]


def test_positions_are_counted_within_documents():
    model = language_model(data__source="synthetic", data__synthetic__length=16)
    found = by_position(model, held_out(model, sequences=2))
    assert found[-1].last == 15
    # 2 sequences of 128: 16 documents, whose last token has no successor
    assert [s.tokens for s in found] == [16, 16, 32, 64, 16 * 7]


def test_the_same_last_tokens_are_scored_with_each_context():
    model = language_model(data__source="synthetic", data__synthetic__length=64)
    (batch,) = within_documents(model, length=64, sequences=1)
    assert list(batch.cu_seqlens) == [0, 64]
    logits = [model.logits(model.hidden(batch.tokens[:, -context:]))[0, -16:] for context in (16, 40)]
    expected = [F.cross_entropy(each, batch.targets[0, -16:], ignore_index=-100).item() for each in logits]
    assert [loss_with_context(model, batch, context, 16) for context in (16, 40)] == pytest.approx(expected)
    assert expected[0] != expected[1]


def test_a_gain_is_the_mean_difference_with_its_standard_error():
    assert gain([1.0, 2.0], [1.5, 2.1]) == pytest.approx((-0.3, 0.2))


def test_sequences_without_a_scored_target_are_skipped(tmp_path, capsys):
    """EOS, the last of a document's tokens, has no target."""
    file = tmp_path / "lines.jsonl"
    data = {"data__source": "jsonl", "data__path": str(file), "data__validation_fraction": 0.5}
    model = language_model(**data, data__packing="whole")
    write_config(model.run, {}, tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")

    def sequences(sizes, last, length=65):
        lines = (json.dumps({"text": f"{i:0{size - 1}}"}) for size in sizes for i in range(8))
        file.write_text("".join(f"{line}\n" for line in lines))
        command = ["eval", "context", str(tmp_path), "--lengths", str(length), "--last", str(last)]
        code, (out, err) = main(command), capsys.readouterr()
        return err if code else json.loads(out.splitlines()[-1])["sequences"]

    both = sequences((65, 100), 2)
    assert 0 < sequences((65, 100), 1) == both - sequences((65,), 2)
    assert re.search(r"--last 1 has no target .* \d validation sequences of 65 tokens.*larger", sequences((65,), 1))
    assert "no validation document has 66 tokens" in sequences((65,), 1, 66)


def test_the_search_for_a_scored_target_ends_in_endless_data():
    with pytest.raises(TercetError, match="--last 1 has no target"):
        next(within_documents(language_model(), length=16, sequences=1, last=1))


def test_models_of_other_data_and_seeds_are_compared_on_the_same_text(tmp_path, capsys):
    folders = []
    for seed, word in enumerate(("one", "another")):
        file = tmp_path / f"{word}.txt"
        file.write_text("".join(f"{word} line, number {i}\n" for i in range(800)))
        data = {"data__source": "text", "data__path": str(file), "data__validation_fraction": 0.5}
        folders.append(trained(tmp_path / word, run__seed=seed, train__steps=2, data__seq_len=64 >> seed, **data))
    first, second = (str(folder) for folder in folders)
    capsys.readouterr()
    assert main(["eval", "perplexity", first, "--data-of", second, "--seq-len", "64", "--device", "cpu"]) == 0
    first_line, *_, record = capsys.readouterr().out.splitlines()
    assert first_line == f"validation text of text {tmp_path / 'another.txt'}, seed 1"
    record = json.loads(record)
    assert (record["data_of"], record["trained_length"]) == (second, 64)
    compared, own, given = load_model(first, data_of=second), load_model(first), load_model(second)
    texts = [b"".join(bytes(b.tokens[0].tolist()) for b in held_out(m, sequences=4, seq_len=64))
             for m in (compared, own, given)]  # fmt: skip
    assert texts[0] == texts[2] != texts[1]


def test_all_of_ones_own_text_is_measured_whatever_its_format(stored, tmp_path, capsys):
    texts = ["one short document", "another, of 300 bytes: " + "abcdefg " * 35, "é" * 40]
    for i, text in enumerate(texts):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / f"{i}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"body": texts}), tmp_path / "a.parquet")
    prepare(DataConfig(source="text", path=str(tmp_path / "folder")), tmp_path / "shards")
    records = []
    for name in ("folder", "a.jsonl", "a.parquet", "shards"):
        field = ["--text-field", "body"] if name.startswith("a.") else []
        words = ["eval", "perplexity", str(stored), "--data", str(tmp_path / name), *field, "--device", "cpu"]
        assert main(words) == 0, name
        records.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    model = load_model(stored)
    joined = [torch.tensor([*text.encode(), 0]) for text in texts]
    sizes = sum(len(tokens) - 1 for tokens in joined)
    for record in records:
        assert record["all"]["tokens"] == sizes  # nothing is held out, nothing is read twice
        assert record["all"]["nats"] == pytest.approx(records[0]["all"]["nats"], rel=1e-6)
    file = tmp_path / "folder" / "0.txt"  # in one sequence
    assert main(["eval", "perplexity", str(stored), "--data", str(file), "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    with torch.no_grad():
        nats = F.cross_entropy(model(joined[0][None])[0, :-1].float(), joined[0][1:], reduction="sum")
    assert record["all"]["nats"] == pytest.approx(nats.item(), rel=1e-5)
    assert record["data"] == ["text", str(file)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data {0}/gone", "matches no file"),
        ("--data {0} --data-of {0}", "two texts"),
        ("--data {0} --text-field body", "has no effect"),
        ("--text-field body", "without --data"),
    ],
)
def test_a_wrong_choice_of_text_is_refused(stored, words, said, capsys):
    assert main(["eval", "perplexity", str(stored), *words.format(stored).split()]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_corpus_is_named_with_the_flag_that_reads_another(stored, tmp_path, capsys):
    write_config(language_model(data__source="text", data__path=str(tmp_path / "gone")).run, {}, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(stored / "model.safetensors")
    for command in ("perplexity", "context", "ruler"):
        assert main(["eval", command, str(tmp_path)]) == 2
        assert re.search(r"path=\S+/gone matches no file.*--data-of RUN$", capsys.readouterr().err, re.M), command
        assert main(["eval", command, "--help"]) == 0
        assert "--data_of" in capsys.readouterr().out


def test_shards_of_another_tokenizer_are_refused_with_a_fix_that_evaluations_have(stored, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"line number {i}\n" for i in range(800)))
    text = DataConfig(source="text", path=str(tmp_path / "text.txt"))
    train_bpe(text, bpe := tmp_path / "tokenizer.json", vocab_size=300)
    prepare(text.model_copy(update={"tokenizer": str(bpe)}), shards := tmp_path / "shards")
    write_config(language_model(data__source="shards", data__path=str(shards)).run, {}, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(stored / "model.safetensors")
    assert main(["eval", "perplexity", str(tmp_path), "--data-of", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"was tokenized with \S+, not with tokenizer=byte: .* another run's .* --data-of RUN", error)


@pytest.mark.parametrize(
    ("command", "flag", "usual", "beyond"),
    [
        ("perplexity {} --sequences 1", "--seq-len", "128", "256"),
        ("context {} --sequences 1", "--lengths", "64 128", "64 192 256"),
    ],
)
def test_lengths_beyond_training_are_measured_with_a_warning(stored, tmp_path, capsys, command, flag, usual, beyond):
    def measured(*more: str) -> tuple[str, dict]:
        assert main(["eval", *command.format(stored, tmp_path).split(), *more]) == 0
        out, err = capsys.readouterr()
        return err, json.loads(out.splitlines()[-1])

    for within in ((), (flag, *usual.split())):
        err, record = measured(*within)
        assert (err, record["warning"], record["trained_length"]) == ("", None, 128)
    err, record = measured(flag, *beyond.split())
    longer = beyond.removeprefix("64 ")
    assert err.startswith(f"warning: {flag} {longer} is beyond the 128 tokens that {stored} was trained with")
    assert err.count("\n") == 1
    assert err == f"warning: {record['warning']}\n"


@pytest.mark.parametrize("command", ["perplexity {} --sequences 2", "context {} --sequences 2"])
def test_a_long_evaluation_shows_how_far_it_is(stored, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(terminal, "SECONDS_PER_LINE", 0)
    assert main(["eval", *command.format(stored, tmp_path).split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "100%"
    assert all(re.fullmatch(r"\d+%, about \d+ (s|min) left", line) for line in lines[:-1])


def test_the_map_shows_the_blocks_that_the_layers_read():
    model = language_model()
    tokens = list(b"the quick brown fox jumps over <lazy> dogs and then & then some more words come")
    found = record_selections(model, tokens)
    t, size = len(tokens) - 1, model.config.nsa.select_block
    for layer, selection in zip(model.attention_layers(), found, strict=True):
        blocks = selection.selected_by(t)
        assert len(blocks) == model.config.nsa.select_count
        assert selection.forced(t) <= blocks.keys()
        assert layer.stats.read() == {}, "the layer has its own statistics back"
    told = selection_page(tokens, model.tokenizer, found)
    text = "".join(part.partition(">")[2].partition("</span>")[0] for part in told.split("<span ")[1:])
    assert text == bytes(tokens).decode().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    spans = [part.partition('"')[0] for part in told.split('<span class="')[1:]]
    assert [i for i, kind in enumerate(spans) if kind == "forced"] == sorted(found[0].forced(t))
    assert len(spans) == t // size + 1


def test_a_model_that_selects_nothing_has_no_map():
    with pytest.raises(TercetError, match="no layer of this model selects"):
        record_selections(language_model(model__attention="dense"), [1, 2, 3])


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    from tokenizers import Tokenizer, decoders, models

    letters = "abcd"
    pairs = {a + b: i for i, (a, b) in enumerate(itertools.product(letters, repeat=2))}
    library = Tokenizer(models.WordLevel({**pairs, "<eos>": len(pairs)}, unk_token="<eos>"))
    library.decoder = decoders.Fuse()
    tokenizer = LibraryTokenizer(library, "pairs", "<eos>")
    ids = [*range(16)] * 3
    assert text_bytes(tokenizer, ids) == 2 * len(ids)
    assert text_bytes(ByteTokenizer(), [97, 0, 0xC3, 0xA9, 0xC3]) == 4  # EOS has no text; half a character counts one


def test_bits_per_byte_are_those_of_the_text(stored, capsys):
    assert main(["eval", "perplexity", str(stored), "--sequences", "2"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    record = json.loads(out.splitlines()[-1])  # tokens are bytes, and no document ends within the sequences' targets
    assert record["bits_per_byte"] == pytest.approx(record["all"]["nats"] / math.log(2) / record["bytes"])
    assert record["bytes"] <= record["all"]["tokens"]

"""Evaluations count what they should, compared with models whose answers are known."""

from __future__ import annotations

import importlib.util
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
    ContextLoss,
    by_position,
    held_out,
    loss_with_context,
    overall,
    token_losses,
    within_documents,
)
from tercet.inference.plots import context_plot, needle_map, recall_plot
from tercet.inference.recall import default_lengths, find_needles, recall_by_distance, window_reach
from tercet.inference.selection_map import record_selections, selection_page
from tercet.model.config import ModelConfig

RECALL = {
    "data__synthetic__task": "recall",
    "data__synthetic__min_distance": 20,
    "data__synthetic__pairs": 3,
    "data__synthetic__queries": 2,
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A model of the recall task, as a folder that the commands read."""
    folder, model = tmp_path_factory.mktemp("model"), language_model(**RECALL)
    write_config(model.run, {}, folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


class Knowing(torch.nn.Module):
    """A model that finds every fact up to `sight` tokens back, and none beyond."""

    def __init__(self, model, sight):
        super().__init__()
        self.run, self.config, self.tokenizer, self.context = model.run, model.config, model.tokenizer, model.context
        self.embedding = torch.nn.Embedding(1, 1)
        self.sight, self.step = sight, 0

    def hidden(self, tokens, cu_seqlens=None):
        self.tokens = tokens
        row, at = torch.meshgrid(*(torch.arange(n) for n in tokens.shape), indexing="ij")
        return torch.stack((row, at), dim=-1)

    def logits(self, places):
        guesses = []
        for row, at in places.tolist():
            text = bytes(self.tokens[row].tolist())
            asked = text.rindex(b"?", 0, at + 1)
            fact = text.index(text[asked + 1 : at + 1])
            guesses.append(text[fact + at - asked] if at - (fact + at - asked - 1) <= self.sight else 0)
        return F.one_hot(torch.tensor(guesses), 256).float()


def test_recall_is_right_exactly_as_far_as_the_model_sees():
    model = language_model(**RECALL)
    results = recall_by_distance(Knowing(model, 10_000), length=128, documents=12, batch=8)
    assert all(r.right == r.asked > 0 for r in results)
    assert sum(r.asked for r in results) == 12 * model.run.data.synthetic.queries
    short = {r.first: r for r in recall_by_distance(Knowing(model, 63), length=128, documents=12)}
    assert [r.accuracy for first, r in short.items() if first < 64] == [1.0] * sum(first < 64 for first in short)
    assert short[64].accuracy == 0


@pytest.mark.parametrize(
    ("changes", "reach"),
    [
        ({}, 14),
        ({"attention": "window"}, 14),
        ({"branches": ("selected", "window")}, 14),
        ({"branches": ("selected",)}, None),
        ({"attention": "nsa,dense"}, None),
    ],
)
def test_how_far_windows_reach(changes, reach):
    config = language_model(**RECALL).config
    assert window_reach(ModelConfig(**{**dict(config), **changes})) == reach


def test_recall_refuses_a_model_of_other_data():
    with pytest.raises(TercetError, match="trained on random, not on the recall task"):
        recall_by_distance(language_model(), length=64, documents=1)


def test_a_needle_is_found_where_the_model_sees_it_and_nowhere_else():
    model = language_model(**RECALL)
    found = list(find_needles(Knowing(model, 50), lengths=(32, 128), depths=(0.0, 1.0), trials=3))
    assert [(f.length, f.depth, f.right) for f in found] == [(32, 0.0, 3), (32, 1.0, 3), (128, 0.0, 0), (128, 1.0, 3)]
    # logits of 1 for the chosen one of 256 tokens, 0 for all others
    spread = math.log(math.e + 255)
    assert [f.nats for f in found] == pytest.approx([spread - 1, spread - 1, spread, spread - 1])


def test_default_lengths_fit_a_needle():
    facts, text = language_model(**RECALL), language_model(data__source="python-source")
    assert (facts.context, text.context) == (128, 128)
    assert default_lengths(facts) == (32, 64, 128)  # a fact takes a dozen tokens, a sentence some eighty
    assert default_lengths(text) == default_lengths(facts, "text") == (128,)
    assert len(list(find_needles(text, lengths=default_lengths(text), depths=(0.5,), trials=1))) == 1


def test_a_haystack_longer_than_the_validation_text_is_refused(tmp_path):
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(40))
    (tmp_path / "a.jsonl").write_text(lines)
    model = language_model(
        data__source="jsonl", data__path=str(tmp_path / "a.jsonl"), data__validation_fraction=0.5, data__shuffle=False
    )
    assert list(find_needles(model, lengths=(100,), depths=(0.5,), trials=1))
    with pytest.raises(TercetError, match="validation tokens for a haystack of 1000"):
        list(find_needles(model, lengths=(1000,), depths=(0.5,), trials=1))


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


@pytest.mark.parametrize("cross", [False, True])
def test_a_sequence_longer_than_the_text_is_measured_without_its_padding(tmp_path, monkeypatch, cross):
    (tmp_path / "a.txt").write_text("".join(f"line {i};" for i in range(40)))
    data = {"data__source": "text", "data__path": str(tmp_path / "a.txt"), "data__separator": ";"}
    model = language_model(**data, data__validation_fraction=0.5, data__cross_document_attention=cross)
    (batch,) = held_out(model, sequences=8, seq_len=1024, batch=2)
    losses = torch.cat([nats for _, nats in token_losses(model, batch)])
    hidden, read = model.hidden, []
    monkeypatch.setattr(model, "hidden", lambda tokens, *a, **k: read.append(tokens.numel()) or hidden(tokens, *a, **k))
    total = overall(by_position(model, [batch]))
    assert read == [batch.stats.tokens]
    assert (total.tokens, total.nats) == (len(losses), pytest.approx(losses.sum().item(), rel=1e-5))


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
    assert ContextLoss(8, [1.0, 2.0]).gain(ContextLoss(4, [1.5, 2.1])) == pytest.approx((-0.3, 0.2))


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
    prepare(DataConfig(source="text", path=str(tmp_path / "folder")), tmp_path / "shards", workers=1)
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
    assert (
        main(["eval", "perplexity", str(stored), "--data", str(tmp_path / "folder" / "0.txt"), "--device", "cpu"]) == 0
    )
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
    options = {"perplexity": [], "context": [], "needle": [], "ruler": []}
    for command, more in options.items():
        assert main(["eval", command, str(tmp_path), *more]) == 2
        assert re.search(r"path=\S+/gone matches no file.*--data-of RUN$", capsys.readouterr().err, re.M), command
        assert main(["eval", command, "--help"]) == 0
        assert "--data_of" in capsys.readouterr().out


def test_shards_of_another_tokenizer_are_refused_with_a_fix_that_evaluations_have(stored, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"line number {i}\n" for i in range(800)))
    text = DataConfig(source="text", path=str(tmp_path / "text.txt"))
    train_bpe(text, bpe := tmp_path / "tokenizer.json", vocab_size=300)
    prepare(text.model_copy(update={"tokenizer": str(bpe)}), shards := tmp_path / "shards", workers=1)
    write_config(language_model(data__source="shards", data__path=str(shards)).run, {}, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(stored / "model.safetensors")
    assert main(["eval", "perplexity", str(tmp_path), "--data-of", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"was tokenized with \S+, not with tokenizer=byte: give --data-of a run on text", error)
    assert "data.tokenizer" not in error


@pytest.mark.parametrize(
    ("command", "flag", "usual", "beyond"),
    [
        ("perplexity {} --sequences 1", "--seq-len", "128", "256"),
        ("context {} --sequences 1", "--lengths", "64 128", "64 192 256"),
        ("needle {} --depths 0.5 --trials 1", "--lengths", "64 128", "64 192 256"),
        ("recall {} --documents 1", "--length", "128", "256"),
    ],
)
def test_lengths_beyond_training_are_measured_with_a_warning(stored, tmp_path, capsys, command, flag, usual, beyond):
    def measured(*more: str) -> tuple[str, dict]:
        assert main(["eval", *command.format(stored, tmp_path).split(), *more]) == 0
        out, err = capsys.readouterr()
        record = json.loads(out.splitlines()[-1])
        return err, record["runs"][0] if "runs" in record else record

    for within in ((), (flag, *usual.split())):
        err, record = measured(*within)
        assert (err, record["warning"], record["trained_length"]) == ("", None, 128)
    err, record = measured(flag, *beyond.split())
    longer = beyond.removeprefix("64 ")
    assert err.startswith(f"warning: {flag} {longer} is beyond the 128 tokens that {stored} was trained with")
    assert err.count("\n") == 1
    assert err == f"warning: {record['warning']}\n"


@pytest.mark.parametrize("command", ["perplexity {} --sequences 2", "context {} --sequences 2", "recall {}"])
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


def test_a_plot_that_cannot_be_written_fails_before_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tercet.inference.load.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    for command in ("perplexity", "context", "needle", "recall"):
        for plot, said in (("p.png", ".svg"), (tmp_path / "file" / "p.svg", "cannot be written")):
            assert main(["eval", command, str(tmp_path), "--plot", str(plot)]) == 2
            assert said in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["eval", "perplexity", str(tmp_path), "--plot", str(tmp_path / "p.svg")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "p.svg").exists()


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    """A uniform model over pairs of letters takes as many bits per byte as one over letters."""
    from tokenizers import Tokenizer, decoders, models

    letters = "abcd"
    pairs = {a + b: i for i, (a, b) in enumerate(itertools.product(letters, repeat=2))}
    library = Tokenizer(models.WordLevel({**pairs, "<eos>": len(pairs)}, unk_token="<eos>"))
    library.decoder = decoders.Fuse()
    tokenizer = LibraryTokenizer(library, "pairs", "<eos>")
    ids = [*range(16)] * 3
    assert text_bytes(tokenizer, ids) == 2 * len(ids)
    assert text_bytes(ByteTokenizer(), [97, 0, 0xC3, 0xA9, 0xC3]) == 4  # EOS has no text; half a character counts one
    assert len(ids) * math.log(16) / text_bytes(tokenizer, ids) == pytest.approx(math.log(4))


@pytest.mark.parametrize("style", ["perplexity {} --sequences 2", "needle {} --depths 0.5 --trials 1", "recall {}"])
def test_every_evaluation_reports_bits_per_byte(stored, capsys, style):
    assert main(["eval", *style.format(stored).split()]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    record = json.loads(out.splitlines()[-1])
    if record["eval"] == "perplexity":  # tokens are bytes, and no document ends within the sequences' targets
        assert record["bits_per_byte"] == pytest.approx(record["all"]["nats"] / math.log(2) / record["bytes"])
        assert record["bytes"] <= record["all"]["tokens"]
    elif record["eval"] == "needle":
        assert record["found"][0]["bits_per_byte"] == pytest.approx(record["found"][0]["nats"] / math.log(2))
    else:
        assert record["runs"][0]["bits_per_byte"] > 0


def test_pictures_are_drawn(tmp_path):
    model = language_model(**RECALL)
    found = list(find_needles(Knowing(model, 50), lengths=(32, 128), depths=(0.0, 1.0), trials=1))
    needle_map(found, tmp_path / "needle.svg")
    context_plot({"a": [(8, 5.0), (16, 4.5)]}, tmp_path / "p.svg")
    recall_plot({"a": [(8, 1.0), (16, 0.5)]}, tmp_path / "c.svg", window_reach=14)
    for name in ("needle", "p", "c"):
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()

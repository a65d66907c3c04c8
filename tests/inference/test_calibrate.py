"""`tercet calibrate`: what settings of block-sparse attention keep of a dense model's attention on planted facts."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

import tercet
import tercet.interop.huggingface
from tercet.attention.selector import slow_channels
from tercet.cli import main
from tercet.inference import calibrate
from tercet.inference.calibrate import Document, FactTable, Grid, Setting, fact_table, measure, plant_facts

SIZES = {
    "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 48,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 1536,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with bytes as tokens."""
    out = tmp_path_factory.mktemp("calibrate") / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", *alphabet])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>").save_pretrained(out)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 900  # far from uniform attention
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def loaded(folder):
    return calibrate.load_dense(folder, "cpu")


def test_a_document_asks_for_its_fact(loaded):
    documents = plant_facts(loaded[1], length=1200, count=8)
    assert {len(d.tokens) for d in documents} == {1200}
    assert len({d.fact.start * 10 // 1200 for d in documents}) > 4  # depths
    for d in documents:
        fact, answer = (loaded[1].decode([d.tokens[i] for i in part]).strip() for part in (d.fact, d.answer))
        assert (answer.isdigit(), fact.count(answer), loaded[1].decode(d.tokens).count(answer)) == (True, 1, 2)


def test_what_is_kept_is_the_attention_on_the_blocks_that_the_operator_reads(loaded, monkeypatch):
    model, block, tokens = loaded[0], 8, 40
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 257, (203,), generator=generator).tolist()
    document, grid = Document(ids, range(61, 75), range(199, 203)), Grid((block,), (tokens,), (16, 32, 48))
    seen = {}

    def spy(self, module, query, key, *rest, **options):
        seen[module.layer_idx] = (query, key)
        return original(self, module, query, key, *rest, **options)

    original = calibrate._Probe.__call__
    monkeypatch.setattr(calibrate._Probe, "__call__", spy)
    found, answered = measure(model, document, grid)
    assert not answered
    assert model.config._attn_implementation == "sdpa"
    asked, ordinary = range(198, 202), torch.linspace(203 / 2, 199 - 64, calibrate.ORDINARY).long().tolist()
    causal, config = torch.ones(203, 203, dtype=torch.bool).tril(), tercet.NSAConfig(8, 8, block, tokens // block)
    for layer, (q, k) in seen.items():
        logits = q[0] @ k[0].repeat_interleave(3, 0).transpose(1, 2) * 48**-0.5
        p = logits.masked_fill(~causal, -torch.inf).softmax(-1).unflatten(0, (2, 3)).sum(1)  # [groups, queries, keys]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        for i, channels in enumerate((*grid.channels, None)):  # None: block means
            exact = None if channels else ()
            planes = slow_channels(48, channels // 2) if channels else None
            _, aux = tercet.block_sparse_attention(
                q, k, k, config=config, scorer="own", score_channels=planes, exact_groups=exact, return_aux=True
            )
            read = (aux.block_indices[0][..., None] == torch.arange(203) // block).any(2).transpose(0, 1)
            kept = p * read
            expected = kept[:, asked][..., list(document.fact)].sum((1, 2)), kept[:, ordinary].sum((1, 2))
            got = found.fact[layer, :, 0, i + 1, 0], found.mass[layer, :, 0, i + 1, 0]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.fact_total[layer], p[:, asked][..., list(document.fact)].sum((1, 2)))
        assert (found.fact[layer, :, 0, 0, 0] <= found.fact_total[layer] + 1e-6).all()
        assert (found.mass[layer, :, 0, 0, 0] >= found.mass[layer, :, 0, :, 0].amax(-1) - 1e-4).all()  # the oracle


def test_more_tokens_keep_more_and_all_of_them_everything(loaded):
    table = fact_table(
        loaded[0], loaded[1], ["Some text. " * 200], length=900, facts=2, blocks=(32,), tokens=(96, 128, 448)
    )
    for kept in ("fact", "mass", "free"):
        few, more, many = ([getattr(s, kept) for s in table.settings if s.tokens == n] for n in (96, 128, 448))
        assert all(a <= b <= c <= 1 for a, b, c in zip(few, more, many, strict=True))
    model, document = loaded[0], plant_facts(loaded[1], length=900, count=1)[0]
    found, _ = measure(model, document, Grid((32,), (928,), (48,)))
    torch.testing.assert_close(found.fact[:, :, 0, 1, 0], found.fact_total)
    torch.testing.assert_close(found.mass[:, :, 0, 2, 0], found.mass_total)


def test_layers_with_a_window_are_left_out(loaded):
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    table = fact_table(AutoModelForCausalLM.from_config(config), loaded[1], length=900, facts=2, tokens=(256,))
    assert table.sizes[0] == 3
    assert {layer for layer, _, _ in table.groups} == {0}
    assert table.exact_groups(0.5)[1:] == [[], []]


def setting(exact, fact, mass, block=64, tokens=1024):
    return Setting(block, tokens, "own", 32, exact, fact, mass, mass)


def test_the_fastest_setting_that_keeps_enough_is_recommended():
    groups = [(0, 1, 0.6), (1, 0, 0.3), (0, 0, 0.1), (1, 1, 0.0)]
    settings = [
        setting(1.0, 0.95, 0.9), setting(0.5, 0.945, 0.895), setting(0.25, 0.93, 0.88), setting(0.0, 0.95, 0.83),
        setting(1.0, 0.93, 0.9, tokens=512), setting(0.5, 0.96, 0.95, tokens=2048),
    ]  # fmt: skip
    table = FactTable((2, 32, 2, 128), [], settings, groups, 4, 4, 4096)
    assert table.default == settings[0]
    assert table.recommended == settings[1]
    assert [table.exact_groups(share) for share in (0.5, 0.25, 1.0)] == [[[1], [0]], [[1], []], []]
    assert "exact_groups" not in table.stored(settings[0])
    assert table.stored(settings[1])["exact_groups"] == [[1], [0]]
    length = table.faster_from(settings[1])
    assert table.speed(settings[1], length - 1024) < 1 <= table.speed(settings[1], length)
    assert table.faster_from(setting(1.0, 0.9, 0.9, block=32, tokens=1 << 18)) == 0  # never
    # an eighth of a dense forward pass for the scores, at 64k, and 1,024 of 32k keys on average
    dense, scores, blocks = table.work(settings[0], 65536)
    assert (scores / dense, blocks / dense) == pytest.approx((1 / 8, 1 / 32), rel=0.02)
    assert table.work(settings[1], 65536)[1] == pytest.approx(scores * (32 + 128 / 64) / 2 / 32)


def test_the_command_prints_a_table_and_stores_its_recommendation(folder, capsys, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("It rains in the hills, and the river rises slowly. " * 120)
    assert main(["calibrate", str(folder), "--text", str(text), "--length", "2048", "--facts", "8", "--store"]) == 0
    assert "recommended: " in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text())["tercet"]["selector"] == "own"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=tercet.interop.huggingface.support.NAME)
    assert model(torch.ones(1, 600, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere", "does not exist"),
        ("{folder}/..", "no config.json"),
        ("{folder}/tokenizer.json --store", "--store needs a folder"),
        ("{folder} --length 300", "too short"),
        ("{folder} --length 1100 --store", "needs texts of at least 2048 tokens"),
        ("{folder} --text nowhere.txt", "--text nowhere.txt cannot be read"),
    ],
)
def test_errors_are_one_line(arguments, words, folder, capsys):
    assert main(["calibrate", *arguments.format(folder=folder).split()]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in error

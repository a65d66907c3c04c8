"""Imported dense checkpoints start with the loss of the dense model and can be trained."""

from __future__ import annotations

import copy
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import tercet
from inference.models import AS_M7C, trained
from tercet import cli
from tercet.attention.config import NSAConfig
from tercet.cli import main
from tercet.config.load import load
from tercet.data.tokenizers import ByteTokenizer
from tercet.errors import TercetError, UsageError
from tercet.interop.huggingface import import_hf
from tercet.interop.huggingface.export import as_transformers_tokenizer, export
from tercet.interop.huggingface.import_hf import import_model

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 256, "initializer_range": 0.2,
    "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SIZES, rope_theta=5000.0, tie_word_embeddings=True),
    "llama, linear scaling": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}
# blocks of 8: 8 of them, or a window of 64, cover 64 tokens
NSA = NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=8, window=64)
LENGTH = 64
# as nsa.md recommends: blocks that do not overlap, their mean, of the selected branch's keys
BLOCKS = replace(NSA, compress_block=NSA.compress_stride)
RECOMMENDED = {"nsa": BLOCKS, "compression": "mean", "compress_selected_keys": True}
PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("huggingface.md", "convert.md")]


def dense_model(folder, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # weights of 0 or 1 would hide a wrong mapping
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(params=FAMILIES, scope="module")
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "model"
    return dense_model(folder, FAMILIES[request.param]), folder


def losses(theirs, folder, length):
    """Mean loss of the dense model and of its import, on the same tokens."""
    tokens = torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(1))
    targets = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    with torch.no_grad():
        loss = tercet.load_model(folder)(tokens, None, targets)
        return theirs(tokens, labels=tokens).loss.item(), (loss.total / loss.tokens).item()


def test_a_longer_context_scales_rope_as_transformers_does(tmp_path):
    short = dense_model(tmp_path / "dense", FAMILIES["llama"])
    context = short.config.max_position_embeddings
    imported = import_model(tmp_path / "dense", tmp_path / "out", attention="dense", extend=4 * context)
    assert imported.run.data.seq_len == 4 * context
    config = copy.deepcopy(short.config)
    config.rope_parameters |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": context}
    theirs = type(short)(config)
    theirs.load_state_dict(short.state_dict())
    tokens = torch.randint(1, 99, (2, 100))
    with torch.no_grad():
        logits = tercet.load_model(tmp_path / "out")(tokens)
        torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(logits, short(tokens).logits, atol=1e-2)
    with pytest.raises(TercetError, match=f"is not above max_position_embeddings={context}: use --seq_len"):
        import_model(tmp_path / "dense", tmp_path / "same", attention="dense", extend=context)


def test_layers_of_different_kinds_match_the_dense_loss_as_far_as_all_of_them_reach(tmp_path):
    theirs = dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    chosen = {"nsa": replace(NSA, window=48), "attention": "window,nsa,dense", "gate_logit": 20.0}
    imported = import_model(tmp_path / "dense", tmp_path / "out", **chosen)
    assert imported.exact_length == 48
    dense, ours = losses(theirs, tmp_path / "out", 48)
    assert abs(ours - dense) < 2e-5
    with pytest.raises(UsageError, match="attention='window,nsa' names 2 layers but layers=3"):
        import_model(tmp_path / "dense", tmp_path / "other", attention="window,nsa")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_block_sparse_import_is_the_same_model_below_dense_below_cached_and_not(family, tmp_path, backend):
    theirs, folder = family
    options = {"attention": "block-sparse", "nsa": replace(NSA, select_count=4), "dense_below": 50}
    imported = import_model(folder, tmp_path / "out", **options)
    assert imported.exact_length == 50
    assert imported.run.run.name == "model-block-sparse"
    model = tercet.load_model(tmp_path / "out")
    for layer in model.attention_layers():
        layer.backend = backend
    tokens = torch.randint(1, 99, (2, 50))
    caches = [layer.make_cache(2) for layer in model.attention_layers()]
    with torch.no_grad():
        right = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), right, rtol=1e-3, atol=1e-4)
        cached = [model(part, cache=caches) for part in (tokens[:, :20], tokens[:, 20:49], tokens[:, 49:])]
        torch.testing.assert_close(torch.cat(cached, 1), right, rtol=1e-3, atol=1e-4)
        longer = torch.randint(1, 99, (1, 100))
        assert not torch.allclose(model(longer), theirs(longer).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attention", "block-sparse", "--gate_logit", "20"], "--gate_logit has no effect with --attention block-"),
        (["--attention", "dense", "--nsa.select_count", "7"], "--nsa has no effect with --attention dense"),
        (["--seq_len", "0"], "--seq_len 0 is below 2"),
        (["--seq_len", "64", "--extend", "128"], "both set the length to train with"),
    ],
)
def test_options_without_effect_are_refused(words, message, tmp_path, capsys):
    assert main(["import", "hf", str(tmp_path), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_block_sparse_options_that_contradict_each_other_are_refused(tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    for chosen, words in (
        ({"dense_below": 5}, "--dense_below has no effect with --attention nsa: drop it, or use block-sparse"),
        ({"selector": "learned"}, "--selector has no effect with --attention nsa"),
        ({"attention": "block-sparse,nsa,dense"}, "cannot be mixed"),
        ({"attention": "two-branch,nsa,dense"}, "two-branch and nsa cannot be mixed"),
        ({"attention": "two-branch", "dense_below": 5}, "--dense_below has no effect"),
        ({"attention": "blocksparse"}, "'blocksparse' is unknown: pick from nsa, dense, window, block-sparse"),
    ):
        with pytest.raises(UsageError, match=words):
            import_model(tmp_path / "dense", tmp_path / "out", **chosen)
    learned = {"attention": "block-sparse*2,dense", "selector": "learned"}
    with pytest.raises(UsageError, match=r"nothing to choose: every query reads all .* of at most 256 tokens"):
        import_model(tmp_path / "dense", tmp_path / "out", **learned)
    pattern = import_model(tmp_path / "dense", tmp_path / "out", **learned, nsa=NSA)
    assert pattern.run.model.attention_kinds == ("nsa", "nsa", "dense")
    two = import_model(tmp_path / "dense", tmp_path / "two", attention="two-branch*2,dense", nsa=NSA).run.model
    assert two.attention_kinds == ("nsa", "nsa", "dense")
    assert (two.branches, two.selector) == (("selected", "window"), "learned")


@pytest.mark.parametrize(
    "chosen", [{"nsa": NSA}, RECOMMENDED, {"nsa": NSA, "attention": "two-branch"}], ids=["paper", "recommended", "two"]
)
def test_the_selected_branch_matches_the_dense_loss(family, tmp_path, chosen):
    theirs, folder = family
    imported = import_model(folder, tmp_path / "out", **chosen)
    assert imported.exact_length == LENGTH
    dense, ours = losses(theirs, tmp_path / "out", LENGTH)
    assert abs(ours - dense) < 2e-3
    import_model(folder, tmp_path / "shut", gate_logit=20.0, **chosen)
    dense, ours = losses(theirs, tmp_path / "shut", LENGTH)
    assert abs(ours - dense) < 2e-5


def test_keys_and_values_are_copied_to_every_branch(family, tmp_path):
    theirs, folder = family
    import_model(folder, tmp_path / "own", nsa=NSA)
    import_model(folder, tmp_path / "tied", **RECOMMENDED)
    own, tied = (tercet.load_model(tmp_path / name).state_dict() for name in ("own", "tied"))
    for i, layer in enumerate(theirs.model.layers):
        for kind in ("weight", "bias"):
            k, v = (getattr(proj, kind) for proj in (layer.self_attn.k_proj, layer.self_attn.v_proj))
            if k is None:
                continue
            name = f"blocks.{i}.attention.kv_proj.{kind}"
            assert torch.equal(own[name], torch.cat((k, v) * 3))
            assert torch.equal(tied[name], torch.cat((v, *(k, v) * 2)))
        norms = [n for n in tied if n.startswith(f"blocks.{i}.attention.k_norms.")]
        assert len(norms) == (2 if hasattr(layer.self_attn, "k_norm") else 0)
        assert all(torch.equal(tied[n], layer.self_attn.k_norm.weight) for n in norms)
    assert not [n for n in tied if "compress_" in n]  # a mean has no weights


def test_an_import_prints_what_sparsity_costs(tmp_path, capsys):
    sizes = {**SIZES, "vocab_size": 256, "max_position_embeddings": 1024}
    dense_model(tmp_path / "dense", LlamaConfig(**sizes))
    as_transformers_tokenizer(ByteTokenizer(), 1024).save_pretrained(tmp_path / "dense")
    words = ["import", "hf", str(tmp_path / "dense"), str(tmp_path / "out"), "--attention", "block-sparse"]
    assert cli.main([*words, "--nsa.select_count", "8"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert "no tokenizer.json" not in output.err
    assert "comparing facts and loss, dense: text 1 of 4" in output.err
    at = next(i for i, line in enumerate(lines) if "facts" in line and "1,024 tokens" in line)
    dense, sparse = lines[at + 1 : at + 3]
    assert re.match(r"dense +\d of 4 +\d\.\d{3}$", dense)
    assert re.match(r"8 blocks of 64, own +\d of 4 +\d\.\d{3} +[+-]\d\.\d%$", sparse)
    assert load(file=tmp_path / "out" / "config.toml").config.model.selector == "own"


def test_a_gguf_file_is_read_by_transformers(tmp_path, monkeypatch):
    model = dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    tokenizer = as_transformers_tokenizer(ByteTokenizer(), 256)
    file = tmp_path / "small.gguf"
    file.touch()
    monkeypatch.setattr(import_hf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="package gguf: pip install gguf"):
        import_model(file, tmp_path / "out")
    monkeypatch.setattr(import_hf.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(import_hf, "load_dense", lambda path, device: (model, tokenizer))
    assert import_model(file, tmp_path / "out").run.run.name == "small-nsa"
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("dense", "out")]
    assert torch.equal(weights[0]["model.embed_tokens.weight"], weights[1]["embedding.weight"])


def test_the_import_commands_in_the_docs_work(tmp_path, monkeypatch):
    """One uses the paper's settings, one those of the preset m7c, two are block-sparse, one is two-branch."""
    dense_model(tmp_path / "Qwen3-0.6B", Qwen3Config(**{**SIZES, "num_hidden_layers": 1}, head_dim=16))
    monkeypatch.chdir(tmp_path)
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = [line for line in text.splitlines() if line.startswith("tercet import hf ")]
    made = []
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0
        out = Path(shlex.split(line)[4])
        run = load(file=out / "config.toml").config
        made.append(run.model)
        out.rename(f"made-{len(made)}")
    paper, recommended, two, blocks, learned = made
    assert (blocks.gate, blocks.selector, blocks.dense_below) == ("none", "own", 4096)
    assert run.data.seq_len > max(learned.dense_below, learned.nsa.select_count * learned.nsa.select_block)
    assert learned == blocks.model_copy(update={"selector": "learned"})
    m7c, m7c_two = (load(name).config.model for name in ("m7c", "m7c-two-branch"))
    assert (two.gate, two.branches, two.selector) == (m7c_two.gate, m7c_two.branches, m7c_two.selector)
    assert (paper.compression, paper.compress_selected_keys, paper.nsa) == ("mlp", False, NSAConfig())
    for name in ("compression", "compress_selected_keys", "nsa"):
        assert getattr(recommended, name) == getattr(m7c, name)


@pytest.mark.parametrize(
    ("given", "eos"), [({"eos_token": "</s>"}, "</s>"), ({"eos_token": {"content": "<eos>"}}, "<eos>"), ({}, "")]
)
def test_the_tokenizer_and_its_eos_are_imported(given, eos, tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    (tmp_path / "dense" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "dense" / "tokenizer_config.json").write_text(json.dumps(given))
    data = import_model(tmp_path / "dense", tmp_path / "ours", nsa=NSA).run.data
    assert (data.tokenizer, data.eos_token) == (str(tmp_path / "ours" / "tokenizer.json"), eos)
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == '{"model": {"vocab": {"a": 0}}}'


def test_an_import_can_be_trained(tmp_path):
    from tercet.train.trainer import train

    theirs = dense_model(tmp_path / "dense", LlamaConfig(**{**SIZES, "vocab_size": 256}))
    import_model(tmp_path / "dense", tmp_path / "out", nsa=NSA, seq_len=LENGTH)
    flags = {"run.dir": str(tmp_path / "run"), "train.steps": 2, "train.tokens_per_step": 128, "train.val_tokens": 0,
             "data.source": "synthetic", "log.tensorboard": False, "checkpoint.every": 2, "run.threads": 1,
             "train.micro_batch": 1, "train.sample_tokens": 0, "train.lr": 1e-2, "train.warmup_steps": 0}  # fmt: skip
    assert train(load(file=tmp_path / "out" / "config.toml", flags=flags).config, origins=None, resume=None) == 0
    before, after = (tercet.load_model(tmp_path / name).state_dict() for name in ("out", "run"))
    assert torch.equal(before["embedding.weight"], theirs.model.embed_tokens.weight)
    # Closed branches get gradients too.
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert "blocks.0.attention.gate.proj.weight" in changed
    assert "blocks.0.attention.kv_proj.weight" in changed


@pytest.mark.parametrize("changes", [{}, AS_M7C], ids=str)
def test_an_imported_export_has_exactly_the_same_weights(tmp_path, changes):
    run = trained(tmp_path / "run", train__steps=2, **changes)
    import_model(export(run, tmp_path / "exported"), tmp_path / "back")
    before, after = tercet.load_model(run), tercet.load_model(tmp_path / "back")
    assert before.config == after.config
    assert before.context == after.context
    assert after.run.accumulation == 16  # passes of 4096 tokens, however short the sequences are
    assert before.tokenizer.fingerprint == after.tokenizer.fingerprint
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])


def test_options_of_a_dense_import_are_refused_for_an_export(tmp_path):
    folder = export(trained(tmp_path / "run", train__steps=1), tmp_path / "exported")
    with pytest.raises(
        UsageError, match=r"exported is a Tercet export.*: leave out nsa, compress_selected_keys, gate_logit$"
    ):
        import_model(folder, tmp_path / "back", nsa=NSA, compress_selected_keys=True, gate_logit=2.0)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' cannot be imported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' cannot be imported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' cannot be imported"),
        ({"num_hidden_layers": 4}, "lacks model.layers.3."),
        ({"num_hidden_layers": 2}, "unexpected weights"),
        ({"intermediate_size": 64}, "config.json requires [64, 32]"),
        ({"num_key_value_heads": 3}, "kv_heads=3"),
        ({"hidden_size": None}, "of the wrong type"),
        ({"rope_parameters": 5}, "of the wrong type"),
        ({"max_position_embeddings": "x"}, "of the wrong type"),
        ({"vocab_size": 2**24}, "config.json requires [16777216, 32]"),
    ],
)
def test_unsupported_models_raise_one_line(tmp_path, change, said):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TercetError) as caught:
        import_model(tmp_path / "dense", tmp_path / "out")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_an_incomplete_folder_is_refused(tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    (tmp_path / "dense" / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(TercetError, match=r"model\.safetensors cannot be read"):
        import_model(tmp_path / "dense", tmp_path / "out")
    (tmp_path / "dense" / "config.json").unlink()
    with pytest.raises(TercetError, match=r"config\.json is missing"):
        import_model(tmp_path / "dense", tmp_path / "out")

"""Block-sparse and dense models leave for plain transformers, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import tercet
from interop.test_import import NSA, SIZES, dense_model
from tercet import cli
from tercet.errors import UsageError
from tercet.interop.huggingface import use_block_sparse
from tercet.interop.huggingface.dense_weights import SELECTOR_WEIGHTS
from tercet.interop.huggingface.export import export
from tercet.interop.huggingface.folder import read_weights
from tercet.interop.huggingface.import_hf import import_model
from tercet.interop.options import check_family
from tercet.model.config import ModelConfig

FAMILIES = {
    "llama": LlamaConfig(
        **SIZES, attention_bias=True, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_give_the_original_weights_and_logits(family: str, tmp_path):
    theirs = dense_model(tmp_path / "dense", FAMILIES[family])
    import_model(tmp_path / "dense", tmp_path / "ours", attention="block-sparse", nsa=NSA, selector="learned")
    export(tmp_path / "ours", tmp_path / "back", family)
    before, after = (read_weights(tmp_path / name) for name in ("dense", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(theirs)
    tokens = torch.randint(1, 99, (2, 64))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, theirs(tokens).logits)
        ours = tercet.load_model(tmp_path / "ours")(tokens)
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-3, atol=1e-4)
    imported = import_model(tmp_path / "back", tmp_path / "again", seed=7)
    assert imported.restored
    assert imported.run.model == tercet.load_model(tmp_path / "ours").config
    ours_file, again = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert ours_file.keys() == again.keys()
    assert "blocks.0.attention.selector.k_proj.weight" in again
    assert all(torch.equal(ours_file[name], again[name]) for name in ours_file)


def test_an_exported_folder_can_be_converted_anew(tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    import_model(tmp_path / "dense", tmp_path / "ours", attention="block-sparse", dense_below=9)
    export(tmp_path / "ours", tmp_path / "back", "llama")
    imported = import_model(tmp_path / "back", tmp_path / "again", attention="nsa")
    assert not imported.restored
    assert imported.run.model.gate == "sigmoid"
    with pytest.raises(UsageError, match="leave out dense_below, or pass --attention"):
        import_model(tmp_path / "back", tmp_path / "other", dense_below=5)


def test_settings_of_use_block_sparse_are_imported(tmp_path):
    theirs = dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    use_block_sparse(theirs, NSA, dense_below=50)
    theirs.save_pretrained(tmp_path / "sparse")
    model = import_model(tmp_path / "sparse", tmp_path / "ours").run.model
    assert (model.gate, model.nsa, model.dense_below, model.qk_norm) == ("none", NSA, 50, True)


@pytest.mark.parametrize("attention", [["dense", "nsa"], "dense,nsa"])
def test_saved_settings_for_another_number_of_layers_are_refused(attention: object, tmp_path):
    theirs = dense_model(tmp_path / "dense", FAMILIES["llama"])
    use_block_sparse(theirs, NSA)
    theirs.config.tercet |= {"layers": 2, "attention": attention}
    theirs.save_pretrained(tmp_path / "sparse")
    with pytest.raises(UsageError, match=r"attention.* names 2 layers but layers=3"):
        import_model(tmp_path / "sparse", tmp_path / "ours")


def test_selectors_that_do_not_fit_are_refused(tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    import_model(tmp_path / "dense", tmp_path / "ours", attention="block-sparse", selector="learned", nsa=NSA)
    export(tmp_path / "ours", tmp_path / "back", "llama")
    path = tmp_path / "back" / SELECTOR_WEIGHTS
    saved = load_file(path)
    first = "blocks.0.attention.selector.k_proj.weight"
    for changed, words in (
        ({first: saved[first][1:].clone()}, r"k_proj\.weight has shape \[63, 32\]"),
        ({"blocks.9.x": torch.zeros(1)}, r"has 1 unexpected weights, such as blocks\.9\.x"),
        (None, "lacks blocks.0"),
    ):
        save_file(saved | changed if changed else {}, path)
        with pytest.raises(UsageError, match=words):
            import_model(tmp_path / "back", tmp_path / "again")
    path.unlink()
    with pytest.raises(UsageError, match=f"has no {SELECTOR_WEIGHTS}.*copy"):
        import_model(tmp_path / "back", tmp_path / "again")
    config = tmp_path / "back" / "config.json"
    config.write_text(config.read_text().replace('"selector": "learned"', '"selector": "best"'))
    with pytest.raises(UsageError, match=r"config\.tercet\.selector: "):
        import_model(tmp_path / "back", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_command_writes_one_file_and_says_how_to_load_it(tmp_path, capsys):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    source, ours, back = (str(tmp_path / name) for name in ("dense", "ours", "back"))
    assert cli.main(["import", "hf", source, ours, "--attention", "block-sparse", "--dense_below", "2000"]) == 0
    said, warned = capsys.readouterr()
    assert "has no tokenizer.json" in warned
    assert "--train.tokens_per_step 256" in said  # on a CPU one sequence, not 65,536 tokens
    assert "still dense in sequences of" in said
    assert cli.main(["export", "hf", ours, back, "--format", "llama", "--dtype", "bfloat16"]) == 0
    assert "from transformers import AutoModelForCausalLM" in capsys.readouterr().out
    assert (tmp_path / "back" / "model.safetensors").exists()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tercet"]["dense_below"] == 2000
    assert AutoModelForCausalLM.from_pretrained(back).dtype == torch.bfloat16


def test_an_import_with_new_selectors_says_how_to_train_them_first(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dense_model(tmp_path / "dense", LlamaConfig(**{**FAMILIES["llama"].to_dict(), "vocab_size": 256}))
    words = ["--attention", "block-sparse", "--selector", "learned", "--seq_len", "256"]
    blocks = ["--nsa.select_block", "32", "--nsa.select_count", "4"]
    assert cli.main(["import", "hf", "dense", "ours", *words, *blocks]) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(commands) == 2
    for command, tokens in zip(commands, (5e6, 20e6), strict=True):
        _, _, line = command.partition(" train ")
        flags = line.split()
        assert int(flags[flags.index("--train.steps") + 1]) * 256 == pytest.approx(tokens, rel=1e-3)
        assert cli.main(["train", *flags, "--train.steps", "1", "--train.sample_tokens", "0"]) == 0
    assert (tmp_path / "converted" / "metrics.json").exists()


def test_models_that_are_not_of_the_family_are_refused(tmp_path):
    dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    import_model(tmp_path / "dense", tmp_path / "ours", attention="dense")
    for family in ("llama", "qwen2"):
        with pytest.raises(UsageError, match=f"--format {family} does not fit: the model has QK norm; use .* qwen3"):
            export(tmp_path / "ours", tmp_path / "back", family)
    dense_model(tmp_path / "biases", FAMILIES["llama"])
    import_model(tmp_path / "biases", tmp_path / "with biases", attention="dense")
    with pytest.raises(UsageError, match=r"--format qwen2 does not fit: .*o_proj.bias"):
        export(tmp_path / "with biases", tmp_path / "back", "qwen2")
    with pytest.raises(UsageError, match="the model has no QK norm; use --format"):
        export(tmp_path / "with biases", tmp_path / "back", "qwen3")
    with pytest.raises(UsageError, match=r"model\.attention=nsa cannot be exported with --format llama"):
        check_family(ModelConfig(attention="nsa"), "llama")

"""Block-sparse and dense models leave for plain transformers, bit for bit."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import tercet
from interop.test_import import NSA, SIZES, dense_model
from tercet import cli
from tercet.errors import UsageError
from tercet.interop.huggingface.export_dense import SELECTOR_WEIGHTS, check_family, export_dense
from tercet.interop.huggingface.folder import LazyWeights, tensors
from tercet.interop.huggingface.import_hf import import_model
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
    # small enough for several files
    export_dense(tmp_path / "ours", tmp_path / "back", family, shard_bytes=1 << 15)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) >= 4
    before, after = dict(tensors(tmp_path / "dense")), dict(tensors(tmp_path / "back"))
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
    import_model(tmp_path / "back", tmp_path / "again", attention="block-sparse", nsa=NSA, selector="learned")
    ours_file, again = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "again"))
    assert all(torch.equal(ours_file[name], again[name]) for name in ours_file)
    selectors = load_file(tmp_path / "back" / SELECTOR_WEIGHTS)
    assert sorted(selectors)[0] == "blocks.0.attention.selector.k_proj.weight"


def test_an_import_holds_a_few_tensors_at_a_time(tmp_path, monkeypatch):
    theirs = dense_model(tmp_path / "dense", FAMILIES["qwen3"])
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = LazyWeights.__getitem__

    def counted(self: LazyWeights, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(LazyWeights, "__getitem__", counted)
    import_model(tmp_path / "dense", tmp_path / "out", attention="block-sparse")
    assert len(alive) == len(theirs.state_dict())
    assert most <= 5  # the tensor that is being written, and two pairs of a block that are joined


def test_the_command_writes_one_file_and_says_how_to_load_it(tmp_path, capsys):
    dense_model(tmp_path / "dense", FAMILIES["llama"])
    source, ours, back = (str(tmp_path / name) for name in ("dense", "ours", "back"))
    assert cli.main(["import", "hf", source, ours, "--attention", "block-sparse", "--dense_below", "2000"]) == 0
    assert "equal to the dense model up to 2,000 tokens" in capsys.readouterr().out
    assert cli.main(["export", "hf", ours, back, "--format", "llama", "--dtype", "bfloat16"]) == 0
    assert "AutoModelForCausalLM.from_pretrained" in capsys.readouterr().out
    assert (tmp_path / "back" / "model.safetensors").exists()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tercet"]["dense_below"] == 2000
    assert AutoModelForCausalLM.from_pretrained(back).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", {}, "pick one of tercet, llama"),
        ("llama", {"attention": "nsa"}, "model.attention=nsa cannot be exported"),
        ("llama", {"qk_norm": True}, "qwen3 has norms"),
        ("qwen3", {}, "qwen3 has norms"),
        ("qwen2", {}, "use --format llama"),
        ("mistral", {"attention_bias": True}, "use --format llama"),
        ("llama", {"value_dim": 32}, "values must be as large as keys"),
    ],
)
def test_models_that_are_not_of_the_family_are_refused(family: str, changes: dict[str, object], words: str):
    with pytest.raises(UsageError, match=words):
        check_family(ModelConfig(**{"attention": "dense", **changes}), family)

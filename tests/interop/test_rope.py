"""RoPE of extended models: the frequencies and logits of transformers, in every form a model takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tercet
from interop.test_import import NSA, SIZES, dense_model
from tercet.errors import TercetError, UsageError
from tercet.interop.huggingface.dense_weights import model_config, read_config, rope_parameters
from tercet.interop.huggingface.export import export
from tercet.interop.huggingface.import_hf import import_model
from tercet.model.config import ModelConfig
from tercet.model.rope import Rotary

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# At sizes of real models: all channels from fast to slow
REAL: dict[str, dict[str, Any]] = {
    "llama 3.1": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "llama 3.2": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "qwen": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
    "yarn, all options": {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4,
        "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.3,
    },
    "yarn, mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4, "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "yarn, no range": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 1e4,
    },
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
}  # fmt: skip
# Small enough that 50 tokens turn all channels
SMALL = {
    "llama3": LlamaConfig(
        **SIZES,
        rope_parameters={**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0},
    ),
    "yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0,
        "beta_fast": 4.0,
    }),
}  # fmt: skip


def as_dict(config: LlamaConfig) -> dict[str, Any]:
    """The content of a config.json."""
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content


def settings(content: dict[str, Any]) -> ModelConfig:
    """As an import reads a config.json."""
    return model_config(read_config(content), {"attention": "dense", "nsa": NSA})


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", REAL)
def test_frequencies_are_those_of_transformers(name: str, size: int):
    theirs = LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(REAL[name])
    )
    ours = settings(as_dict(theirs))
    rotary = Rotary(ours.head_dim, ours.rope_theta, ours.rope_scaling, rope=ours.rope)
    wanted, factor = ROPE_INIT_FUNCTIONS[REAL[name]["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(rotary.frequencies(torch.device("cpu")).float(), wanted, rtol=2e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(factor)
    again = as_dict(theirs) | {"rope_parameters": rope_parameters(ours)}
    assert settings(again) == ours


def test_old_names_of_the_fields_and_a_missing_factor_are_understood():
    old = as_dict(SMALL["llama3"])
    scaling = old.pop("rope_parameters")
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    expected = settings(as_dict(SMALL["llama3"]))
    assert settings({**old, "rope_theta": theta, "rope_scaling": {"type": kind, **scaling}}) == expected
    yarn = as_dict(SMALL["yarn"])
    yarn["rope_parameters"]["factor"] = None
    assert settings(yarn).rope_scaling == SIZES["max_position_embeddings"] / 32


@pytest.mark.parametrize("kind", SMALL)
def test_logits_equal_transformers_wherever_the_model_goes(kind: str, tmp_path):
    close = {"rtol": 1e-3, "atol": 1e-4}
    theirs = dense_model(tmp_path / "dense", SMALL[kind])
    tokens = torch.randint(1, 99, (2, 50), generator=torch.Generator().manual_seed(1))
    options = {"attention": "block-sparse", "nsa": replace(NSA, select_count=4), "dense_below": 50}
    imported = import_model(tmp_path / "dense", tmp_path / "ours", **options)
    assert imported.run.model.rope.type == kind
    model = tercet.load_model(tmp_path / "ours")
    caches = [layer.make_cache(2) for layer in model.attention_layers()]
    family = SMALL[kind].model_type
    export(tmp_path / "ours", tmp_path / "back", family)
    sparse = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="tercet")
    with torch.no_grad():
        right = theirs(tokens).logits
        for found in (
            model(tokens),
            model.train()(tokens),  # as in training
            torch.cat([model.eval()(part, cache=caches) for part in (tokens[:, :20], *tokens[:, 20:].split(15, 1))], 1),
            AutoModelForCausalLM.from_pretrained(export(tmp_path / "ours", tmp_path / "tercet"))(tokens).logits,
            AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits,
            sparse(tokens).logits,
        ):
            torch.testing.assert_close(found, right, **close)
        # beyond dense_below, blocks are chosen by the same rotated keys
        longer = torch.randint(1, 99, (2, 100), generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(sparse(longer).logits, model(longer), **close)
        for layer in (model, *model.attention_layers()):
            layer.rotary.rope = replace(layer.rotary.rope, original_length=1000)
        assert not torch.allclose(model(tokens), right, rtol=1e-2, atol=1e-2)
    again = import_model(tmp_path / "back", tmp_path / "again").run.model
    assert again == imported.run.model


def test_a_limit_of_wavelengths_is_not_exported():
    with pytest.raises(UsageError, match="rope_max_wavelength=250 cannot be exported"):
        rope_parameters(ModelConfig(rope_max_wavelength=250))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_type": "dynamic"}, "rope_type='dynamic' cannot be imported: supported are linear"),
        ({"factor": None}, "of the wrong type"),
        ({"high_freq_factor": 0.5}, "rope.slow=1 above 0 and below rope.fast=0.5"),
        (
            {"original_max_position_embeddings": 0.5},
            "rope.original_length=0 must be at least 1",
        ),
        ({"factor": -1.0}, "rope_scaling=-1"),
        ({"partial_rotary_factor": 0.5}, "would not rotate as transformers does"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 8192, "truncate": False},
            "would not rotate as transformers does",
        ),
    ],
    ids=str,
)
def test_rope_that_cannot_be_imported_is_refused(change: dict[str, Any], words: str, tmp_path):
    SMALL["llama3"].save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"{}      ")
    path = tmp_path / "dense" / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(TercetError) as caught:
        import_model(tmp_path / "dense", tmp_path / "out")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

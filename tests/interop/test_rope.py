"""RoPE of extended models: the frequencies and logits of transformers, in every form a model takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tercet
from interop.test_import import NSA, SIZES, dense_model
from tercet.config.load import load, to_toml
from tercet.errors import TercetError
from tercet.interop.huggingface.dense_weights import model_config, read_config
from tercet.interop.huggingface.export import export, export_dense
from tercet.interop.huggingface.import_hf import import_model
from tercet.interop.huggingface.rope import rope_parameters
from tercet.model.config import ModelConfig, RopeConfig
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
    "yarn": Qwen3Config(
        **SIZES,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1000.0,
            "beta_fast": 4.0,
        },
    ),
}
# wavelengths of 16 channels: 6, 15, 35, 84, 199, 471, 1,117 and 2,649 positions
LIMITED = {
    "llama": (LlamaConfig(**SIZES, head_dim=16, rope_theta=1000.0), {}),
    "mistral, linear": (
        MistralConfig(**SIZES, head_dim=16, rope_theta=1000.0, sliding_window=None),
        {"rope_scaling": 3.0},
    ),
    "qwen2, llama3": (
        Qwen2Config(**SIZES, head_dim=16, rope_theta=1000.0),
        {"rope_scaling": 8.0, "rope": RopeConfig("llama3", original_length=100)},
    ),
    "qwen3, yarn": (
        Qwen3Config(**SIZES, head_dim=16, rope_theta=1000.0),
        {"rope_scaling": 4.0, "rope": RopeConfig("yarn", original_length=100, fast=8.0)},
    ),
}


def limit_wavelength(folder: Path, limit: float, **settings: Any) -> ModelConfig:
    """Change the RoPE of an imported model."""
    path = folder / "config.toml"
    run = load(file=path).config
    model = ModelConfig(**{**dict(run.model), **settings, "rope_max_wavelength": limit})
    path.write_text(to_toml(run.model_copy(update={"model": model})), encoding="utf-8")
    return model


def as_dict(config: LlamaConfig) -> dict[str, Any]:
    """The content of a config.json."""
    content: dict[str, Any] = json.loads(config.to_json_string())
    return content


def settings(content: dict[str, Any]) -> ModelConfig:
    """As an import reads a config.json."""
    return model_config(read_config(content).to_dict(), {"attention": "dense", "nsa": NSA})


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
    again = as_dict(theirs) | {"rope_parameters": rope_parameters(ours, 131072)}
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
    export_dense(tmp_path / "ours", tmp_path / "back", family)
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


@pytest.mark.parametrize("kind", LIMITED)
def test_unrotated_channels_stay_so_wherever_the_model_goes(kind: str, tmp_path):
    theirs, settings = LIMITED[kind]
    dense_model(tmp_path / "dense", theirs)
    ours = tmp_path / "ours"
    options = {"attention": "block-sparse", "nsa": replace(NSA, select_count=4)}
    import_model(tmp_path / "dense", ours, **options, dense_below=300)
    config = limit_wavelength(ours, 250.0, **settings)
    model = tercet.load_model(ours)
    rotated = model.rotary.frequencies(torch.device("cpu")) > 0
    assert 1 < rotated.sum() < len(rotated)
    back = export_dense(ours, tmp_path / "back", theirs.model_type)
    plain = AutoModelForCausalLM.from_pretrained(back)
    sparse = AutoModelForCausalLM.from_pretrained(back, attn_implementation="tercet")
    # beyond max_position_embeddings, where other longrope models change their frequencies
    tokens = torch.randint(1, 99, (2, 300), generator=torch.Generator().manual_seed(1))
    longer = torch.randint(1, 99, (2, 400), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        right = model(tokens)
        cache, parts = None, []
        for part in tokens.split(100, dim=1):
            step = plain(part, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            parts.append(step.logits)
        for found in (plain(tokens).logits, torch.cat(parts, dim=1), sparse(tokens).logits):
            torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(sparse(longer).logits, model(longer), rtol=1e-3, atol=1e-4)
    plain.save_pretrained(tmp_path / "saved")
    for folder in (back, tmp_path / "saved"):
        name = folder.name
        assert import_model(folder, tmp_path / f"again-{name}").run.model == config
        converted = import_model(folder, tmp_path / f"nsa-{name}", attention="nsa").run.model
        assert (converted.rope, converted.rope_scaling) == (config.rope, config.rope_scaling)
        assert converted.rope_max_wavelength == 250.0
        before, after = (load_file(where / "model.safetensors") for where in (ours, tmp_path / f"again-{name}"))
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("scaling", [1.0, 3.0])
@pytest.mark.parametrize("limit", [5.0, 7.0, 300.0, 6000.0, 1e6])
def test_a_wavelength_limit_is_found_in_the_factors_of_channels(limit: float, scaling: float):
    theirs = as_dict(LlamaConfig(hidden_size=256, num_attention_heads=4, rope_theta=1e4))
    limited = ModelConfig(head_dim=64, rope_theta=1e4, rope_scaling=scaling, rope_max_wavelength=limit)
    theirs["rope_parameters"] = json.loads(json.dumps(rope_parameters(limited, 2048)))
    found = settings(theirs)
    wanted, frequencies = (
        Rotary(64, 1e4, c.rope_scaling, c.rope_max_wavelength).frequencies(torch.device("cpu"))
        for c in (limited, found)
    )
    torch.testing.assert_close(frequencies, wanted, rtol=1e-12, atol=0)
    # without any rotated channel, scaling is unknown
    assert found.rope_scaling == pytest.approx(scaling if wanted.any() else 1.0)
    assert settings(theirs | {"tercet": limited.model_dump(mode="json")}).rope_max_wavelength == limit


def longrope(factors: list[Any], **changes: Any) -> dict[str, Any]:
    kind = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {**kind, **changes}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_type": "dynamic"}, "rope_type='dynamic' cannot be imported: supported are default, linear"),
        ({"rope_type": "longrope"}, "config.json has a value of the wrong type, or values that contradict each other"),
        (longrope([1, 1, 1]), "short_factor has 3 entries, but head_dim=8 needs 4"),
        (longrope([1, 1, 1, 1e30], long_factor=[1, 1, 2, 1e30]), "Tercet's RoPE is the same at all lengths"),
        (longrope([1, 1, 2, 1e30]), "one factor for all channels that are rotated"),
        (longrope([1, 1, 1, 1e30], attention_factor=1.1), "with attention_factor=1.1 and factors 1 to 1e+30"),
        (longrope([1, 1, 1, 1e30], attention_factor=None), "with attention_factor=1.26491 and factors 1 to 1e+30"),
        ({"factor": None}, "config.json has no factor for rope_type='llama3'"),
        ({"high_freq_factor": 0.5}, "rope.slow=1 above 0 and below rope.fast=0.5"),
        (
            {"original_max_position_embeddings": 0.5},
            "original_max_position_embeddings=0.5 cannot be imported: use a whole number",
        ),
        ({"factor": -1.0}, "config.json: rope_scaling: "),
        ({"partial_rotary_factor": 0.5}, "Tercet rotates whole heads; pick a model"),
        ({"rope_type": "yarn", "truncate": False}, "Tercet always truncates; pick another model"),
        ({"rope_type": "yarn", "rope_theta": 1.0}, "config.json: rope_theta=1.0 must be above 1 for rope.type=yarn"),
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

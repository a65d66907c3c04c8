"""An import is the model that transformers runs, or is refused: every family with every kind of setting."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

import tercet
from interop.test_import import NSA, SIZES, dense_model
from tercet import cli
from tercet.errors import TercetError
from tercet.interop.huggingface import dense_weights, import_hf
from tercet.interop.huggingface.import_hf import import_model
from tercet.model.config import ModelConfig

WINDOW, LENGTH = 16, 70
FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
}  # fmt: skip
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
# Entries of config.json, and the attention that fits; the first are those of a model without windows.
WINDOWS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [({}, "dense")],
    "mistral": [({"sliding_window": None}, "dense"), ({"sliding_window": WINDOW}, "window")],
    "qwen2": [
        ({"sliding_window": WINDOW}, "dense"),
        ({**WINDOWED, "max_window_layers": 0}, "window"),
        ({**WINDOWED, "max_window_layers": 1}, "dense,window,window"),
        (
            {**WINDOWED, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "window,dense,window",
        ),
    ],
}
WINDOWS["qwen3"] = WINDOWS["qwen2"]
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", **ORIGINAL, "attention_factor": 1.0}
# For heads of 8 and 16 channels
ROPE: dict[str, Callable[[int], dict[str, Any]]] = {
    "default": lambda size: {"rope_theta": 500.0},
    "linear": lambda size: {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 500.0},
    "yarn": lambda size: {"rope_parameters": {**YARN, **ORIGINAL, "rope_theta": 500.0, "beta_fast": 4.0}},
    "yarn, mscale": lambda size: {"rope_scaling": {**YARN, **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn, length outside": lambda size: {"rope_scaling": YARN, "rope_theta": 500.0, **ORIGINAL},
    "llama3": lambda size: {
        "rope_parameters": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL,
            "rope_theta": 100.0,
        }
    },
    "longrope": lambda size: {
        "rope_parameters": {**LONGROPE, "short_factor": [2.0] * (size // 2), "long_factor": [2.0] * (size // 2)}
    },
    "dynamic": lambda size: {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
}  # fmt: skip
REFUSED = {"dynamic", "longrope"}


def change(folder: Path, entries: Mapping[str, Any], remove: tuple[str, ...] = ()) -> None:
    path = folder / "config.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k not in remove}
    path.write_text(json.dumps(content | entries))


def equal(folder: Path, out: Path, length: int = LENGTH) -> None:
    tokens = torch.randint(99, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")(tokens).logits
        torch.testing.assert_close(tercet.load_model(out)(tokens), theirs, rtol=1e-3, atol=2e-4)


def check_case(family: str, tied: str, windows: int, rope: str, size: int, bias: bool, folder: Path) -> None:
    entries, attention = WINDOWS[family][windows]
    known = {"head_dim": size, "attention_bias": bias, "tie_word_embeddings": tied == "tied"}
    dense_model(folder / "dense", FAMILIES[family](**SIZES, **known, sliding_window=None))
    removed = ("rope_parameters", "layer_types", "use_sliding_window", "sliding_window")
    change(folder / "dense", entries | ROPE[rope](size), removed)
    options = {"attention": attention, "nsa": replace(NSA, window=WINDOW)}
    if attention == "dense":
        options = {"attention": "block-sparse", "dense_below": LENGTH} if bias else {"attention": "dense"}
    if rope in REFUSED:
        with pytest.raises(TercetError, match="cannot be imported"):
            import_model(folder / "dense", folder / "out", **options, check=False)
        return
    if attention != "dense":
        with pytest.raises(TercetError, match=rf"sliding_window={WINDOW} cannot be imported as .* pass --attention"):
            import_model(folder / "dense", folder / "out", attention="dense", check=False)
    import_model(folder / "dense", folder / "out", **options, check=False)
    equal(folder / "dense", folder / "out")


@pytest.mark.parametrize(
    "case",
    [
        ("llama", "untied", 0, "llama3", 16, True),
        ("mistral", "tied", 1, "yarn, length outside", 8, True),
        ("qwen2", "untied", 3, "linear", 16, False),
        ("qwen3", "tied", 2, "yarn", 16, True),
        ("qwen3", "tied", 0, "longrope", 8, False),
    ],
    ids=str,
)
def test_imports_equal_transformers_or_are_refused(case, tmp_path):
    check_case(*case, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_imports_equal_transformers_or_are_refused(family, size, tmp_path):
    choices = product(("tied", "untied"), range(len(WINDOWS[family])), ROPE, (False, True))
    for i, (tied, windows, rope, bias) in enumerate(choices):
        try:
            check_case(family, tied, windows, rope, size, bias, tmp_path / str(i))
        except BaseException as error:
            error.add_note(f"{family}, {tied}, {windows}, {rope}, head_dim={size}, attention_bias={bias}")
            raise


def biases(names: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {
        name.replace("weight", "bias"): torch.ones(len(tensor)) for name, tensor in weights.items() if names in name
    }


def down(value: float, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {"model.layers.1.mlp.down_proj.weight": torch.full((32, 48), value, dtype=dtype)}


@pytest.mark.parametrize(
    ("family", "entries", "weights", "words"),
    [
        ("mistral", {"attention_bias": True}, biases("self_attn"), "unexpected weights, such as .*k_proj.bias"),
        ("qwen2", {}, biases("o_proj"), "unexpected weights, such as .*o_proj.bias"),
        ("llama", {"is_causal": False}, None, "is_causal=False cannot be imported"),
        ("llama", {"mlp_bias": True}, biases("mlp"), "mlp_bias=True cannot be imported"),
        (
            "llama",
            {"tie_word_embeddings": True},
            lambda weights: {"lm_head.weight": weights["lm_head.weight"] + 1},
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, None, "rope_type=None cannot"),
        (
            "llama",
            {},
            down(1, torch.int8),
            "layers.1.mlp.down_proj.weight has type torch.int8: use the unquantized",
        ),
        ("llama", {}, down(1, torch.float8_e4m3fn), "has type torch.float8_e4m3fn"),
        ("llama", {}, down(float("nan"), torch.bfloat16), "blocks.1.ffn.down.weight has NaN or infinite weights"),
        ("llama", {}, down(1e300, torch.float64), "has NaN or infinite weights"),
        ("llama", {"transformers_weights": "none.safetensors"}, None, "cannot be compared .* pass --no_check"),
    ],
    ids=lambda given: given.replace(" ", "-")[:40] if isinstance(given, str) else "",
)
def test_models_that_tercet_would_compute_differently_are_refused(family, entries, weights, words, tmp_path):
    dense_model(tmp_path / "dense", FAMILIES[family](**SIZES, head_dim=8, sliding_window=None))
    change(tmp_path / "dense", entries)
    if weights:
        path = tmp_path / "dense" / "model.safetensors"
        stored = load_file(path)
        save_file(stored | weights(stored), path, metadata={"format": "pt"})
    with pytest.raises(TercetError, match=words) as caught:
        import_model(tmp_path / "dense", tmp_path / "out", check="cannot be compared" in words)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_mistral_without_the_key_has_the_window_of_its_class_and_is_compared_beyond_it(tmp_path, capsys):
    dense_model(tmp_path / "dense", MistralConfig(**{**SIZES, "num_hidden_layers": 1}))
    change(tmp_path / "dense", {}, ("sliding_window",))
    command = ["import", "hf", str(tmp_path / "dense"), str(tmp_path / "out"), "--attention"]
    assert cli.main([*command, "dense"]) == 2
    assert (
        "sliding_window=4096 cannot be imported as dense attention: pass --attention window" in capsys.readouterr().err
    )
    assert cli.main([*command, "window", "--nsa.window", "4096"]) == 0
    assert "compared with transformers: logits of 4,128 tokens differ by" in capsys.readouterr().out


def test_an_import_that_differs_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    dense_model(tmp_path / "dense", LlamaConfig(**SIZES, tie_word_embeddings=True))
    real = dense_weights.model_config
    wrong = {"norm_eps": 1e-2}
    monkeypatch.setattr(dense_weights, "model_config", lambda *given: real(*given).model_copy(update=wrong))
    command = ["import", "hf", str(tmp_path / "dense"), str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert "differs from what transformers computes: logits of 128 tokens differ by" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    assert cli.main([*command, "--no_check"]) == 0
    assert "not compared with transformers" in capsys.readouterr().out


@pytest.mark.parametrize("chosen", [{}, {"attention": "two-branch*2,dense"}], ids=str)
def test_sparse_imports_are_compared_as_dense_ones(tmp_path, chosen):
    dense_model(tmp_path / "dense", Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True))
    (note,) = import_model(tmp_path / "dense", tmp_path / "out", **chosen, nsa=NSA).notes
    assert "compared with transformers, with dense attention in place of sparse: logits of 128 tokens" in note


def test_the_comparison_of_large_models_is_bounded():
    large = {"attention": "dense", "vocab_size": 128256, "tie_embeddings": False}
    eight = ModelConfig(dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn_dim=14336, **large)
    assert import_hf._affordable_layers(eight) == 1
    small = ModelConfig(dim=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn_dim=3072, vocab_size=151936)
    assert import_hf._affordable_layers(small) == 28

"""attn_implementation="tercet" serves any decoder of transformers whose attention it computes, and refuses others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import tercet
from tercet.interop.huggingface import attention, use_block_sparse
from tercet.interop.huggingface.support import UnsupportedError

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# layers without RoPE, rotation by pairs or of a part, another scale, other norms, windows in some layers
SERVED: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "cohere": {},
    "granite": {"attention_multiplier": 0.3},
    "gemma3_text": {"layer_types": LAYERS, "sliding_window": 16, "query_pre_attn_scalar": 4},
}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {}, "glm": {}, "olmo": {}, "olmo2": {}, "ernie4_5": {}, "stablelm": {}, "seed_oss": {}, "nanochat": {},
    "phi3": {"sliding_window": None}, "starcoder2": {"sliding_window": None, "attention_dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.0},
    "qwen2": {"layer_types": LAYERS, "sliding_window": 16, "use_sliding_window": True},
    "cohere2": {"layer_types": LAYERS, "sliding_window": 16}, "exaone4": {"layer_types": LAYERS, "sliding_window": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense"] * 3, "dense_intermediate_size": 48,
    },
}  # fmt: skip
REFUSED = {
    "gemma2": ({}, "softcap .*soft-capping"),
    "gpt_oss": ({"num_local_experts": 4}, "s_aux .*attention sinks"),
    "bloom": ({}, "AttentionInterface"),
    "gptj": ({"rotary_dim": 8}, "AttentionInterface"),
    "bart": ({"decoder_layers": 1, "d_model": 16, "decoder_attention_heads": 2}, "cross-attention .*encoder_attn"),
    "mistral": ({"sliding_window": 16}, "sliding_window=16 in every layer .*sliding_window=None"),
    "llama": ({"is_causal": False}, "is_causal=False .*only causal"),
    "glm_moe_dsa": ({"n_routed_experts": 4, "mlp_layer_types": ["dense"] * 3}, "indices .*single tokens"),
}
# 3 blocks of 8: queries from position 24 on have to choose
NSA = tercet.NSAConfig(compress_block=4, compress_stride=2, select_block=8, select_count=3)


def build(family: str, changes: dict[str, Any], **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += (0.1 if "norm" in name or "bias" in name else 0.2) * torch.randn_like(parameter)
    return model.double()


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(0))


def run(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the first 24 of them."""
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    logits[:, :24].square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*SERVED, *(pytest.param(family, marks=pytest.mark.slow) for family in MORE)])
def test_where_every_block_is_chosen_a_model_computes_what_it_did(family: str):
    model, tokens = build(family, (SERVED | MORE)[family]), some_tokens(2, 50)
    logits, gradients = run(model, tokens)
    use_block_sparse(model, NSA)
    sparse, sparse_gradients = run(model, tokens)
    error = {"rtol": 1e-5, "atol": 1e-5}  # norms and RoPE are in float32
    torch.testing.assert_close(sparse[:, :24], logits[:, :24], **error)
    torch.testing.assert_close(sparse_gradients, gradients, **error)
    assert not torch.allclose(sparse[:, 24:], logits[:, 24:], rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        cache, parts = DynamicCache(config=model.config), []
        for part in (slice(0, 30), slice(30, 31), slice(31, 50)):
            parts.append(model(tokens[:, part], past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), sparse, **error)
        mask = torch.ones_like(tokens)
        mask[0, :7] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(tokens[:1, 7:], use_cache=False).logits
        if family != "gpt2":  # learned positions need position_ids of their own
            torch.testing.assert_close(padded[:1, 7:], alone, **error)
        torch.testing.assert_close(padded[1:], sparse[1:], **error)


def test_some_layers_are_sparse_and_the_settings_are_saved(tmp_path):
    model, tokens = build("llama", {"head_dim": 32}), some_tokens(1, 50)
    outputs = {}
    for layers in (None, [1], [0, 1, 2]):
        use_block_sparse(model, NSA, layers=layers, score_channels=16, dense_below=30)
        outputs[str(layers)] = model(tokens).logits
    assert torch.equal(outputs["None"], outputs["[0, 1, 2]"])
    use_block_sparse(model, NSA, layers=[1], score_channels=16, dense_below=30)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="tercet")
    assert again.config.tercet == model.config.tercet
    assert torch.equal(again(tokens).logits, outputs["[1]"])
    model.set_attn_implementation("sdpa")
    first = model.model.layers[0](model.model.embed_tokens(tokens), position_embeddings=model.model.rotary_emb(
        tokens.double(), torch.arange(50)[None]), attention_mask=None)  # fmt: skip
    again.model.layers[0].register_forward_hook(lambda layer, given, out: outputs.update(first=out))
    again(tokens)
    torch.testing.assert_close(outputs["first"], first)  # layer 0 is dense
    assert not torch.allclose(outputs["[1]"], model(tokens).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "cohere"])
@pytest.mark.parametrize("channels", [None, 16, 24, "all"])
def test_blocks_are_chosen_by_the_slowest_channels(family: str, channels: int | str | None, monkeypatch):
    model, tokens, seen = build(family, {"head_dim": 64}), some_tokens(1, 50), []
    use_block_sparse(model, NSA, score_channels=channels)
    real = attention.attend
    monkeypatch.setattr(
        attention, "attend", lambda inputs, *a, **k: seen.append((inputs, k["scorer"])) or real(inputs, *a, **k)
    )
    model(tokens, use_cache=False)
    inputs, scorer = seen[0]
    count = {None: 32, "all": 64}.get(channels, channels)
    sin = model.model.rotary_emb(inputs.q, torch.ones(1, 1, dtype=torch.long))[1][0, 0]
    slowest = sin.argsort()[:count]
    assert scorer.keys.shape[-1] == count
    torch.testing.assert_close(scorer.keys.sort(-1).values, inputs.k_selected[..., slowest].sort(-1).values)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {"score_channels": 17}, "score_channels=17 must be .* even number from 16 to 32"),
        ("llama", {"score_channels": 64}, "score_channels=64 must be"),
        ("llama", {"score_channels": 16, "scorer": "compressed"}, "no effect with scorer='compressed'"),
        ("glm", {"score_channels": 16}, "model_type='glm' does not rotate whole heads .*\"all\""),
        ("llama", {"layers": [3]}, r"layers=\[3\] must be some of .* 0 to 2"),
        ("llama", {"layers": []}, "layers="),
        ("llama", {"scorer": "random"}, "selector: .*'random' is unknown"),
    ],
)
def test_settings_that_cannot_be_are_refused(family: str, options: dict[str, Any], words: str):
    with pytest.raises(UnsupportedError, match=words):
        use_block_sparse(build(family, {"head_dim": 32}), NSA, **options)


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot_are_refused_when_they_are_loaded(family: str, tmp_path):
    changes, words = REFUSED[family]
    model = build(family, changes)
    model.save_pretrained(tmp_path)
    calls = (
        lambda: AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="tercet"),
        lambda: model.set_attn_implementation("tercet"),
        lambda: use_block_sparse(model, NSA),
    )
    for call in calls[
        : 1 if words == "AttentionInterface" else None
    ]:  # transformers itself does not switch such models
        with pytest.raises(UnsupportedError, match=f"model_type={family!r}.*{words}") as error:
            call()
        assert "\n" not in str(error.value)

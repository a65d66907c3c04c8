"""Map dense checkpoints of the Llama and Qwen families to Tercet models.

embed_tokens, norm, lm_head           embedding, norm, head
input_layernorm                       attention_norm
post_attention_layernorm              ffn_norm
mlp.gate_proj, mlp.up_proj            ffn.gate_up, concatenated
mlp.down_proj                         ffn.down
self_attn.q_proj, o_proj              attention.q_proj, o_proj
self_attn.k_proj, v_proj              attention.kv_proj: k and v once for dense, once per branch for NSA; with
                                      compress_selected_keys, no k for the compressed branch
self_attn.q_norm, k_norm (Qwen3)      attention.q_norm, k_norms of all branches
(none)                                gate: zero weights, biases that open one branch and close the others
(none)                                φ: newly initialized, which is the mean of a block

A block-sparse layer has a dense layer's weights. Learned selectors are newly initialized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tercet.attention.config import BRANCHES
from tercet.interop.huggingface.rope import ForeignModelError, rope_settings
from tercet.model.config import ModelConfig
from tercet.model.nsa import NativeSparseAttention
from tercet.model.transformer import Block, Transformer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Weights of learned selectors, next to those of the family. Names and shapes are a Transformer's.
SELECTOR_WEIGHTS = "tercet_selector.safetensors"
Cover = Literal["selected", "window"]


def exact_length(config: ModelConfig, hf_config: Mapping[str, Any], cover: Cover) -> int | None:
    """Tokens up to which every layer sees what it saw before, so that the import equals the original; None: always."""
    nsa = config.nsa
    blocks = max(config.dense_below, nsa.selected_tokens)
    reach = {
        "nsa": nsa.window if cover == "window" and config.gate != "none" else blocks,
        "dense": None,
        "window": None if _sliding_window(hf_config) else nsa.window,
    }
    limits = [limit for kind in set(config.attention_kinds) if (limit := reach[kind]) is not None]
    return min(limits, default=None)


def saved_options(saved: ModelConfig) -> dict[str, Any]:
    """Model settings for the entry `tercet` of a config.json, as an export or `use_block_sparse` left it.
    `model_config` replaces those that the rest of config.json describes."""
    if "nsa" in saved.attention_kinds and saved.gate != "none":
        raise ForeignModelError(
            f"config.json: tercet.gate={saved.gate}: a dense model's weights need gate=none; to convert them, pass "
            "--attention"
        )
    return dict(saved)


def _sliding_window(hf_config: Mapping[str, Any]) -> int | None:
    """The window of a model whose layers all have one; only Mistral's configuration says that."""
    return hf_config.get("sliding_window") if hf_config.get("model_type") == "mistral" else None


def model_config(hf_config: Mapping[str, Any], chosen: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig for a config.json and the chosen NSA options; raises if Tercet cannot represent the model."""
    family = hf_config.get("model_type")
    if family not in FAMILIES:
        raise ForeignModelError(
            f"model_type={family!r} cannot be imported: supported are {', '.join(FAMILIES)} and tercet"
        )
    _check_supported(hf_config, chosen)
    heads = int(hf_config["num_attention_heads"])
    described = {
        "dim": hf_config["hidden_size"],
        "layers": hf_config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf_config.get("num_key_value_heads") or heads,
        "head_dim": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        "ffn_dim": hf_config["intermediate_size"],
        "vocab_size": hf_config["vocab_size"],
        "tie_embeddings": hf_config.get("tie_word_embeddings", False),
        **rope_settings(hf_config),
        "qk_norm": family == "qwen3",
        "attention_bias": family == "qwen2" or bool(hf_config.get("attention_bias", False)),
        "norm_eps": hf_config.get("rms_norm_eps", 1e-6),
    }
    return ModelConfig(**{**chosen, **described})


def _check_supported(hf_config: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """Raise for features that Tercet does not have."""
    window = _sliding_window(hf_config)
    same_window = window is not None and chosen["attention"] == "window" and chosen["nsa"].window == window
    rules: dict[str, tuple[bool, str]] = {
        "hidden_act": (hf_config.get("hidden_act", "silu") == "silu", "Tercet's feed-forward is SwiGLU (silu)"),
        "mlp_bias": (not hf_config.get("mlp_bias"), "Tercet's feed-forward has no biases"),
        "sliding_window": (
            not hf_config.get("sliding_window") or hf_config.get("use_sliding_window") is False or same_window,
            f"pass --attention window --nsa.window {window}" if window else "an import can only match full attention",
        ),
        "quantization_config": (not hf_config.get("quantization_config"), "import the unquantized weights"),
    }
    for name, (supported, why) in rules.items():
        if not supported:
            raise ForeignModelError(f"{name}={hf_config.get(name)!r} cannot be imported: {why}")


def check_weights(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise for missing or surplus weights and for wrong shapes, before anything large is allocated."""
    expected = _expected_shapes(config, output_bias="model.layers.0.self_attn.o_proj.bias" in shapes)
    for name, shape in expected.items():
        if name not in shapes:
            raise ForeignModelError(f"the checkpoint lacks {name}: it is incomplete, or from another model family")
        _check_shape(name, shapes[name], shape)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    surplus = sorted(set(shapes) - expected.keys() - optional)
    surplus = [name for name in surplus if not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        raise ForeignModelError(f"{len(surplus)} unexpected weights, such as {surplus[0]}: is it another model family?")


def selector_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of learned selectors."""
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if ".selector." in name}


def check_selectors(config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """As `check_weights`, for the file of the selectors."""
    expected = selector_shapes(config)
    if surplus := sorted(shapes.keys() - expected.keys()):
        raise ForeignModelError(
            f"{SELECTOR_WEIGHTS} has {surplus[0]}, which the model of config.json does not have: copy both files from "
            "the same export"
        )
    for name, shape in expected.items():
        if name not in shapes:
            raise ForeignModelError(f"{SELECTOR_WEIGHTS} lacks {name}: it is incomplete, or of another model")
        _check_shape(name, shapes[name], shape)


def _expected_shapes(config: ModelConfig, *, output_bias: bool) -> dict[str, tuple[int, ...]]:
    dim, ffn = config.dim, config.ffn_dim
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, dim)}
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        found |= {f"{prefix}{norm}.weight": (dim,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found[f"{prefix}mlp.down_proj.weight"] = (dim, ffn)
        found |= {f"{prefix}mlp.{name}_proj.weight": (ffn, dim) for name in ("gate", "up")}
        found |= {f"{prefix}self_attn.{name}_proj.weight": (count, dim) for name, count in rows.items()}
        found[f"{prefix}self_attn.o_proj.weight"] = (dim, rows["q"])
        if config.attention_bias:
            found |= {f"{prefix}self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
            if output_bias:  # Llama has them, Qwen2 does not
                found[f"{prefix}self_attn.o_proj.bias"] = (dim,)
        if config.qk_norm:
            found |= {f"{prefix}self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    found["model.norm.weight"] = (dim,)
    if not config.tie_embeddings:
        found["lm_head.weight"] = (config.vocab_size, dim)
    return found


def _check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if list(shape) != list(expected):
        raise ForeignModelError(f"{name} has shape {list(shape)}, but config.json requires {list(expected)}")


def convert(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    selectors: Mapping[str, Tensor],
    *,
    cover: Cover,
    gate_logit: float,
) -> Iterator[tuple[str, Tensor]]:
    """The state of a Transformer, in its order, from a checkpoint that `check_weights` accepted. Holds one block at a
    time; what neither the checkpoint nor `selectors` has is newly initialized."""
    yield "embedding.weight", weights["model.embed_tokens.weight"]
    for i, kind in enumerate(config.attention_kinds):
        with torch.no_grad():
            block = Block(config, kind)
            block.init_weights(config.init_std, config.init_std / (2 * config.layers) ** 0.5)
            _load_block(block, weights, f"model.layers.{i}.")
            if isinstance(block.attention, NativeSparseAttention):
                open_gate(block.attention, cover, gate_logit)
        state = {f"blocks.{i}.{name}": tensor for name, tensor in block.state_dict().items()}
        yield from ((name, selectors.get(name, tensor)) for name, tensor in state.items())
    yield "norm.weight", weights["model.norm.weight"]
    if not config.tie_embeddings:
        yield "head.weight", weights["lm_head.weight"]


def _load_block(block: Block, weights: Mapping[str, Tensor], prefix: str) -> None:
    attention, self_attn = block.attention, f"{prefix}self_attn."
    block.attention_norm.weight.copy_(weights[f"{prefix}input_layernorm.weight"])
    block.ffn_norm.weight.copy_(weights[f"{prefix}post_attention_layernorm.weight"])
    block.ffn.down.weight.copy_(weights[f"{prefix}mlp.down_proj.weight"])
    block.ffn.gate_up.weight.copy_(torch.cat([weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]))
    attention.q_proj.weight.copy_(weights[f"{self_attn}q_proj.weight"])
    attention.o_proj.weight.copy_(weights[f"{self_attn}o_proj.weight"])
    size = attention.kv_proj.out_features
    copies = -(-size // (2 * attention.kv_heads * attention.head_dim))
    # One copy per branch; the first may have no keys, which come before its values.
    kv = torch.cat([weights[f"{self_attn}{name}_proj.weight"] for name in ("k", "v")])
    attention.kv_proj.weight.copy_(kv.repeat(copies, 1)[-size:])
    if attention.q_proj.bias is not None:
        attention.q_proj.bias.copy_(weights[f"{self_attn}q_proj.bias"])
        bias = torch.cat([weights[f"{self_attn}{name}_proj.bias"] for name in ("k", "v")])
        attention.kv_proj.bias.copy_(bias.repeat(copies)[-size:])
        if f"{self_attn}o_proj.bias" in weights:
            attention.o_proj.bias.copy_(weights[f"{self_attn}o_proj.bias"])
        else:
            attention.o_proj.bias.zero_()
    if attention.q_norm is not None:
        attention.q_norm.weight.copy_(weights[f"{self_attn}q_norm.weight"])
        k_norm = weights[f"{self_attn}k_norm.weight"]
        norms = attention.k_norms if isinstance(attention, NativeSparseAttention) else [attention.k_norm]
        for norm in norms or ():
            assert isinstance(norm, nn.RMSNorm)
            norm.weight.copy_(k_norm)


@torch.no_grad()
def open_gate(layer: NativeSparseAttention, cover: Cover, logit: float) -> None:
    """Make the gates constant: the covering branch at +logit, the others at -logit."""
    layer.gate.proj.weight.zero_()
    sign = torch.tensor([1.0 if branch == cover else -1.0 for branch in BRANCHES])
    layer.gate.proj.bias.copy_((logit * sign).repeat(layer.heads))

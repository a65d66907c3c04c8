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
from copy import deepcopy
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from tercet.attention.config import BRANCHES
from tercet.interop.huggingface.rope import ForeignModelError, rope_settings
from tercet.model.attention import Attention
from tercet.model.config import ModelConfig
from tercet.model.transformer import Block, Transformer
from tercet.parse import describe

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Weights of learned selectors, next to those of the family. Names and shapes are a Transformer's.
SELECTOR_WEIGHTS = "tercet_selector.safetensors"
Cover = Literal["selected", "window"]


def read_config(content: Mapping[str, Any]) -> PretrainedConfig:
    """A config.json as transformers reads it: with the defaults of its class, old fields under their new names."""
    family = content.get("model_type")
    if family not in FAMILIES:
        raise ForeignModelError(
            f"model_type={family!r} cannot be imported: supported are {', '.join(FAMILIES)} and tercet"
        )
    try:
        config = CONFIG_MAPPING[family].from_dict(deepcopy(dict(content)))
        config.standardize_rope_params()  # again, as RoPE does: original_max_position_embeddings may be outside
        return config
    except Exception as error:  # of many kinds
        raise ForeignModelError(
            f"config.json has a value of the wrong type, or values that contradict each other ({describe(error)}): "
            "copy it again"
        ) from None


def exact_length(config: ModelConfig, windows: Sequence[int | None], cover: Cover) -> int | None:
    """Tokens up to which every layer sees what it saw before, so that the import equals the original; None: always.
    windows: those of the original."""
    nsa = config.nsa
    blocks = max(config.dense_below, nsa.selected_tokens)
    sparse = nsa.window if cover == "window" and config.gate != "none" else blocks
    limits = [
        sparse if kind == "nsa" else nsa.window
        for kind, window in zip(config.attention_kinds, windows, strict=True)
        if window is None and kind != "dense"
    ]
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


def sliding_windows(hf_config: Mapping[str, Any]) -> list[int | None]:
    """The sliding window of each layer; None: it sees the whole context."""
    family, layers, window = hf_config["model_type"], hf_config["num_hidden_layers"], hf_config.get("sliding_window")
    kinds, full = hf_config.get("layer_types"), "full_attention"
    if family in ("llama", "mistral"):  # layer_types change nothing but their caches
        runs = [full if window is None or family == "llama" else "sliding_attention"] * layers
        agree = kinds in (None, runs) and (window is None or family == "mistral")
    else:
        runs = kinds or []
        agree = len(runs) == layers and {*runs} <= {full, "sliding_attention"} and (window or {*runs} == {full})
    if not agree or (window is not None and window < 1):
        raise ForeignModelError(
            f"sliding_window={window} cannot be imported: {family} has no such windows (layer_types={kinds})"
        )
    return [None if kind == full else window for kind in runs]


def model_config(hf_config: Mapping[str, Any], chosen: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig for the content of a config.json as `read_config` reads it and the chosen NSA options; raises if
    Tercet cannot represent the model."""
    family = hf_config["model_type"]
    _check_supported(hf_config)
    heads = int(hf_config["num_attention_heads"])
    described = {
        "dim": hf_config["hidden_size"],
        "layers": hf_config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hf_config["num_key_value_heads"],
        "head_dim": hf_config.get("head_dim") or hf_config["hidden_size"] // heads,  # Qwen2 does not have it
        "ffn_dim": hf_config["intermediate_size"],
        "vocab_size": hf_config["vocab_size"],
        "tie_embeddings": hf_config["tie_word_embeddings"],
        **rope_settings(hf_config),
        "qk_norm": family == "qwen3",
        "attention_bias": family == "qwen2" or (family != "mistral" and hf_config["attention_bias"]),
        "norm_eps": hf_config["rms_norm_eps"],
    }
    config = ModelConfig(**{**chosen, **described})
    _check_windows(config, sliding_windows(hf_config))
    return config


def _check_supported(hf_config: Mapping[str, Any]) -> None:
    """Raise for features that Tercet does not have."""
    rules: dict[str, tuple[Any, str]] = {
        "hidden_act": (hf_config["hidden_act"] == "silu", "Tercet's feed-forward is SwiGLU (silu)"),
        "mlp_bias": (not hf_config.get("mlp_bias"), "Tercet's feed-forward has no biases"),
        "is_causal": (hf_config.get("is_causal", True), "Tercet's attention is causal"),
        "quantization_config": (not hf_config.get("quantization_config"), "import the unquantized weights"),
    }
    for name, (supported, why) in rules.items():
        if not supported:
            raise ForeignModelError(f"{name}={hf_config.get(name)!r} cannot be imported: {why}")


def _check_windows(config: ModelConfig, windows: Sequence[int | None]) -> None:
    """Raise if a layer with a sliding window would become one that sees more or less."""
    for kind, window in zip(config.attention_kinds, windows, strict=True):
        if window is not None and (kind != "window" or config.nsa.window != window):
            names = [(name, len([*run])) for name, run in groupby("window" if w else "dense" for w in windows)]
            pattern = ",".join(f"{name}*{count}" for name, count in names) if len(names) > 1 else names[0][0]
            raise ForeignModelError(
                f"sliding_window={window} cannot be imported as {kind} attention: pass --attention {pattern} "
                f"--nsa.window {window}"
            )


def check_weights(config: ModelConfig, family: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise for missing or surplus weights and for wrong shapes, before anything large is allocated."""
    output_bias = family != "qwen2" and "model.layers.0.self_attn.o_proj.bias" in shapes
    expected = _expected_shapes(config, output_bias=output_bias)
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


def same_embeddings(weights: Mapping[str, Tensor]) -> bool:
    """Whether the head of a tied model is its embedding, in the files too. If not, transformers does not tie them."""
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    if not names <= weights.keys():
        return True
    head, embedding = (weights[name].float() for name in names)
    return torch.equal(head, embedding)


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
            if block.attention.gate is not None:
                open_gate(block.attention, cover, gate_logit)
        state = {f"blocks.{i}.{name}": tensor for name, tensor in block.state_dict().items()}
        yield from ((name, selectors.get(name, tensor)) for name, tensor in state.items())
    yield "norm.weight", weights["model.norm.weight"]
    if not config.tie_embeddings:
        yield "head.weight", weights["lm_head.weight"]


def dense_twin(config: ModelConfig, windows: Sequence[int | None], weights: Mapping[str, Tensor]) -> Transformer:
    """The first layers of an imported model with dense attention, or with the original's sliding windows."""
    kinds = tuple("dense" if window is None else "window" for window in windows)
    with torch.device("meta"):
        model = Transformer(config.model_copy(update={"layers": len(kinds), "attention": kinds}))
    state = {}
    for name, expected in model.state_dict().items():
        # all branches have the same keys and values; the first may have no keys, which come before its values
        stored = name if name in weights else name.replace("k_norm.", "k_norms.0.")
        state[name] = weights[stored][-len(expected) :]
    model.load_state_dict(state, assign=True)
    return model.eval()


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
        for norm in attention.key_norms:
            norm.weight.copy_(k_norm)


@torch.no_grad()
def open_gate(layer: Attention, cover: Cover, logit: float) -> None:
    """Make the gates constant: the covering branch at +logit, the others at -logit."""
    assert layer.gate is not None
    layer.gate.proj.weight.zero_()
    sign = torch.tensor([1.0 if branch == cover else -1.0 for branch in BRANCHES])
    layer.gate.proj.bias.copy_((logit * sign).repeat(layer.heads))

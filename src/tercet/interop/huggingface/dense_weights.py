"""Map dense checkpoints of the Llama and Qwen families to Tercet models, and back.

`BLOCK` and `OUTSIDE` name the weights. A layer with several branches has k and v once per branch; with
compress_selected_keys, no k for the compressed branch. What a dense model lacks is newly initialized: gates open one
branch and close the others, φ is the mean of a block, and learned selectors are random.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

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
# Weights of a block, and those of the family whose rows they join, in this order.
BLOCK = {
    "attention_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
    "attention.q_proj": ("self_attn.q_proj",),
    "attention.kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.o_proj": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
}
OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
# Weights of learned selectors, next to those of the family. Names and shapes are a Transformer's.
SELECTOR_WEIGHTS = "tercet_selector.safetensors"


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


def exact_length(config: ModelConfig, windows: Sequence[int | None], cover: str) -> int | None:
    """Tokens up to which every layer sees what it saw before, so that the import equals the original; None: always.
    windows: those of the original."""
    nsa = config.nsa
    blocks = max(config.dense_below, nsa.selected_tokens)
    sparse = nsa.window if cover == "window" and config.spec("nsa").gated else blocks
    limits = [
        sparse if kind == "nsa" else nsa.window
        for kind, window in zip(config.attention_kinds, windows, strict=True)
        if window is None and kind != "dense"
    ]
    return min(limits, default=None)


def saved_options(saved: ModelConfig) -> dict[str, Any]:
    """Model settings for the entry `tercet` of a config.json, as an export or `use_block_sparse` left it.
    `model_config` replaces those that the rest of config.json describes."""
    if "nsa" in saved.attention_kinds and saved.spec("nsa").gated:
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


def family_names(name: str) -> list[str]:
    """The weights of the family whose rows one of a Transformer's joins; none if a dense model has no such weights."""
    part, _, kind = name.rpartition(".")
    if part in OUTSIDE:
        return [f"{OUTSIDE[part]}.{kind}"]
    _, layer, part = re.sub(r"k_norms\.\d+$", "k_norm", part).split(".", 2)
    return [f"model.layers.{layer}.{theirs}.{kind}" for theirs in BLOCK.get(part, ())]


def dense_tensors(
    weights: Mapping[str, Tensor], names: Iterable[str], *, output_bias: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the family, from those of a Transformer without gates and branches."""
    for name in names:
        theirs = family_names(name)
        if theirs and (output_bias or not name.endswith("o_proj.bias")):
            yield from zip(theirs, weights[name].chunk(len(theirs)), strict=True)


def check_weights(config: ModelConfig, family: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise for missing or surplus weights and for wrong shapes, before anything large is allocated."""
    # Llama has biases of the output projections, Qwen2 does not
    output_bias = family != "qwen2" and "model.layers.0.self_attn.o_proj.bias" in shapes
    dense = _empty_state(config.model_copy(update={"attention": "dense"}))
    expected = {name: tensor.shape for name, tensor in dense_tensors(dense, dense, output_bias=output_bias)}
    for name, shape in expected.items():
        if name not in shapes:
            raise ForeignModelError(f"the checkpoint lacks {name}: it is incomplete, or from another model family")
        _check_shape(name, shapes[name], shape)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    surplus = sorted(set(shapes) - expected.keys() - optional)
    surplus = [name for name in surplus if not name.endswith("rotary_emb.inv_freq")]
    if surplus:
        raise ForeignModelError(f"{len(surplus)} unexpected weights, such as {surplus[0]}: is it another model family?")


def _empty_state(config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return Transformer(config).state_dict()


def selector_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of the weights of learned selectors."""
    return {name: tensor.shape for name, tensor in _empty_state(config).items() if ".selector." in name}


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
    cover: str,
    gate_logit: float,
) -> Iterator[tuple[str, Tensor]]:
    """The state of a Transformer, in its order, from a checkpoint that `check_weights` accepted. Holds one block at a
    time; what neither the checkpoint nor `selectors` has is newly initialized."""
    yield "embedding.weight", weights["model.embed_tokens.weight"]
    for i in range(config.layers):
        with torch.no_grad():
            block = Block(config, i)
            block.init_weights(config.init_std, config.init_std / (2 * config.layers) ** 0.5)
            state = {f"blocks.{i}.{name}": tensor for name, tensor in block.state_dict().items()}
            for name, tensor in state.items():
                if theirs := family_names(name):
                    _join(tensor, weights, theirs)
            if block.attention.gate is not None:
                open_gate(block.attention, cover, gate_logit)
        yield from ((name, selectors.get(name, tensor)) for name, tensor in state.items())
    yield "norm.weight", weights["model.norm.weight"]
    if not config.tie_embeddings:
        yield "head.weight", weights["lm_head.weight"]


def _join(tensor: Tensor, weights: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Fill a weight with the family's, once per branch; the first branch may have no keys, which come first."""
    if names[0] not in weights:  # biases of the output projections that a family does not have
        tensor.zero_()
        return
    joined = torch.cat([weights[name] for name in names])
    copies = -(-len(tensor) // len(joined))
    tensor.copy_(torch.cat([joined] * copies)[-len(tensor) :])


def dense_model(config: ModelConfig, windows: Sequence[int | None], weights: Mapping[str, Tensor]) -> Transformer:
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


@torch.no_grad()
def open_gate(layer: Attention, cover: str, logit: float) -> None:
    """Make the gates constant: the covering branch at +logit, the others at -logit."""
    assert layer.gate is not None
    layer.gate.proj.weight.zero_()
    sign = torch.tensor([1.0 if branch == cover else -1.0 for branch in BRANCHES])
    layer.gate.proj.bias.copy_((logit * sign).repeat(layer.heads))

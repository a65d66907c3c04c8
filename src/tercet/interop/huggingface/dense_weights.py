"""Map config.json and weights of the Llama and Qwen families to Tercet models, and back.

`BLOCK` and `OUTSIDE` name the weights. A layer with several branches has k and v once per branch; with
compress_selected_keys, no k for the compressed branch. What a dense model lacks is newly initialized: gates open the
selected branch and close the others, φ is the mean of a block, and learned selectors are random.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tercet.attention.config import BRANCHES
from tercet.errors import UsageError
from tercet.interop.huggingface.support import NAMES
from tercet.model.attention import Gate
from tercet.model.config import ModelConfig, RopeConfig, RopeType
from tercet.model.rope import Rotary
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


class ForeignModelError(UsageError):
    """A checkpoint that Tercet cannot represent."""


# ------------------------------------------------------------ config.json


def read_config(content: Mapping[str, Any]) -> PreTrainedConfig:
    """A config.json as transformers reads it: with the defaults of its class, old fields under their new names."""
    family = content.get("model_type")
    if family not in FAMILIES:
        raise ForeignModelError(f"model_type={family!r} cannot be imported: use tercet, {', '.join(FAMILIES)}")
    try:
        config = CONFIG_MAPPING[family].from_dict(deepcopy(dict(content)))
        config.standardize_rope_params()  # again, as RoPE does: original_max_position_embeddings may be outside
        return config
    except Exception as error:  # of many kinds
        raise ForeignModelError(f"config.json has a value of the wrong type ({describe(error)})") from None


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of transformers without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def model_config(config: PreTrainedConfig, chosen: Mapping[str, Any]) -> ModelConfig:
    """The ModelConfig for a config.json and the chosen settings of the attention, which may be those of an export."""
    family, heads = config.model_type, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads  # Qwen2 does not have it
    if config.hidden_act != "silu":
        raise ForeignModelError(f"hidden_act={config.hidden_act!r} cannot be imported: Tercet's feed-forward is SwiGLU")
    for name, wrong, why in (
        ("mlp_bias", True, "feed-forward has no biases"),
        ("is_causal", False, "attention is causal"),
    ):
        if getattr(config, name, None) == wrong:
            raise ForeignModelError(f"{name}={wrong} cannot be imported: Tercet's {why}")
    described = {ours: getattr(config, theirs) for theirs, ours in NAMES.items() if theirs != "head_dim"} | {
        "head_dim": size,
        **rope_settings(config, size),
        "qk_norm": family == "qwen3",
        "attention_bias": family == "qwen2" or (family != "mistral" and config.attention_bias),
        "norm_eps": config.rms_norm_eps,
    }
    made = ModelConfig(**{**chosen, **described})
    _check_windows(made, sliding_windows(config))
    return made


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer; None: it sees the whole context."""
    family, window = config.model_type, getattr(config, "sliding_window", None)
    if family in ("llama", "mistral"):  # layer_types change nothing but their caches
        return [window if family == "mistral" else None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in config.layer_types]


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


def exact_length(config: ModelConfig, windows: Sequence[int | None]) -> int | None:
    """Tokens up to which every layer sees what it saw before, so that the import equals the original; None: always.
    windows: those of the original."""
    reach = {"nsa": max(config.dense_below, config.nsa.selected_tokens), "window": config.nsa.window}
    kinds = zip(config.attention_kinds, windows, strict=True)
    return min((reach[kind] for kind, window in kinds if window is None and kind != "dense"), default=None)


# transformers' names of `model.rope.slow` and `fast`
ROPE_RANGE = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


def rope_settings(config: PreTrainedConfig, size: int) -> dict[str, Any]:
    """Model settings for the RoPE of a config.json. Raises if Tercet's frequencies would differ from transformers'."""
    rope = config.rope_parameters
    kind, options = rope.get("rope_type"), RopeConfig()
    factor = rope.get("factor") if kind == "linear" else 1.0
    if kind not in ("default", *get_args(RopeType)):
        raise ForeignModelError(f"rope_type={kind!r} cannot be imported: supported are linear, llama3 and yarn")
    theirs = type(meta_model(config).model.rotary_emb)(config)
    if kind in ROPE_RANGE:
        original = int(rope["original_max_position_embeddings"])
        factor = rope.get("factor") or config.max_position_embeddings / original
        slow, fast = (float(rope.get(name) or usual) for name, usual in zip(ROPE_RANGE[kind], (1, 32), strict=True))
        options = RopeConfig(kind, original, slow, fast)
        if kind == "yarn" and not math.isclose(theirs.attention_scaling, 0.1 * math.log(max(factor, 1)) + 1):
            options = replace(options, attention_factor=theirs.attention_scaling)
    rotary = Rotary(size, rope["rope_theta"], factor, rope=options)
    ours = rotary.frequencies(torch.device("cpu")).float()
    same = ours.shape == theirs.inv_freq.shape and torch.allclose(ours, theirs.inv_freq, rtol=1e-5, atol=0)
    if not same or not math.isclose(rotary.attention_factor, theirs.attention_scaling, rel_tol=1e-6):
        raise ForeignModelError(f"rope_type={kind!r} cannot be imported: Tercet would not rotate as transformers does")
    return {"rope_theta": rope["rope_theta"], "rope_scaling": factor, "rope": options, "rope_max_wavelength": 0.0}


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """transformers' rope_parameters: the inverse of `rope_settings`."""
    rope, factor = config.rope, config.rope_scaling
    if config.rope_max_wavelength:
        raise UsageError(
            f"model.rope_max_wavelength={config.rope_max_wavelength:g} cannot be exported to another family: its RoPE "
            "has no such limit; use --format tercet"
        )
    plain = rope.type == "linear" and factor == 1
    settings = {"rope_type": "default" if plain else rope.type, "rope_theta": config.rope_theta}
    settings |= {} if plain else {"factor": factor}
    if rope.type in ROPE_RANGE:
        settings |= dict(zip(ROPE_RANGE[rope.type], (rope.slow, rope.fast_or_default), strict=True))
        settings["original_max_position_embeddings"] = rope.original_length
    return settings | ({} if rope.attention_factor is None else {"attention_factor": rope.attention_factor})


def family_config(config: ModelConfig, family: str, length: int, **others: Any) -> PreTrainedConfig:
    """The inverse of `model_config`: `tercet` keeps the settings of the blocks, which transformers ignores."""
    return CONFIG_MAPPING[family](
        **{theirs: getattr(config, ours) for theirs, ours in NAMES.items()},
        max_position_embeddings=length,
        rms_norm_eps=config.norm_eps,
        attention_bias=config.attention_bias and family != "qwen2",
        sliding_window=None,
        rope_parameters=rope_parameters(config),
        tercet=config.model_dump(mode="json"),
        **others,
    )


# ------------------------------------------------------------ weights


def family_names(name: str) -> list[str]:
    """The weights of the family whose rows one of a Transformer's joins; none if a dense model has no such weights."""
    part, _, kind = name.rpartition(".")
    if part in OUTSIDE:
        return [f"{OUTSIDE[part]}.{kind}"]
    _, layer, part = re.sub(r"k_norms\.\d+$", "k_norm", part).split(".", 2)
    return [f"model.layers.{layer}.{theirs}.{kind}" for theirs in BLOCK.get(part, ())]


def family_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The family's weights, from those of a Transformer without gates and branches."""
    named = [(names, tensor) for name, tensor in weights.items() if (names := family_names(name))]
    return {k: v for names, tensor in named for k, v in zip(names, tensor.chunk(len(names)), strict=True)}


def check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], what: str) -> None:
    """Raise for missing or surplus weights and for wrong shapes."""
    for name, tensor in expected.items():
        if name not in given:
            raise ForeignModelError(f"{what} lacks {name}: it is incomplete, or of another kind of model")
        if (shape := list(given[name].shape)) != list(tensor.shape):
            raise ForeignModelError(f"{name} has shape {shape}, but config.json requires {list(tensor.shape)}")
    if surplus := sorted(given.keys() - expected.keys()):
        raise ForeignModelError(f"{what} has {len(surplus)} unexpected weights, such as {surplus[0]}: is it of another "
                                "kind of model?")  # fmt: skip


def empty_state(config: ModelConfig) -> dict[str, Tensor]:
    """A Transformer's weights without values."""
    with torch.device("meta"):
        return Transformer(config).state_dict()


def convert(config: ModelConfig, weights: Mapping[str, Tensor], gate_logit: float) -> Iterator[tuple[str, Tensor]]:
    """The state of a Transformer, in its order, from a checkpoint of a family. Holds one block at a time; what the
    checkpoint does not have is newly initialized."""
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
                open_gate(block.attention.gate, gate_logit)
        yield from ((name, weights.get(name, tensor)) for name, tensor in state.items())
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


@torch.no_grad()
def open_gate(gate: Gate, logit: float) -> None:
    """Make a gate constant, and open for the selected branch only."""
    gate.proj.weight.zero_()
    sign = torch.tensor([1.0 if branch == "selected" else -1.0 for branch in BRANCHES])
    gate.proj.bias.copy_((logit * sign).repeat(len(gate.proj.bias) // len(BRANCHES)))


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

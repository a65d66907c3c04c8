"""Dense checkpoints of the Llama and Qwen families as Tercet's models: which weight goes where.

embed_tokens, norm, lm_head           embedding, norm, head
input_layernorm                       attention_norm
post_attention_layernorm              ffn_norm
mlp.gate_proj, mlp.up_proj            ffn.gate_up, one above the other
mlp.down_proj                         ffn.down
self_attn.q_proj, o_proj              attention.q_proj, o_proj
self_attn.k_proj, v_proj              attention.kv_proj: k and v once for dense, and for each branch of NSA; with
                                      compress_selected_keys there is no k for the compressed one
self_attn.q_norm, k_norm (Qwen3)      attention.q_norm, k_norms of all branches
(nothing)                             gate: weights 0, biases that open the covering branch and close the others
(nothing)                             φ: fresh, which is the mean of a block
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.errors import UsageError
from tercet.model.attention import NativeSparseAttention
from tercet.model.config import ModelConfig
from tercet.model.transformer import Block, Transformer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Cover = Literal["selected", "window"]


class ForeignModelError(UsageError):
    """A checkpoint that has no counterpart here."""


def reach(nsa: NSAConfig, cover: Cover) -> int:
    """Tokens up to which the covering branch sees everything, so that the import equals the dense model."""
    return nsa.window if cover == "window" else nsa.select_count * nsa.select_block


def model_config(theirs: Mapping[str, Any], chosen: Mapping[str, Any]) -> ModelConfig:
    """The sizes in a config.json, and what was chosen beside them; what this Tercet cannot compute is refused."""
    family = theirs.get("model_type")
    if family not in FAMILIES:
        raise ForeignModelError(f"model_type={family!r} cannot be imported: only {', '.join(FAMILIES)} and tercet can")
    _refuse_what_differs(theirs)
    heads = int(theirs["num_attention_heads"])
    rope = theirs.get("rope_parameters") or {
        **(theirs.get("rope_scaling") or {}),
        "rope_theta": theirs.get("rope_theta"),
    }
    return ModelConfig(
        dim=theirs["hidden_size"],
        layers=theirs["num_hidden_layers"],
        heads=heads,
        kv_heads=theirs.get("num_key_value_heads") or heads,
        head_dim=theirs.get("head_dim") or theirs["hidden_size"] // heads,
        ffn_dim=theirs["intermediate_size"],
        vocab_size=theirs["vocab_size"],
        tie_embeddings=theirs.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta") or 10000.0,
        rope_scaling=_linear_scaling(rope),
        qk_norm=family == "qwen3",
        attention_bias=family == "qwen2" or bool(theirs.get("attention_bias", False)),
        norm_eps=theirs.get("rms_norm_eps", 1e-6),
        **chosen,
    )


def _linear_scaling(rope: Mapping[str, Any]) -> float:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear"):
        raise ForeignModelError(
            f"rope_type={kind!r} cannot be imported: Tercet divides all positions alike (linear); take a checkpoint "
            "without it"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ForeignModelError(f"partial_rotary_factor={rope['partial_rotary_factor']}: Tercet rotates whole heads")
    return float(rope.get("factor", 1.0)) if kind == "linear" else 1.0


def _refuse_what_differs(theirs: Mapping[str, Any]) -> None:
    """Features that change what is computed and that have no counterpart here."""
    rules: dict[str, tuple[bool, str]] = {
        "hidden_act": (theirs.get("hidden_act", "silu") == "silu", "Tercet's feed-forward is SwiGLU (silu)"),
        "mlp_bias": (not theirs.get("mlp_bias"), "Tercet's feed-forward has no biases"),
        "sliding_window": (
            not theirs.get("sliding_window") or theirs.get("use_sliding_window") is False,
            "only full attention is the dense model that an import can match",
        ),
        "quantization_config": (not theirs.get("quantization_config"), "import the weights before quantisation"),
    }
    for name, (same, why) in rules.items():
        if not same:
            raise ForeignModelError(f"{name}={theirs.get(name)!r} cannot be imported: {why}")


@torch.no_grad()
def fill(model: Transformer, theirs: Mapping[str, Tensor], *, cover: Cover, gate_logit: float) -> None:
    """Copy every weight to its place; a name or shape that does not fit, or a weight left over, is an error."""
    left = dict(theirs)
    left.pop("lm_head.weight") if model.head is None and "lm_head.weight" in left else None

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in left:
            raise ForeignModelError(f"the checkpoint lacks {name}: it is half written, or of another family")
        tensor = left.pop(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ForeignModelError(f"{name} is {list(tensor.shape)} and config.json asks for {list(shape)}")
        return tensor

    def copy(into: Tensor, name: str) -> None:
        into.copy_(take(name, tuple(into.shape)))

    # Qwen2 has biases before attention but none behind it, in any layer: a bias of 0 is none.
    output_bias = any(name.endswith(".o_proj.bias") for name in theirs)
    copy(model.embedding.weight, "model.embed_tokens.weight")
    copy(model.norm.weight, "model.norm.weight")
    if model.head is not None:
        copy(model.head.weight, "lm_head.weight")
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        _fill_block(block, f"model.layers.{i}.", copy, take, output_bias=output_bias)
        if isinstance(block.attention, NativeSparseAttention):
            open_gate(block.attention, cover, gate_logit)
    surplus = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
    if surplus:
        raise ForeignModelError(f"{len(surplus)} weights have no place here, such as {surplus[0]}: of another family?")


def _fill_block(
    block: Block,
    prefix: str,
    copy: Callable[[Tensor, str], None],
    take: Callable[[str, tuple[int, ...]], Tensor],
    *,
    output_bias: bool,
) -> None:
    attention, size, dim = block.attention, block.ffn.down.in_features, block.attention.dim
    copy(block.attention_norm.weight, f"{prefix}input_layernorm.weight")
    copy(block.ffn_norm.weight, f"{prefix}post_attention_layernorm.weight")
    copy(block.ffn.down.weight, f"{prefix}mlp.down_proj.weight")
    gate_up = [take(f"{prefix}mlp.{name}_proj.weight", (size, dim)) for name in ("gate", "up")]
    block.ffn.gate_up.weight.copy_(torch.cat(gate_up))
    own = f"{prefix}self_attn."
    copy(attention.q_proj.weight, f"{own}q_proj.weight")
    copy(attention.o_proj.weight, f"{own}o_proj.weight")
    rows = attention.kv_heads * attention.head_dim
    there = attention.kv_proj.out_features
    sets = -(-there // (2 * rows))  # whole ones, of which the first may lack its keys, which come before its values
    kv = torch.cat([take(f"{own}{name}_proj.weight", (rows, dim)) for name in ("k", "v")])
    attention.kv_proj.weight.copy_(kv.repeat(sets, 1)[-there:])
    if attention.q_proj.bias is not None:
        copy(attention.q_proj.bias, f"{own}q_proj.bias")
        bias = torch.cat([take(f"{own}{name}_proj.bias", (rows,)) for name in ("k", "v")])
        attention.kv_proj.bias.copy_(bias.repeat(sets)[-there:])
        if output_bias:
            copy(attention.o_proj.bias, f"{own}o_proj.bias")
        else:
            attention.o_proj.bias.zero_()
    if attention.q_norm is not None:
        copy(attention.q_norm.weight, f"{own}q_norm.weight")
        k_norm = take(f"{own}k_norm.weight", (attention.head_dim,))
        norms = attention.k_norms if isinstance(attention, NativeSparseAttention) else [attention.k_norm]
        for norm in norms or ():
            assert isinstance(norm, nn.RMSNorm)
            norm.weight.copy_(k_norm)


@torch.no_grad()
def open_gate(layer: NativeSparseAttention, cover: Cover, logit: float) -> None:
    """Gates that do not depend on x yet: the covering branch at +logit, the others at -logit."""
    layer.gate.proj.weight.zero_()
    sign = torch.tensor([1.0 if branch == cover else -1.0 for branch in BRANCHES])
    layer.gate.proj.bias.copy_((logit * sign).repeat(layer.heads))

"""`tercet export hf --format llama|qwen2|qwen3|mistral`: write a model with a dense model's weights for transformers.

The folder loads in transformers alone. There it runs with dense attention, which a block-sparse model equals below
model.dense_below. Weights of learned selectors, which the family has no place for, go to SELECTOR_WEIGHTS.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tercet.errors import UsageError
from tercet.inference.arguments import check_empty
from tercet.inference.load import Dtype, LanguageModel, load_model
from tercet.interop.huggingface.folder import CONFIG, INDEX, WEIGHTS, atomic_folder, check_folder
from tercet.model.config import ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
SELECTOR_WEIGHTS = "tercet_selector.safetensors"
SHARD_BYTES = 4 << 30


def export_dense(
    run: str | Path, out: str | Path, family: str, *, dtype: Dtype = "float32", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Export the model of a run, a checkpoint or a folder of weights to `out`, which must be empty or not exist."""
    from tercet.interop.huggingface.tokenizer import as_transformers_tokenizer

    out = Path(out)
    check_empty(out)
    model = load_model(run, device="cpu", dtype=dtype)
    check_family(model.config, family)
    _check_output_bias(model, family)
    with atomic_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(hf_config(model, family, dtype), indent=2) + "\n", encoding="utf-8")
        _write_shards(folder, dense_tensors(model, family), shard_bytes)
        _write_selectors(folder, model)
        as_transformers_tokenizer(model.tokenizer, model.context).save_pretrained(folder)
        check_folder(folder)
    return out


def check_family(config: ModelConfig, family: str) -> None:
    """Raise if a model of this configuration is not one of the family, apart from reading blocks."""
    if family not in ARCHITECTURES:
        raise UsageError(f"--format {family} is unknown: pick one of tercet, {', '.join(ARCHITECTURES)}")
    kinds = set(config.attention_kinds)
    rules = {
        "attention": (
            kinds <= {"dense", "nsa"} and ("nsa" not in kinds or config.gate == "none"),
            "only dense and block-sparse (model.gate = none) layers have a dense model's weights",
        ),
        "rope_max_wavelength": (not config.rope_max_wavelength, "its models rotate all channels"),
        "value_dim": (config.head_value_dim == config.head_dim, "values must be as large as keys"),
        "qk_norm": (config.qk_norm == (family == "qwen3"), "qwen3 has norms of queries and keys, the others do not"),
        "attention_bias": (
            config.attention_bias or family != "qwen2",
            "qwen2 has biases of queries, keys and values; use --format llama",
        ),
    }
    if family == "mistral":
        rules["attention_bias"] = (not config.attention_bias, "mistral has no biases; use --format llama")
    for name, (fits, why) in rules.items():
        if not fits:
            raise UsageError(f"model.{name}={getattr(config, name)} cannot be exported with --format {family}: {why}")


def _check_output_bias(model: LanguageModel, family: str) -> None:
    if family == "qwen2" and any(layer.o_proj.bias.any() for layer in model.attention_layers()):
        raise UsageError("--format qwen2: the model has biases of its output projections, use --format llama")


def hf_config(model: LanguageModel, family: str, dtype: str) -> dict[str, Any]:
    """The config.json of the family. `tercet` keeps the settings of the blocks, which transformers ignores."""
    config = model.config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != 1:
        rope |= {"rope_type": "linear", "factor": config.rope_scaling}
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": model.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias and family != "qwen2",
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "eos_token_id": model.tokenizer.eos_id,
        "pad_token_id": model.tokenizer.eos_id,
        "bos_token_id": None,
        "dtype": dtype,
        "tercet": config.model_dump(mode="json"),
    }


def dense_tensors(model: LanguageModel, family: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the family: the inverse of the table in dense_weights.py."""
    yield "model.embed_tokens.weight", model.embedding.weight
    block: Any
    for i, block in enumerate(model.blocks):
        attention = block.attention
        prefix, rows = f"model.layers.{i}.", attention.kv_heads * attention.head_dim
        yield f"{prefix}input_layernorm.weight", block.attention_norm.weight
        yield f"{prefix}post_attention_layernorm.weight", block.ffn_norm.weight
        for kind in ("weight", "bias") if attention.q_proj.bias is not None else ("weight",):
            yield f"{prefix}self_attn.q_proj.{kind}", getattr(attention.q_proj, kind)
            kv = getattr(attention.kv_proj, kind)
            yield f"{prefix}self_attn.k_proj.{kind}", kv[:rows]
            yield f"{prefix}self_attn.v_proj.{kind}", kv[rows:]
            if kind == "weight" or family != "qwen2":
                yield f"{prefix}self_attn.o_proj.{kind}", getattr(attention.o_proj, kind)
        if attention.q_norm is not None:
            yield f"{prefix}self_attn.q_norm.weight", attention.q_norm.weight
            yield f"{prefix}self_attn.k_norm.weight", attention.k_norm.weight
        gate_up = block.ffn.gate_up.weight
        yield f"{prefix}mlp.gate_proj.weight", gate_up[: gate_up.shape[0] // 2]
        yield f"{prefix}mlp.up_proj.weight", gate_up[gate_up.shape[0] // 2 :]
        yield f"{prefix}mlp.down_proj.weight", block.ffn.down.weight
    yield "model.norm.weight", model.norm.weight
    if model.head is not None:
        yield "lm_head.weight", model.head.weight


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """One file, or several of at most about shard_bytes with an index. Holds the tensors of one file at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def write() -> None:
        save_file(held, folder / f"{len(shards)}.part", {"format": "pt"})
        shards.append(list(held))
        held.clear()

    total = size = 0
    for name, tensor in tensors:
        bytes_ = tensor.numel() * tensor.element_size()
        if held and size + bytes_ > shard_bytes:
            write()
            size = 0
        held[name] = tensor.detach().contiguous()
        size, total = size + bytes_, total + bytes_
    write()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_selectors(folder: Path, model: LanguageModel) -> None:
    from safetensors.torch import save_file

    found = {name: p.detach().contiguous() for name, p in model.named_parameters() if ".selector." in name}
    if found:
        save_file(found, folder / SELECTOR_WEIGHTS, {"format": "pt"})

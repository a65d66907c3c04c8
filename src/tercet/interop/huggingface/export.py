"""`tercet export hf`: write a model folder that transformers can load.

--format tercet: wherever tercet is installed. --format llama|qwen2|qwen3|mistral: a model with a dense model's weights,
in transformers alone. There it runs with dense attention, which a block-sparse model equals below model.dense_below.
Weights of learned selectors, which the family has no place for, go to SELECTOR_WEIGHTS.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from tercet.config.keys import flatten_table
from tercet.config.load import load as load_config
from tercet.config.load import to_toml
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import GENERATION, SOURCE_CONFIG, TOKENIZER, ByteTokenizer
from tercet.errors import UsageError
from tercet.inference.arguments import CONFIG as OUR_CONFIG
from tercet.inference.load import Dtype, LanguageModel, load_model
from tercet.interop.huggingface.dense_weights import SELECTOR_WEIGHTS, dense_tensors, selector_shapes
from tercet.interop.huggingface.folder import CONFIG, INDEX, WEIGHTS, atomic_folder, check_folder, write_tensors
from tercet.interop.huggingface.import_hf import batch_settings
from tercet.interop.huggingface.model import TercetConfig, TercetForCausalLM
from tercet.interop.huggingface.rope import rope_parameters
from tercet.interop.huggingface.tokenizer import generation_settings, save_tokenizer, saved_settings, special_ids
from tercet.interop.options import ARCHITECTURES, check_empty, check_family

SHARD_BYTES = 4 << 30


def as_transformers_model(model: LanguageModel) -> TercetForCausalLM:
    """Wrap a model for transformers. Weights are shared, not copied."""
    config = TercetConfig(
        tercet=model.config.model_dump(mode="json"),
        max_position_embeddings=_positions(model),
        **special_ids(model.tokenizer),
        dtype=model.dtype,
    )
    with torch.device("meta"):
        wrapped = TercetForCausalLM(config)
    wrapped.model.load_state_dict(model.state_dict(), assign=True)
    wrapped.generation_config = GenerationConfig(
        **{name: value for name, value in generation_settings(model.tokenizer).items() if name.endswith("token_id")}
    )
    return wrapped.eval()


def _positions(model: LanguageModel) -> int:
    """max_position_embeddings: an imported model keeps its own, even if trained in shorter sequences."""
    source = saved_settings(model.tokenizer, SOURCE_CONFIG) if model.run.train.init_from is not None else None
    return max(model.context, (source or {}).get("max_position_embeddings") or 0)


def _save_tokenizer(model: LanguageModel, folder: Path) -> None:
    save_tokenizer(model.tokenizer, _positions(model), folder)
    text = json.dumps(generation_settings(model.tokenizer), indent=2) + "\n"
    (folder / GENERATION).write_text(text, encoding="utf-8")


def export(run: str | Path, out: str | Path, *, dtype: Dtype = "float32", verify: bool = True) -> Path:
    """Export the model of a run, a checkpoint or a folder of weights to `out`, which must be empty or not exist.

    verify: check the checkpoint's checksums first.
    """
    out = Path(out)
    check_empty(out)
    model = load_model(run, device="cpu", dtype=dtype, verify=verify)
    with atomic_folder(out) as folder:
        as_transformers_model(model).save_pretrained(folder)
        _save_tokenizer(model, folder)
        (folder / OUR_CONFIG).write_text(to_toml(_own_config(model)), encoding="utf-8")
        check_folder(folder)
    return out


def _own_config(model: LanguageModel) -> RunConfig:
    """A configuration without the data of the run: `tercet eval` and `generate` read the export like an import."""
    byte = isinstance(model.tokenizer, ByteTokenizer)
    values = {"run.name": model.run.run.name, **batch_settings(model.context)}
    values |= {"data.tokenizer": "byte" if byte else f"./{TOKENIZER}", "data.eos_token": model.run.data.eos_token}
    return load_config(flags=values | flatten_table({"model": model.config.model_dump(mode="json")})).config


def export_dense(
    run: str | Path,
    out: str | Path,
    family: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> Path:
    """As `export`, with the weights and the config.json of a dense model family."""
    out = Path(out)
    check_empty(out)
    model = load_model(run, device="cpu", dtype="float32", verify=verify)
    weights = model.state_dict()
    check_family(model.config, family)
    _check_output_bias(weights, family)
    stored_as, output_bias = getattr(torch, dtype), family != "qwen2"
    with atomic_folder(out) as folder:
        (folder / CONFIG).write_text(json.dumps(hf_config(model, family, dtype), indent=2) + "\n", encoding="utf-8")
        shards = plan_shards(dense_tensors(weights, weights, output_bias=output_bias), stored_as, shard_bytes)
        contents = dense_tensors(weights, weights, output_bias=output_bias)
        for file, shapes in shards.items():
            write_tensors(folder / file, shapes, islice(contents, len(shapes)), stored_as)
        if len(shards) > 1:
            _write_index(folder, shards, stored_as)
        if selectors := selector_shapes(model.config):
            contents = ((name, weights[name]) for name in selectors)
            write_tensors(folder / SELECTOR_WEIGHTS, selectors, contents, stored_as)
        _save_tokenizer(model, folder)
        check_folder(folder)
    return out


def _check_output_bias(weights: Mapping[str, Tensor], family: str) -> None:
    if family == "qwen2" and any(weights[name].any() for name in weights if name.endswith(".o_proj.bias")):
        raise UsageError("--format qwen2: the model has biases of its output projections, use --format llama")


def hf_config(model: LanguageModel, family: str, dtype: str) -> dict[str, Any]:
    """The config.json of the family. `tercet` keeps the settings of the blocks, which transformers ignores."""
    config = model.config
    extended = round(config.rope.original_length * config.rope_scaling) if config.rope.type != "linear" else 0
    length = max(_positions(model), extended)
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
        "max_position_embeddings": length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias and family != "qwen2",
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope_parameters(config, length),
        **special_ids(model.tokenizer),
        "dtype": dtype,
        "tercet": config.model_dump(mode="json"),
    }


def plan_shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> dict[str, dict[str, Sequence[int]]]:
    """Shapes by file and name: one file, or several of at most shard_bytes, unless a single tensor is larger."""
    shards: list[dict[str, Sequence[int]]] = [{}]
    size = 0
    for name, tensor in tensors:
        bytes_ = tensor.numel() * dtype.itemsize
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.shape
        size += bytes_
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shapes for i, shapes in enumerate(shards, 1)}


def _write_index(folder: Path, shards: Mapping[str, Mapping[str, Sequence[int]]], dtype: torch.dtype) -> None:
    weight_map = {name: file for file, shapes in shards.items() for name in shapes}
    total = sum(math.prod(shape) for shapes in shards.values() for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

"""`tercet import hf`: convert a Hugging Face folder to config.toml, model.safetensors and tokenizer.json.

Continue training with: tercet train --config OUT/config.toml
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.config.keys import flatten_table
from tercet.config.load import load as load_config
from tercet.config.load import to_toml
from tercet.config.schema import RunConfig
from tercet.data.tokenizers import SOURCE_CONFIG, TOKENIZER, TRANSFORMERS_FILES
from tercet.errors import UsageError
from tercet.inference.arguments import CONFIG as OUR_CONFIG
from tercet.inference.arguments import WEIGHTS as OUR_WEIGHTS
from tercet.interop.huggingface import dense_weights
from tercet.interop.huggingface.folder import (
    CONFIG,
    FolderError,
    LazyWeights,
    atomic_folder,
    check_folder,
    read_json,
    tensors,
    weight_files,
    write_tensors,
)
from tercet.interop.huggingface.tokenizer import BYTE_EOS
from tercet.interop.options import BLOCK_SPARSE, DEFAULT_OPTIONS, attention_options, check_empty
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer
from tercet.parse import WRONG_VALUE, describe, first_problem, one_line_errors

# The default sequence length is at most this: 128k tokens do not fit on every GPU.
MAX_DEFAULT_SEQ_LEN = 4096


@dataclass(frozen=True)
class Imported:
    folder: Path
    run: RunConfig
    exact_length: int | None  # equal to the dense model up to this many tokens; None: always equal
    restored: bool = False  # whether the folder had settings of an earlier export, which were taken


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    nsa: NSAConfig | None = None,
    attention: str | None = None,
    compression: Literal["mlp", "mean"] = "mlp",
    compress_selected_keys: bool = False,
    cover: dense_weights.Cover = "selected",
    gate_logit: float = 8.0,
    dense_below: int = 0,
    selector: Literal["compressed", "learned"] | None = None,
    seq_len: int | None = None,
    seed: int = 1337,
) -> Imported:
    """Import a dense model of one of dense_weights.FAMILIES, or a Tercet export, and write it to `out`.

    attention: None for nsa or, if config.json has settings of Tercet, for those.
    """
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise FolderError(f"{source} is not a folder: pass one with config.json and safetensors files")
    check_empty(out)
    check_folder(source)
    hf_config = read_json(source / CONFIG)
    with _wrong_values(source / CONFIG):
        context = int(hf_config.get("max_position_embeddings") or MAX_DEFAULT_SEQ_LEN)
    exact_length = None
    options: dict[str, Any] = {
        "nsa": nsa or NSAConfig(),
        "attention": attention,
        "compression": compression,
        "compress_selected_keys": compress_selected_keys,
    }
    ours = hf_config.get("model_type") == "tercet"
    restored = ours or (bool(hf_config.get("tercet")) and attention is None)
    if restored:
        start = {"cover": cover, "gate_logit": gate_logit, "dense_below": dense_below, "selector": selector}
        _check_no_options(source, options | start, ours)
    if ours:
        model = _load_export(source, hf_config)
        config, weights = model.config, iter(model.state_dict().items())
    else:
        if restored:
            options = dense_weights.saved_options(_saved_config(source, hf_config))
        else:
            options |= attention_options(attention or "nsa", dense_below, selector)
        config = _dense_model_config(hf_config, options, attention)
        stored = LazyWeights(weight_files(source))
        dense_weights.check_weights(config, stored.shapes)
        selectors = _saved_selectors(source, config) if restored else {}
        torch.manual_seed(seed)  # for φ or a selector, which the checkpoint does not have
        weights = dense_weights.convert(config, stored, selectors, cover=cover, gate_logit=gate_logit)
        exact_length = dense_weights.exact_length(config, hf_config, cover)
    run = _write(source, out, config, weights, seq_len or min(context, MAX_DEFAULT_SEQ_LEN), seed)
    return Imported(out, run, exact_length, restored)


def batch_settings(seq_len: int) -> dict[str, int]:
    """Sequences of this length: about 4,096 tokens in a pass, and 65,536 in a step."""
    batch = max(1, MAX_DEFAULT_SEQ_LEN // seq_len)
    tokens = batch * seq_len
    return {
        "data.seq_len": seq_len,
        "train.micro_batch": batch,
        "train.tokens_per_step": tokens * max(1, 65536 // tokens),
    }


def _check_no_options(source: Path, options: Mapping[str, Any], ours: bool) -> None:
    """Refuse options for an export, which has its own. ours: its weights are not those of a dense model."""
    if unused := [name for name, value in options.items() if value != DEFAULT_OPTIONS[name]]:
        fix = "" if ours else ", or pass --attention to convert its dense weights again"
        raise UsageError(f"{source} is a Tercet export, whose options are fixed: leave out {', '.join(unused)}{fix}")


def _saved_selectors(source: Path, config: ModelConfig) -> Mapping[str, Tensor]:
    """The learned selectors that an export stored next to the weights of the family."""
    if config.selector != "learned":
        return {}
    path = source / dense_weights.SELECTOR_WEIGHTS
    if not path.is_file():
        raise FolderError(
            f"{source} has no {path.name}, but config.json says tercet.selector=learned: copy that file too, or pass "
            "--attention block-sparse --selector learned for new selectors"
        )
    selectors = LazyWeights([path])
    dense_weights.check_selectors(config, selectors.shapes)
    return selectors


def _dense_model_config(hf_config: dict[str, Any], options: dict[str, Any], attention: str | None) -> ModelConfig:
    try:
        return dense_weights.model_config(hf_config, options)
    except KeyError as error:
        raise FolderError(f"config.json has no {error.args[0]}: it is not a config of this model family") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(map(str, first["loc"]))
        if attention and (message.startswith("attention=") or where == "attention"):
            raise UsageError(f"--attention {attention}: {message}") from None
        raise FolderError(": ".join(filter(None, ("config.json", where, message)))) from None
    except WRONG_VALUE as error:
        raise FolderError(f"config.json has a value of the wrong type ({describe(error)}): copy it again") from None


def _wrong_values(path: Path) -> AbstractContextManager[None]:
    return one_line_errors(FolderError, f"{path} has a value of the wrong type: copy the model again")


def _saved_config(source: Path, hf_config: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(hf_config.get("tercet") or {})
    except ValidationError as error:
        raise FolderError(f"{source / CONFIG}: {first_problem(error, 'tercet')}") from None


def _load_export(source: Path, hf_config: dict[str, Any]) -> Transformer:
    config = _saved_config(source, hf_config)
    stored = dict(tensors(source))
    layers = len({name.split(".")[2] for name in stored if name.startswith("model.blocks.")})
    if layers != config.layers:
        raise FolderError(f"{source}: config.json says {config.layers} layers, the weights {layers}: copy it again")
    with torch.device("meta"):
        model = Transformer(config)
    weights = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())
        raise FolderError(f"{source}: its weights do not fit its config.json ({message[:300]})") from None
    return model


def _write(
    source: Path, out: Path, config: ModelConfig, weights: Iterator[tuple[str, Tensor]], seq_len: int, seed: int
) -> RunConfig:
    sparse = [name for name in config.attention_names if name in (BLOCK_SPARSE, "nsa")]
    kind = sparse[0] if sparse else "-".join(sorted(set(config.attention_names)))
    values: dict[str, Any] = {
        "run.name": f"{source.resolve().name}-{kind}",
        "run.seed": seed,
        **batch_settings(seq_len),
        "train.init_from": str((out / OUR_WEIGHTS).resolve()),
        "train.init_state": "weights",
    }
    values |= flatten_table({"model": config.model_dump(mode="json")})
    tokenizer = source / TOKENIZER
    with _wrong_values(tokenizer):
        copy_tokenizer = tokenizer.is_file() and not _is_byte_tokenizer(tokenizer)
    if copy_tokenizer:
        values["data.tokenizer"] = str((out / TOKENIZER).resolve())
        values["data.eos_token"] = _eos_token(source)
    run = load_config(flags=values).config
    with atomic_folder(out) as folder:
        with torch.device("meta"):
            state = Transformer(config).state_dict()
        write_tensors(folder / OUR_WEIGHTS, {name: tensor.shape for name, tensor in state.items()}, weights)
        if copy_tokenizer:
            for name in (TOKENIZER, *TRANSFORMERS_FILES):
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
            shutil.copyfile(source / CONFIG, folder / SOURCE_CONFIG)
        (folder / OUR_CONFIG).write_text(to_toml(run), encoding="utf-8")
    return run


def _is_byte_tokenizer(tokenizer: Path) -> bool:
    """Whether this is the byte tokenizer written by an export."""
    model = read_json(tokenizer).get("model", {})
    vocabulary = model.get("vocab", {})
    return not model.get("merges") and len(vocabulary) == 256 and vocabulary.get(BYTE_EOS) == 0


def _eos_token(source: Path) -> str:
    """The EOS token in tokenizer_config.json; empty to look for one of the usual names."""
    path = source / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""

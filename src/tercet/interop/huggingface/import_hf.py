"""`tercet import hf`: a Hugging Face folder becomes config.toml, model.safetensors and tokenizer.json of Tercet's own,
from which training goes on: tercet train --config OUT/config.toml
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from tercet.attention.config import NSAConfig
from tercet.config.load import load as load_config
from tercet.config.load import to_toml
from tercet.config.schema import RunConfig
from tercet.errors import TercetError, UsageError
from tercet.inference.load import CONFIG as OUR_CONFIG
from tercet.inference.load import WEIGHTS as OUR_WEIGHTS
from tercet.interop.huggingface import dense_weights
from tercet.interop.huggingface.folder import CONFIG, FolderError, check_folder, read_json, tensors
from tercet.interop.huggingface.tokenizer import BYTE_EOS
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer

TOKENIZER = "tokenizer.json"
# Beyond this, sequences are the user's decision: one of 128k tokens does not fit everywhere.
LONGEST_SEQUENCE = 4096
# What is chosen for a dense model, and what an export has long decided.
UNCHOSEN: dict[str, Any] = {
    "nsa": NSAConfig(),
    "attention": "nsa",
    "compression": "mlp",
    "compress_selected_keys": False,
    "cover": "selected",
    "gate_logit": 8.0,
}


@dataclass(frozen=True)
class Imported:
    """What was made, and up to which length it equals the dense model (None where it is the same model anyway)."""

    folder: Path
    run: RunConfig
    covers: int | None


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    nsa: NSAConfig | None = None,
    attention: Literal["nsa", "dense"] = "nsa",
    compression: Literal["mlp", "mean"] = "mlp",
    compress_selected_keys: bool = False,
    cover: dense_weights.Cover = "selected",
    gate_logit: float = 8.0,
    seq_len: int | None = None,
    seed: int = 1337,
) -> Imported:
    """Read a folder of config.json and safetensors (a dense model of dense_weights.FAMILIES, or an export of Tercet's)."""
    source, out = Path(source), Path(out)
    if not source.is_dir():
        raise FolderError(f"{source} is no folder: name one with config.json and model.safetensors")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name another folder, or remove it")
    check_folder(source)
    theirs = read_json(source / CONFIG)
    covers = None
    chosen = {
        "nsa": nsa or NSAConfig(),
        "attention": attention,
        "compression": compression,
        "compress_selected_keys": compress_selected_keys,
    }
    if theirs.get("model_type") == "tercet":
        idle = [k for k, v in {**chosen, "cover": cover, "gate_logit": gate_logit}.items() if v != UNCHOSEN[k]]
        if idle:
            raise UsageError(f"{source} is an export of Tercet's and stays as it is: leave out {', '.join(idle)}")
        model = _ours(source, theirs)
    else:
        config = _valid(theirs, chosen)
        torch.manual_seed(seed)  # φ starts fresh
        model = Transformer(config)
        dense_weights.fill(model, dict(tensors(source)), cover=cover, gate_logit=gate_logit)
        covers = dense_weights.reach(config.nsa, cover) if attention == "nsa" else None
    context = int(theirs.get("max_position_embeddings") or LONGEST_SEQUENCE)
    run = _write(source, out, model, seq_len or min(context, LONGEST_SEQUENCE), seed)
    return Imported(out, run, covers)


def _valid(theirs: dict[str, Any], chosen: dict[str, Any]) -> ModelConfig:
    try:
        return dense_weights.model_config(theirs, chosen)
    except KeyError as error:
        raise FolderError(f"config.json has no {error.args[0]}: it is no config of this family") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise FolderError(f"config.json: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _ours(source: Path, theirs: dict[str, Any]) -> Transformer:
    try:
        config = ModelConfig.model_validate(theirs.get("tercet") or {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise FolderError(f"{source / CONFIG}: tercet.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    with torch.device("meta"):
        model = Transformer(config)
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors(source)}
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise FolderError(f"{source}: its weights do not fit its config.json ({said[:300]})") from None
    return model


def _write(source: Path, out: Path, model: Transformer, seq_len: int, seed: int) -> RunConfig:
    from safetensors.torch import save_file

    writing = out.with_name(f".writing-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)  # what an interrupted import left
    values: dict[str, Any] = {
        "run.name": f"{source.resolve().name}-nsa",
        "run.seed": seed,
        "data.seq_len": seq_len,
        "train.micro_batch": 1,
        "train.tokens_per_step": seq_len * max(1, 65536 // seq_len),
        "train.init_from": str((out / OUR_WEIGHTS).resolve()),
        "train.init_state": "weights",
    }
    values |= {f"model.{name}": value for name, value in _sizes(model.config).items()}
    tokenizer = source / TOKENIZER
    if tokenizer.is_file() and not _is_byte(tokenizer):
        values["data.tokenizer"] = str((out / TOKENIZER).resolve())
        values["data.eos_token"] = _eos_token(source)
    run = load_config(flags=values).config
    try:
        writing.mkdir(parents=True)
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, writing / OUR_WEIGHTS, {"format": "pt"})
        if "data.tokenizer" in values:
            shutil.copyfile(tokenizer, writing / TOKENIZER)
        (writing / OUR_CONFIG).write_text(to_toml(run), encoding="utf-8")
        if out.exists():
            out.rmdir()
        writing.rename(out)
    except OSError as error:
        raise TercetError(f"{out} cannot be written ({error}): free space there, or name another folder") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return run


def _sizes(config: ModelConfig) -> dict[str, Any]:
    sizes = config.model_dump(mode="json")
    return {**{f"nsa.{k}": v for k, v in sizes.pop("nsa").items()}, **sizes}


def _is_byte(tokenizer: Path) -> bool:
    """Whether it is the byte tokenizer as an export writes it."""
    model = read_json(tokenizer).get("model", {})
    vocabulary = model.get("vocab", {})
    return not model.get("merges") and len(vocabulary) == 256 and vocabulary.get(BYTE_EOS) == 0


def _eos_token(source: Path) -> str:
    """The end of a document as the tokenizer's own settings name it; empty: one of the usual names."""
    path = source / "tokenizer_config.json"
    token = read_json(path).get("eos_token") if path.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    return token or ""

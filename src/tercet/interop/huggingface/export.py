"""`tercet export hf`: a folder that transformers loads wherever tercet is installed.

It is written under another name and renamed when it is whole, so that a folder that bears the name is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig

from tercet.errors import TercetError, UsageError
from tercet.inference.load import Dtype, LanguageModel, load_model
from tercet.interop.huggingface.folder import check_folder
from tercet.interop.huggingface.model import TercetConfig, TercetForCausalLM
from tercet.interop.huggingface.tokenizer import as_transformers


def as_transformers_model(model: LanguageModel) -> TercetForCausalLM:
    """The same weights (shared, not copied) in transformers' clothes."""
    config = TercetConfig(
        tercet=model.config.model_dump(mode="json"),
        max_position_embeddings=model.context,
        eos_token_id=model.tokenizer.eos_id,
        pad_token_id=model.tokenizer.eos_id,
        dtype=model.dtype,
    )
    with torch.device("meta"):
        made = TercetForCausalLM(config)
    made.model.load_state_dict(model.state_dict(), assign=True)
    made.generation_config = GenerationConfig(eos_token_id=model.tokenizer.eos_id, pad_token_id=model.tokenizer.eos_id)
    return made.eval()


def export(run: str | Path, out: str | Path, *, dtype: Dtype = "float32") -> Path:
    """Write the model of a run, a checkpoint or a folder of weights to `out`, which must not hold anything."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: name another folder, or remove it")
    model = load_model(run, device="cpu", dtype=dtype)
    writing = out.with_name(f".writing-{out.name}")
    shutil.rmtree(writing, ignore_errors=True)  # what an interrupted export left
    try:
        writing.mkdir(parents=True)
        as_transformers_model(model).save_pretrained(writing)
        as_transformers(model.tokenizer, model.context).save_pretrained(writing)
        check_folder(writing)
        if out.exists():
            out.rmdir()
        writing.rename(out)
    except OSError as error:
        raise TercetError(f"{out} cannot be written ({error}): free space there, or name another folder") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return out

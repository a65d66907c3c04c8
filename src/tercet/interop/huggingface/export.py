"""`tercet export hf`: write a folder that transformers can load wherever tercet is installed."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig

from tercet.inference.arguments import check_empty
from tercet.inference.load import Dtype, LanguageModel, load_model
from tercet.interop.huggingface.folder import atomic_folder, check_folder
from tercet.interop.huggingface.model import TercetConfig, TercetForCausalLM
from tercet.interop.huggingface.tokenizer import as_transformers_tokenizer


def as_transformers_model(model: LanguageModel) -> TercetForCausalLM:
    """Wrap a model for transformers. Weights are shared, not copied."""
    config = TercetConfig(
        tercet=model.config.model_dump(mode="json"),
        max_position_embeddings=model.context,
        eos_token_id=model.tokenizer.eos_id,
        pad_token_id=model.tokenizer.eos_id,
        dtype=model.dtype,
    )
    with torch.device("meta"):
        wrapped = TercetForCausalLM(config)
    wrapped.model.load_state_dict(model.state_dict(), assign=True)
    wrapped.generation_config = GenerationConfig(
        eos_token_id=model.tokenizer.eos_id, pad_token_id=model.tokenizer.eos_id
    )
    return wrapped.eval()


def export(run: str | Path, out: str | Path, *, dtype: Dtype = "float32") -> Path:
    """Export the model of a run, a checkpoint or a folder of weights to `out`, which must be empty or not exist."""
    out = Path(out)
    check_empty(out)
    model = load_model(run, device="cpu", dtype=dtype)
    with atomic_folder(out) as folder:
        as_transformers_model(model).save_pretrained(folder)
        as_transformers_tokenizer(model.tokenizer, model.context).save_pretrained(folder)
        check_folder(folder)
    return out

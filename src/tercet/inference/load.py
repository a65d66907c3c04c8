"""Load a trained model with its tokenizer and context length.

Accepts a run folder, a checkpoint folder, or a folder of weights with a config.toml (written by `tercet import hf`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.data.tokenizers import Tokenizer
from tercet.inference.arguments import WEIGHTS, Dtype, ModelError, find_model, has_weights, stored_tokenizer
from tercet.model.transformer import Transformer
from tercet.train import checkpoint
from tercet.train.device import pick_device


class LanguageModel(Transformer):
    """A Transformer with its run configuration and tokenizer, as generation and evaluation need it."""

    def __init__(self, run: RunConfig, *, source: Path | None = None, step: int = 0) -> None:
        super().__init__(run.model)
        self.run, self.source, self.step = run, source, step

    @property
    def context(self) -> int:
        """The sequence length it was trained with."""
        return self.run.data.seq_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its training data, loaded on first use: the copy next to the weights if there is one."""
        return stored_tokenizer(self.run, self.source)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype


def load_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    verify: bool = True,
    data_of: str | Path | None = None,
) -> LanguageModel:
    """Load the model of a run folder (its newest intact checkpoint), a checkpoint, or a folder of weights.

    dtype: auto is bfloat16 on a GPU if the model was trained in bfloat16, otherwise float32.
    verify: check the checkpoint's checksums first.
    data_of: another run or model, whose data and seed replace the model's own.
    """
    target = pick_device(device, flag="--device")
    stored = find_model(path, verify=verify)
    with torch.device("meta"):  # initializing weights would be wasted work and advance the caller's random state
        model = LanguageModel(stored.run, source=stored.source, step=stored.step)
    model.to_empty(device="cpu")
    if data_of is not None:
        model.run = _with_data_of(model.run, find_model(data_of).run)
    if has_weights(stored.source):
        checkpoint.load_weights_file(stored.source / WEIGHTS, model)
    else:
        checkpoint.load_tensors(stored.source, model, None)
    return model.to(target, _pick_dtype(dtype, model.run, target)).eval()


def _with_data_of(own: RunConfig, other: RunConfig) -> RunConfig:
    """The order of the validation text depends on the seed. Length and tokenizer belong to the model."""
    kept = {name: getattr(own.data, name) for name in ("seq_len", "tokenizer", "eos_token")}
    data, run = other.data.model_copy(update=kept), own.run.model_copy(update={"seed": other.run.seed})
    return own.model_copy(update={"data": data, "run": run})


def _pick_dtype(dtype: Dtype, run: RunConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        precision = resolved_precision(run.train.precision, device.type)
        return torch.bfloat16 if device.type == "cuda" and precision == "bf16" else torch.float32
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ModelError(f"dtype={dtype} is unknown: pick auto, float32, bfloat16, float16 or float64")
    return chosen

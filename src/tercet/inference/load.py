"""Load a trained model with its tokenizer and context length.

Accepts a run folder, a checkpoint folder, or a folder of weights with a config.toml (written by `tercet import hf`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.data.tokenizers import Tokenizer
from tercet.inference.arguments import WEIGHTS, ModelError, StoredModel, find_model, has_weights, stored_tokenizer
from tercet.model.transformer import Transformer
from tercet.train import checkpoint
from tercet.train.checkpoint import MODEL, OPTIMIZER
from tercet.train.device import pick_device

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


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
    model = _build(find_model(path, verify=verify)).to_empty(device="cpu")
    assert model.source is not None
    if data_of is not None:
        model.run = _with_data_of(model.run, find_model(data_of).run)
    if has_weights(model.source):
        checkpoint.load_weights_file(model.source / WEIGHTS, model)
    else:
        checkpoint.load_tensors(model.source, model, None)
    return model.to(target, _pick_dtype(dtype, model.run, target)).eval()


def open_model(path: str | Path, *, verify: bool = True) -> tuple[LanguageModel, StoredWeights]:
    """As `load_model`, but the model has no weights (meta device); they are read one by one from the second value."""
    model = _build(find_model(path, verify=verify)).eval()
    assert model.source is not None
    weights = StoredWeights(model.source)
    checkpoint.compare_shapes(model.source, {name: p.shape for name, p in model.state_dict().items()}, weights.shapes())
    return model, weights


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a checkpoint or of a folder of weights by name. Each access maps one tensor, as long as it is
    used."""

    def __init__(self, folder: Path) -> None:
        reader = HuggingFaceStorageReader(str(folder))  # reads every .safetensors file that `fs` lists
        if has_weights(folder):
            reader.fs = _WeightsFile()
        try:
            metadata = reader.read_metadata()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder}: its weights cannot be read ({error}): damaged, copy it again") from None
        self._files = metadata.storage_data
        self._stored = {
            name.removeprefix(MODEL): (name, stored)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not name.startswith(OPTIMIZER)
        }

    def shapes(self) -> dict[str, torch.Size]:
        return {name: stored.size for name, (_, stored) in self._stored.items()}

    def __getitem__(self, name: str) -> Tensor:
        key, stored = self._stored[name]
        if len(stored.chunks) == 1:
            return self._read(key, stored.chunks[0])
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        for shard in stored.chunks:  # one per rank that saved
            place = tuple(slice(first, first + size) for first, size in zip(shard.offsets, shard.sizes, strict=True))
            tensor[place] = self._read(key, shard)
        return tensor

    def _read(self, key: str, shard: ChunkStorageMetadata) -> Tensor:
        with safe_open(self._files[MetadataIndex(key, shard.offsets)].relative_path, framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _WeightsFile(FileSystem):
    """Lists the file that `load_model` reads from a folder of weights, not backups or adapters next to it."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(Path(path) / WEIGHTS)]


def _build(stored: StoredModel) -> LanguageModel:
    """The model without weights: initializing them would be wasted work and advance the caller's random state."""
    with torch.device("meta"):
        return LanguageModel(stored.run, source=stored.source, step=stored.step)


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

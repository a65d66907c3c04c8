"""Load the tensors of a checkpoint, or a file of weights, into a model and an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tercet.train.checkpoint import MODEL, OPTIMIZER, OPTIONS, tensors_to_save
from tercet.train.manifest import CheckpointError, WrongCheckpoint


def load_tensors(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load weights (and optimizer moments) from a checkpoint folder, resharding as needed."""
    live = tensors_to_save(model, optimizer)
    reader = HuggingFaceStorageReader(str(path))
    _check_stored_shapes(path, live, reader)
    try:
        dcp.load(dict(live), storage_reader=reader)
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
        raise CheckpointError(f"{path}: cannot be loaded ({causes})") from error
    set_model_state_dict(model, {k.removeprefix(MODEL): v for k, v in live.items() if k.startswith(MODEL)})
    if optimizer is not None:
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
        state |= {k.removeprefix(OPTIMIZER): v for k, v in live.items() if k.startswith(OPTIMIZER)}
        set_optimizer_state_dict(model, optimizer, state, options=OPTIONS)


def load_weights_file(path: Path, model: nn.Module) -> None:
    """Load weights from a .safetensors file. Every name and shape must match."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except OSError as error:
        raise WrongCheckpoint(f"train.init_from={path}: cannot be read ({error}): check the path") from None
    except SafetensorError as error:
        raise CheckpointError(f"train.init_from={path}: cannot be read ({error}): damaged, copy it again") from None
    weights = {k.removeprefix(MODEL): v for k, v in weights.items() if not k.startswith(OPTIMIZER)}
    live = {k.removeprefix(MODEL): v for k, v in tensors_to_save(model, None).items()}
    compare_shapes(path, {k: v.shape for k, v in live.items()}, {k: v.shape for k, v in weights.items()})
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])


def _check_stored_shapes(path: Path, live: Mapping[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    metadata = reader.read_metadata().state_dict_metadata
    parts = {k.split(".", 1)[0] for k in live}  # loading weights only ignores the moments
    stored = {
        k: v.size for k, v in metadata.items() if isinstance(v, TensorStorageMetadata) and k.split(".", 1)[0] in parts
    }
    compare_shapes(path, {k: v.shape for k, v in live.items()}, stored)


def compare_shapes(path: Path, live: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
    """Raise if the names and shapes of stored weights are not those of the model."""
    missing, extra = sorted(live.keys() - stored.keys()), sorted(stored.keys() - live.keys())
    differ = [
        f"{k} {list(stored[k])}, the model has {list(live[k])}" for k in live.keys() & stored if live[k] != stored[k]
    ]
    for problem, names in (("lacks", missing), ("has extra", extra), ("differs in shape:", sorted(differ))):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WrongCheckpoint(f"{path} does not fit the model: it {problem} {', '.join(names[:3])}{more}")

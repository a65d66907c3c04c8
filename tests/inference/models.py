"""Small untrained models whose weights are large enough that every token matters to the next one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runs import small
from tercet.inference.load import LanguageModel
from tercet.model.transformer import Transformer
from tercet.train.trainer import train

# How the preset m7c chooses its blocks, at the sizes of these models: by means of the selected keys, l = d.
AS_M7C = {"model__nsa__compress_block": 2, "model__compression": "mean", "model__compress_selected_keys": True}


def language_model(seed: int = 0, **changes: Any) -> LanguageModel:
    """`model__heads=4` changes model.heads."""
    torch.manual_seed(seed)
    # an untied head: with a tied one an untrained model repeats the token it has just read
    sizes = {"data__seq_len": 128, "train__tokens_per_step": 256, "model__tie_embeddings": False}
    model = LanguageModel(small(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "embedding" in name else 2.0 * parameter.shape[-1] ** -0.5)
    return model


def trained(folder: Path, **changes: Any) -> Path:
    """The folder of a run of a few steps."""
    config = small(run__dir=str(folder), checkpoint__async_save=False, **changes)
    assert train(config, origins=None, resume=None) == 0
    return folder


def greedy_without_cache(model: Transformer, prompt: list[int], steps: int) -> list[int]:
    """The most likely tokens after a prompt, with everything computed again for each."""
    row, device = list(prompt), model.embedding.weight.device
    with torch.no_grad():
        for _ in range(steps):
            row.append(int(model.logits(model.hidden(torch.tensor([row], device=device))[0, -1]).argmax()))
    return row[len(prompt) :]

"""Recorded selections: the blocks that layers of a trained model selected in one sequence, in a small file.

`tercet eval selections` writes them, and `tercet bench attention --inputs recorded` reads them. Selection is causal, so
the first 8,192 queries of a recording are the selection of a sequence of 8,192 tokens.

The file is a NumPy archive (.npz) without pickled objects. Blocks are one bit per layer, KV head, block and query:
neighbouring queries select many of the same blocks, so a block's bits form runs, which LZMA compresses well.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tercet.atomic_io import atomic_write
from tercet.attention.config import NSAConfig
from tercet.data.loader import Batch
from tercet.errors import UsageError
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import held_out
from tercet.inference.selection_map import LayerSelection, record_selections

# Sequences among which one that lies within a single document is searched.
_SEARCHED = 64
_CONFIG = ("select_block", "select_count", "select_initial", "select_local")


@dataclass(frozen=True)
class Recording:
    """bits: uint8 [layers, G, blocks, tokens / 8], as np.packbits packs the queries of a block."""

    about: str
    layers: tuple[int, ...]
    tokens: int
    sizes: dict[str, int]  # the settings of _CONFIG
    bits: np.ndarray

    def block_indices(self, layer: int, tokens: int, groups: int, batch: int = 1) -> Tensor:
        """What `nsa_attention` takes, for the first `tokens` queries of the layer at this place of `layers`: int32 [B,
        T, G, n]. More KV heads or sequences than recorded repeat those that are."""
        block, count = self.sizes["select_block"], self.sizes["select_count"]
        heads = [_unpack(bits, tokens, block, count) for bits in self.bits[layer]]
        chosen = [heads[i % len(heads)] for i in range(batch * groups)]
        return torch.from_numpy(np.stack(chosen)).unflatten(0, (batch, groups)).transpose(1, 2).contiguous()


def record(
    model: LanguageModel,
    length: int,
    layers: int | None = None,
    kv_heads: int | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Recording:
    """Read one validation sequence, and keep the selection of this many layers (none: at most 4), evenly spaced;
    kv_heads: of each. progress: called with the tokens of each layer's forward pass."""
    selecting = model.config.attention_kinds.count("nsa")
    layers = layers or min(4, selecting)
    for name, given, most, what in (
        ("layers", layers, selecting, "layers that select blocks"),
        ("kv-heads", kv_heads or 1, model.config.kv_heads, "KV heads of a layer"),
    ):
        if given > most:
            raise UsageError(f"--{name} {given} is more than the {most} {what}: give at most {most}")
    found = record_selections(model, _sequence(model, length).tokens[0].tolist(), progress)
    kept = [found[round(i * (len(found) - 1) / max(1, layers - 1))] for i in range(layers)]
    about = (
        f"{model.run.run.name}, step {model.step}, selector {model.config.selector}, trained at {model.context} tokens"
    )
    return make_recording(about, kept, kv_heads)


def make_recording(about: str, layers: Sequence[LayerSelection], kv_heads: int | None = None) -> Recording:
    config, tokens = layers[0].config, layers[0].blocks.shape[0]
    blocks = config.num_blocks(tokens)
    bits = np.stack([np.stack([_pack(x, blocks) for x in layer.blocks.unbind(1)[:kv_heads]]) for layer in layers])
    sizes = {name: getattr(config, name) for name in _CONFIG}
    return Recording(about, tuple(layer.layer for layer in layers), tokens, sizes, bits)


def save(recording: Recording, path: Path) -> None:
    arrays = {
        "about": np.array(recording.about), "layers": np.array(recording.layers), "tokens": np.array(recording.tokens),
        "bits": recording.bits, **{name: np.array(size) for name, size in recording.sizes.items()},
    }  # fmt: skip
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def load(path: Path) -> Recording:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {problem}: record selections with `tercet eval selections RUN {path}`")
    try:
        with np.load(path, allow_pickle=False) as file:
            sizes = {name: int(file[name]) for name in _CONFIG}
            layers = tuple(int(layer) for layer in file["layers"])
            tokens, bits = int(file["tokens"]), file["bits"]
            expected = len(layers), -(-tokens // sizes["select_block"]), -(-tokens // 8)
            if bits.dtype != np.uint8 or bits.ndim != 4 or (bits.shape[0], *bits.shape[2:]) != expected:
                raise ValueError("bits of another type or size")
            return Recording(str(file["about"]), layers, tokens, sizes, bits)
    except (OSError, EOFError, KeyError, TypeError, ValueError, LZMAError, zipfile.BadZipFile, zlib.error):
        raise UsageError(
            f"{path} is not a recording of selections: write one with `tercet eval selections RUN {path}`"
        ) from None


def check_fits(recording: Recording, path: Path, config: NSAConfig, tokens: int, what: str) -> None:
    """Raise if the recording cannot be read with this config, or is too short."""
    for name, size in recording.sizes.items():
        if size != getattr(config, name):
            ours = getattr(config, name)
            raise UsageError(
                f"{path} was recorded with {name}={size} and {what} has {ours}: record a model with {ours}"
            )
    if tokens > recording.tokens:
        raise UsageError(f"{what} has {tokens:,} tokens and {path} {recording.tokens:,}: record a longer sequence")


def _sequence(model: LanguageModel, length: int) -> Batch:
    """A validation sequence within one document, if there is one among the first; else the first one without padding,
    whose documents the model then reads as one."""
    first: Batch | None = None
    most = padding = 0  # most: tokens of the fullest sequence
    for batch in held_out(model, sequences=_SEARCHED, seq_len=length, bounds=True):
        filled = length - (batch.stats.padding - padding)
        most, padding = max(most, filled), batch.stats.padding
        if filled < length:
            continue
        first = batch if first is None else first
        if batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, length]:
            return batch
    if first is None:
        raise UsageError(
            f"--length {length} is more than the longest validation sequence, which has {most} tokens of text: give "
            f"at most {most}"
        )
    return first


def _pack(indices: Tensor, blocks: int) -> np.ndarray:
    """[T, n], padded with -1 -> uint8 [blocks, T / 8]"""
    query, slot = (indices >= 0).nonzero(as_tuple=True)
    selected = np.zeros((blocks, indices.shape[0]), dtype=bool)
    selected[indices[query, slot].numpy(), query.numpy()] = True
    return np.packbits(selected, axis=1)


def _unpack(bits: np.ndarray, tokens: int, block: int, count: int) -> np.ndarray:
    """The first `tokens` queries of `_pack`: int32 [T, n]"""
    selected = np.unpackbits(bits[: -(-tokens // block)], axis=1, count=tokens).T
    query, chosen = np.nonzero(selected)  # by query, blocks ascending
    counts = selected.sum(1, dtype=np.int64)
    first = np.cumsum(counts) - counts
    indices = np.full((tokens, count), -1, dtype=np.int32)
    indices[query, np.arange(len(query)) - first[query]] = chosen
    return indices

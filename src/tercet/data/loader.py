"""Batches for the trainer, each with the data cursor after it.

A run resumes from the cursor of the last batch it consumed, so batches that were prefetched but not used are neither
lost nor repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tercet.config.data import DataConfig
from tercet.config.keys import flatten_table
from tercet.data.packing import (
    FORMAT,
    BatchLayout,
    LoaderStats,
    PackedBatches,
    block_dtype,
    check_block,
    pack,
    pack_shuffled,
)
from tercet.data.paths import describe_changes
from tercet.data.sources import open_stream
from tercet.data.stream import DataError, DataUsageError, DocumentStream, Prefetcher, Split
from tercet.data.tokenizers import Tokenizer, load_tokenizer
from tercet.parse import one_line_errors

DAMAGED_CURSOR = "the data cursor of the checkpoint is damaged: use an earlier one"


@dataclass(frozen=True)
class Batch:
    """One rank's share of a batch. tokens, targets: [b, T]; cu_seqlens: [documents + 1] over the b * T tokens."""

    tokens: torch.Tensor  # int64; pinned if this process uses a GPU
    targets: torch.Tensor  # int64; -100 where there is nothing to predict
    cu_seqlens: torch.Tensor | None  # int32; None with cross_document_attention
    state: dict[str, Any]  # cursor after this batch: JSON, the same on every rank
    stats: LoaderStats


class Loader(Prefetcher[Batch]):
    """Iterate over it once; close it, or use it as a context manager."""

    stream: DocumentStream
    changes: list[str]  # of the files since the state was saved, which data.accept_changes accepted


def build_loader(
    data: DataConfig,
    *,
    seed: int,
    batch_sequences: int,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    state: dict[str, Any] | None = None,
    file_lists: Path | None = None,
    tokenizer: Tokenizer | None = None,
    stop: Callable[[], bool] = lambda: False,
    limit: int | None = None,
) -> Loader:
    """Batches of `batch_sequences` sequences over all ranks; this rank gets its contiguous share.

    state: a batch's state, to continue after that batch, at any world size, batch size or sequence length.
    file_lists: folder with the file lists of the run that saved the state, to name files that changed since.
    stop: polled while waiting for a batch; once it returns True, StoppedWaiting is raised after a grace period.
    limit: sequences until another sequence length follows; the last block of shuffled sequences ends with them.

    With data.prefetch=0 batches are read in the calling thread, and `stop` is not polled. Batches are in pinned memory
    if this process has initialised CUDA (a CPU run on a GPU machine has not).
    """
    if batch_sequences < 1 or batch_sequences % world_size:
        above = -(-max(batch_sequences, 1) // world_size) * world_size
        raise DataUsageError(
            f"batch_sequences={batch_sequences} is not a multiple of world_size={world_size}: use {above}"
        )
    if not 0 <= rank < world_size:
        raise DataUsageError(f"rank={rank} is not in 0 … {world_size - 1} (world_size={world_size})")
    if tokenizer is None:
        tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    saved = state.get("identity") if isinstance(state, dict) else None
    stream = open_stream(data, tokenizer, seed=seed, split=split, saved=saved)
    changes: list[str] = []
    for files in stream.notes.files.values():
        _ = files.contents  # computed now, or the prefetch thread and its caller would both do it
    if state is not None:
        with one_line_errors(DataError, DAMAGED_CURSOR):
            changes = _match_files(state, stream, file_lists, accept=data.accept_changes)
            check_block(state, data.shuffle_sequences, data.seq_len)
    share = batch_sequences // world_size
    packing = BatchLayout(
        seq_len=data.seq_len,
        sequences=batch_sequences,
        first=rank * share,
        count=share,
        whole=data.packing == "whole",
        padding_token=tokenizer.eos_id,
        accept_changes=data.accept_changes,
    )
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    if data.shuffle_sequences and split == "train":
        packing = replace(packing, dtype=block_dtype(tokenizer.vocab_size))
        packed = pack_shuffled(stream, packing, data.shuffle_sequences, seed, state, limit)
    else:
        packed = pack(stream, packing, state)
    if state is not None:
        packed = _check_cursor(packed)
    loader = Loader(_to_torch(packed, data, device), data.prefetch, stop)
    loader.stream, loader.changes = stream, changes
    return loader


def _match_files(state: dict[str, Any], stream: DocumentStream, file_lists: Path | None, *, accept: bool) -> list[str]:
    """How the files changed since the state was saved, which is an error unless `accept`. Nothing else may have."""
    before, now = copy.deepcopy(state.get("identity", {})), stream.identity
    changes = []
    for source, files in stream.notes.files.items():
        mixed = isinstance(now.get(source), dict)
        was, is_ = (identity.get(source, {}) if mixed else identity for identity in (before, now))
        keys = was.keys() & is_.keys() & {"files", "shards", "contents"}
        if changed := {key: is_[key] for key in keys if was[key] != is_[key]}:
            changes.append(f"{source}: {describe_changes(file_lists, was.get('contents'), files)}")
            was.update(changed)
    if changes and not accept:
        raise DataError(
            f"the data changed since the checkpoint: {'; '.join(changes)}: restore the files, or continue with "
            "--data.accept_changes (see its help), or start a new run from the weights with train.init_from"
        )
    _check_identity(state.get("format"), before, now)
    return changes


def _check_identity(version: Any, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Reject a state saved with different data: its cursor would point at other documents."""
    if version != FORMAT:
        raise DataError(
            f"data cursor has format {version!r}, this version reads {FORMAT}: resume with the version "
            "that wrote it, or start a new run from the weights with train.init_from"
        )
    before, now = flatten_table(saved), flatten_table(identity)
    for name in sorted(before.keys() | now.keys()):
        if name.endswith(("contents", "chat_template")) and name not in before:
            continue  # saved by version 0.1, or 0.2
        if before.get(name) != now.get(name):
            raise DataError(
                f"the data changed since the checkpoint: {name} was {before.get(name, 'absent')!r} and is "
                f"{now.get(name, 'absent')!r}: restore it, or start a new run from the weights with train.init_from"
            )


def _check_cursor(packed: PackedBatches) -> PackedBatches:
    """Report a damaged cursor, which reading the first batch uses, in one line."""
    try:
        with one_line_errors(DataError, DAMAGED_CURSOR):
            first = next(packed, None)
        if first is not None:
            yield first
            del first  # or it would stay in memory for the whole run
            yield from packed
    finally:
        packed.close()


def _to_torch(packed: PackedBatches, data: DataConfig, device: int | None) -> Generator[Batch, None, None]:
    if device is not None:
        # The prefetch thread defaults to GPU 0, where every rank would then allocate memory.
        torch.cuda.set_device(device)
    try:
        for batch in packed:
            tensors = [torch.from_numpy(array) for array in batch[:3]]
            if device is not None:
                tensors = [tensor.pin_memory() for tensor in tensors]
            tokens, targets, cu_seqlens = tensors
            yield Batch(
                tokens=tokens.view(-1, data.seq_len),
                targets=targets.view(-1, data.seq_len),
                cu_seqlens=None if data.cross_document_attention else cu_seqlens,
                state=batch.state,
                stats=batch.stats,
            )
    finally:
        packed.close()

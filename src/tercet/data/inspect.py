"""`tercet data inspect`: show documents, boundaries and targets as the model will read them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tercet.config.data import DataConfig
from tercet.data.packing import IGNORE, PackedBatch, Packing, pack
from tercet.data.shards import read_manifest, verify
from tercet.data.sources import open_stream
from tercet.data.stream import DataUsageError, Split
from tercet.data.tokenizers import Tokenizer, load_tokenizer

WIDTH = 96


def describe(data: DataConfig, *, split: Split, sequences: int, seed: int) -> Iterator[str]:
    """Lines about the first sequences: each document with its length and its first and last characters."""
    if sequences < 1:
        raise DataUsageError(f"sequences={sequences} is below 1: use a positive number of sequences")
    try:
        data.check_exercises_fit(data.seq_len)
    except ValueError as error:
        raise DataUsageError(str(error)) from None
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    stream = open_stream(data, tokenizer, seed=seed, split=split)
    yield f"source {data.source}, split {split}, seed {seed}"
    yield f"tokenizer {tokenizer.name}: {tokenizer.vocab_size} tokens, EOS {tokenizer.eos_id}"
    yield from stream.notes.held_out
    packing = Packing(data.seq_len, sequences, 0, sequences, data.packing == "whole", tokenizer.eos_id)
    batches = pack(stream, packing)
    packed = next(batches, None)
    batches.close()
    if packed is None:
        yield "no documents"
        return
    yield from _segments(packed, tokenizer, data.seq_len)
    stats = packed.stats
    counted = int((packed.targets != IGNORE).sum())
    has_exercises = any(part.retrieval for part in (data, *data.mixture))
    exercises = f", {stats.exercises} retrieval exercises" * has_exercises
    yield (
        f"{stats.documents} complete documents, {stats.tokens} tokens, {counted} targets, {stats.padding} padding, "
        f"{stats.skipped} bad records skipped, {stats.left_out} empty documents skipped{exercises}"
    )


def describe_shards(folder: Path, *, check: bool) -> Iterator[str]:
    """Lines about a shard folder; `check` verifies its checksums."""
    manifest = verify(folder) if check else read_manifest(folder)
    used = manifest["tokenizer"]
    yield f"{folder}: {len(manifest['shards'])} shards, {manifest['documents']} documents, {manifest['tokens']} tokens"
    yield f"tokenizer {used['name']}: {used['vocab_size']} tokens, fingerprint {used['fingerprint']}"
    source = manifest["source"]["source"]
    yield f"prepared from {source}: {manifest['skipped']} bad records skipped, {manifest['left_out']} empty documents"
    yield "all checksums match" if check else "checksums not verified (use --verify)"


def _segments(packed: PackedBatch, tokenizer: Tokenizer, seq_len: int) -> Iterator[str]:
    bounds = packed.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        if begin % seq_len == 0:
            yield f"sequence {begin // seq_len}"
        tokens = packed.tokens[begin:end].tolist()
        counted = int((packed.targets[begin:end] != IGNORE).sum())
        ended = tokens[-1] == tokenizer.eos_id
        if ended and counted == 0 and len(set(tokens)) == 1:
            yield f"  {len(tokens):>8} tokens of padding"
            continue
        text = repr(tokenizer.decode(tokens))[1:-1]
        shown = text if len(text) <= WIDTH else f"{text[: WIDTH // 2]} … {text[-WIDTH // 2 :]}"
        end = "ends with EOS" if ended else "continues in the next sequence"
        yield f"  {len(tokens):>8} tokens, {counted:>8} targets, {end}: {shown}"

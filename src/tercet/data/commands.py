"""`tercet data ...`: each command is a function, its arguments are flags and its docstring is the help.

torch is imported late, so that --help is fast.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from shlex import quote
from typing import Literal

import numpy as np

from tercet.config.data import DataConfig
from tercet.data.packing import IGNORE, BatchLayout, PackedBatch, pack
from tercet.data.prepare import prepare as prepare_shards
from tercet.data.prepare import train_bpe
from tercet.data.shards import read_manifest, verify_shards
from tercet.data.sources import open_stream
from tercet.data.stream import DataUsageError, Split
from tercet.data.tokenizers import Tokenizer, load_tokenizer
from tercet.terminal import printable

WIDTH = 96  # of a shortened text
MOST_PARTS = 24  # of a document, learned or masked


def prepare(data: DataConfig, out: Path, shard_tokens: int = 1 << 26) -> int:
    """Tokenize a source once into memory-mapped shards, to be read with --data.source shards --data.path OUT.

    Run an interrupted preparation again with the same arguments to continue after the last finished shard.

    Args:
        data: What to read, and the tokenizer.
        out: Output folder for the shards, a manifest with checksums, and the tokenizer.
        shard_tokens: Tokens per shard.
    """
    begin = time.perf_counter()

    def print_progress(now: dict[str, int]) -> None:
        print(
            f"{now['shards']} shard{'s' * (now['shards'] != 1)}, {now['documents']:,} documents, "
            f"{now['tokens']:,} tokens, {now['skipped']} skipped, {now['left_out']} empty, "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )

    manifest = prepare_shards(data, out, shard_tokens=shard_tokens, report=print_progress)
    tokenizer = "byte" if manifest["tokenizer"]["name"] == "byte" else out / "tokenizer.json"
    path = quote(str(out))
    flags = f"--data.source shards --data.path {path} --data.tokenizer {quote(str(tokenizer))}"
    if data.eos_token:
        flags += f" --data.eos_token {quote(data.eos_token)}"
    if data.validation_fraction != DataConfig().validation_fraction:
        flags += f" --data.validation_fraction {data.validation_fraction}"
    print(f"use them with: {flags}")
    return 0


def train_tokenizer(
    data: DataConfig, out: Path, vocab_size: int = 8192, max_bytes: int = 1 << 30, force: bool = False
) -> int:
    """Train a byte-level BPE tokenizer on the training documents of a text source.

    Args:
        data: What to read; data.tokenizer is not used.
        out: The tokenizer.json to write.
        vocab_size: Vocabulary size, including the 256 bytes and EOS.
        max_bytes: Maximum amount of text to read.
        force: Overwrite an existing file.
    """
    tokenizer = train_bpe(data, out, vocab_size=vocab_size, max_bytes=max_bytes, force=force)
    option = f"--data.tokenizer {quote(str(out))}"
    print(f"{out}: {tokenizer.vocab_size} tokens, EOS {tokenizer.eos_id}; use it with: {option}")
    return 0


def inspect(
    data: DataConfig,
    split: Literal["train", "validation"] = "train",
    sequences: int = 4,
    seed: int = 1337,
    verify: bool = False,
) -> int:
    """Show the first sequences as the model will read them: documents, boundaries, targets.

    Args:
        data: What to read.
        split: Training or validation documents.
        sequences: Number of sequences to show.
        seed: Seed of the document order, as run.seed.
        verify: For shards: verify all checksums first.
    """
    shards = describe_shards(Path(data.path[0]).expanduser(), check=verify) if data.source == "shards" else ()
    for line in chain(shards, describe(data, split=split, sequences=sequences, seed=seed)):
        print(printable(line))
    return 0


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
    packing = BatchLayout(data.seq_len, sequences, 0, sequences, data.packing == "whole", tokenizer.eos_id)
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
    manifest = verify_shards(folder) if check else read_manifest(folder)
    used = manifest["tokenizer"]
    yield f"{folder}: {len(manifest['shards'])} shards, {manifest['documents']} documents, {manifest['tokens']} tokens"
    yield f"tokenizer {used['name']}: {used['vocab_size']} tokens, fingerprint {used['fingerprint']}"
    source = manifest["source"]
    settings = [f"{name}={source[name]}" for name in ("special_tokens", "loss_on") if name in source]
    prepared = ", ".join([source["source"], *settings])
    yield f"prepared from {prepared}: {manifest['skipped']} bad records skipped, {manifest['left_out']} empty documents"
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
        what = "ends with EOS" if ended else "continues in the next sequence"
        line = f"  {len(tokens):>8} tokens, {counted:>8} targets, {what}"
        # A token is learned as the target of the one before. The first one is shown like the second.
        learned = packed.targets[begin : end - 1] != IGNORE
        learned = np.concatenate([learned[:1], learned])
        edges = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
        if len(edges) <= 2:
            yield f"{line}: {_shorten(tokenizer.decode(tokens, specials=True))}"
            continue
        yield line
        for first, last in islice(pairwise(edges), MOST_PARTS):
            text = _shorten(tokenizer.decode(tokens[first:last], specials=True))
            yield f"           {'learned' if learned[first] else 'masked '} {text}"
        if len(edges) - 1 > MOST_PARTS:
            yield f"           … {len(edges) - 1 - MOST_PARTS} more parts"


def _shorten(text: str) -> str:
    text = repr(text)[1:-1]
    return text if len(text) <= WIDTH else f"{text[: WIDTH // 2]} … {text[-WIDTH // 2 :]}"

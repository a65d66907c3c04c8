"""`tercet data ...`: each command is a function, its arguments are flags and its docstring is the help.

torch is imported late, so that --help is fast.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from shlex import quote
from typing import Literal

import numpy as np

from tercet.config.data import DataConfig, MixturePart, SourceConfig
from tercet.data.files import Record
from tercet.data.packing import IGNORE, BatchLayout, PackedBatch, pack
from tercet.data.prepare import Progress, train_bpe
from tercet.data.prepare import prepare as prepare_shards
from tercet.data.shards import read_manifest, verify_shards
from tercet.data.sources import open_stream, record_source
from tercet.data.stream import DataUsageError, Split
from tercet.data.tokenizers import Tokenizer, load_tokenizer
from tercet.terminal import printable

WIDTH = 96  # of a shortened text
MOST_PARTS = 24  # of a document, learned or masked
SCANNED_BYTES = 16 << 20  # of text, for strings of special tokens


def prepare(data: DataConfig, out: Path, workers: int = 0, shard_tokens: int = 1 << 26) -> int:
    """Tokenize a source once into memory-mapped shards, to be read with --data.source shards --data.path OUT.

    Run an interrupted preparation again with the same arguments to continue after the last finished shard.

    Args:
        data: What to read, and the tokenizer.
        out: Output folder for the shards, a manifest with checksums, and the tokenizer.
        workers: Tokenizing processes; 0: one per core. The shards do not depend on it.
        shard_tokens: Tokens per shard.
    """

    def print_progress(now: Progress) -> None:
        speed = f", {now.tokens / now.seconds:,.0f} tokens/s" if now.seconds > 1 else ""
        print(
            f"{now.shards} shard{'s' * (now.shards != 1)}, {now.documents:,} documents, {now.tokens:,} tokens, "
            f"{now.skipped} skipped, {now.left_out} empty, {now.seconds:.0f} s{speed}",
            flush=True,
        )

    manifest = prepare_shards(data, out, workers=workers, shard_tokens=shard_tokens, report=print_progress)
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
    data: DataConfig,
    out: Path,
    vocab_size: int = 8192,
    max_bytes: int = 1 << 30,
    seed: int = 0,
    force: bool = False,
) -> int:
    """Train a byte-level BPE tokenizer on the training documents of a text source.

    Args:
        data: What to read; data.tokenizer is not used.
        out: The tokenizer.json to write.
        vocab_size: Vocabulary size, including the 256 bytes and EOS.
        max_bytes: Maximum amount of text to read.
        seed: Seed of the document order; matters if there is more text than max_bytes.
        force: Overwrite an existing file.
    """
    tokenizer = train_bpe(data, out, vocab_size=vocab_size, max_bytes=max_bytes, seed=seed, force=force)
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


def bench(
    data: DataConfig, seconds: float = 5.0, batch_sequences: int = 32, world_size: int = 1, seed: int = 1337
) -> int:
    """Measure loader throughput without a model. The last line is JSON.

    Args:
        data: What to read.
        seconds: How long to measure.
        batch_sequences: Sequences per batch, over all ranks.
        world_size: Read as rank 0 of this many ranks.
        seed: Seed of the document order, as run.seed.
    """
    from tercet.data.loader import build_loader

    begin = time.perf_counter()
    with build_loader(data, seed=seed, batch_sequences=batch_sequences, world_size=world_size) as loader:
        batch = next(loader)
        started, started_busy = time.perf_counter(), time.process_time()
        first = batch.stats.tokens
        while time.perf_counter() - started < seconds and (following := next(loader, None)) is not None:
            batch = following
        elapsed, busy = time.perf_counter() - started, time.process_time() - started_busy
    tokens = batch.stats.tokens - first
    source = data.source if data.source != "synthetic" else f"synthetic/{data.synthetic.task}"
    speed, per_core, opened = tokens / elapsed, tokens / busy, round(started - begin, 3)
    print(
        f"{source}, {data.tokenizer}: {speed:,.0f} tokens/s, {per_core:,.0f} tokens per CPU second "
        f"(first batch after {opened} s)"
    )
    measured = {
        "source": source, "tokenizer": data.tokenizer, "seq_len": data.seq_len, "batch_sequences": batch_sequences,
        "world_size": world_size, "first_batch_seconds": opened, "tokens": tokens,  # over all ranks
        "seconds": round(elapsed, 3),  # without the first batch
        "tokens_per_second": round(speed, 1),
        "tokens_per_core_second": round(per_core, 1),  # of CPU time, all threads; steadier on a busy machine
        "documents": batch.stats.documents, "epoch": batch.stats.epoch, "machine": platform.machine(),
    }  # fmt: skip
    print(json.dumps(measured))
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
    for part in data.mixture or (data,):
        yield from _special_strings(part, tokenizer)
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


def _special_strings(part: SourceConfig, tokenizer: Tokenizer) -> Iterator[str]:
    """How often the texts of a source hold the string of a special token."""
    if not tokenizer.special_strings or part.source in ("synthetic", "shards"):
        return
    # the longest first: <|im_start|>x may be one, too
    strings = sorted(tokenizer.special_strings, key=len, reverse=True)
    pattern = re.compile(b"|".join(re.escape(string.encode()) for string in strings))
    counts: Counter[str] = Counter()
    documents = size = 0
    chats = False
    records = record_source(part, None, tokenizer).open(0, None)
    for record in records:
        if isinstance(record, Record):
            documents, chats = documents + 1, chats or record.learned is not None
            text = (record.prompt or b"") + (record.messages or record.text)
            counts.update(match.decode() for match in pattern.findall(text))
            size += len(text)
            if size >= SCANNED_BYTES:
                break
    name = part.name if isinstance(part, MixturePart) and part.name else part.source
    read = f"the first {documents:,} documents" if size >= SCANNED_BYTES else f"documents: {documents:,}"
    listed = ", ".join(f"{string} {count:,}" for string, count in counts.most_common(5))
    become = "special tokens" if part.special_tokens or chats else "plain text, or tokens with data.special_tokens"
    yield (
        f"{name}: {counts.total():,} strings of special tokens in the text ({read})"
        + (f": {listed}; they become {become}" if counts else "")
    )

"""`tercet data inspect`: show documents, boundaries and targets as the model will read them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from tercet.config.data import DataConfig, MixturePart, SourceConfig
from tercet.data.packing import IGNORE, BatchLayout, PackedBatch, pack
from tercet.data.records import Record
from tercet.data.shards import read_manifest, verify
from tercet.data.sources import open_stream, record_source
from tercet.data.stream import DataUsageError, Split
from tercet.data.tokenizers import Tokenizer, load_tokenizer

WIDTH = 96
MOST_PARTS = 24  # of a document, learned or masked
SCANNED_BYTES = 16 << 20  # of text, for strings of special tokens


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
    manifest = verify(folder) if check else read_manifest(folder)
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
    records = record_source(part, seed=0, shuffle=False, tokenizer=tokenizer).open(0, None)
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

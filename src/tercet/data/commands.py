"""`tercet data ...`: each function is a command, its arguments are flags and its docstring is the help.

Imports nothing heavy, so that --help is fast.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from shlex import quote
from typing import Literal

from tercet.config.data import DataConfig
from tercet.terminal import printable


def prepare(data: DataConfig, out: Path, workers: int = 0, shard_tokens: int = 1 << 26) -> int:
    """Tokenize a source once into memory-mapped shards, to be read with --data.source shards --data.path OUT.

    Run an interrupted preparation again with the same arguments to continue after the last finished shard.

    Args:
        data: What to read, and the tokenizer.
        out: Output folder for the shards, a manifest with checksums, and the tokenizer.
        workers: Tokenizing processes; 0: one per core. The shards do not depend on it.
        shard_tokens: Tokens per shard.
    """
    from tercet.data.prepare import Progress
    from tercet.data.prepare import prepare as run

    def print_progress(now: Progress) -> None:
        speed = f", {now.tokens / now.seconds:,.0f} tokens/s" if now.seconds > 1 else ""
        print(
            f"{now.shards} shard{'s' * (now.shards != 1)}, {now.documents:,} documents, {now.tokens:,} tokens, "
            f"{now.skipped} skipped, {now.left_out} empty, {now.seconds:.0f} s{speed}",
            flush=True,
        )

    manifest = run(data, out, workers=workers, shard_tokens=shard_tokens, report=print_progress)
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
    from tercet.data.train_tokenizer import train_bpe

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
    from tercet.data.inspect import describe, describe_shards

    if data.source == "shards":
        for line in describe_shards(Path(data.path[0]).expanduser(), check=verify):
            print(printable(line))
    for line in describe(data, split=split, sequences=sequences, seed=seed):
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
    measured = {
        "source": data.source if data.source != "synthetic" else f"synthetic/{data.synthetic.task}",
        "tokenizer": data.tokenizer,
        "seq_len": data.seq_len,
        "batch_sequences": batch_sequences,
        "world_size": world_size,
        "first_batch_seconds": round(started - begin, 3),
        "tokens": tokens,  # over all ranks
        "seconds": round(elapsed, 3),  # without the first batch
        "tokens_per_second": round(tokens / elapsed, 1),
        "tokens_per_core_second": round(tokens / busy, 1),  # of CPU time, all threads; steadier on a busy machine
        "documents": batch.stats.documents,
        "epoch": batch.stats.epoch,
        "machine": platform.machine(),
    }
    print(
        f"{measured['source']}, {measured['tokenizer']}: {measured['tokens_per_second']:,.0f} tokens/s, "
        f"{measured['tokens_per_core_second']:,.0f} tokens per CPU second "
        f"(first batch after {measured['first_batch_seconds']} s)"
    )
    print(json.dumps(measured))
    return 0

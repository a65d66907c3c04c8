"""Checks of disk and data: free space for checkpoints, write speed, and whether the data source delivers a batch."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.doctor.machine import FAILED, OK, WARNING, Finding
from tercet.model.cost import parameters
from tercet.telemetry.units import size

SLOW_MB_S = 50.0
# A smaller write shows that the disk is writable, but not how fast it is.
MIN_SPEED_MB = 32
SLOW_DATA_SECONDS = 60


def disk(folder: Path, config: RunConfig, *, megabytes: int) -> Finding:
    """Write a file with fsync, as a checkpoint is written, and check free space."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        speed = _write_speed(place, megabytes)
    except OSError as error:
        return Finding("disk", FAILED, f"{place} cannot be written ({error.strerror})", "pick another --run.dir")
    free = shutil.disk_usage(place).free
    seen = f"{size(free)} free in {place}"
    if megabytes >= MIN_SPEED_MB:
        seen = f"{speed:.0f} MB/s with fsync, {seen}"
    checkpoint = 12 * parameters(config.model).total  # fp32 weights and two moments
    kept = config.checkpoint.keep
    if kept == 0:
        kept = config.train.steps // (config.checkpoint.every or config.train.steps)
    needed = checkpoint * (kept + 1)
    seen += f"; a checkpoint takes about {size(checkpoint)}"
    if free < needed:
        fix = f"free {size(needed - free)}, lower checkpoint.keep, or pick another --run.dir"
        return Finding("disk", FAILED if free < 2 * checkpoint else WARNING, seen, fix)
    if speed < SLOW_MB_S and megabytes >= MIN_SPEED_MB:
        return Finding("disk", WARNING, seen, "checkpoints will be slow here: pick a local disk with --run.dir")
    return Finding("disk", OK, seen)


def _write_speed(folder: Path, megabytes: int) -> float:
    block = os.urandom(2**20)
    path = folder / f".doctor-{os.getpid()}"
    try:
        start = time.perf_counter()
        with path.open("wb") as stream:
            for _ in range(megabytes):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        return megabytes * 2**20 / 1e6 / (time.perf_counter() - start)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def data(config: RunConfig) -> Finding:
    """Open the source as training would and read one batch, without shuffling sequences: packing a block is slow."""
    from tercet.data.loader import build_loader
    from tercet.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos_token)
    if tokenizer.vocab_size > config.model.vocab_size:
        fix = f"--model.vocab_size {-(-tokenizer.vocab_size // 64) * 64}"
        problem = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.model.vocab_size}"
        return Finding("data", FAILED, problem, fix)
    start = time.perf_counter()
    stage = config.stages[0]
    source = stage.data.model_copy(update={"prefetch": 0, "shuffle_sequences": 0})
    with build_loader(
        source, seed=config.run.seed, batch_sequences=stage.train.micro_batch, tokenizer=tokenizer
    ) as loader:
        batch = next(iter(loader), None)
    elapsed = time.perf_counter() - start
    if batch is None:
        return Finding("data", FAILED, f"{config.data.source} has no training documents", "see tercet data inspect")
    seen = f"{config.data.source}: first batch of {batch.tokens.numel():,} tokens in {elapsed:.2f} s"
    if elapsed > SLOW_DATA_SECONDS:
        return Finding("data", WARNING, seen, "tercet data prepare writes shards, which open immediately")
    return Finding("data", OK, seen)

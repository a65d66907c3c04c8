"""Disk and data: room for checkpoints, the speed of writing them, and whether tokens come."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.doctor.machine import FAILED, OK, WARNING, Finding
from tercet.model.cost import parameters

SLOW_MB_S = 50.0
# Less than this says nothing about speed, only that the disk can be written.
ENOUGH_MB = 32


def disk(folder: Path, config: RunConfig | None = None, *, megabytes: int = 64) -> Finding:
    """Writes a file with fsync, as a checkpoint is written, and asks how much room is left."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        speed = _write_speed(place, megabytes)
    except OSError as error:
        return Finding("disk", FAILED, f"{place} cannot be written ({error.strerror})", "pick another --run.dir")
    free = shutil.disk_usage(place).free
    told = f"{free / 2**30:.1f} GiB free in {place}"
    if megabytes >= ENOUGH_MB:
        told = f"{speed:.0f} MB/s with fsync, {told}"
    if config is not None:
        one = 12 * parameters(config.model).total  # fp32 weights and two moments
        needed = one * (config.checkpoint.keep + 1)
        told += f"; a checkpoint takes about {one / 2**30:.2f} GiB"
        if config.checkpoint.keep == 0:
            saves = config.train.steps // (config.checkpoint.every or config.train.steps) + 1
            needed = one * saves
        if free < needed:
            mend = f"free {(needed - free) / 2**30:.1f} GiB, lower checkpoint.keep, or pick another --run.dir"
            return Finding("disk", FAILED if free < 2 * one else WARNING, told, mend)
    if speed < SLOW_MB_S and megabytes >= ENOUGH_MB:
        return Finding("disk", WARNING, told, "checkpoints will be slow here: pick a local disk with --run.dir")
    return Finding("disk", OK, told)


def _write_speed(folder: Path, megabytes: int) -> float:
    block = os.urandom(2**20)
    path = folder / f".doctor-{os.getpid()}"
    try:
        begun = time.perf_counter()
        with path.open("wb") as stream:
            for _ in range(megabytes):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        return megabytes * 2**20 / 1e6 / (time.perf_counter() - begun)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def data(config: RunConfig) -> Finding:
    """Opens the source as training would, and takes one batch, in the order of packing: a block of shuffled sequences
    takes a while, and training will pack it anyway."""
    from tercet.data.loader import build_loader
    from tercet.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos_token)
    if tokenizer.vocab_size > config.model.vocab_size:
        mend = f"--model.vocab-size {-(-tokenizer.vocab_size // 64) * 64}"
        wrong = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.model.vocab_size}"
        return Finding("data", FAILED, wrong, mend)
    begun = time.perf_counter()
    source = config.data.model_copy(update={"prefetch": 0, "shuffle_sequences": 0})
    with build_loader(
        source, seed=config.run.seed, batch_sequences=config.train.micro_batch, tokenizer=tokenizer
    ) as loader:
        batch = next(iter(loader), None)
    took = time.perf_counter() - begun
    if batch is None:
        return Finding("data", FAILED, f"{config.data.source} has no training documents", "tercet data inspect")
    told = f"{config.data.source}: a first batch of {batch.tokens.numel():,} tokens in {took:.2f} s"
    if took > 60:
        return Finding("data", WARNING, told, "tercet data prepare makes shards that open at once")
    return Finding("data", OK, told)

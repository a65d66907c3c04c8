"""Loader throughput without a model: `tercet data bench`."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass

from tercet.config.data import DataConfig


@dataclass(frozen=True)
class Throughput:
    source: str
    tokenizer: str
    seq_len: int
    batch_sequences: int
    world_size: int
    first_batch_seconds: float
    tokens: int  # over all ranks
    seconds: float  # without the first batch
    tokens_per_second: float
    tokens_per_core_second: float  # per second of CPU time, all threads; steadier on a busy machine
    documents: int
    epoch: int
    machine: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure(
    data: DataConfig, *, seconds: float = 5.0, batch_sequences: int = 32, world_size: int = 1, seed: int = 1337
) -> Throughput:
    """Read batches for about `seconds` as rank 0 of `world_size`."""
    from tercet.data.loader import build_loader

    begin = time.perf_counter()
    with build_loader(data, seed=seed, batch_sequences=batch_sequences, world_size=world_size) as loader:
        batch = next(loader)
        started, started_busy = time.perf_counter(), time.process_time()
        first = batch.stats.tokens
        while time.perf_counter() - started < seconds:
            following = next(loader, None)
            if following is None:
                break
            batch = following
        elapsed, busy = time.perf_counter() - started, time.process_time() - started_busy
    tokens = batch.stats.tokens - first
    return Throughput(
        source=data.source if data.source != "synthetic" else f"synthetic/{data.synthetic.task}",
        tokenizer=data.tokenizer,
        seq_len=data.seq_len,
        batch_sequences=batch_sequences,
        world_size=world_size,
        first_batch_seconds=round(started - begin, 3),
        tokens=tokens,
        seconds=round(elapsed, 3),
        tokens_per_second=round(tokens / elapsed, 1),
        tokens_per_core_second=round(tokens / busy, 1),
        documents=batch.stats.documents,
        epoch=batch.stats.epoch,
        machine=platform.machine(),
    )

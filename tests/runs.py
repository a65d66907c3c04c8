"""Runs small enough for tests: a model of a few thousand weights, and what its run folder holds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from tercet.config.load import load
from tercet.config.schema import RunConfig
from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import Event, StepLogged
from tercet.train.manifest import complete_checkpoints

E = TypeVar("E", bound=Event)

# Small, but selection has a choice: 8 blocks of 8 tokens, of which queries read 4 (one by score), and a window of 8.
SMALL: dict[str, Any] = {
    "model.dim": 16, "model.layers": 2, "model.heads": 2, "model.kv_heads": 1, "model.head_dim": 8, "model.ffn_dim": 32,
    "model.vocab_size": 256, "model.nsa.compress_block": 4, "model.nsa.compress_stride": 2, "model.nsa.select_block": 8,
    "model.nsa.select_count": 4, "model.nsa.window": 8, "data.source": "synthetic", "data.seq_len": 64,
    "data.shuffle_sequences": 0,  # presets shuffle: tiny would read its whole buffer before the first step
    "train.steps": 6, "train.micro_batch": 2, "train.tokens_per_step": 128, "train.warmup_steps": 2,
    "train.val_tokens": 0, "train.sample_tokens": 0, "checkpoint.every": 2, "log.every": 1, "log.tensorboard": False,
    "run.device": "cpu", "run.threads": 1,
}  # fmt: skip


# The smallest sizes that the kernels support, for runs on a GPU. In fp32 such a test mostly compiles.
GPU_SIZES: dict[str, Any] = {
    "model__dim": 64, "model__heads": 4, "model__kv_heads": 2, "model__head_dim": 16, "model__ffn_dim": 128,
    "model__nsa__compress_block": 8, "model__nsa__compress_stride": 4, "model__nsa__select_block": 16,
    "model__nsa__select_count": 4, "model__nsa__window": 32, "data__seq_len": 512, "run__device": "cuda",
}  # fmt: skip


def small(**changes: Any) -> RunConfig:
    """A small run; `train__steps=9` changes train.steps."""
    return load(flags=SMALL | {k.replace("__", "."): v for k, v in changes.items()}).config


def train_small(folder: Path, resume: str | None = None, **changes: Any) -> int:
    """Train a small run in this folder, in this process; returns its exit code."""
    from tercet.train.trainer import train

    return train(small(run__dir=str(folder), **changes), resume=resume)


def events_of(folder: Path, kind: type[E]) -> list[E]:
    """Events of one kind, of rank 0."""
    return [event for event in read_events(events_file(folder)) if isinstance(event, kind)]


def step_logged(step: int, **changes: Any) -> StepLogged:
    """The event of an interval of one step."""
    values = {
        "loss": 1.0, "lr": 1e-3, "grad_norm": 1.5, "tokens": 128 * step, "tokens_per_s": 1000.0, "step_seconds": 0.128,
        "data_seconds": 0.0, "mfu": None, "memory_gib": 0.5, "skipped": 0, "epoch": 0, "first_step": step,
        "losses": [1.0], "grad_norms": [1.5],
    }  # fmt: skip
    return StepLogged(step=step, **values | changes)


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as dictionaries of strings."""
    with path.open() as stream:
        return list(csv.DictReader(stream))


def losses(run: Path) -> dict[int, str]:
    """step -> loss with all digits, as written in training.csv. Every step is logged once."""
    logged = rows(run / "training.csv")
    assert len({r["step"] for r in logged}) == len(logged)
    return {int(r["step"]): r["loss"] for r in logged}


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    return complete_checkpoints(run / "checkpoints")[-1]


def tensors(run: Path, part: str = "") -> dict[str, torch.Tensor]:
    """Weights and optimizer moments of the newest checkpoint, whose names begin with `part`."""
    files = sorted(newest(run).glob("*.safetensors"))
    return {k: v for f in files for k, v in load_file(f).items() if k.startswith(part)}


def assert_same_run(expected: Path, got: Path) -> None:
    """The same losses, weights and optimizer moments, to the bit."""
    assert losses(got) == losses(expected)
    ours, theirs = tensors(expected), tensors(got)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)

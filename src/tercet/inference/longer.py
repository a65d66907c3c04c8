"""How a model is taught a greater length than that of its training: the command, from what its folder has kept."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from tercet.config.load import ConfigError, load
from tercet.config.schema import RunConfig
from tercet.inference.load import CONFIG, WEIGHTS
from tercet.train import manifest
from tercet.typed import typed


def train_on(run: Path, length: int) -> str:
    """The command, with NEW for a folder to be picked; the keys to set where no command is known to be accepted."""
    run = run.expanduser()
    weights = run / WEIGHTS if (run / CONFIG).is_file() and (run / WEIGHTS).is_file() else run
    file = next((f for f in (run / CONFIG, manifest.run_of(run) / CONFIG) if f.is_file()), None)
    try:
        if file is not None:
            return _command(file, weights, length)
    except ConfigError:
        pass
    return (
        f"train with its configuration, train.init_from={weights}, data.seq_len={length}, and a train.tokens_per_step "
        "that is a multiple of train.micro_batch × data.seq_len × ranks"
    )


def _command(file: Path, weights: Path, length: int) -> str:
    config = load(file=file).config
    keys = {"run.dir": "NEW", "train.init_from": str(weights), "data.seq_len": length, **_sizes(config, length)}
    parallel = load(file=file, flags=keys).config.parallel  # refused here rather than after it was typed
    ranks = f"{typed('torchrun')} --standalone --nproc-per-node={parallel.world_size} -m tercet"
    words = ["train", "--config", str(file)]
    for key, value in keys.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return f"{ranks if parallel.strategy != 'single' else typed()} {shlex.join(words)}"


def _sizes(config: RunConfig, length: int) -> dict[str, Any]:
    """What must change with the length: as many tokens at once as before, or one sequence, and whole passes a step."""
    asked, ranks = config.train.tokens_per_step, config.parallel.data_ranks
    most = max(1, config.train.micro_batch * config.data.seq_len // length)
    sequences, rest = divmod(asked, length * ranks)
    if rest:
        batch, one = most, most * length * ranks
        asked = -(-asked // one) * one
    else:
        batch = max(n for n in range(1, most + 1) if sequences % n == 0)
    sizes = {"train.micro_batch": batch, "train.tokens_per_step": asked}
    now = {"train.micro_batch": config.train.micro_batch, "train.tokens_per_step": config.train.tokens_per_step}
    return {key: value for key, value in sizes.items() if value != now[key]}

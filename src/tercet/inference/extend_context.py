"""Suggest the command that continues training a model at a longer sequence length."""

from __future__ import annotations

from pathlib import Path

from tercet import hints
from tercet.config.load import ConfigError, load
from tercet.config.schema import RunConfig
from tercet.inference.arguments import CONFIG, WEIGHTS, has_weights
from tercet.train import manifest


def extend_context_command(run: Path, length: int) -> str:
    """The command, with NEW as the run folder to choose; if none would be valid, the keys to set."""
    run = run.expanduser()
    weights = run / WEIGHTS if has_weights(run) else run
    file = next((f for f in (run / CONFIG, manifest.run_of(run) / CONFIG) if f.is_file()), None)
    try:
        if file is not None:
            return _train_command(file, weights, length)
    except ConfigError:
        pass
    return (
        f"train with its configuration, train.init_from={weights}, data.seq_len={length}, and a train.tokens_per_step "
        "that is a multiple of train.micro_batch × data.seq_len × ranks"
    )


def _train_command(file: Path, weights: Path, length: int) -> str:
    config = load(file=file).config
    keys = {"run.dir": "NEW", "train.init_from": str(weights), "data.seq_len": length, **_batch_sizes(config, length)}
    if config.train.stages:  # a run of one stage, like the last one
        last = {"train.steps": config.train.stages[-1].steps, "model.rope_theta": config.stages[-1].model.rope_theta}
        keys |= {"train.stages": "none", **last}
    parallel = load(file=file, flags=keys).config.parallel  # raises ConfigError if the command would be invalid
    return hints.train_config(file, keys, ranks=None if parallel.strategy == "single" else parallel.world_size)


def _batch_sizes(config: RunConfig, length: int) -> dict[str, int]:
    """About as many tokens per pass as before, and whole passes per step."""
    batch = max(1, config.train.micro_batch * config.data.seq_len // length)
    per_pass = batch * length * config.parallel.data_ranks
    return {
        "train.micro_batch": batch,
        "train.tokens_per_step": -(-config.stages[-1].train.tokens_per_step // per_pass) * per_pass,
    }

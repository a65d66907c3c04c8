"""The lines that say, before anything moves, what is about to run."""

from __future__ import annotations

import torch

from tercet.config.schema import RunConfig
from tercet.model.cost import parameters
from tercet.parallel.strategy import Strategy
from tercet.telemetry.progress import quantity
from tercet.train.device import device_name
from tercet.train.state import TrainState, compiles


def header_lines(
    config: RunConfig, state: TrainState, device: torch.device, strategy: Strategy, folder: object
) -> list[tuple[str, str]]:
    """(name, value) pairs."""
    train, model = config.train, config.model
    kinds = "+".join(sorted(set(model.attention_kinds)))
    arithmetic = "bf16 over fp32 weights" if precision_of(config, device) == "bf16" else "fp32"
    extras = [arithmetic, "blocks compiled"] if compiles(config, device) else [arithmetic]
    if train.activation_checkpointing != "none":
        extras.append(f"{train.activation_checkpointing} activation checkpointing")
    if config.run.deterministic:
        extras.append("deterministic")
    sizes = f"{model.layers} layers of {kinds}, dim {model.dim}, {model.heads} heads over {model.kv_heads} KV heads"
    all_tokens = quantity(train.steps * train.tokens_per_step)
    passes = f"{config.accumulation} × {train.micro_batch} sequences per rank"
    lines = [
        ("model", f"{quantity(parameters(model).total)} parameters: {sizes}"),
        ("data", f"{config.data.source}, {config.data.tokenizer} tokens, sequences of {config.data.seq_len}"),
        ("device", f"{device_name(device)}, {', '.join(extras)}"),
        ("strategy", f"{strategy.name}, {strategy.world_size} rank{'s' * (strategy.world_size > 1)}"),
        ("step", f"{quantity(train.tokens_per_step)} tokens: {passes}"),
        ("run", f"{train.steps} steps, {all_tokens} tokens, lr {train.lr:g} ({train.schedule}), into {folder}"),
    ]
    if state.step:
        lines.append(("resumed", f"after step {state.step}, {quantity(state.tokens)} tokens"))
    if state.parent:
        lines.append(("started from", f"{train.init_state} of {state.parent['path']}"))
    if train.warmup_steps >= train.steps:
        lines.append(
            ("note", f"warmup_steps={train.warmup_steps} covers all {train.steps} steps: lr stays below its peak")
        )
    return lines


def precision_of(config: RunConfig, device: torch.device) -> str:
    """bf16 or fp32, with `auto` resolved."""
    asked = config.train.precision
    return asked if asked != "auto" else ("bf16" if device.type == "cuda" else "fp32")

"""The lines that say, before anything moves, what is about to run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from shlex import quote

import torch

from tercet.atomic_io import write_json
from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.model.cost import flops_per_token, memory, parameters
from tercet.parallel.strategy import Strategy
from tercet.telemetry.events import EventLog, RunEnded, read_events
from tercet.telemetry.hardware import GIB, GPU_UTILISATION, host_total_gib, peak_flops
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import summarise
from tercet.telemetry.units import duration, quantity, size
from tercet.train import manifest
from tercet.train.device import device_name
from tercet.train.run_folder import RunFolder, go_on
from tercet.train.state import TrainState, compiles, records
from tercet.typed import typed


def header_lines(
    config: RunConfig, state: TrainState, device: torch.device, strategy: Strategy, folder: object, vocab_size: int
) -> list[tuple[str, str]]:
    """(name, value) pairs. `vocab_size`: the tokenizer's."""
    train, model = config.train, config.model
    kinds = "+".join(sorted(set(model.attention_kinds)))
    arithmetic = "bf16 over fp32 weights" if precision_of(config, device) == "bf16" else "fp32"
    extras = [arithmetic, "blocks compiled"] if compiles(config, device) else [arithmetic]
    if records(config, device):
        extras.append("steps as CUDA graphs")
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
        ("time", _time(config, state, device, strategy)),
    ]
    if train.val_tokens:
        lines.append(("validation", _validation(config)))
    if state.step:
        lines.append(("resumed", f"after step {state.step}, {quantity(state.tokens)} tokens"))
    if state.parent:
        lines.append(("started from", f"{train.init_state} of {state.parent['path']}"))
    if strategy.world_size == 1 and (room := _total_memory(device)) is not None:
        compute = 2 if precision_of(config, device) == "bf16" else 4
        needed = memory(
            model, config.tokens_per_pass, compute_bytes=compute,
            activation_checkpointing=train.activation_checkpointing,
        ).total  # fmt: skip
        if needed > room:
            mend = "fewer sequences (train.micro_batch), train.activation_checkpointing=full, or another preset"
            lines.append(("warning", f"a step needs about {size(needed)}, and there are {size(room)}: {mend}"))
    if (told := config.data.shuffle_warning(vocab_size, _host_memory())) is not None:
        lines.append(("warning", told))
    if train.warmup_steps >= train.steps:
        lines.append(
            ("note", f"warmup_steps={train.warmup_steps} covers all {train.steps} steps: lr stays below its peak")
        )
    return lines


def _time(config: RunConfig, state: TrainState, device: torch.device, strategy: Strategy) -> str:
    """A first guess; one from measured steps follows with the first log lines."""
    # The peaks that we know are bf16's: fp32 is many times slower, by a factor of its own on every device.
    known = device.type == "cuda" and precision_of(config, device) == "bf16"
    peak = peak_flops(device_name(device)) if known else None
    if peak is None:
        return "estimated after the first log lines"
    left = (config.train.steps - state.step) * config.train.tokens_per_step
    rate = peak * GPU_UTILISATION * strategy.world_size / flops_per_token(config.model, config.data.seq_len)
    return f"about {duration(left / rate)}, if steps reach {GPU_UTILISATION:.0%} of the device's peak"


def _total_memory(device: torch.device) -> int | None:
    """Bytes of the device, or of the machine where the run is on its CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return _host_memory()


def _host_memory() -> int | None:
    total = host_total_gib()
    return None if total is None else round(total * GIB)


def _validation(config: RunConfig) -> str:
    asked, made = config.train.val_tokens, config.validation_passes * config.tokens_per_pass
    rounded = "" if asked == made else f" (val_tokens={asked} rounded up to whole passes)"
    every = config.train.val_every
    return f"{quantity(made)} tokens{rounded}, {f'every {every} steps and ' if every else ''}at the end"


def precision_of(config: RunConfig, device: torch.device) -> str:
    """bf16 or fp32, with `auto` resolved."""
    return resolved_precision(config.train.precision, device.type)


# ------------------------------------------------------------------------------------------------
# The last words of a run: its closing event, metrics.json, and what a person is told.

METRICS = "metrics.json"


def close_record(log: EventLog, folder: RunFolder, outcome: str, reason: str, state: TrainState, began: float) -> None:
    """The closing event, and on rank 0 metrics.json."""
    log.emit(RunEnded(step=state.step, outcome=outcome, reason=reason, seconds=time.time() - began))
    if log.rank == 0:
        write_json(folder.path / METRICS, summarise(read_events(log.path)))


def sum_up(
    screen: Screen,
    config: RunConfig,
    folder: RunFolder,
    state: TrainState,
    *,
    completed: bool,
    reason: str,
    began: float,
    first_step: int,
    first_tokens: int,
    bad_records: int,
    bad_examples: Sequence[str],
) -> None:
    """One line of what was done, and what to do next."""
    took = duration(time.time() - began)
    steps = f"{state.step}/{config.train.steps} steps, {quantity(state.tokens)} tokens"
    if first_step:  # the time is this process's alone: a killed one before it may have left none
        steps += f"; since the resume {state.step - first_step} steps, {quantity(state.tokens - first_tokens)} tokens"
    if not completed and state.step == 0:
        screen.say(f"{reason}: left before the first step, with nothing to save")
        return
    if not completed:
        screen.say(
            f"{reason}: saved after step {state.step} and left ({steps}, {took}); go on with: {go_on(folder.path)}"
        )
        return
    if state.step == first_step > 0:
        screen.say(_nothing_left(config, folder, state.step, reason))
        return
    if bad_records:
        screen.say(f"warning: {bad_records} bad records were left out: {'; '.join(bad_examples)}", "bold yellow")
    figures = json.loads((folder.path / METRICS).read_text(encoding="utf-8"))
    losses = [f"{n} {figures[k]:.4f}" for n, k in (("loss", "loss"), ("validation", "val_loss")) if figures[k]]
    screen.say(f"done: {steps} in {took} ({reason}); {', '.join(losses)}; run folder {folder.path}")
    screen.say(f"is it any good?  {typed()} report {quote(str(folder.path))}")


def _nothing_left(config: RunConfig, folder: RunFolder, made: int, reason: str) -> str:
    """Of a run that had ended before it was resumed."""
    planned = config.train.steps
    if made < planned:
        why = f"{made} steps were made before, of {planned} planned, and {reason}"
        more = "--data.exhaustion repeat --checkpoint.allow-config-change"
    else:
        why = f"{made} steps were made before, of {planned} planned"
        more = f"--train.steps {2 * made}"
    return f"nothing was left to do: {why}; to train further: {go_on(folder.path)} {more}"


def newest(folder: RunFolder) -> str:
    """What is safe whatever happened, in words."""
    kept = manifest.complete_checkpoints(folder.checkpoints)
    return f"the newest complete checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"


def disk_sentence(error: OSError, folder: RunFolder) -> str:
    """A disk that failed, what is safe all the same, and how to go on."""
    where = error.filename or folder.path
    return f"{where}: {error.strerror or error}; {newest(folder)}: go on with: {go_on(folder.path)}"

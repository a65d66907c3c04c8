"""Console output at the start and the end of a run: a header with the main settings, a summary with the next commands.

Progress in between comes from events (telemetry.progress).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from tercet import hints
from tercet.config.keys import flatten
from tercet.config.load import describe
from tercet.config.schema import RunConfig, uses_cuda_graph
from tercet.config.sections import resolved_precision
from tercet.doctor.memory import device_memory, largest_stage, savings, shortage, step_memory
from tercet.errors import TercetError, UsageError, is_out_of_memory
from tercet.model.cost import parameters, selector_parameters
from tercet.parallel.strategy import Strategy
from tercet.telemetry.hardware import host_memory
from tercet.telemetry.progress import Screen
from tercet.terminal import duration, passes_of, plural, quantity, size
from tercet.train import manifest
from tercet.train.device import device_name
from tercet.train.run_folder import RunFolder
from tercet.train.state import TrainState, uses_compile

METRICS = "metrics.json"


def header_lines(
    config: RunConfig, state: TrainState, device: torch.device, strategy: Strategy, folder: object, vocab_size: int
) -> list[tuple[str, str]]:
    """(name, value) pairs to print before training. `vocab_size`: the tokenizer's."""
    train, model = config.train, config.model
    kinds = "+".join(sorted(set(model.attention_names)))
    heads = f"{plural(model.heads, 'query head')}, {plural(model.kv_heads, 'KV head')}"
    sizes = f"{plural(model.layers, 'layer')} of {kinds}{model.nsa_options}, dim {model.dim}, {heads}"
    tokens = quantity(config.total_tokens)
    trains = f", of which the selectors' {quantity(selector_parameters(model))} train" if train.selector.only else ""
    rate = f"lr {train.lr:g}"
    if train.optimizer == "muon":
        rate = f"lr {train.muon.lr or train.lr:g} with Muon and {train.lr:g} with AdamW"
    lines = [
        ("model", f"{quantity(parameters(model).total)} parameters{trains}: {sizes}"),
        ("data", f"{config.data.source}, tokenizer {config.data.tokenizer}, sequences of {_sequences(config)}"),
        ("device", f"{device_name(device)}, {', '.join(_execution(config, device))}"),
        ("strategy", f"{strategy.name}, {plural(strategy.world_size, 'rank')}"),
        *_step_lines(config),
        ("run", f"{plural(train.steps, 'step')}, {tokens} tokens, {rate} ({train.schedule}), in {folder}"),
    ]
    if state.step:
        lines.append(("resumed", f"after step {state.step}, {quantity(state.tokens)} tokens"))
    if state.parent:
        lines.append(("started from", f"{train.init_state} of {state.parent['path']}"))
    if strategy.world_size == 1 and (available := device_memory(device)) is not None:
        warning = shortage(config, precision_of(config, device), available, on_gpu=device.type == "cuda")
        if warning is not None:
            lines.append(("warning", warning))
    if (warning := config.largest_shuffle.shuffle_warning(vocab_size, host_memory())) is not None:
        lines.append(("warning", warning))
    return [*lines, *(("note", note) for note in _notes(config))]


def _notes(config: RunConfig) -> Iterator[str]:
    """Settings that are valid, and probably not meant so."""
    train, model = config.train, config.model
    if train.warmup_steps >= train.steps:
        yield f"warmup_steps={train.warmup_steps} covers all {train.steps} steps: lr stays below its peak"
    tokens = "nsa" in model.attention_kinds and model.selector in ("learned", "own")
    if tokens and (found := config.nothing_to_choose) is not None:
        yield f"model.selector={model.selector} has nothing to choose: {found.reason}: {found.fix}"


def _execution(config: RunConfig, device: torch.device) -> list[str]:
    """How steps run on the device."""
    train = config.train
    options = ["bf16 with fp32 weights" if precision_of(config, device) == "bf16" else "fp32"]
    if uses_compile(config, device):
        options.append("compiled blocks")
    if uses_cuda_graph(config, device.type):
        options.append("CUDA graphs")
    if train.activation_checkpointing != "none":
        options.append(f"{train.activation_checkpointing} activation checkpointing")
    if config.run.deterministic:
        options.append("deterministic")
    return options


def _sequences(config: RunConfig) -> str:
    lengths = ", then ".join(str(stage.data.seq_len) for stage in config.stages)
    block = config.largest_shuffle.shuffle_sequences
    return f"{lengths}, {block:,} packed and shuffled before the first step" if block else lengths


def _step_lines(config: RunConfig) -> list[tuple[str, str]]:
    """The batch of a step; with train.stages, one line per stage."""
    batches = [
        f"{quantity(stage.train.tokens_per_step)} tokens: " + passes_of(stage.accumulation, stage.train.micro_batch)
        for stage in config.stages
    ]
    if not config.train.stages:
        return [("step", batches[0])]
    rows = zip(config.stages, config.train.stages, batches, strict=True)
    return [
        (f"stage {n}", f"{own.steps} steps of {batch}, length {own.seq_len}, rope_theta {stage.model.rope_theta:g}")
        for n, (stage, own, batch) in enumerate(rows, 1)
    ]


def config_lines(config: RunConfig, origins: Mapping[str, str], folder: Path) -> list[str]:
    """The settings that differ from the preset, and the commands that show the rest and the progress."""
    presets = [origin for origin in dict.fromkeys(origins.values()) if origin.startswith("preset ")]
    changed = describe(config, origins, without=presets)
    base = " and ".join(presets) or "the defaults"
    return [
        f"settings: {base}{' with these changes' if changed else ''} (all: {hints.tercet('config', 'show', folder)})",
        *(f"  {line}" for line in changed),
        f"watch from another terminal: {hints.tercet('watch', folder)}",
    ]


def no_effect_lines(config: RunConfig, origins: Mapping[str, str]) -> list[str]:
    """A message for each reason why flags of the model have no effect."""
    given = flatten(config)
    lines = []
    for reason, names in config.model.unused_keys.items():
        keys = [
            key for name in names if origins.get(key := f"model.{name}") == "flag" and given[key] not in (False, None)
        ]
        if keys:
            lines.append(f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: {reason}")
    return lines


def precision_of(config: RunConfig, device: torch.device) -> str:
    """bf16 or fp32, with `auto` resolved."""
    return resolved_precision(config.train.precision, device.type)


class Start(NamedTuple):
    """Where this process started."""

    time: float
    step: int
    tokens: int


def print_summary(
    screen: Screen, config: RunConfig, folder: RunFolder, state: TrainState, start: Start, *, completed: bool,
    reason: str, bad_records: int, bad_examples: Sequence[str],
) -> None:  # fmt: skip
    """Print what was done and what to do next."""
    seconds = duration(time.time() - start.time)
    steps = f"{state.step}/{config.train.steps} steps, {quantity(state.tokens)} tokens"
    if start.step:  # the time is this process's only
        done, tokens = state.step - start.step, quantity(state.tokens - start.tokens)
        steps += f" ({done} steps, {tokens} tokens since the resume)"
    look = [hints.generate(folder.path, config.sample_prompt or "TEXT"), hints.report(folder.path)]
    if not completed and state.step == 0:
        screen.say(f"{reason}: stopped before the first step: nothing to save, the same command starts again")
        return
    if not completed:
        screen.say(f"{reason}: saved step {state.step} and stopped ({steps}, {seconds})")
        screen.say(f"resume with: {hints.resume(folder.path, config.parallel.world_size)}")
        screen.say("\n  ".join(["generate text, check the run:", *look]))
        return
    longer = _train_longer(config, folder, state.step)
    if state.step == start.step > 0:  # it was already complete
        why = f" and {reason}" if state.step < config.train.steps else ""
        screen.say(
            f"nothing left to do: {state.step} of {config.train.steps} steps are done{why}; train longer with: {longer}"
        )
        return
    if bad_records:
        screen.say(f"warning: {bad_records} bad records were skipped: {'; '.join(bad_examples)}", "bold yellow")
    path = folder.path / METRICS  # missing if the disk was full
    metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # One step's loss is noisy.
    named = (("smoothed loss", "smoothed_loss"), ("validation loss", "val_loss"))
    losses = [f"{name} {metrics[key]:.4f}" for name, key in named if metrics.get(key)]
    screen.say(f"done: {steps} in {seconds} ({reason}); {', '.join([*losses, f'run folder {folder.path}'])}", wrap=True)
    screen.say("\n  ".join(["next: generate text, check the run, train longer", *look, longer]))


def _train_longer(config: RunConfig, folder: RunFolder, done: int) -> str:
    """The command that continues a completed run. A run with steps left has used all its data."""
    ended = done < config.train.steps
    more = "--data.exhaustion repeat --checkpoint.allow_config_change" if ended else f"--train.steps {2 * done}"
    if config.train.stages and not ended:
        longer = ",".join(map(str, [*config.train.stages, config.train.stages[-1]]))
        more = f"--train.stages {longer} --checkpoint.allow_config_change"
    return f"{hints.resume(folder.path, config.parallel.world_size)} {more}"


def check_memory(config: RunConfig, device: torch.device) -> None:
    """Refuse a model whose training state alone exceeds the device, before any of it is allocated; on a CPU, also one
    whose steps take far more than its memory."""
    precision, available = precision_of(config, device), device_memory(device)
    if available is None:
        return
    needed = step_memory(config, precision)
    if (state := needed.weights + needed.gradients + needed.optimizer) > available:
        raise UsageError(
            f"{quantity(parameters(config.model).total)} parameters with gradients and optimizer state take "
            f"{size(state)} per rank, and {device_name(device)} has {size(available)}: use a smaller model, or more "
            "ranks with --parallel.strategy fsdp"
        )
    # A GPU that runs out of memory raises an error, a host kills processes: refuse what cannot fit even if the estimate
    # is far too high.
    step = step_memory(largest_stage(config, precision)[1], precision).total
    if device.type == "cpu" and step > 1.5 * available:
        missing = "" if torch.cuda.is_available() else "no GPU was found, and on this CPU "
        raise UsageError(missing + (shortage(config, precision, available, on_gpu=False) or ""))


@contextmanager
def memory_errors(config: RunConfig, device: torch.device, step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn running out of memory into one line with three settings that need less, and how much less.

    step: the last step done, which tells the stage of train.stages.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        index = config.stage_index(step() + 1)
        needed = step_memory(config.stages[index], precision_of(config, device)).total
        available = device_memory(device)
        tried = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", str(error))
        amount = "" if tried is None else size(float(tried[1])) if tried[2] == "bytes" else f"{tried[1]} {tried[2]}"
        parts = [
            f"out of memory on {device}{amount and f' (tried to allocate {amount})'}: a step needs about {size(needed)}"
            + ("" if available is None else f" of {size(available)}"),
            *savings(config, index, precision_of(config, device), on_gpu=device.type == "cuda"),
            "--debug shows where",
        ]
        raise TercetError("; ".join(parts)) from error


def disk_error(error: OSError, folder: RunFolder, ranks: int) -> str:
    """Error message for a failed write: what failed, what is safe, and how to resume."""
    where, newest = error.filename or folder.path, manifest.describe_newest(folder.checkpoints)
    return f"{where}: {error.strerror or error}; {newest}: resume with: {hints.resume(folder.path, ranks)}"

"""Subprocess of `tercet bench train`: measures cells one after another with the trainer's own step.

    python -m tercet.bench.train_cell '{"cells": [...], "steps": 10, "repeats": 3, "checks": [...]}'

Prints one JSON line for each check of kernels and each cell. Between cells it resets the compiler and frees device
memory, so that a cell behaves as in a fresh process.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tercet.bench.settings import is_out_of_memory, loaded
from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.data.loader import build_loader
from tercet.doctor.kernels import parity
from tercet.doctor.machine import FAILED, OK
from tercet.errors import TercetError
from tercet.parallel.strategy import Single, Strategy
from tercet.telemetry.events import GraphCaptureFailed
from tercet.telemetry.observer import LayerProbe
from tercet.train.device import device_name, peak_memory_gib, pick_device
from tercet.train.optim import learning_rate
from tercet.train.state import build_state
from tercet.train.step import MicroBatch, autocast, loss_sum, train_step, untimed

# Relative difference between compiled and uncompiled loss: a mean over thousands of tokens in bf16
_SAME_LOSS = 2e-3
# Above this an extra uncompiled pass would cost more than the cell itself
_CHECKED_TOKENS = 1 << 18
# Warm-up steps: the first compiles, and memory allocation is stable after the third
_WARM = 3


class _DrawnOnDevice(Single):
    """Draws the initial weights on the device, which is faster than on the host."""

    def build_model(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        with device:
            return build()


class Steps:
    """One model, trained on one batch."""

    def __init__(
        self, config: RunConfig, *, packed: bool = True, strategy: Strategy | None = None,
        batch: Callable[[], MicroBatch] | None = None,
    ) -> None:  # fmt: skip
        """strategy, batch: of several ranks."""
        self.config, self.strategy = config, strategy or _DrawnOnDevice()
        current = torch.cuda.current_device() if strategy and torch.cuda.is_initialized() else 0
        self.device = pick_device(config.run.device, current, flag="--device")
        self.state = build_state(config, self.device, self.strategy, None)
        self.batch = batch() if batch else _batch(config, self.device, packed=packed)
        self.losses: list[float] = []

    def interval(self, steps: int) -> float:
        """Seconds per step over one log interval, device synchronised before and after."""
        state, config = self.state, self.config.train
        self._wait()
        started = time.perf_counter()
        for step in range(state.step + 1, state.step + 1 + steps):
            result = train_step(
                state.model, state.optimizer, [self.batch], step=step,
                lr=learning_rate(config, min(step, config.steps)), clip=config.clip, precision=config.precision,
                guard=state.guard, strategy=self.strategy, phase=untimed, executor=state.graph,
            )  # fmt: skip
            state.step = step
            state.interval.add(step, result)
        self.losses += [measured.loss for measured in state.interval.read()]
        state.interval.clear()
        self._wait()
        return (time.perf_counter() - started) / steps

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def configured(cell: dict[str, Any]) -> RunConfig:
    """The run configuration of a cell."""
    keys = {
        "data.seq_len": cell["length"], "train.micro_batch": cell["batch"],
        "train.tokens_per_step": cell["batch"] * cell["length"],
        "train.activation_checkpointing": cell["checkpointing"],
    }  # fmt: skip
    return loaded(cell, **keys)


def measure(cell: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """Check the loss of a cell, then time intervals of steps."""
    torch._dynamo.reset()
    config = configured(cell)
    run = Steps(config, packed=cell["packed"])
    on_gpu, state = run.device.type == "cuda", run.state
    expected = _uncompiled_loss(run)
    first = run.interval(min(steps, _WARM) if repeats else steps)  # compiles
    if on_gpu and repeats:
        torch.cuda.reset_peak_memory_stats(run.device)
    seconds = [run.interval(steps) for _ in range(repeats)] or [first]
    peak = peak_memory_gib(run.device, state.held_bytes) if on_gpu else None
    routes = {str(route) for layer in LayerProbe(state.model).layers for route in layer.routes.values()}
    took, start = statistics.median(seconds), run.losses[0]
    noted = state.graph.take_events() if state.graph is not None else []
    lost = [event.reason for event in noted if isinstance(event, GraphCaptureFailed)]
    outcome = f"CUDA graph capture failed: {lost[0][:200]}" if lost else "ok"
    if not all(map(math.isfinite, run.losses)) or (expected and abs(start - expected) > _SAME_LOSS * expected):
        outcome = f"wrong loss: {start} at the first step, {expected} uncompiled"
    return {
        "outcome": outcome, "selector": None if cell["kind"] == "dense" else config.model.selector,
        "tokens_per_s": config.train.tokens_per_step / took, "ms": 1e3 * took,
        "spread": (max(seconds) - min(seconds)) / took, "peak_gib": peak,
        "reserved_gib": torch.cuda.max_memory_reserved(run.device) / 2**30 if on_gpu else None,
        "first_loss": start, "uncompiled_loss": expected, "last_loss": run.losses[-1],
        "includes_compiling": repeats == 0, "routes": sorted(routes),
        "parameters": sum(p.numel() for p in state.model.parameters()),
    }  # fmt: skip


def _batch(config: RunConfig, device: torch.device, *, packed: bool) -> MicroBatch:
    """One document per sequence: one row each, or packed into one row with cu_seqlens. Tokens are random; for weights
    from train.init_from they are training data, whose own documents are ignored."""
    rows, length = config.train.micro_batch, config.data.seq_len
    if config.train.init_from is None:
        drawn = torch.Generator().manual_seed(config.run.seed)
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=drawn).to(device)
    else:
        data = config.data.model_copy(update={"seq_len": length + 1})
        with build_loader(data, seed=config.run.seed, batch_sequences=rows) as loader:
            tokens = next(iter(loader)).tokens.to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if not packed:
        return MicroBatch(inputs, targets, None)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    return MicroBatch(inputs.view(1, -1), targets.view(1, -1), bounds, length)


@torch.no_grad()
def _uncompiled_loss(run: Steps) -> float | None:
    """Loss at initialisation without torch.compile; None if the batch is too long for a second pass."""
    if run.batch.tokens.numel() > _CHECKED_TOKENS:
        return None
    with torch.compiler.set_stance("force_eager"), autocast(run.device, run.config.train.precision):
        return float(loss_sum(run.state.model, run.batch)) / run.batch.targets.numel()


def check_kernels(cell: dict[str, Any]) -> dict[str, Any]:
    """Compare output and gradients of the kernels with the reference at a model's sizes, as `tercet doctor` does.

    On a CPU there are no kernels to check, and `correct` is None.
    """
    config = loaded(cell)
    device = pick_device(config.run.device, flag="--device")
    about = {"check": cell["kind"], "device": device_name(device), "torch": torch.__version__}
    if device.type != "cuda":
        return {**about, "found": "no kernels on this device", "correct": None}
    precision = resolved_precision(config.train.precision, "cuda")
    found = parity(config.model, short=True, packed=cell["packed"], precision=precision, seq_len=cell["length"])
    return {**about, "found": found.finding, "correct": {OK: True, FAILED: False}.get(found.verdict)}


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    for cell in asked.get("checks", ()):
        print(json.dumps(check_kernels(cell)), flush=True)
    for cell in asked["cells"]:
        try:
            result = measure(cell, asked["steps"], asked["repeats"])
        except (TercetError, RuntimeError) as error:  # torch.compile wraps errors in a RuntimeError
            text = str(error) if isinstance(error, TercetError) else (str(error).strip().splitlines() or [""])[0][:200]
            text = text or type(error).__name__
            result = {"outcome": "out of memory" if is_out_of_memory(str(error)) else f"failed: {text}"}
        print(json.dumps({**cell, **result}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

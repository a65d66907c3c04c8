"""Cells of `tercet bench train`, measured one after another in one process: whole steps, as the trainer makes them.

    python -m tercet.bench.train_cell '{"cells": [...], "steps": 10, "repeats": 3}'

Prints one line of JSON for the kernels' parity and one for each cell. Between cells the compiler forgets what it
compiled and the device's memory is given back, so that a cell is as it would be in a process of its own.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tercet.bench.telemetry import Bench
from tercet.config.load import load
from tercet.config.schema import RunConfig
from tercet.model.attention import NativeSparseAttention
from tercet.model.transformer import Block
from tercet.telemetry.layers import LayerProbe
from tercet.train.device import device_name, pick_device
from tercet.train.step import MicroBatch, autocast, loss_sum

# ‖Δ‖/‖reference‖ of a block's output and gradients, by the laws of the operator
_TOLERANCE = {True: 1e-2, False: 1e-5}  # in bf16 or not
# A compiled model's loss beside its own, uncompiled: a mean over thousands of tokens in bf16
_SAME_LOSS = 2e-3
# Beyond this an uncompiled pass beside the compiled one would cost more than the cell
_CHECKED_TOKENS = 1 << 18


def configured(cell: dict[str, Any], steps: int) -> RunConfig:
    """The configuration that a run of this cell would have."""
    flags = {
        "data.seq_len": cell["length"],
        "train.micro_batch": cell["batch"],
        "train.tokens_per_step": cell["batch"] * cell["length"],
        "train.activation_checkpointing": cell["checkpointing"],
        "log.every": steps,
        "log.tensorboard": False,
        "checkpoint.every": 0,
        **cell.get("flags", {}),
    }
    return load(preset=cell["preset"], flags=flags).config


def measure(cell: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """One cell: first the loss is checked, then steps are timed in log intervals, everything that watches included."""
    torch._dynamo.reset()
    config = configured(cell, steps)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder))
        bench.batches = [_batch(config, bench.device, packed=cell["packed"])]
        expected = _uncompiled_loss(bench)
        begun = time.perf_counter()
        first = bench.interval(watched=True)  # compiles
        first_seconds = (time.perf_counter() - begun) if steps == 1 else None
        losses = [_logged_losses(Path(folder))]
        if bench.device.type == "cuda" and repeats:
            torch.cuda.reset_peak_memory_stats(bench.device)
        seconds = [bench.interval(watched=True) for _ in range(repeats)] or [first]
        losses.append(_logged_losses(Path(folder)))
        peak = torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.device.type == "cuda" else None
        probe = LayerProbe(bench.state.model)
        routes = sorted({str(route) for layer in probe.layers for route in layer.routes.values()})
        bench.log.close()
        for sink in bench.behind:
            sink.close()
    took, tokens = statistics.median(seconds), config.train.tokens_per_step
    all_losses = losses[-1]
    start = all_losses[0]
    sound = all(map(math.isfinite, all_losses)) and (expected is None or abs(start - expected) <= _SAME_LOSS * expected)
    return {
        "outcome": "ok" if sound else f"wrong loss: {start} at the first step, {expected} uncompiled",
        "tokens_per_s": tokens / took,
        "ms": 1e3 * took,
        "spread": (max(seconds) - min(seconds)) / took,
        "peak_gib": peak,
        "first_loss": start,
        "uncompiled_loss": expected,
        "last_loss": all_losses[-1],
        "first_interval_s": first * steps if first_seconds is None else first_seconds,
        "includes_compiling": repeats == 0,
        "routes": routes,
        "parameters": sum(p.numel() for p in bench.state.model.parameters()),
    }


def _batch(config: RunConfig, device: torch.device, *, packed: bool) -> MicroBatch:
    """Random tokens: a document per sequence, as rows of a batch, or packed into one row with their bounds."""
    rows, length = config.train.micro_batch, config.data.seq_len
    drawn = torch.Generator().manual_seed(config.run.seed)
    tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=drawn).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if not packed:
        return MicroBatch(inputs, targets, None)
    bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    return MicroBatch(inputs.view(1, -1), targets.view(1, -1), bounds)


@torch.no_grad()
def _uncompiled_loss(bench: Bench) -> float | None:
    """Of the first weights; None where the batch is too long to pass twice."""
    batch = bench.batches[0]
    if batch.tokens.numel() > _CHECKED_TOKENS:
        return None
    with torch.compiler.set_stance("force_eager"), autocast(bench.device, bench.config.train.precision):
        return float(loss_sum(bench.state.model, batch)) / batch.targets.numel()


def _logged_losses(folder: Path) -> list[float]:
    from tercet.telemetry.events import StepLogged, events_file, read_events

    return [loss for e in read_events(events_file(folder)) if isinstance(e, StepLogged) for loss in e.losses]


def parity(preset: str, flags: dict[str, Any]) -> dict[str, Any]:
    """A block of the model on this device's backend against the reference: output where blocks are chosen (4·n·l'
    tokens), output and every gradient where all fit in, and no near-tie can choose others."""
    config = load(preset=preset, flags=flags).config
    device = pick_device(config.run.device)
    torch.manual_seed(0)
    block = Block(config.model, "nsa")
    block.init_weights(0.02, 0.02)
    block.to(device)
    fits = config.model.nsa.select_count * config.model.nsa.select_block
    low = device.type == "cuda"
    errors = {}
    for name, length in (("chosen", 4 * fits if low else fits + fits // 2), ("all blocks", fits)):
        x = torch.randn(1, length, config.model.dim, device=device)
        found, wanted = (_passed(block, x, backend, config.train.precision) for backend in ("auto", "reference"))
        kept = found.keys() if name == "all blocks" else ("output",)
        for key in kept:
            difference, size = (found[key] - wanted[key]).norm(), wanted[key].norm()
            errors[f"{name}: {key}"] = float(difference / size) if size else float(difference)
    worst = max(errors, key=lambda key: errors[key])
    assert isinstance(block.attention, NativeSparseAttention)
    return {
        "parity": errors[worst],
        "of": worst,
        "correct": errors[worst] <= _TOLERANCE[low],
        "device": device_name(device),
        "torch": torch.__version__,
    }


def _passed(block: nn.Module, x: Tensor, backend: str, precision: str) -> dict[str, Tensor]:
    block.attention.backend = backend  # type: ignore[union-attr, assignment]
    inputs = x.clone().requires_grad_()
    block.zero_grad()
    with autocast(x.device, precision):
        out = block(inputs)
    drawn = torch.Generator(x.device).manual_seed(1)
    out.backward(torch.randn(out.shape, generator=drawn, device=x.device, dtype=out.dtype))
    assert inputs.grad is not None
    grads = {name: p.grad.double() for name, p in block.named_parameters() if p.grad is not None}
    return {"output": (out - x).detach().double(), "input": inputs.grad.double(), **grads}


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    if asked.get("parity"):
        print(json.dumps(parity(*asked["parity"])), flush=True)
    for cell in asked["cells"]:
        try:
            result = measure(cell, asked["steps"], asked["repeats"])
        except torch.OutOfMemoryError:
            result = {"outcome": "out of memory"}
        except RuntimeError as error:  # the compiler wraps what happens while it compiles
            text = str(error)
            lines = text.strip().splitlines() or [type(error).__name__]
            result = {"outcome": "out of memory" if "out of memory" in text else f"failed: {lines[0][:200]}"}
        print(json.dumps({**cell, **result}), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Subprocess of `tercet bench train`: measures cells one after another with the trainer's own step.

    python -m tercet.bench.train_cell '{"cells": [...], "steps": 10, "repeats": 3}'

Prints one JSON line for the kernel check and one per cell. Between cells it resets the compiler and frees device
memory, so that a cell behaves as in a fresh process.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tercet.bench.attention import Shape, check_gradients
from tercet.bench.telemetry import Bench
from tercet.bench.timing import profile
from tercet.config.load import load
from tercet.config.schema import RunConfig
from tercet.data.loader import build_loader
from tercet.errors import TercetError
from tercet.telemetry.observer import LayerProbe
from tercet.train.device import device_name, peak_memory_gib, pick_device
from tercet.train.graph_choice import STEPS_TO_DECIDE
from tercet.train.step import MicroBatch, autocast, loss_sum

# ‖Δ‖/‖reference‖ of the operator's output and gradients in bf16
_TOLERANCE = 1e-2
# Relative difference between compiled and uncompiled loss: a mean over thousands of tokens in bf16
_SAME_LOSS = 2e-3
# Above this an extra uncompiled pass would cost more than the cell itself
_CHECKED_TOKENS = 1 << 18
# Warm-up steps: the first compiles, and memory allocation is stable after the third
_WARM = 3
# With train.cuda_graph=auto: the graph is captured, if at all
_WARM_AUTO = STEPS_TO_DECIDE + _WARM


def configured(cell: dict[str, Any], steps: int) -> RunConfig:
    """The run configuration of a cell."""
    flags = {
        "data.seq_len": cell["length"],
        "train.micro_batch": cell["batch"],
        "train.tokens_per_step": cell["batch"] * cell["length"],
        "train.activation_checkpointing": cell["checkpointing"],
        "log.every": steps if cell.get("statistics", True) else 1_000_000_000,
        "log.tensorboard": False,
        "checkpoint.every": 0,
        **cell.get("flags", {}),
    }
    return load(preset=cell["preset"], flags=flags).config


def measure(cell: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """Check the loss of a cell, then time log intervals, telemetry included."""
    torch._dynamo.reset()
    config = configured(cell, steps)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder))
        bench.batches = [_batch(config, bench.device, packed=cell["packed"])]
        expected = _uncompiled_loss(bench)
        warm = _warm_ups(config, steps) if repeats else steps
        first = bench.interval(watched=True, steps=warm)  # compiles
        if bench.device.type == "cuda" and repeats:
            torch.cuda.reset_peak_memory_stats(bench.device)
        seconds = [bench.interval(watched=True, steps=steps) for _ in range(repeats)] or [first]
        losses = _logged_losses(Path(folder))
        on_gpu = bench.device.type == "cuda"
        peak = peak_memory_gib(bench.device, bench.state.held_bytes) if on_gpu else None
        reserved = torch.cuda.max_memory_reserved(bench.device) / 2**30 if on_gpu else None
        probe = LayerProbe(bench.state.model)
        routes = sorted({str(route) for layer in probe.layers for route in layer.routes.values()})
        bench.close()
    took, tokens = statistics.median(seconds), config.train.tokens_per_step
    start, lost = losses[0], bench.state.graph.take_failures() if bench.state.graph is not None else []
    sound = all(map(math.isfinite, losses)) and (expected is None or abs(start - expected) <= _SAME_LOSS * expected)
    outcome = f"CUDA graph capture failed: {lost[0][:200]}" if lost else "ok"
    return {
        "outcome": outcome if sound else f"wrong loss: {start} at the first step, {expected} uncompiled",
        "tokens_per_s": tokens / took,
        "ms": 1e3 * took,
        "spread": (max(seconds) - min(seconds)) / took,
        "peak_gib": peak,
        "reserved_gib": reserved,
        "first_loss": start,
        "uncompiled_loss": expected,
        "last_loss": losses[-1],
        "first_interval_s": first * warm,
        "includes_compiling": repeats == 0,
        "routes": routes,
        "parameters": sum(p.numel() for p in bench.state.model.parameters()),
    }


def kernel_times(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Profile a training step of a cell: milliseconds and launches of every kernel, longest first. Needs a GPU."""
    torch._dynamo.reset()
    config = configured(cell, 1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder))
        bench.batches = [_batch(config, bench.device, packed=cell["packed"])]
        bench.interval(watched=False, steps=_warm_ups(config, _WARM))
        found = profile(lambda: bench.interval(watched=False, steps=1), repeats=2)
        bench.close()
    return [{"kernel": name, "ms": ms, "launches": launches} for ms, launches, name in found]


def _warm_ups(config: RunConfig, most: int) -> int:
    return _WARM_AUTO if config.train.cuda_graph == "auto" else min(most, _WARM)


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
def _uncompiled_loss(bench: Bench) -> float | None:
    """Loss at initialisation without torch.compile; None if the batch is too long for a second pass."""
    batch = bench.batches[0]
    if batch.tokens.numel() > _CHECKED_TOKENS:
        return None
    with torch.compiler.set_stance("force_eager"), autocast(bench.device, bench.config.train.precision):
        return float(loss_sum(bench.state.model, batch)) / batch.targets.numel()


def _logged_losses(folder: Path) -> list[float]:
    from tercet.telemetry.event_log import events_file, read_events
    from tercet.telemetry.events import StepLogged

    return [loss for e in read_events(events_file(folder)) if isinstance(e, StepLogged) for loss in e.losses]


def parity(preset: str, flags: dict[str, Any], packed: bool) -> dict[str, Any]:
    """Compare output and gradients of the kernels with the fp32 reference at the model's heads, with the same blocks.

    On a CPU there are no kernels to check, and `correct` is None.
    """
    config = load(preset=preset, flags=flags).config
    device, model = pick_device(config.run.device, flag="--device"), config.model
    about = {"device": device_name(device), "torch": torch.__version__, "packed": packed}
    if device.type != "cuda":
        return {"parity": None, "of": "no kernels on this device", "correct": None, **about}
    shape = Shape(1, 4096, model.heads, model.kv_heads, model.head_dim)
    errors = check_gradients(shape, model.nsa, "random", 0.0, packed=packed, block_sparse=model.gate == "none")
    worst = max(errors, key=lambda key: errors[key])
    return {"parity": errors[worst], "of": worst, "correct": errors[worst] <= _TOLERANCE, **about}


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    if asked.get("parity"):
        print(json.dumps(parity(*asked["parity"])), flush=True)
    for cell in asked["cells"]:
        try:
            result = measure(cell, asked["steps"], asked["repeats"])
        except torch.OutOfMemoryError:
            result = {"outcome": "out of memory"}
        except TercetError as error:
            result = {"outcome": f"failed: {error}"}
        except RuntimeError as error:  # torch.compile wraps errors in this one
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

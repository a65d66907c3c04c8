"""Benchmark the whole attention layer against the dense one (`tercet bench layer`).

Runs the layers that models train with (projections, RoPE, compression and gates included), forward + backward, in bf16
on a GPU or fp32 on a CPU. Compares this device's backend with the reference first; if they differ, no ratio is printed
and the exit code is 1. The last line of output is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tercet.errors import UsageError
from tercet.model.dense import DenseAttention
from tercet.model.nsa import NativeSparseAttention
from tercet.telemetry.units import plural

# Allowed ‖Δ‖/‖reference‖ of the output
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def main(lengths: Sequence[int], tokens: int, compile: bool, repeats: int) -> int:
    if not lengths:
        raise UsageError("--lengths is empty: nothing to measure")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    shapes = [(max(1, tokens // length), length) for length in lengths]
    print(f"{name}, torch {torch.__version__}, {dtype}, dim 768, 12 heads, 2 KV heads, head 64, normal inputs")
    print(
        f"{plural(len(shapes), 'shape')}: {', '.join(f'{batch} x {length}' for batch, length in shapes)} tokens; "
        f"NSA and dense{', compiled' * compile}, forward + backward, median of {repeats}"
    )
    print(f"{'T':>8} {'batch':>6} {'error':>9} {'NSA ms':>9} {'dense ms':>9} {'× dense':>8}  backend")
    results = [_at(length, batch, device, dtype, compile, repeats) for batch, length in shapes]
    verdicts = {row["correct"] for row in results}
    correct = False if False in verdicts else None if None in verdicts else True
    print(json.dumps({"bench": "layer", "device": name, "compiled": compile, "correct": correct, "results": results}))
    return 1 if correct is False else 0


def _at(
    length: int, batch: int, device: torch.device, dtype: torch.dtype, compile: bool, repeats: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    sparse = NativeSparseAttention(768, 12, 2, 64)
    dense = DenseAttention(768, 12, 2, 64)
    for layer in (sparse, dense):
        layer.init_weights(std=0.02, output_std=0.02)
        layer.to(device)
    x = torch.randn(batch, length, 768, device=device)
    error = _error(sparse, x, dtype)
    correct = None if error is None else error <= _TOLERANCE[dtype]
    times = [_milliseconds(_step(layer, x, dtype, compile), device, repeats) for layer in (sparse, dense)]
    route = sparse.routes["compressed"]
    row = {
        "T": length, "batch": batch, "error": error, "correct": correct, "nsa_ms": times[0], "dense_ms": times[1],
        "times_dense": None if correct is False else times[1] / times[0], "backend": str(route),
    }  # fmt: skip
    ratio = "   WRONG" if correct is False else f"{times[1] / times[0]:8.2f}"
    shown = "–" if error is None else f"{error:.1e}"
    print(f"{length:8d} {batch:6d} {shown:>9} {times[0]:9.2f} {times[1]:9.2f} {ratio}  {route!r}", flush=True)
    return row


def _autocast(x: Tensor, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(x.device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


@torch.no_grad()
def _error(layer: NativeSparseAttention, x: Tensor, dtype: torch.dtype) -> float | None:
    """Relative error of one row of the batch against the reference, both in this dtype; None if the reference ran."""
    with _autocast(x, dtype):
        found = layer(x[:1]).double()
        if "reference" in layer.routes.values():
            return None
        layer.backend = "reference"
        wanted = layer(x[:1]).double()
    layer.backend = "auto"
    return float((found - wanted).norm() / wanted.norm())


def _step(layer: nn.Module, x: Tensor, dtype: torch.dtype, compile: bool) -> Callable[[], None]:
    run = torch.compile(layer) if compile else layer
    inputs = x.clone().requires_grad_()

    def step() -> None:
        inputs.grad = None
        with _autocast(x, dtype):
            out = run(inputs)
        out.float().square().mean().backward()

    return step


def _milliseconds(step: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median over `repeats`, after a warm-up."""
    for _ in range(min(3, repeats)):
        step()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)

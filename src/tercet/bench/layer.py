"""Benchmark the whole attention layer against the dense one (`tercet bench layer`).

Runs the layers that models train with (projections, RoPE, compression and gates included), forward + backward, in bf16
on a GPU or fp32 on a CPU. Compares this device's backend with the reference first; if they differ, no ratio is printed
and the exit code is 1. The last line of output is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tercet.bench.timing import device_name, milliseconds, reference_error
from tercet.errors import UsageError
from tercet.model.layers import DenseAttention, NativeSparseAttention
from tercet.telemetry.units import plural

# Allowed ‖Δ‖/‖reference‖ of the output
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def main(lengths: Sequence[int], tokens: int, compile: bool, budget: float) -> int:
    if not lengths:
        raise UsageError("--lengths is empty: nothing to measure")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = [(max(1, tokens // length), length) for length in lengths]
    print(f"{device_name()}, torch {torch.__version__}, {dtype}, dim 768, 12 heads, 2 KV heads, head 64, normal inputs")
    print(
        f"{plural(len(shapes), 'shape')}: {', '.join(f'{batch} x {length}' for batch, length in shapes)} tokens; "
        f"NSA and dense{', compiled' * compile}, forward + backward, median"
    )
    print(f"{'T':>8} {'batch':>6} {'error':>9} {'NSA ms':>9} {'dense ms':>9} {'× dense':>8}  backend")
    results = [_at(length, torch.zeros(batch, length, 768, device=device), dtype, compile, budget)
               for batch, length in shapes]  # fmt: skip
    verdicts = {row["correct"] for row in results}
    correct = False if False in verdicts else None if None in verdicts else True
    record = {"bench": "layer", "device": device_name(), "compiled": compile, "correct": correct, "results": results}
    print(json.dumps(record))
    return 1 if correct is False else 0


def _at(length: int, x: Tensor, dtype: torch.dtype, compile: bool, budget: float) -> dict[str, Any]:
    torch.manual_seed(0)
    x.normal_()
    sparse, dense = NativeSparseAttention(768, 12, 2, 64), DenseAttention(768, 12, 2, 64)
    for layer in (sparse, dense):
        layer.init_weights(std=0.02, output_std=0.02)
        layer.to(x.device)
    with _autocast(x, dtype):
        error = reference_error(sparse, lambda: sparse(x[:1]))
    correct = None if error is None else error <= _TOLERANCE[dtype]
    nsa_ms, dense_ms = (milliseconds(_step(layer, x, dtype, compile), budget) for layer in (sparse, dense))
    times = None if correct is False else dense_ms / nsa_ms
    route = sparse.routes["compressed"]
    ratio, shown = "   WRONG" if times is None else f"{times:8.2f}", "–" if error is None else f"{error:.1e}"
    print(f"{length:8d} {len(x):6d} {shown:>9} {nsa_ms:9.2f} {dense_ms:9.2f} {ratio}  {route!r}", flush=True)
    return {
        "T": length, "batch": len(x), "error": error, "correct": correct, "nsa_ms": nsa_ms, "dense_ms": dense_ms,
        "times_dense": times, "backend": str(route),
    }  # fmt: skip


def _autocast(x: Tensor, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(x.device.type, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()


def _step(layer: nn.Module, x: Tensor, dtype: torch.dtype, compile: bool) -> Callable[[], None]:
    run = torch.compile(layer) if compile else layer
    inputs = x.clone().requires_grad_()

    def step() -> None:
        inputs.grad = None
        with _autocast(x, dtype):
            out = run(inputs)
        out.float().square().mean().backward()

    return step

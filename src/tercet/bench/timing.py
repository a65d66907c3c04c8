"""Time calls on a GPU, or on a CPU for dry runs: eager, as a CUDA graph, by kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def milliseconds(call: Callable[[], Any], budget: float = 0.6) -> float:
    """Median over back-to-back calls, by CUDA events: includes launch overhead where the host is the bottleneck."""
    if not torch.cuda.is_available():
        return _cpu_milliseconds(call, budget)
    call()
    once = max(_between([call])[0], 1e-3)
    for _ in range(0 if once > 200 else 2):
        call()
    return statistics.median(_between([call] * max(3, min(200, int(budget * 1000 / once)))))


def _between(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each call."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _cpu_milliseconds(call: Callable[[], Any], budget: float) -> float:
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < min(budget, 0.1):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, budget: float) -> dict[str, float]:
    """Milliseconds of an inference forward and of forward + backward, and the peak memory of the latter."""

    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, dout)

    def forward_only() -> Any:
        with torch.no_grad():
            return forward()

    found = {"forward_ms": milliseconds(forward_only, budget)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    found["both_ms"] = milliseconds(both, budget)
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def print_profile(call: Callable[[], Any], repeats: int = 3) -> None:
    """Print milliseconds and launches of every kernel of one call, longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = [e for e in events.key_averages() if e.self_device_time_total]
    for e in sorted(found, key=lambda e: -e.self_device_time_total):
        ms = e.self_device_time_total / 1000 / repeats
        print(f"  {ms:9.4f} ms {e.count // repeats:4d} × {e.key[:90]}")

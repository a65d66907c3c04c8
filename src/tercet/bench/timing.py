"""Time calls on a GPU, or on a CPU for dry runs: eager, as a CUDA graph, by kernel."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def milliseconds(call: Callable[[], Any], budget: float = 0.6) -> float:
    """Median over back-to-back calls, by CUDA events: includes launch overhead where the host is the bottleneck."""
    if not torch.cuda.is_available():
        return _cpu_milliseconds(call, budget)
    call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    count = max(3, min(200, int(budget * 1000 / once)))
    for _ in range(0 if once > 200 else 2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def _cpu_milliseconds(call: Callable[[], Any], budget: float) -> float:
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < min(budget, 0.1):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def host_milliseconds(call: Callable[[], Any], count: int = 20) -> float:
    """Launch overhead: how long the host takes to enqueue a call (mean of the faster half)."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.mean(sorted(times)[: count // 2]) * 1000


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


def measure(
    forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, graph: bool, budget: float
) -> dict[str, float]:
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
    if graph:
        found["graph_both_ms"] = milliseconds(graphed(both), budget)
    return found


def profile(call: Callable[[], Any], repeats: int = 3) -> list[tuple[float, int, str]]:
    """(milliseconds, launches, kernel name) of one call, longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as events:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = [
        (e.self_device_time_total / 1000 / repeats, e.count // repeats, e.key)
        for e in events.key_averages()
        if e.self_device_time_total
    ]
    return sorted(found, reverse=True)


def print_profile(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> None:
    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, dout)

    print(f"  launch overhead: {host_milliseconds(both):.3f} ms for forward and backward")
    for ms, launches, kernel in profile(both):
        print(f"  {ms:9.4f} ms {launches:4d} × {kernel[:90]}")

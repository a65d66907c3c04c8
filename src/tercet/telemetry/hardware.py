"""Speed and memory of known GPUs, and properties of this machine. No torch at import: `tercet plan` uses it.

For an unknown device no MFU is shown: a wrong number is worse than none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """A GPU model: dense bf16 TFLOP/s of its data sheet, and its memory, advertised GB -> GiB that CUDA reports."""

    name: str
    tflops: float
    memory: Mapping[int, float]


# The first match wins: specific names come first.
GPUS = (
    GPU("GH200", 989.0, {96: 95.0, 144: 140.0}),
    GPU("H200", 989.0, {141: 139.8}),
    GPU("H100 PCIe", 756.0, {80: 79.1}),
    GPU("H100 NVL", 835.0, {94: 93.0}),
    GPU("H100", 989.0, {80: 79.1}),
    GPU("H800", 989.0, {80: 79.1}),
    GPU("H20", 148.0, {96: 95.0}),
    GPU("B200", 2250.0, {180: 178.0}),
    GPU("A100", 312.0, {80: 79.1, 40: 39.4}),
    GPU("A800", 312.0, {80: 79.1, 40: 39.4}),
    GPU("RTX A6000", 155.0, {48: 47.4}),
    GPU("A40", 150.0, {48: 44.4}),
    GPU("A10", 125.0, {24: 22.0}),
    GPU("L40S", 362.0, {48: 44.4}),
    GPU("L40", 181.0, {48: 44.4}),
    GPU("L4", 121.0, {24: 22.0}),
    GPU("RTX PRO 6000", 500.0, {96: 95.0}),
    GPU("RTX 6000 Ada", 364.0, {48: 47.4}),
    GPU("RTX 5090", 210.0, {32: 31.4}),
    GPU("RTX 4090", 165.0, {24: 23.5}),
    GPU("RTX 3090", 71.0, {24: 23.6}),
)

# MFU that time estimates assume, from measured training steps. On a CPU `tiny` reaches 13%, a model of dim 512 more
# than 30%.
GPU_UTILISATION = 0.30
CPU_UTILISATION = 0.15
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def find_gpu(name: str) -> GPU | None:
    """The model that a device name means, in any spelling: NVIDIA GeForce RTX 4090, rtx4090, 4090; None if unknown."""
    given = _words(name)
    if "laptop" in given:  # slower, and with less memory
        return None
    return next((gpu for gpu in GPUS if _words(gpu.name) - {"rtx"} <= given), None)


def _words(name: str) -> set[str]:
    # Whole words: an H2000 is not an H200.
    return set(re.findall(r"[a-z0-9]+", re.sub(r"nvidia|geforce|tesla|rtx|pcie|sxm|nvl", r" \g<0> ", name.lower())))


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device; None if unknown."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.tflops * 1e12


def usable_cores() -> int:
    """Cores that this process may use, or the container's limit if lower."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, CPU_QUOTA.read_text().split())
    except (OSError, ValueError):  # there is none, or it is "max"
        return cores
    return max(1, min(cores, quota // period))


@cache
def measured_cpu_flops() -> float:
    """fp32 FLOP/s of all cores that this process may use, from the fastest of many short matrix products: other
    programs interrupt some of them, not all.

    Products of this size run on one thread. Larger ones wait for the slowest of their threads.
    """
    import numpy as np

    side = 64
    a = np.ones((side, side), np.float32)
    seconds = []
    for _ in range(3000):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return usable_cores() * 2.0 * side**3 / min(seconds)


def host_memory() -> int | None:
    """Bytes of RAM of this machine, or the container's limit if lower; None if unknown."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        limits += [int(limit)] if limit.isdigit() else []
    except (OSError, ValueError):
        pass
    return min(limits, default=None)

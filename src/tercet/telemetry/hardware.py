"""Peak FLOP/s of known devices, and properties of this machine. No torch at import: `tercet plan` uses it.

For an unknown device no MFU is shown: a wrong number is worse than none.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

# Dense bf16 TFLOP/s from the data sheets, by a word of the device name that CUDA reports. The first match wins.
_BF16_TFLOPS = (
    ("GH200", 989.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.0),
)
KNOWN = tuple(part for part, _ in _BF16_TFLOPS)

GIB = 2**30

# MFU that time estimates assume, from measured training steps.
GPU_UTILISATION = 0.30
CPU_UTILISATION = 0.30


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a device; None if unknown."""

    def named(part: str) -> bool:
        # match whole words: an H2000 is not an H200
        return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", device_name, re.IGNORECASE) is not None

    return next((tflops * 1e12 for part, tflops in _BF16_TFLOPS if named(part)), None)


def measured_cpu_flops(side: int = 512) -> float:
    """Measured fp32 FLOP/s of this CPU, from 0.1 s of matrix products."""
    import numpy as np

    a = np.ones((side, side), np.float32)
    a @ a
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < 0.1:
        a @ a
        done += 1
    return done * 2.0 * side**3 / spent


def host_total_gib() -> float | None:
    """RAM of this machine, or the container's limit if lower; None if unknown."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        found += [int(limit) / GIB] if limit.isdigit() else []
    except (OSError, ValueError):
        pass
    return min(found, default=None)

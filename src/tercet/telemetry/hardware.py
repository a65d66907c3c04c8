"""Peak arithmetic of known devices. For an unknown one no utilisation is shown: a wrong figure is worse than none."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

# Dense bf16 TFLOP/s by a part of the name that CUDA reports, from the makers' data sheets. First match wins.
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

# Shares of the peak that whole training steps were seen to reach; an estimate says that it assumes them.
GPU_UTILISATION = 0.30
CPU_UTILISATION = 0.30


def peak_flops(device_name: str) -> float | None:
    """bf16 FLOP/s that the device could do at most; None where we do not know."""

    def named(part: str) -> bool:
        # a whole word: an H2000 is no H200
        return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", device_name, re.IGNORECASE) is not None

    return next((tflops * 1e12 for part, tflops in _BF16_TFLOPS if named(part)), None)


def measured_cpu_flops(side: int = 512) -> float:
    """fp32 FLOP/s of this machine: a tenth of a second of products says more about a CPU than its name."""
    import numpy as np

    a = np.ones((side, side), np.float32)
    a @ a
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < 0.1:
        a @ a
        done += 1
    return done * 2.0 * side**3 / spent


# ------------------------------------------------------------------------------------------------
# The machine that a process runs on. No torch: a plan asks too.

GIB = 2**30


def host_total_gib() -> float | None:
    """RAM of the machine, or of the container if that has less."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        found += [int(limit) / GIB] if limit.isdigit() else []
    except (OSError, ValueError):
        pass
    return min(found, default=None)

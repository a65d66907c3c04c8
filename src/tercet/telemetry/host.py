"""The machine that a process runs on. No torch: a plan asks too."""

from __future__ import annotations

import os
from pathlib import Path

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

"""What the parts of scripts/measure.py share."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
CORRELATION = 0.996  # of successive queries in smooth inputs


class Warmup(NamedTuple):
    """A process that fills Triton's and Inductor's caches before a part is timed."""

    name: str
    seconds: float  # rough; long jobs start first
    gib: float  # device memory it needs
    argv: list[str]


def compile_job(part: str, names: str, seconds: float, gib: float) -> Warmup:
    """A job that calls the part's `compile` with these names."""
    argv = [sys.executable, str(ROOT / "scripts" / "measure.py"), ".", "--compile", f"{part}:{names}"]
    return Warmup(f"{part} {names}".rstrip(), seconds, gib, argv)


def raise_clocks() -> None:
    """Keep the GPU busy for a second, so that the first row is not timed at idle clocks."""
    if torch.cuda.is_available():
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        started = time.time()
        while time.time() - started < 1:
            for _ in range(20):
                x @ x
            torch.cuda.synchronize()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

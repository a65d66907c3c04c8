"""The device of a run: which one, deterministic or not, and its peak memory."""

from __future__ import annotations

import os
import platform
import resource
import sys

import torch

from tercet.errors import TercetError
from tercet.telemetry.units import plural


def pick_device(name: str, local_rank: int = 0, *, share: bool = False, flag: str = "--run.device") -> torch.device:
    """`auto` uses a GPU if there is one; `cuda` without a GPU is an error that names `flag`.

    `share`: several ranks may use one GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise TercetError(f"{flag} cuda, but torch sees no CUDA device: use {flag} cpu, or fix the driver")
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus if share else local_rank)
        if device.index < gpus:  # otherwise parallel.launch.check_launch refuses with a clear message
            torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {plural(torch.get_num_threads(), 'thread')})"


def set_arithmetic(*, deterministic: bool, threads: int | None) -> None:
    """Process-wide settings. Deterministic: an operator without a reproducible implementation is an error."""
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this when it creates its first handle; without it torch refuses deterministic matmuls.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def peak_memory_gib(device: torch.device, held_bytes: int = 0) -> float:
    """On a GPU: peak allocated memory plus what CUDA graphs hold (TrainState.held_bytes). On a CPU: peak RSS."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) + held_bytes) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

"""The device a run computes on: which one, how exactly, and how much memory it has used."""

from __future__ import annotations

import os
import platform
import resource
import sys

import torch

from tercet.errors import TercetError


def pick_device(name: str, local_rank: int = 0, *, share: bool = False, flag: str = "--run.device") -> torch.device:
    """`auto` takes a GPU if there is one; asking for one that is not there is an error that names the flag.
    `share`: ranks go round."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise TercetError(f"{flag} cuda, but torch sees no CUDA device: use {flag} cpu, or mend the driver")
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", local_rank % gpus if share else local_rank)
        if device.index < gpus:  # a rank too many is refused in words where ranks are counted (parallel/launch.py)
            torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """What people call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def set_arithmetic(*, deterministic: bool, threads: int | None) -> None:
    """Process-wide switches. Deterministic: an operator without a reproducible form is an error, not a warning."""
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this when its first handle is made; torch refuses its matmuls without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def peak_memory_gib(device: torch.device, held_bytes: int = 0) -> float:
    """Most memory allocated so far on a GPU, and what a recorded step holds beside it (TrainState.held_bytes); most
    resident memory of the process on a CPU."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) + held_bytes) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

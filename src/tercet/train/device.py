"""The device of a run: which one, deterministic or not, its peak memory, and its description in env.json."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from contextlib import suppress
from importlib import metadata
from typing import Any

import torch

from tercet.errors import TercetError
from tercet.telemetry.hardware import usable_cores
from tercet.terminal import plural
from tercet.version import __version__


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
    threads = threads or min(torch.get_num_threads(), usable_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if deterministic:
        # cuBLAS reads this when it creates its first handle; without it torch refuses deterministic matmuls.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)


def peak_memory_gib(device: torch.device, held_bytes: int) -> float:
    """On a GPU: peak allocated memory plus what CUDA graphs hold (TrainState.held_bytes). On a CPU: peak RSS."""
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated(device) + held_bytes) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def environment(device: torch.device, name: str) -> dict[str, Any]:
    """Machine and versions. No environment variables: they do not affect a run and may hold secrets."""
    versions = {}
    for package in ("torch", "triton", "numpy", "pydantic", "safetensors", "tokenizers", "huggingface_hub"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    env: dict[str, Any] = {
        "tercet": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "command": sys.argv,
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": name,
        "cuda": torch.version.cuda,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        env["gpu"] = {
            "memory_gib": properties.total_memory / 2**30,
            "capability": f"{properties.major}.{properties.minor}",
            "count": torch.cuda.device_count(),
        }
    return env

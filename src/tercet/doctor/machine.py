"""What an examination found."""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from tercet.telemetry.hardware import host_total_gib

OK, WARNING, FAILED, NOT_TESTED = "ok", "warning", "failed", "not tested"


@dataclass(frozen=True)
class Finding:
    """One check: what was seen and, unless all is well, what to do about it."""

    check: str
    verdict: str
    finding: str
    mend: str = ""
    seconds: float = 0.0


def timed(check: str, examine: Callable[[], Finding]) -> Finding:
    """The finding of one check. A check that breaks is itself a finding: the doctor never dies of a patient."""
    begun = time.perf_counter()
    try:
        found = examine()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        found = Finding(check, FAILED, f"{type(error).__name__}: {text}", "mend what the error names, then ask again")
    return replace(found, check=check, seconds=time.perf_counter() - begun)


# ------------------------------------------------------------------------------------------------
# Versions, devices, drivers, memory: what the machine is.

# (package, at least, below): what pyproject.toml asks for, and what a run cannot do without.
NEEDED = (
    ("torch", (2, 11), (2, 14)),
    ("numpy", (2, 0), None),
    ("pydantic", (2, 10), None),
    ("tyro", (1, 0), None),
    ("rich", (13,), None),
    ("safetensors", (0, 5), None),
)
SHARED_MEMORY_MIB = 64


def versions() -> Finding:
    """Python and the packages that a run needs."""
    seen, wrong = [f"Python {platform.python_version()}"], []
    for package, least, below in NEEDED:
        if importlib.util.find_spec(package) is None:
            wrong.append(f"{package} is missing")
            continue
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            seen.append(f"{package} of an unknown version")  # brought along as a bare folder
            continue
        seen.append(f"{package} {version}")
        numbers = version_numbers(version)
        if numbers < least or (below is not None and numbers >= below):
            asked = f">={_dotted(least)}" + (f",<{_dotted(below)}" if below else "")
            wrong.append(f"{package} {version} is not {asked}")
    if wrong:
        return Finding("versions", FAILED, "; ".join(wrong), "pip install -c constraints.txt -e . in the checkout")
    return Finding("versions", OK, ", ".join(seen))


def version_numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def device(wanted: str = "auto") -> Finding:
    """The device that a run would take, how much of its memory is free, and the driver's version."""
    import torch

    if not torch.cuda.is_available():
        threads, memory = torch.get_num_threads(), host_total_gib()
        seen = f"CPU, {os.cpu_count()} cores, {threads} threads, {memory or 0:.1f} GiB of memory"
        if wanted == "cuda":
            return Finding("device", FAILED, f"{seen}; torch sees no CUDA device", _no_cuda(torch.version.cuda))
        if shutil.which("nvidia-smi"):
            return Finding(
                "device", WARNING, f"{seen}; a driver is there, torch sees no GPU", _no_cuda(torch.version.cuda)
            )
        return Finding("device", OK, seen)
    parts, wrong = [], ""
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        memory_free = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        parts.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}, {memory_free})")
        if free < 0.9 * total:
            wrong = wrong or f"GPU {index} is in use by somebody else, or by an earlier process that has not ended"
        if (major, minor) < (8, 0):
            wrong = wrong or f"GPU {index} is older than sm_80 and has no bf16"
    finding = f"{', '.join(parts)}; CUDA {torch.version.cuda}, driver {driver() or 'unknown'}"
    if wrong:
        return Finding("device", WARNING, f"{finding}; {wrong}", "see nvidia-smi; end what should not be there")
    return Finding("device", OK, finding)


def _no_cuda(built_for: str | None) -> str:
    if built_for is None:
        return "this torch is a CPU build: install a CUDA build, or use --run.device cpu"
    return f"torch is built for CUDA {built_for}: see that nvidia-smi works and that its driver is new enough"


def driver() -> str | None:
    """The driver's version, as nvidia-smi tells it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout.split("\n")[0].strip() or None


def arithmetic(seconds: float = 0.5) -> Finding:
    """Whether the device is as fast as one of its kind should be: a throttled one is found here, not in a week."""
    import time

    import torch

    from tercet.telemetry.hardware import peak_flops

    cuda = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=dtype)
    product = a @ a
    if not bool(product.isfinite().all()):
        return Finding(
            "arithmetic", FAILED, "a product of random matrices is not finite", "the device is broken: use another"
        )

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    begun, count = now(), 0
    while (took := now() - begun) < seconds:
        for _ in range(10):
            a @ a
        count += 10
    flops = 2 * size**3 * count / took
    told = f"{flops / 1e12:.3g} TFLOP/s in products of {size}×{size} {str(dtype).removeprefix('torch.')}"
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak is None:
        return Finding("arithmetic", OK, told)
    share = flops / peak
    if share < 0.5:
        mend = "see nvidia-smi -q -d CLOCK,POWER: throttled by heat, power or a neighbour"
        return Finding("arithmetic", WARNING, f"{told}, {100 * share:.0f}% of its peak", mend)
    return Finding("arithmetic", OK, f"{told}, {100 * share:.0f}% of its peak")


def shared_memory() -> Finding:
    """Containers often have 64 MiB of it, and NCCL wants more."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", NOT_TESTED, "there is no /dev/shm here")
    free = shutil.disk_usage(path).free / 2**20
    if free < SHARED_MEMORY_MIB:
        return Finding("shared memory", WARNING, f"{free:.0f} MiB free in /dev/shm", "docker run --shm-size 8g")
    return Finding("shared memory", OK, f"{free:.0f} MiB free in /dev/shm")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

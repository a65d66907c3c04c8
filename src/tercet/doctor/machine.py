"""Checks of the machine: versions, devices, matmul speed, shared memory and collectives. Also defines `Finding`."""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tercet.config.sections import LogConfig
from tercet.errors import TercetError
from tercet.telemetry.hardware import host_total_gib, peak_flops
from tercet.telemetry.sinks import import_tensorboard, import_wandb, tensorboard_wanted
from tercet.telemetry.units import plural

OK, WARNING, FAILED, NOT_TESTED = "ok", "warning", "failed", "not tested"

# (package, minimum, below): required packages, as in pyproject.toml.
NEEDED = (
    ("torch", (2, 11), (2, 14)),
    ("numpy", (2, 0), None),
    ("pydantic", (2, 10), None),
    ("rich", (13,), None),
    ("safetensors", (0, 5), None),
)
SHARED_MEMORY_MIB = 64
CPU_RANKS = 2  # processes of the gloo all-reduce without GPUs


@dataclass(frozen=True)
class Finding:
    """The result of one check and, unless it is ok, how to fix the problem."""

    check: str
    verdict: str
    finding: str
    fix: str = ""
    seconds: float = 0.0


def timed(check: str, run: Callable[[], Finding]) -> Finding:
    """Run one check. An exception becomes a failed finding, so that the other checks still run."""
    start = time.perf_counter()
    try:
        found = run()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        found = Finding(check, FAILED, f"{type(error).__name__}: {text}", "fix the cause, then run it again")
    return replace(found, check=check, seconds=time.perf_counter() - start)


def versions() -> Finding:
    """Python and the required packages."""
    seen, wrong = [f"Python {platform.python_version()}"], []
    for package, minimum, below in NEEDED:
        if importlib.util.find_spec(package) is None:
            wrong.append(f"{package} is missing")
            continue
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            seen.append(f"{package} of unknown version")  # a bare folder on the path
            continue
        seen.append(f"{package} {version}")
        numbers = version_numbers(version)
        if numbers < minimum or (below is not None and numbers >= below):
            required = f">={_dotted(minimum)}" + (f",<{_dotted(below)}" if below else "")
            wrong.append(f"{package} {version} is not {required}")
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


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def logging(config: LogConfig) -> Finding:
    """Packages that the run's logs need: those asked for must be installed, TensorBoard with auto may be missing."""
    for wanted, load in ((config.tensorboard is True, import_tensorboard), (config.wandb, import_wandb)):
        try:
            if wanted:
                load()
        except TercetError as error:
            problem, _, fix = str(error).partition(": ")
            return Finding("logging", FAILED, problem, fix)
    if config.tensorboard == "auto" and not tensorboard_wanted("auto"):
        return Finding("logging", OK, "CSV and JSON; TensorBoard is not installed, so runs have no tb/")
    extra = [name for name, on in (("TensorBoard", config.tensorboard), ("W&B", config.wandb)) if on]
    return Finding("logging", OK, ", ".join(["CSV", "JSON", *extra]))


def device(wanted: str = "auto") -> Finding:
    """The devices a run would use, their free memory, and the driver version."""
    import torch

    if not torch.cuda.is_available():
        threads, memory = torch.get_num_threads(), host_total_gib()
        cores = plural(os.cpu_count() or 1, "core")
        seen = f"CPU, {cores}, {plural(threads, 'thread')}, {memory or 0:.1f} GiB of memory"
        if wanted == "cuda":
            return Finding("device", FAILED, f"{seen}; torch sees no CUDA device", _no_cuda_fix(torch.version.cuda))
        if shutil.which("nvidia-smi"):
            seen += "; an NVIDIA driver is installed, but torch sees no GPU"
            return Finding("device", WARNING, seen, _no_cuda_fix(torch.version.cuda))
        return Finding("device", OK, seen)
    parts, problem = [], ""
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        memory_free = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        parts.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor}, {memory_free})")
        if free < 0.9 * total:
            problem = problem or f"GPU {index} is in use by another process"
        if (major, minor) < (8, 0):
            problem = problem or f"GPU {index} is older than sm_80 and has no bf16"
    seen = f"{', '.join(parts)}; CUDA {torch.version.cuda}, driver {driver_version() or 'unknown'}"
    if problem:
        return Finding("device", WARNING, f"{seen}; {problem}", "see nvidia-smi; stop processes that should not run")
    return Finding("device", OK, seen)


def _no_cuda_fix(built_for: str | None) -> str:
    if built_for is None:
        return "this torch is a CPU build: install a CUDA build, or use --run.device cpu"
    return (
        f"torch is built for CUDA {built_for}: check that nvidia-smi works and that its driver is new enough, or use "
        "--run.device cpu"
    )


def driver_version() -> str | None:
    """The NVIDIA driver version, from nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.split("\n")[0].strip() or None


def matmul_speed(seconds: float = 0.5) -> Finding:
    """Matmul throughput against the device's peak, to find a throttled or faulty device early."""
    import torch

    cuda = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=dtype)
    product = a @ a
    if not bool(product.isfinite().all()):
        return Finding("arithmetic", FAILED, "a product of random matrices is not finite", "use another device")

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start, count = now(), 0
    while (elapsed := now() - start) < seconds:
        for _ in range(10):
            a @ a
        count += 10
    flops = 2 * size**3 * count / elapsed
    seen = f"{flops / 1e12:.3g} TFLOP/s in {size}×{size} {str(dtype).removeprefix('torch.')} matmuls"
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak is None:
        return Finding("arithmetic", OK, seen)
    seen += f", {100 * flops / peak:.0f}% of peak"
    if flops / peak < 0.5:
        fix = "see nvidia-smi -q -d CLOCK,POWER: throttled by heat or power, or shared with another process"
        return Finding("arithmetic", WARNING, seen, fix)
    return Finding("arithmetic", OK, seen)


def shared_memory() -> Finding:
    """Free space in /dev/shm: containers often have only 64 MiB, and NCCL needs more."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", NOT_TESTED, "this machine has no /dev/shm")
    free = shutil.disk_usage(path).free / 2**20
    if free < SHARED_MEMORY_MIB:
        return Finding("shared memory", WARNING, f"{free:.0f} MiB free in /dev/shm", "docker run --shm-size 8g")
    return Finding("shared memory", OK, f"{free:.0f} MiB free in /dev/shm")


def collectives() -> Finding:
    """An all-reduce over new processes: NCCL with one per GPU, or gloo with two on a CPU."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collectives", NOT_TESTED, "this torch has no distributed package", "install another build")
    cuda = torch.cuda.is_available()
    if cuda and not dist.is_nccl_available():
        return Finding("collectives", FAILED, "this torch has GPUs but no NCCL", "install a CUDA build of torch")
    ranks = torch.cuda.device_count() if cuda else CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _all_reduce,
            args=(ranks, str(Path(folder) / "store"), "nccl" if cuda else "gloo"),
            nprocs=ranks,
            start_method="spawn",
        )  # type: ignore[no-untyped-call]
    name = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else "gloo"
    return Finding("collectives", OK, f"{name}: all-reduce over {ranks} rank{'s' * (ranks > 1)} is correct")


def _all_reduce(rank: int, ranks: int, store: str, backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device: Any = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60)
    )
    try:
        value = torch.full((1024,), float(rank + 1), device=device)
        dist.all_reduce(value)
        expected = ranks * (ranks + 1) / 2
        if not bool((value == expected).all()):
            raise RuntimeError(f"all-reduce over {ranks} ranks gave {float(value[0])}, expected {expected}")
    finally:
        dist.destroy_process_group()

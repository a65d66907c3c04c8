"""Checks of the machine: versions, devices, speed, shared memory, disk and data. Defines `Finding`."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.model.cost import parameters
from tercet.telemetry.hardware import GIB, host_memory, peak_flops
from tercet.terminal import plural, size

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
SLOW_MB_S = 50.0
MIN_SPEED_MB = 32  # a smaller write shows that the disk is writable, but not how fast it is
SLOW_DATA_SECONDS = 60


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
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        seen.append(f"{package} {version}")
        numbers = version_numbers(version)
        if numbers < minimum or (below is not None and numbers >= below):
            bounds = [f"{sign}{'.'.join(map(str, bound))}" for sign, bound in ((">=", minimum), ("<", below)) if bound]
            wrong.append(f"{package} {version} is not {','.join(bounds)}")
    if wrong:
        return Finding("versions", FAILED, "; ".join(wrong), "pip install -c constraints.txt -e . in the checkout")
    return Finding("versions", OK, ", ".join(seen))


def version_numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def device(wanted: str = "auto") -> Finding:
    """The devices a run would use, their free memory, and the driver version."""
    import torch

    if not torch.cuda.is_available():
        threads, memory = torch.get_num_threads(), host_memory()
        cores = plural(os.cpu_count() or 1, "core")
        seen = f"CPU, {cores}, {plural(threads, 'thread')}, {(memory or 0) / GIB:.1f} GiB of memory"
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
    seen = f"{', '.join(parts)}; CUDA {torch.version.cuda}, driver {_driver_version()}"
    if problem:
        return Finding("device", WARNING, f"{seen}; {problem}", "see nvidia-smi; stop processes that should not run")
    return Finding("device", OK, seen)


def _no_cuda_fix(built_for: str | None) -> str:
    if built_for is None:
        return "this torch is a CPU build: install a CUDA build, or use --run.device cpu"
    fix = "check that nvidia-smi works and that its driver is new enough, or use --run.device cpu"
    return f"torch is built for CUDA {built_for}: {fix}"


def _driver_version() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.split("\n")[0].strip() or "unknown"


def matmul_speed(seconds: float = 0.5) -> Finding:
    """Matmul throughput against the device's peak, to find a throttled or faulty device early."""
    import torch

    cuda = torch.cuda.is_available()
    side, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a = torch.randn(side, side, device="cuda" if cuda else "cpu", dtype=dtype)
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
    flops = 2 * side**3 * count / elapsed
    seen = f"{flops / 1e12:.3g} TFLOP/s in {side}×{side} {str(dtype).removeprefix('torch.')} matmuls"
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


def disk(folder: Path, config: RunConfig, *, megabytes: int) -> Finding:
    """Write a file with fsync, as a checkpoint is written, and check free space."""
    place = folder
    while not place.exists():
        place = place.parent
    try:
        speed = _write_speed(place, megabytes)
    except OSError as error:
        return Finding("disk", FAILED, f"{place} cannot be written ({error.strerror})", "pick another --run.dir")
    free = shutil.disk_usage(place).free
    seen = f"{size(free)} free in {place}"
    if megabytes >= MIN_SPEED_MB:
        seen = f"{speed:.0f} MB/s with fsync, {seen}"
    checkpoint = 12 * parameters(config.model).total  # fp32 weights and two moments
    kept = config.checkpoint.keep
    if kept == 0:
        kept = config.train.steps // (config.checkpoint.every or config.train.steps)
    needed = checkpoint * (kept + 1)
    seen += f"; a checkpoint takes about {size(checkpoint)}"
    if free < needed:
        fix = f"free {size(needed - free)}, lower checkpoint.keep, or pick another --run.dir"
        return Finding("disk", FAILED if free < 2 * checkpoint else WARNING, seen, fix)
    if speed < SLOW_MB_S and megabytes >= MIN_SPEED_MB:
        return Finding("disk", WARNING, seen, "checkpoints will be slow here: pick a local disk with --run.dir")
    return Finding("disk", OK, seen)


def _write_speed(folder: Path, megabytes: int) -> float:
    block = os.urandom(2**20)
    path = folder / f".doctor-{os.getpid()}"
    try:
        start = time.perf_counter()
        with path.open("wb") as stream:
            for _ in range(megabytes):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        return megabytes * 2**20 / 1e6 / (time.perf_counter() - start)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def data(config: RunConfig) -> Finding:
    """Open the source as training would and read one batch, without shuffling sequences: packing a block is slow."""
    from tercet.data.loader import build_loader
    from tercet.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eos_token)
    if tokenizer.vocab_size > config.model.vocab_size:
        fix = f"--model.vocab_size {-(-tokenizer.vocab_size // 64) * 64}"
        problem = f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.model.vocab_size}"
        return Finding("data", FAILED, problem, fix)
    start = time.perf_counter()
    stage = config.stages[0]
    source = stage.data.model_copy(update={"prefetch": 0, "shuffle_sequences": 0})
    with build_loader(
        source, seed=config.run.seed, batch_sequences=stage.train.micro_batch, tokenizer=tokenizer
    ) as loader:
        batch = next(iter(loader), None)
    elapsed = time.perf_counter() - start
    if batch is None:
        return Finding("data", FAILED, f"{config.data.source} has no training documents", "see tercet data inspect")
    seen = f"{config.data.source}: first batch of {batch.tokens.numel():,} tokens in {elapsed:.2f} s"
    if elapsed > SLOW_DATA_SECONDS:
        return Finding("data", WARNING, seen, "tercet data prepare writes shards, which open immediately")
    return Finding("data", OK, seen)

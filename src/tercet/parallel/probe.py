"""`tercet doctor --distributed`, under torchrun: what to know of ranks before a run is trusted to them.

Versions are compared where ranks meet (launch.py); here: speed of all-reduce, agreement of clocks, and one file system.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tercet.config.sections import ParallelConfig
from tercet.parallel.launch import Launch, World, WrongLaunch, check_launch, join
from tercet.typed import typed

# Logs of ranks whose clocks differ by more cannot be read side by side.
CLOCK_SECONDS = 1.0
SIZES = {"cpu": (1 << 10, 1 << 20, 1 << 24), "cuda": (1 << 10, 1 << 20, 1 << 24, 1 << 28)}  # bytes


def probe(folder: str | None = None, backend: str = "auto", *, share_gpus: bool = False) -> int:
    """Measure, on every rank that torchrun started; rank 0 tells. `folder`: where runs will be kept."""
    launch = Launch.here()
    if not launch.by_torchrun:
        raise WrongLaunch(
            "doctor --distributed examines ranks: start it with "
            f"{typed('torchrun')} --nproc-per-node=N -m tercet doctor --distributed"
        )
    parallel = ParallelConfig.model_validate(
        {"strategy": "ddp", "world_size": launch.world_size, "backend": backend, "share_gpus": share_gpus}
    )
    gpus = torch.cuda.device_count()
    check_launch(parallel, launch, "cuda" if gpus else "cpu", gpus)
    device = torch.device("cuda", launch.local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    root = Path(folder) if folder else Path(tempfile.gettempdir())
    world = join(launch, parallel, device, {}, lambda _: root / "tercet-doctor")
    found: dict[str, Any] = {
        "ranks": launch.world_size,
        "hosts": len({m["host"] for m in world.members}),
        "device": device.type,
        "all_reduce": [all_reduce(size, device) for size in SIZES[device.type]],
        "clock_seconds": clock_spread(world),
        "cannot_see_folder": blind_ranks(world, root),
    }
    bad = bool(found["cannot_see_folder"]) or found["clock_seconds"] > CLOCK_SECONDS
    if launch.rank == 0:
        print("\n".join(told(found, root)))
        print(json.dumps(found))
        shutil.rmtree(root / "tercet-doctor", ignore_errors=True)
    world.close()
    return int(bad)


def all_reduce(size: int, device: torch.device, repeats: int = 10) -> dict[str, float]:
    """Median seconds, and the bytes per second that each rank's link carries: 2 (W-1)/W of the size each way."""
    tensor = torch.zeros(size // 4, device=device)
    seconds = []
    for i in range(repeats + 3):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= 3:
            seconds.append(time.perf_counter() - begun)
    took = statistics.median(seconds)
    ranks = dist.get_world_size()
    return {"bytes": size, "seconds": took, "bus_bytes_per_s": 2 * (ranks - 1) / ranks * size / took}


def clock_spread(world: World) -> float:
    """Most that two ranks' clocks differ by, as read just after the best of a few barriers."""
    best = float("inf")
    for _ in range(5):
        dist.barrier(group=world.control)
        now: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(now, time.time(), group=world.control)
        best = min(best, max(now) - min(now))
    return best


def blind_ranks(world: World, root: Path) -> list[str]:
    """Ranks that do not see a file which rank 0 has written: checkpoints need one file system."""
    path = root / f".tercet-{world.call}"
    if world.launch.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        path.write_text(world.call)
        os.sync()
    dist.barrier(group=world.control)
    sees: list[Any] = [None] * dist.get_world_size()
    mine = path.exists() and path.read_text() == world.call
    dist.all_gather_object(sees, mine, group=world.control)
    dist.barrier(group=world.control)
    if world.launch.rank == 0:
        path.unlink()
    return [f"rank {r} on {world.members[r]['host']}" for r, good in enumerate(sees) if not good]


def told(found: dict[str, Any], root: Path) -> list[str]:
    lines = [f"{found['ranks']} ranks on {found['hosts']} hosts ({found['device']}), of one version"]
    for one in found["all_reduce"]:
        lines.append(
            f"all-reduce of {one['bytes'] / 2**10:g} KiB: {one['seconds'] * 1e3:.3f} ms, "
            f"{one['bus_bytes_per_s'] / 1e9:.3f} GB/s per link"
        )
    late = found["clock_seconds"] > CLOCK_SECONDS
    mend = ": set them with NTP, or logs cannot be compared" if late else ""
    lines.append(f"clocks differ by at most {found['clock_seconds'] * 1e3:.1f} ms{mend}")
    blind = found["cannot_see_folder"]
    if blind:
        lines.append(f"{', '.join(blind)} cannot see {root}: keep run.dir on a file system that all machines share")
    else:
        lines.append(f"all ranks see {root}")
    return lines

"""`tercet doctor --distributed`, under torchrun: all-reduce speed and a shared file system.

Versions are already compared when the ranks join (launch.py).
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tercet import hints
from tercet.config.sections import ParallelConfig
from tercet.parallel.launch import Launch, World, WrongLaunch, check_launch, join

WARMUPS = 3
SIZES = {"cpu": (1 << 10, 1 << 20, 1 << 24), "cuda": (1 << 10, 1 << 20, 1 << 24, 1 << 28)}  # bytes


def probe(folder: str | None, *, share_gpus: bool) -> int:
    """Run the checks on all ranks that torchrun started; rank 0 prints. `folder`: where runs will be stored."""
    launch = Launch.from_environment()
    if not launch.by_torchrun:
        raise WrongLaunch(
            "doctor --distributed checks several ranks: start it with "
            + hints.torchrun("doctor", "--distributed", ranks="N", nodes=None)
        )
    parallel = ParallelConfig(strategy="ddp", world_size=launch.world_size, share_gpus=share_gpus)
    gpus = torch.cuda.device_count()
    check_launch(parallel, launch, "cuda" if gpus else "cpu", gpus)
    device = torch.device("cuda", launch.local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    root = Path(folder) if folder else Path(tempfile.gettempdir())
    world = join(launch, parallel, device, {}, lambda _: root / "tercet-doctor")
    hosts = len({member["host"] for member in world.members})
    lines = [f"{launch.world_size} ranks on {hosts} hosts ({device.type}), same versions everywhere"]
    lines += [time_all_reduce(size, device) for size in SIZES[device.type]]
    if without := ranks_without_folder(world, root):
        lines.append(f"{', '.join(without)} cannot see {root}: put run.dir on a file system that all machines share")
    else:
        lines.append(f"all ranks see {root}")
    if launch.rank == 0:
        print("\n".join(lines))
        shutil.rmtree(root / "tercet-doctor", ignore_errors=True)
    world.close()
    return int(bool(without))


def time_all_reduce(size: int, device: torch.device, repeats: int = 10) -> str:
    """Median time, and the bus bandwidth per rank: an all-reduce moves 2 (W-1)/W of the size in each direction."""
    tensor = torch.zeros(size // 4, device=device)
    times = []
    for i in range(repeats + WARMUPS):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i >= WARMUPS:
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    ranks = dist.get_world_size()
    speed = 2 * (ranks - 1) / ranks * size / seconds
    return f"all-reduce of {size / 2**10:g} KiB: {seconds * 1e3:.3f} ms, {speed / 1e9:.3f} GB/s per link"


def ranks_without_folder(world: World, root: Path) -> list[str]:
    """Ranks that do not see a file that rank 0 wrote. Checkpoints need a shared file system."""
    path = root / f".tercet-{world.id}"
    if world.launch.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        path.write_text(world.id)
        os.sync()
    dist.barrier(group=world.control)
    seen: list[Any] = [None] * world.launch.world_size
    dist.all_gather_object(seen, path.exists() and path.read_text() == world.id, group=world.control)
    dist.barrier(group=world.control)
    if world.launch.rank == 0:
        path.unlink()
    return [f"rank {r} on {world.members[r]['host']}" for r, ok in enumerate(seen) if not ok]

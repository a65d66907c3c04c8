"""Whether ranks can speak to each other: NCCL over the GPUs of this machine, gloo where there are none."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tercet.doctor.machine import FAILED, NOT_TESTED, OK, Finding

CPU_RANKS = 2


def collectives() -> Finding:
    """One all-reduce over processes of their own, one for each GPU (or two on a CPU)."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("collectives", NOT_TESTED, "this torch has no distributed package", "install another build")
    cuda = torch.cuda.is_available()
    if cuda and not dist.is_nccl_available():
        return Finding("collectives", FAILED, "GPUs, but no NCCL in this torch", "install a CUDA build of torch")
    ranks = torch.cuda.device_count() if cuda else CPU_RANKS
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank,
            args=(ranks, str(Path(folder) / "store"), "nccl" if cuda else "gloo"),
            nprocs=ranks,
            start_method="spawn",
        )  # type: ignore[no-untyped-call]
    name = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else "gloo"
    return Finding("collectives", OK, f"{name}: an all-reduce over {ranks} rank{'s' * (ranks > 1)} is right")


def _rank(rank: int, ranks: int, store: str, backend: str) -> None:
    import datetime

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
            raise RuntimeError(f"an all-reduce over {ranks} ranks gave {float(value[0])}, not {expected}")
    finally:
        dist.destroy_process_group()

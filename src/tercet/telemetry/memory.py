"""Memory reports: mem_boot.json, mem_step{N}.json, opt_state_mb.txt and dtypes_report.txt."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tercet.telemetry.hardware import GIB, host_total_gib


def resident_gib() -> float:
    """Resident memory of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


def device_memory(device: torch.device, held_bytes: int = 0) -> dict[str, float]:
    """GiB allocated, reserved and at peak, without synchronisation; on a CPU, resident memory.

    held_bytes: memory that CUDA graph replay uses and the allocator reports as free; added to the peak.
    """
    if device.type == "cuda":
        # nested: memory_allocated() and similar each build a sorted table of 150 numbers to return one
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        if not stats:  # CUDA is not initialised
            return {"allocated_gib": 0.0, "reserved_gib": 0.0, "peak_gib": 0.0}
        allocated = stats["allocated_bytes"]["all"]
        return {
            "allocated_gib": allocated["current"] / GIB,
            "reserved_gib": stats["reserved_bytes"]["all"]["current"] / GIB,
            "peak_gib": (allocated["peak"] + held_bytes) / GIB,
        }
    resident = resident_gib()
    return {"allocated_gib": resident, "reserved_gib": resident, "peak_gib": resident}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank: the local shard of a sharded tensor; shared storage counts once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        seen[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(seen.values())


def gradients(model: nn.Module) -> dict[str, Any]:
    """Size and types of the gradients; call between backward and the update."""
    tensors = [p.grad for p in model.parameters() if p.grad is not None]
    return {"mib": bytes_of(tensors) / 2**20, "dtypes": _dtype_sizes(tensors)}


def snapshot(
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    grads: dict[str, Any],
    held_bytes: int = 0,
) -> dict[str, Any]:
    """Content of mem_*.json; `grads` is the result of `gradients`."""
    record: dict[str, Any] = {
        "step": step,
        **device_memory(device, held_bytes),
        "host_gib": resident_gib(),
        "host_total_gib": host_total_gib(),
        "parameters_mib": bytes_of(model.parameters()) / 2**20,
        "gradients_mib": grads.get("mib", 0.0),
        "optimizer_mib": bytes_of(optimizer_tensors(optimizer)) / 2**20,
        "buffers_mib": bytes_of(model.buffers()) / 2**20,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        record |= {"device_free_gib": free / GIB, "device_total_gib": total / GIB}
        record["allocation_retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return record


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Moments and step counters."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]


def write_dtypes(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, compute: str, grads: dict[str, Any]
) -> None:
    """Write opt_state_mb.txt, and the types of weights, gradients, optimizer state, buffers and compute to
    dtypes_report.txt. The optimizer has no state before the first update."""
    state = optimizer_tensors(optimizer)
    moments = [t for t in state if t.numel() > 1]  # without AdamW's step counters: one fp32 number per tensor
    lines = [
        "kind: dtype elements",
        f"parameters: {_dtype_sizes(model.parameters())}",
        f"gradients: {grads.get('dtypes', 'none')}",
        f"optimizer: {_dtype_sizes(moments)}",
        f"buffers: {_dtype_sizes(model.buffers())}",
        f"compute: {compute}",
    ]
    (folder / "opt_state_mb.txt").write_text(f"{bytes_of(state) / 2**20:.3f}\n", encoding="utf-8")
    (folder / "dtypes_report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _dtype_sizes(tensors: Iterable[Tensor]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return ", ".join(f"{name} {n}" for name, n in sorted(sizes.items())) or "none"

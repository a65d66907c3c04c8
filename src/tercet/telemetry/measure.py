"""Where the time and the memory of a step go: a clock for its phases, a profiler for a few steps, memory reports.

The profiler writes a trace for Perfetto, a kernel table and a memory snapshot, with NVTX ranges for Nsight. It starts
and stops by step number. Ranges are closed on every exit path: unbalanced ones make profilers hang. Memory reports are
mem_boot.json, mem_step{N}.json, opt_state_mb.txt and dtypes_report.txt.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tercet.config.sections import ProfileConfig
from tercet.telemetry.hardware import GIB, host_memory


class Profiler:
    """Call `before_step`, `range` around the parts of a step, and `close` when `ends_with` is true or the run ends."""

    def __init__(self, folder: Path, rank: int, config: ProfileConfig, device: torch.device) -> None:
        self._folder, self._rank, self._config, self._device = folder / "profile", rank, config, device
        self._cuda = device.type == "cuda"
        self._range = config.range()
        self._profile: Any = None
        self._first = self.last = 0

    @property
    def active(self) -> bool:
        """Whether steps are being traced."""
        return self._profile is not None

    def before_step(self, step: int) -> str:
        """Start tracing if this step is to be traced. Returns a warning if no step will be."""
        if self._range is None or self.active or step < self._range[0]:
            return ""
        if step > self._range[1]:
            first, last = self._range
            self._range = None
            traced = self._folder.exists()  # by an earlier process
            return "" if traced else f"warning: profile.steps={first}:{last} traces nothing: this is step {step}"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize(self._device)  # keep earlier steps out of the trace
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._first = self.last = step
        self._profile.start()
        return ""

    def ends_with(self, step: int) -> bool:
        """Whether this was the last step to trace; then call `close`."""
        if not self.active or self._range is None:
            return False
        self.last = max(self.last, step)
        return step >= self._range[1]

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a part of a step in the trace and for Nsight; does nothing while no step is traced."""
        if not self.active:
            yield
            return
        with torch.profiler.record_function(name):
            if self._cuda:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if self._cuda:
                    torch.cuda.nvtx.range_pop()

    def close(self) -> list[str]:
        """Stop tracing and write the files, also if the run ends early; returns their paths."""
        profile, self._profile, self._range = self._profile, None, None
        if self._cuda:
            torch.cuda.synchronize(self._device)
        profile.stop()
        self._folder.mkdir(exist_ok=True)
        name = f"rank{self._rank}_steps{self._first}-{self.last}"
        written = [self._folder / f"trace_{name}.json.gz", self._folder / f"kernels_{name}.txt"]
        profile.export_chrome_trace(str(written[0]))
        order = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)
        written[1].write_text(table + "\n", encoding="utf-8")
        if self._cuda:
            written.append(self._folder / f"memory_{name}.pickle")
            torch.cuda.memory._dump_snapshot(str(written[-1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return [str(path) for path in written]


PHASES = ("forward", "backward", "optimizer", "communication")


class PhaseClock:
    """Times `with clock.phase("forward"):` blocks in device time; `clock.read()` at log lines.

    On a GPU each phase is a pair of CUDA events, read after they have passed, so the host never waits. GPU idle time
    within a phase, because the host is late, counts towards that phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)  # since the last read; without pending phases
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        if not self._cuda:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - start
            return
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._pending.append((name, begin, end))

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last read. Waits for the last phase, which a log line has already done."""
        if self._pending:
            self._pending[-1][2].synchronize()
        for name, begin, end in self._pending:
            self._seconds[name] += begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        seconds = {**dict.fromkeys(PHASES, 0.0), **self._seconds}
        self._pending.clear()
        self._seconds.clear()
        return seconds

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


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
        "host_total_gib": None if (total := host_memory()) is None else total / GIB,
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

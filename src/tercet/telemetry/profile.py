"""Where step time goes: a clock for the phases of every step, and a profiler for a few steps.

The profiler writes a trace for Perfetto, a kernel table and a memory snapshot, with NVTX ranges for Nsight. It starts
and stops by step number. Ranges are closed on every exit path: unbalanced ones make profilers hang.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tercet.config.sections import ProfileConfig


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

    def before_step(self, step: int) -> None:
        if self._range is None or self.active or not self._range[0] <= step <= self._range[1]:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize(self._device)  # keep earlier steps out of the trace
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self._first = self.last = step
        self._profile.start()

    def missed(self, step: int) -> bool:
        """Whether the steps to trace were over before this one, the first, and none was traced. True once."""
        missed = self._range is not None and step > self._range[1] and not self.active and not self._folder.exists()
        if missed:
            self._range = None
        return missed

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

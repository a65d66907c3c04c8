"""A close look at a few steps: a trace for Perfetto, a table of kernels, NVTX ranges and a memory snapshot.

It begins and ends by the number of the step, writes its files itself, and closes whatever happens: a range is left on
every way out, since unbalanced ones are what makes profilers hang.
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
    """`before_step`; `range` around the parts of a step; `close` when `ends_with` says so, and at the end."""

    def __init__(self, folder: Path, rank: int, config: ProfileConfig, device: torch.device) -> None:
        self._folder, self._rank, self._config, self._device = folder / "profile", rank, config, device
        self._range = config.range()
        self._profile: Any = None
        self._first = self.last = 0

    @property
    def active(self) -> bool:
        """Whether steps are being traced now."""
        return self._profile is not None

    def before_step(self, step: int) -> None:
        if self._range is None or self.active or not self._range[0] <= step <= self._range[1]:
            return
        cuda = self._device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            torch.cuda.synchronize(self._device)  # earlier steps would end up in the trace
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self._config.memory:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profile = torch.profiler.profile(
            activities=activities, with_stack=self._config.stacks, profile_memory=self._config.memory
        )
        self._first = self.last = step
        self._profile.start()

    def ends_with(self, step: int) -> bool:
        """Whether this was the last step to trace: then `close`."""
        self.last = max(self.last, step) if self.active else self.last
        return self.active and self._range is not None and step >= self._range[1]

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """A named part of a step, in the trace and for Nsight; nothing at all while no step is traced."""
        if not self.active:
            yield
            return
        nvtx = self._device.type == "cuda"
        with torch.profiler.record_function(name):
            if nvtx:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if nvtx:
                    torch.cuda.nvtx.range_pop()

    def close(self) -> list[str]:
        """Stop tracing and write; a run that ends early still gets what there is."""
        if not self.active:
            return []
        profile, self._profile, self._range = self._profile, None, None
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
        profile.stop()
        self._folder.mkdir(exist_ok=True)
        name = f"rank{self._rank}_steps{self._first}-{self.last}"
        written = [self._folder / f"trace_{name}.json.gz", self._folder / f"kernels_{name}.txt"]
        profile.export_chrome_trace(str(written[0]))
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=self._config.rows, max_name_column_width=90)
        written[1].write_text(table + "\n", encoding="utf-8")
        if cuda and self._config.memory:
            written.append(self._folder / f"memory_{name}.pickle")
            torch.cuda.memory._dump_snapshot(str(written[-1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return [str(path) for path in written]


# ------------------------------------------------------------------------------------------------
# How long the parts of a step take, on the device's own clock, without ever waiting for the device.

PHASES = ("forward", "backward", "optimizer", "communication")


class PhaseClock:
    """`with clock.phase("forward"):` around the work; `clock.read()` where the device has been waited for anyway.

    On a GPU each phase is two events in the stream, read long after they have passed. Time that the GPU idles within
    a phase, because the host is late, counts as that phase's.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is inside; an error passes through."""
        if not self._cuda:
            begun = time.perf_counter()
            try:
                yield
            finally:
                self._host[name] += time.perf_counter() - begun
            return
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, begin, end))

    def read(self) -> dict[str, float]:
        """Seconds per phase since the last read. Waits for the last phase, which a log line has waited for already."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self._open:
            self._open[-1][2].synchronize()
        for name, begin, end in self._open:
            seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            self._free += [begin, end]
        for name, value in self._host.items():
            seconds[name] = seconds.get(name, 0.0) + value
        self._open.clear()
        self._host.clear()
        return seconds

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

"""How long the parts of a step take, on the device's own clock, without ever waiting for the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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

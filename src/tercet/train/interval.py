"""Measurements since the last log line. Losses stay on the device until they are read; times are the host's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tercet.train.step import StepResult


@dataclass(frozen=True)
class Measured:
    """One step's values, on the host."""

    step: int
    loss: float
    grad_norm: float
    nonfinite: bool


class Interval:
    """Collects step results. Only `read` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: list[Measured] = []  # already read, e.g. for a checkpoint between two log lines
        self._unread: list[tuple[int, StepResult]] = []
        self.steps_timed = 0  # by this process; a resumed interval also holds steps from the checkpoint
        self._started = time.perf_counter()
        self._excluded = 0.0
        self._first_step: float | None = None  # seconds, if it was timed

    def add(self, step: int, result: StepResult) -> None:
        """Add a step without waiting for it."""
        self._unread.append((step, result))
        self.steps_timed += 1

    def read(self) -> list[Measured]:
        """All steps since the last `clear`, in one copy from the device."""
        if self._unread:
            rows = [torch.stack([x.double() for x in (r.loss, r.grad_norm, r.nonfinite)]) for _, r in self._unread]
            numbers = torch.stack(rows).tolist()
            for (step, _), (loss, norm, nonfinite) in zip(self._unread, numbers, strict=True):
                self._read.append(Measured(step, loss, norm, bool(nonfinite)))
            self._unread.clear()
        return list(self._read)

    def seconds_per_step(self) -> float:
        """Mean over the interval without excluded time. Call after `read`, which waits for the device."""
        return self._seconds() / max(1, self.steps_timed)

    def time_first_step(self) -> float:
        """Seconds that the first step of a process or stage took, of which most may be warm-up. Call after `read`."""
        self._first_step = self._seconds()
        return self._first_step

    @property
    def is_warm_up(self) -> bool:
        """Whether the first step took so long that the others are likely to contain warm-up as well."""
        if self._first_step is None or self.steps_timed < 2:
            return self._first_step is not None
        return self._first_step > 3 * (self._seconds() - self._first_step) / (self.steps_timed - 1)

    def _seconds(self) -> float:
        return time.perf_counter() - self._started - self._excluded

    def clear(self) -> None:
        """Start the next interval."""
        self._read.clear()
        self._unread.clear()
        self.start_clock()

    def start_clock(self) -> None:
        """Start timing, after building, loading and resuming."""
        self.steps_timed, self._excluded, self._first_step = 0, 0.0, None
        self._started = time.perf_counter()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Wraps work that does not count as training time: validation, samples, saving."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def state_dict(self) -> list[list[Any]]:
        """Steps measured but not logged yet, so that a resumed run logs the same interval. Waits for the device."""
        # JSON has no nan; repr keeps every float exactly.
        return [[m.step, repr(m.loss), repr(m.grad_norm), m.nonfinite] for m in self.read()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self._read = [Measured(step, float(loss), float(norm), bad) for step, loss, norm, bad in state]

"""What has been measured since the last log line. Losses stay on the device until then; clocks are the host's."""

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
    bad: bool


class Interval:
    """Collects steps. `read` is the one place where the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: list[Measured] = []  # read early, for a checkpoint between two log lines
        self._unread: list[tuple[int, StepResult]] = []
        self._steps_timed = 0
        self._began = time.perf_counter()
        self._excluded = 0.0

    def add(self, step: int, result: StepResult) -> None:
        """A step was ordered; nothing waits for it."""
        self._unread.append((step, result))
        self._steps_timed += 1

    def read(self) -> list[Measured]:
        """Everything since the last `clear`, in one copy from the device."""
        if self._unread:
            results = [r for _, r in self._unread]
            rows = torch.stack(
                [torch.stack([r.loss.double(), r.grad_norm.double(), r.bad.double()]) for r in results]
            ).tolist()
            for (step, _), (loss, norm, bad) in zip(self._unread, rows, strict=True):
                self._read.append(Measured(step, loss, norm, bool(bad)))
            self._unread.clear()
        return list(self._read)

    @property
    def steps_timed(self) -> int:
        """Steps of this process in the interval; a resumed interval may hold others, read from the checkpoint."""
        return self._steps_timed

    def seconds_per_step(self) -> float:
        """Mean over the interval, without what was excluded. Call after `read`, which waits for the device."""
        return (time.perf_counter() - self._began - self._excluded) / max(1, self._steps_timed)

    def clear(self) -> None:
        """Begin the next interval."""
        self._read.clear()
        self._unread.clear()
        self.start_clock()

    def start_clock(self) -> None:
        """Time counts from here: after building, loading and resuming."""
        self._steps_timed, self._excluded = 0, 0.0
        self._began = time.perf_counter()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time that is not training: validation, samples, saving."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - begun

    def state_dict(self) -> list[list[Any]]:
        """Steps measured but not logged yet, so that a resumed run logs the same interval. Waits for the device."""
        return [[m.step, _text(m.loss), _text(m.grad_norm), m.bad] for m in self.read()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self._read = [Measured(step, float(loss), float(norm), bad) for step, loss, norm, bad in state]


def _text(value: float) -> str:
    # JSON has no nan; text keeps every float, to the last bit.
    return repr(value)

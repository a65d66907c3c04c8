"""train.cuda_graph=auto: measure the first steps, and use CUDA graphs if the GPU waits for kernel launches.

The first steps of a batch shape run eagerly. After warm-up, each step notes when the host has launched all passes, and
marks that point in the GPU's queue. If the GPU reaches the mark at almost the same time, it was waiting for launches,
and a graph helps. If it is behind, the host was waiting, or will be, and a graph would only cost memory.

Host times alone are not enough: a host that is ahead is blocked by the full launch queue and seems as slow as the GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tercet.telemetry.events import Event, GraphChosen
from tercet.train.step import MicroBatch

# Steps that compile or allocate memory
_WARM_UPS = 3
_MEASURED = 5
# The GPU waits for the host if it is behind by less than this share of the host's time for a pass.
_WAITING_BELOW = 0.1
# Steps after which a graph has been captured, if it is going to be
STEPS_TO_DECIDE = _WARM_UPS + _MEASURED + 2


class CudaClock:
    """Host time, and points in the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """A mark after the work launched so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has reached it; does not wait."""
        return mark.query()

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Seconds on the device between two marks that it has reached."""
        return first.elapsed_time(last) / 1e3

    def wait(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self._device)


@dataclass(frozen=True)
class _Step:
    started: float
    launched: float
    end: torch.cuda.Event  # after the last launch


class GraphChoice:
    """One decision per device and batch shape. Waits for the device once, before the measured steps."""

    def __init__(self, clock: CudaClock, device: str) -> None:
        self.made: dict[str, bool] = {}  # saved in checkpoints: a resumed run repeats the decisions
        self._clock, self._device = clock, device
        self.events: list[Event] = []  # decisions that are not logged yet
        self._shape, self._passes = "", 0
        self.restart()

    def restart(self) -> None:
        """Measure anew, unless the shape is decided."""
        self._warm_ups = 0
        self._idle: tuple[float, torch.cuda.Event] | None = None  # a point that host and device passed at the same time
        self._steps: list[_Step] = []

    def uses_graph(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether the step runs as a graph; if not, run it within `measured`."""
        shape = _shape(batches[0])
        if shape != self._shape:
            self._shape, self._passes = shape, len(batches)
            self.restart()
        if len(self._steps) == _MEASURED and self._clock.reached(self._steps[-1].end):
            self._decide()
        return self.made.get(self._key, False)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Wraps the launches of an eager step."""
        if self._key in self.made or len(self._steps) == _MEASURED:
            yield
        elif self._warm_ups < _WARM_UPS:
            self._warm_ups += 1
            yield
        else:
            if self._idle is None:
                self._clock.wait()
                self._idle = self._clock.now(), self._clock.mark()
            started = self._clock.now()
            yield
            self._steps.append(_Step(started, self._clock.now(), self._clock.mark()))

    @property
    def _key(self) -> str:
        return f"{self._device}: {self._shape}"

    def _decide(self) -> None:
        assert self._idle is not None
        time_0, mark_0 = self._idle
        host = statistics.median(s.launched - s.started for s in self._steps)
        behind = statistics.median(self._clock.between(mark_0, s.end) - (s.launched - time_0) for s in self._steps)
        graph = behind < _WAITING_BELOW * host / self._passes
        self.made[self._key] = graph
        self.events.append(
            GraphChosen(step=0, graph=graph, shape=self._shape, host_seconds=host, behind_seconds=max(0.0, behind))
        )
        self.restart()


def _shape(batch: MicroBatch) -> str:
    size = " × ".join(map(str, batch.tokens.shape)) + " tokens"
    return size if batch.max_seqlen is None else f"{size} in documents of at most {batch.max_seqlen}"

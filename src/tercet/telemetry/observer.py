"""Everything that watches a training step from inside: clocks, layers, routes, memory, profile and health.

The trainer calls it at fixed points and otherwise knows nothing of it. Between log lines it never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.config.schema import RunConfig
from tercet.telemetry import memory
from tercet.telemetry.events import EventLog, HealthFired, Noted, ResourcesObserved, StepLogged
from tercet.telemetry.health import HealthMonitor
from tercet.telemetry.layers import LayerProbe
from tercet.telemetry.profile import Profiler
from tercet.telemetry.timing import PhaseClock


@dataclass(frozen=True)
class DataCounts:
    """What has been read since the start of the run, over all ranks."""

    documents: int = 0
    tokens: int = 0
    padding: int = 0
    skipped: int = 0
    left_out: int = 0


class Observer:
    """One rank's. `phase` around the parts of a step; the rest between steps."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        rank: int,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: EventLog,
        compute: str,
        all_sum: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._config, self._folder, self._rank, self._device = config, folder, rank, device
        self._model, self._optimizer, self._log, self._compute = model, optimizer, log, compute
        self._all_sum = all_sum
        self._clock = PhaseClock(device)
        self._probe = LayerProbe(model)
        self._profiler = Profiler(folder, rank, config.profile, device)
        self._health = HealthMonitor(config.health)
        self._seen_first_step = False
        self._steps = 0  # since the last log line
        self._dtypes: list[str] = []
        self.data = DataCounts()
        self._outside = {"checkpoint": 0.0, "validation": 0.0}
        self._snapshot("boot", 0)

    # ------------------------------------------------------------ around a step

    def before_step(self, step: int) -> None:
        """Layers are looked at in the steps that will be logged, and in no others."""
        self._probe.sample(step % self._config.log.every == 0 or step == self._config.train.steps)
        self._profiler.before_step(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step: forward, backward, optimizer or communication."""
        if name == "optimizer" and not self._seen_first_step:
            # Gradients exist now, and are gone when the step returns.
            self._dtypes = memory.dtypes(self._model, self._optimizer, self._compute)
        with self._clock.phase(name), self._profiler.range(name):
            yield
        if name == "forward":
            self._probe.count_routes()

    def after_step(self, step: int) -> None:
        self._steps += 1
        if written := self._profiler.after_step(step):
            self._log.emit(Noted(step=step, text=f"profile: {', '.join(written)}"))
        if not self._seen_first_step:
            self._seen_first_step = True
            self._after_first_step(step)
        every = self._config.health.memory_every
        if every and step % every == 0:
            self._snapshot(f"step{step}", step)

    def outside(self, what: str, seconds: float) -> None:
        """Time of the interval that was no training: checkpoint or validation."""
        self._outside[what] += seconds

    # ------------------------------------------------------------ at a log line

    def after_log(self, logged: StepLogged) -> list[HealthFired]:
        """Emit what the interval showed, and each finding of the health rules; returns those that ask to halt."""
        found = self._health.observe(logged)
        self._log.emit(self._resources(logged))
        if layers := self._probe.read(logged.step, self._all_sum):
            self._log.emit(layers)
            found += self._health.observe(layers)
        routes = self._probe.routes(logged.step)
        self._log.emit(routes)
        found += self._health.observe(routes)
        for finding in found:
            self._log.emit(finding)
        self._probe.sample(False)  # a validation that follows is not training
        self._steps = 0
        return [f for f in found if f.action == "halt"]

    def observe(self, event: Any) -> list[HealthFired]:
        """Any other event that a rule may speak of; emits the findings, returns those that ask to halt."""
        found = self._health.observe(event)
        for finding in found:
            self._log.emit(finding)
        return [f for f in found if f.action == "halt"]

    def close(self) -> None:
        """Write a profile that the run's end has cut short."""
        if written := self._profiler.close():
            self._log.emit(Noted(step=0, text=f"profile, cut short: {', '.join(written)}"))

    # ------------------------------------------------------------ parts

    def _resources(self, logged: StepLogged) -> ResourcesObserved:
        steps = max(1, self._steps)
        phases: dict[str, Any] = {f"{name}_seconds": t / steps for name, t in self._clock.read().items()}
        known = logged.data_seconds + sum(phases.values())
        used: dict[str, Any] = memory.device_memory(self._device)
        outside, self._outside = self._outside, dict.fromkeys(self._outside, 0.0)
        return ResourcesObserved(
            step=logged.step,
            data_seconds=logged.data_seconds,
            **phases,
            other_seconds=max(0.0, logged.step_seconds - known),
            checkpoint_seconds=outside["checkpoint"],
            validation_seconds=outside["validation"],
            **used,
            host_gib=memory.resident_gib(),
            documents=self.data.documents,
            real_tokens=self.data.tokens,
            padding=self.data.padding,
            bad_records=self.data.skipped,
            left_out=self.data.left_out,
        )

    def _after_first_step(self, step: int) -> None:
        self._snapshot(f"step{step}", step)
        if self._rank == 0:
            gradients = next((line for line in self._dtypes if line.startswith("gradients:")), "")
            lines = memory.dtypes(self._model, self._optimizer, self._compute)
            lines = [gradients if line.startswith("gradients:") else line for line in lines]
            memory.write_after_first_step(self._folder, self._optimizer, lines)

    def _snapshot(self, name: str, step: int) -> None:
        record = memory.snapshot(self._device, self._model, self._optimizer, step)
        memory.write_snapshot(self._folder, self._rank, name, record)

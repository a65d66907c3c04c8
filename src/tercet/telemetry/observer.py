"""Observer: measures training steps from inside. Phase times, layer statistics, routes, memory, profile and health.

The trainer calls it at fixed points. Between log lines it never waits for the device.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tercet.attention.dispatch import REQUESTED
from tercet.config.schema import RunConfig
from tercet.model.attention import Attention
from tercet.telemetry import events, measure
from tercet.telemetry.event_log import EventLog, full_disk_allowed
from tercet.telemetry.health import HealthMonitor
from tercet.telemetry.measure import PhaseClock, Profiler
from tercet.telemetry.sinks import ROUTE_COLUMNS, STATISTICS

# Field of events.ResourcesObserved -> field of the loader's totals (data.packing.LoaderStats)
_TOTALS = {
    "documents": "documents", "real_tokens": "tokens", "padding": "padding", "bad_records": "skipped",
    "left_out": "left_out", "exercises": "exercises",
}  # fmt: skip


class Observer:
    """One per rank. Put `phase` around the parts of a step; call the rest between steps."""

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
        excluded: Callable[[], AbstractContextManager[None]] = nullcontext,
        held_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """all_sum: sums a tensor over ranks. excluded: context for time that is not training, e.g. writing a profile.
        held_bytes: device memory used by CUDA graphs that the allocator does not count."""
        self._config, self._folder, self._rank, self._device = config, folder, rank, device
        self._model, self._optimizer, self._log, self._compute = model, optimizer, log, compute
        self._all_sum, self._excluded, self._held_bytes = all_sum, excluded, held_bytes
        self._clock = PhaseClock(device)
        self._probe = LayerProbe(model)
        self._profiler = Profiler(folder, rank, config.profile, device)
        self._health = HealthMonitor(config.health.halt, config.train.init_from)
        self.halting: list[events.HealthFired] = []  # findings that ask the run to stop
        log.readers.append(self._judge)
        self._seen_first_step = False
        self._steps = 0  # since the last log line
        self._unreported = 0  # steps whose routes are in no event yet
        self._gradients: dict[str, Any] = {}
        self._snapshot("boot", 0)

    def before_step(self, step: int) -> None:
        """Layer statistics are collected only in steps that will be logged."""
        self._probe.set_sampling(step % self._config.log.every == 0 or step in self._config.train.stage_ends)
        if warning := self._profiler.before_step(step):
            self._log.emit(events.Noted(step=step, text=warning))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step: forward, backward (passes: both, with CUDA graphs), optimizer or communication."""
        if name == "optimizer" and not self._seen_first_step:
            # Gradients exist only now; they are freed before the step returns.
            self._gradients = measure.gradients(self._model)
        with self._clock.phase(name), self._profiler.range(name):
            yield
        if name in ("forward", "passes"):
            self._probe.count_routes()

    def after_step(self, step: int) -> None:
        self._steps += 1
        self._unreported += 1
        self._probe.commit_step()
        if self._profiler.ends_with(step):
            with self._excluded():
                self._write_profile(step)
        if not self._seen_first_step:
            self._seen_first_step = True
            self._snapshot(f"step{step}", step)
            if self._rank == 0:
                with full_disk_allowed():
                    measure.write_dtypes(self._folder, self._model, self._optimizer, self._compute, self._gradients)

    def after_log(self, logged: events.StepLogged, totals: Any = None) -> None:
        """Emit the interval's measurements. totals: the loader's, since the start of the run and over all ranks; None
        without one."""
        self._log.emit(self._resources(logged, totals))
        layers, selectors = self._probe.read(logged.step, self._all_sum)
        if layers is not None:
            self._log.emit(layers)
        if selectors is not None:
            self._log.emit(selectors)
        self._log.emit(self._probe.routes(logged.step))
        self._probe.set_sampling(False)  # a validation may follow
        self._steps = self._unreported = 0

    def flush_routes(self, step: int) -> None:
        """Emit the route counts since the last log line: at a save, from which another process may resume, and at the
        end."""
        if self._unreported:
            self._unreported = 0
            self._log.emit(self._probe.routes(step))

    def _judge(self, event: events.Event) -> None:
        """Apply the health rules to an event of the log, and log what they find."""
        for finding in self._health.observe(event):
            self._log.emit(finding)
            if finding.action == "halt":
                self.halting.append(finding)

    def close(self) -> None:
        """Write a profile that the end of the run cut short."""
        if self._profiler.active:
            self._write_profile(self._profiler.last)

    def _resources(self, logged: events.StepLogged, totals: Any) -> events.ResourcesObserved:
        steps = max(1, self._steps)
        phases: dict[str, Any] = {f"{name}_seconds": t / steps for name, t in self._clock.read().items()}
        known = logged.data_seconds + sum(phases.values())
        if "passes_seconds" in phases:  # CUDA graphs: unknown, which is not the same as zero
            phases |= {"forward_seconds": None, "backward_seconds": None}
        used: dict[str, Any] = measure.device_memory(self._device, self._held_bytes())
        return events.ResourcesObserved(
            step=logged.step,
            data_seconds=logged.data_seconds,
            **phases,
            other_seconds=max(0.0, logged.step_seconds - known),
            **used,
            host_gib=measure.resident_gib(),
            **{field: 0 if totals is None else getattr(totals, name) for field, name in _TOTALS.items()},
        )

    def _write_profile(self, step: int) -> None:
        try:
            text = f"profile: {', '.join(self._profiler.close())}"
        except OSError as error:
            text = f"warning: the profile could not be written ({error})"
        self._log.emit(events.Noted(step=step, text=text))

    def _snapshot(self, name: str, step: int) -> None:
        """Write mem_{name}.json on rank 0, mem_{name}_rank{r}.json on the others."""
        held = self._held_bytes()
        record = measure.snapshot(self._device, self._model, self._optimizer, step, self._gradients, held)
        suffix = f"_rank{self._rank}" if self._rank else ""
        text = json.dumps({"rank": self._rank, **record}, indent=1) + "\n"
        with full_disk_allowed():
            (self._folder / f"mem_{name}{suffix}.json").write_text(text, encoding="utf-8")


class LayerProbe:
    """Gates, selection and routes of the attention layers, found by class under any wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, Attention)]
        self._sparse = [m for m in self.layers if m.spec.sparse]
        self._calls: Counter[events.RouteKey] = Counter()  # of completed steps
        self._current: Counter[events.RouteKey] = Counter()  # of the current step
        self._sampled = False

    def set_sampling(self, on: bool) -> None:
        """Whether the next passes collect statistics. One step per log interval is enough, and cheap."""
        self._sampled = self._sampled or on
        for layer in self._sparse:
            layer.stats.enabled = on

    def count_routes(self) -> None:
        """Call after each forward pass; `commit_step` after the last one of a step. Reads host data only."""
        for i, layer in enumerate(self.layers):
            on_gpu = self.on_gpu(layer)
            for branch, route in layer.routes.items():
                reason = route.reason or ""
                fallback = on_gpu and route == "reference" and reason != REQUESTED
                self._current[i, branch, str(route), reason, fallback] += 1

    def commit_step(self) -> None:
        """Count the passes of the completed step. A failed step never counts: a resumed run repeats it."""
        self._calls.update(self._current)
        self._current.clear()

    @staticmethod
    def on_gpu(layer: Attention) -> bool:
        """Whether kernels could run; on a CPU the reference is not a fallback."""
        return layer.q_proj.weight.is_cuda

    def routes(self, step: int) -> events.RoutesCounted:
        """Passes of all completed steps."""
        rows = [(*key, calls) for key, calls in sorted(self._calls.items())]
        columns: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(ROUTE_COLUMNS)}
        return events.RoutesCounted(step=step, **columns)

    def read(
        self, step: int, all_sum: Callable[[Tensor], Tensor]
    ) -> tuple[events.LayersObserved | None, events.SelectorsObserved | None]:
        """Statistics of all ranks since the last read, if there are any. One all-reduce, one synchronisation."""
        if not self._sampled or not self._sparse:
            return None, None
        self._sampled = False
        device = self._sparse[0].q_proj.weight.device
        rows = all_sum(torch.stack([layer.stats.sums(device) for layer in self._sparse])).tolist()
        means, distances = {}, {}  # by layer
        for layer, row in zip(self._sparse, rows, strict=True):
            means[id(layer)], distances[id(layer)] = layer.stats.means(row), layer.stats.distances(row)
            layer.stats.reset()
        columns: dict[str, Any] = {n: [means.get(id(m), {}).get(n) for m in self.layers] for n in STATISTICS}
        layers = events.LayersObserved(
            step=step,
            attention=[m.kind for m in self.layers],
            distances=[distances.get(id(m), []) for m in self.layers],
            **columns,
        )
        choices = {i: means[id(m)] for i, m in enumerate(self.layers) if "selector_mass" in means.get(id(m), {})}
        names = ("kl", "mass", "best", "random")
        measured: dict[str, Any] = {name: [row.get(f"selector_{name}") for row in choices.values()] for name in names}
        return layers, events.SelectorsObserved(step=step, layer=[*choices], **measured) if choices else None

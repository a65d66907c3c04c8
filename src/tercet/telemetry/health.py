"""Health rules: events in, findings out. The trainer asks while it runs, the report asks again afterwards.

No clocks, no files, no torch: the same events always give the same findings.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tercet.config.sections import HealthConfig
from tercet.telemetry.events import (
    Event,
    HealthFired,
    LayersObserved,
    RecordingFailed,
    RoutesCounted,
    RunStarted,
    StepLogged,
    StepsSkipped,
)

BRANCHES = ("compressed", "selected", "window")
RULES = (
    "gate_collapse",
    "dead_branch",
    "selection_stuck",
    "loss_spike",
    "nonfinite",
    "zero_grad",
    "throughput_drop",
    "data_starvation",
    "fallback",
)
# A median needs some steps under it before a jump means anything.
_FEWEST_LOSSES = 8
_FEWEST_SPEEDS = 3
# Of normally distributed values, the standard deviation over the median deviation.
_DEVIATION = 1.4826


class HealthMonitor:
    """Follows one rank's events. A rule speaks once when trouble begins, and again only after it has gone."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._bad: dict[tuple[str, object], int] = {}  # intervals in a row, by rule and layer
        self._losses: deque[float] = deque(maxlen=config.loss_window)
        self._speeds: deque[float] = deque(maxlen=50)
        self._warming_up = True

    def observe(self, event: Event) -> list[HealthFired]:
        """What this event says that earlier ones did not."""
        if isinstance(event, RunStarted):
            # Another process, perhaps on another device: its speed is its own, and its first interval warms up.
            self._speeds.clear()
            self._warming_up = True
            found = []
        elif isinstance(event, StepLogged):
            found = [*self._loss(event), *self._gradients(event), *self._speed(event), *self._data(event)]
        elif isinstance(event, StepsSkipped):
            steps = ", ".join(map(str, event.steps[:5])) + (" …" if len(event.steps) > 5 else "")
            sentence = f"loss or gradients were not finite in step {steps} ({event.total} so far)"
            found = self._always(event, "nonfinite", sentence, len(event.steps), 0)
        elif isinstance(event, LayersObserved):
            found = [*self._gates(event), *self._selection(event)]
        elif isinstance(event, RoutesCounted):
            found = self._routes(event)
        elif isinstance(event, RecordingFailed):
            sentence = f"steps are launched kernel by kernel, though train.cuda_graph=auto ({event.reason})"
            found = self._always(event, "fallback", sentence, 1, 0)
        else:
            found = []
        return [f for f in found if f.action != "off"]

    # ------------------------------------------------------------ rules

    def _loss(self, event: StepLogged) -> list[HealthFired]:
        c, found = self._config, []
        for step, loss in enumerate(event.losses, event.first_step):
            if not math.isfinite(loss):
                continue  # the nonfinite rule speaks of these
            if len(self._losses) >= _FEWEST_LOSSES:
                middle = statistics.median(self._losses)
                spread = _DEVIATION * statistics.median(abs(x - middle) for x in self._losses)
                limit = middle + max(c.loss_spike_nats, c.loss_spike_deviations * spread)
                sentence = f"loss {loss:.4f} in step {step}, where the last {len(self._losses)} had {middle:.4f}"
                found += self._after(event, "loss_spike", None, loss > limit, 1, sentence, loss, limit)
            self._losses.append(loss)
        return found

    def _gradients(self, event: StepLogged) -> list[HealthFired]:
        norms, limit = event.grad_norms, self._config.zero_grad_norm
        bad = bool(norms) and max(norms) <= limit  # a NaN is not at most anything
        sentence = f"gradient norm was zero in all of steps {event.first_step} to {event.step}: nothing is learnt"
        return self._after(event, "zero_grad", None, bad, 1, sentence, max(norms, default=0.0), limit)

    def _speed(self, event: StepLogged) -> list[HealthFired]:
        if self._warming_up:
            self._warming_up = False
            return []
        speed, c = event.tokens_per_s, self._config
        if len(self._speeds) < _FEWEST_SPEEDS:
            self._speeds.append(speed)
            return []
        usual = statistics.median(self._speeds)
        bad = speed < c.throughput_share * usual
        if not bad:
            self._speeds.append(speed)
        sentence = f"{speed:,.0f} tokens/s up to step {event.step}, where {usual:,.0f} were usual"
        return self._after(event, "throughput_drop", None, bad, c.patience, sentence, speed, c.throughput_share * usual)

    def _data(self, event: StepLogged) -> list[HealthFired]:
        if not event.step_seconds:
            return []
        share, c = event.data_seconds / event.step_seconds, self._config
        sentence = f"{100 * share:.0f}% of each step up to {event.step} was spent waiting for data"
        bad = share > c.data_wait_share
        return self._after(event, "data_starvation", None, bad, c.patience, sentence, share, c.data_wait_share)

    def _gates(self, event: LayersObserved) -> list[HealthFired]:
        c, found = self._config, []
        for i, share in enumerate(event.gate_collapse):
            if share is not None:
                bad = not share < c.gate_collapse_share  # NaN is bad too
                sentence = f"layer {i}: one gate takes over 95% for {100 * share:.0f}% of tokens and heads"
                found += self._after(
                    event, "gate_collapse", i, bad, c.patience, sentence, share, c.gate_collapse_share, layer=i
                )
        for branch in BRANCHES:
            for i, share in enumerate(getattr(event, f"gate_share_{branch}")):
                if share is not None:
                    bad, limit = not share >= c.dead_branch_share, c.dead_branch_share
                    sentence = f"layer {i}: the {branch} branch gets {100 * share:.2f}% of the gates"
                    key = (i, branch)
                    found += self._after(event, "dead_branch", key, bad, c.patience, sentence, share, limit, layer=i)
        return found

    def _selection(self, event: LayersObserved) -> list[HealthFired]:
        c, found = self._config, []
        for i, (forced, overlap) in enumerate(zip(event.selected_forced, event.selected_overlap, strict=True)):
            if forced is not None:
                sentence = f"layer {i}: {100 * forced:.1f}% of the selected blocks are forced ones: nothing is chosen"
                bad, limit = forced >= c.selection_forced_share, c.selection_forced_share
                found += self._after(event, "selection_stuck", (i, "forced"), bad, c.patience, sentence, forced, limit)
            if overlap is not None:
                sentence = f"layer {i}: {100 * overlap:.2f}% of the freely chosen blocks stay from token to token"
                bad, limit = overlap >= c.selection_overlap, c.selection_overlap
                found += self._after(event, "selection_stuck", (i, "same"), bad, c.patience, sentence, overlap, limit)
        return found

    def _routes(self, event: RoutesCounted) -> list[HealthFired]:
        found = []
        rows = zip(event.layer, event.branch, event.route, event.reason, event.fallback, event.calls, strict=True)
        for layer, branch, route, reason, fallback, calls in rows:
            if fallback:
                sentence = f"layer {layer}: the {branch} branch runs on {route} ({reason})"
                key = (layer, branch, reason)
                found += self._after(event, "fallback", key, True, 1, sentence, calls, 0)
        return found

    # ------------------------------------------------------------ episodes

    def _after(
        self,
        event: Event,
        rule: str,
        key: object,
        bad: bool,
        patience: int,
        sentence: str,
        value: float,
        threshold: float,
        layer: int | None = None,
    ) -> list[HealthFired]:
        """One finding, when `bad` has been true `patience` times in a row for the first time."""
        count = self._bad.get((rule, key), 0) + 1 if bad else 0
        self._bad[rule, key] = count
        return self._always(event, rule, sentence, value, threshold, layer) if count == patience else []

    def _always(
        self, event: Event, rule: str, sentence: str, value: float, threshold: float, layer: int | None = None
    ) -> list[HealthFired]:
        return [
            HealthFired(
                step=event.step,
                rank=event.rank,
                time=event.time,
                rule=rule,
                action=getattr(self._config, rule),
                sentence=sentence,
                value=float(value),
                threshold=float(threshold),
                layer=layer,
            )
        ]


def examine(events: Iterable[Event], config: HealthConfig | None = None) -> list[HealthFired]:
    """All findings of a stream; with no config, by the default thresholds, whatever the run's own were."""
    monitor = HealthMonitor(config or HealthConfig())
    return [finding for event in events for finding in monitor.observe(event)]

"""Health rules: events in, findings out. Used by the trainer during a run and by the report's gates afterwards.

A pure function of the events: no clocks, files or torch.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterable

from tercet.attention.config import BRANCHES
from tercet.config.sections import HealthConfig
from tercet.telemetry.events import (
    Event,
    GraphCaptureFailed,
    HealthFired,
    LayersObserved,
    RoutesCounted,
    RunStarted,
    StageStarted,
    StepLogged,
    StepsSkipped,
)

# What a finding of each rule calls for.
FIXES = {
    "loss_spike": "lower train.lr, or resume from an earlier checkpoint",
    "nonfinite": "inspect nonfinite/ in the run folder; lower train.lr",
    "zero_grad": "check that the loss depends on the weights",
    "throughput_drop": "see the step time plot; check what else was running",
    "data_starvation": "raise data.prefetch",
    "gate_collapse": "lower train.lr, or use model.gate=softmax if it is not",
    "dead_branch": "remove the branch (model.branches), or check that its keys receive gradients",
    "selection_stuck": "raise model.nsa.select_count above the number of forced blocks, or raise data.seq_len",
}

# Values needed before a median means anything.
_MIN_LOSSES = 8
_MIN_SPEEDS = 3
# Standard deviation over median absolute deviation, for a normal distribution.
_MAD_TO_STD = 1.4826


class HealthMonitor:
    """Applies the rules to one rank's events. A rule fires once per problem, and again only after it has cleared."""

    def __init__(self, config: HealthConfig, init_from: str | None = None) -> None:
        """init_from: train.init_from. A file of weights is an import, whose gates may be closed by design."""
        self._config = config
        self._imported = str(init_from).endswith(".safetensors")
        self._opened: set[object] = set()  # layers, and branches of layers, that have passed their rule once
        self._bad: dict[tuple[str, object], int] = {}  # consecutive bad intervals, by rule and layer
        self._losses: deque[float] = deque(maxlen=config.loss_window)
        self._ordered: list[float] = []  # the same, sorted
        self._speeds: deque[float] = deque(maxlen=50)
        self._warming_up = True
        self._stage: int | None = None  # of train.stages

    def observe(self, event: Event) -> list[HealthFired]:
        """New findings due to this event."""
        if isinstance(event, RunStarted | StageStarted):
            # Another process, maybe on another device, or another sequence length: throughput starts over, and the
            # first interval is warm-up.
            self._speeds.clear()
            self._bad.pop(("throughput_drop", None), None)
            self._warming_up = True
            if isinstance(event, StageStarted):
                if event.stage != self._stage:  # a process that resumes within a stage repeats its event
                    self._losses.clear()
                    self._ordered.clear()
                self._stage = event.stage
            found = []
        elif isinstance(event, StepLogged):
            found = [*self._loss(event), *self._gradients(event), *self._speed(event), *self._data(event)]
        elif isinstance(event, StepsSkipped):
            steps = ", ".join(map(str, event.steps[:5])) + (" …" if len(event.steps) > 5 else "")
            sentence = f"loss or gradients were not finite in step {steps} ({event.total} so far)"
            found = self._finding(event, "nonfinite", sentence, len(event.steps), 0)
        elif isinstance(event, LayersObserved):
            found = [*self._gates(event), *self._selection(event)]
        elif isinstance(event, RoutesCounted):
            found = self._routes(event)
        elif isinstance(event, GraphCaptureFailed):
            sentence = f"train.cuda_graph=auto fell back to eager execution ({event.reason})"
            found = self._finding(event, "fallback", sentence, 1, 0)
        else:
            found = []
        return [f for f in found if f.action != "off"]

    def _loss(self, event: StepLogged) -> list[HealthFired]:
        c, found = self._config, []
        for step, loss in enumerate(event.losses, event.first_step):
            if not math.isfinite(loss):
                continue  # left to the nonfinite rule
            if len(self._losses) >= _MIN_LOSSES:
                median = _middle(self._ordered)
                limit = median + c.loss_spike_nats
                if loss > limit:
                    spread = _MAD_TO_STD * statistics.median(abs(x - median) for x in self._losses)
                    limit = max(limit, median + c.loss_spike_deviations * spread)
                    count = f"the median of the last {len(self._losses)} steps"
                    sentence = f"loss {loss:.4f} in step {step}; {count} is {median:.4f}"
                    found += self._if_persistent(event, "loss_spike", None, loss > limit, 1, sentence, loss, limit)
                else:
                    self._bad.pop(("loss_spike", None), None)
            if len(self._losses) == self._losses.maxlen:
                del self._ordered[bisect.bisect_left(self._ordered, self._losses[0])]
            self._losses.append(loss)
            bisect.insort(self._ordered, loss)
        return found

    def _gradients(self, event: StepLogged) -> list[HealthFired]:
        norms, limit = event.grad_norms, self._config.zero_grad_norm
        bad = bool(norms) and max(norms) <= limit  # False for NaN
        sentence = f"gradient norm was zero in all steps from {event.first_step} to {event.step}: nothing is learned"
        return self._if_persistent(event, "zero_grad", None, bad, 1, sentence, max(norms, default=0.0), limit)

    def _speed(self, event: StepLogged) -> list[HealthFired]:
        if self._warming_up:
            self._warming_up = False
            return []
        speed, c = event.tokens_per_s, self._config
        if len(self._speeds) < _MIN_SPEEDS:
            self._speeds.append(speed)
            return []
        median = statistics.median(self._speeds)
        bad = speed < c.throughput_share * median
        if not bad:
            self._speeds.append(speed)
        sentence = f"{speed:,.0f} tokens/s up to step {event.step}; the median is {median:,.0f}"
        return self._if_persistent(
            event, "throughput_drop", None, bad, c.patience, sentence, speed, c.throughput_share * median
        )

    def _data(self, event: StepLogged) -> list[HealthFired]:
        if not event.step_seconds:
            return []
        share, c = event.data_seconds / event.step_seconds, self._config
        sentence = f"steps up to {event.step} spent {100 * share:.0f}% of their time waiting for data"
        bad = share > c.data_wait_share
        return self._if_persistent(event, "data_starvation", None, bad, c.patience, sentence, share, c.data_wait_share)

    def _gates(self, event: LayersObserved) -> list[HealthFired]:
        c, found = self._config, []
        limit = c.gate_collapse_share
        for i, share in _measured(event.gate_collapse):
            bad = self._gate_is_bad(i, share, not share < limit)  # NaN is bad too
            if not bad:
                self._bad.pop(("gate_collapse", i), None)
                continue
            sentence = f"layer {i}: one gate has over 95% of the weight for {100 * share:.0f}% of (token, head) pairs"
            found += self._if_persistent(event, "gate_collapse", i, bad, c.patience, sentence, share, limit, layer=i)
        limit = c.dead_branch_share
        for branch in BRANCHES:
            for i, share in _measured(getattr(event, f"gate_share_{branch}")):
                key = (i, branch)
                bad = self._gate_is_bad(key, share, not share >= limit)
                if not bad:
                    self._bad.pop(("dead_branch", key), None)
                    continue
                sentence = f"layer {i}: the {branch} branch gets {100 * share:.2f}% of the gate weight"
                found += self._if_persistent(
                    event, "dead_branch", key, bad, c.patience, sentence, share, limit, layer=i
                )
        return found

    def _gate_is_bad(self, key: object, share: float, closed: bool) -> bool:
        """Whether a gate has closed. One that an import closed counts only after it has opened once."""
        if not closed:
            self._opened.add(key)
        return closed and (not self._imported or key in self._opened or math.isnan(share))

    def _selection(self, event: LayersObserved) -> list[HealthFired]:
        c = self._config

        def stuck(i: int, what: str, share: float, limit: float, sentence: str) -> list[HealthFired]:
            bad = share >= limit
            return self._if_persistent(event, "selection_stuck", (i, what), bad, c.patience, sentence, share, limit)

        found = []
        for i, (forced, overlap) in enumerate(zip(event.selected_forced, event.selected_overlap, strict=True)):
            if forced is not None:
                sentence = f"layer {i}: {100 * forced:.1f}% of the selected blocks are forced ones"
                found += stuck(i, "forced", forced, c.selection_forced_share, sentence)
            if overlap is not None:
                share = f"{100 * overlap:.2f}% of the freely selected blocks"
                sentence = f"layer {i}: {share} are the same for consecutive tokens"
                found += stuck(i, "same", overlap, c.selection_overlap, sentence)
        return found

    def _routes(self, event: RoutesCounted) -> list[HealthFired]:
        found = []
        for (layer, branch, route, reason, fallback), calls in event.by_route().items():
            if fallback:
                sentence = f"layer {layer}: the {branch} branch runs on {route} ({reason})"
                key = (layer, branch, reason)
                found += self._if_persistent(event, "fallback", key, True, 1, sentence, calls, 0)
        return found

    def _if_persistent(
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
        """A finding when `bad` has been true exactly `patience` times in a row."""
        count = self._bad.get((rule, key), 0) + 1 if bad else 0
        self._bad[rule, key] = count
        return self._finding(event, rule, sentence, value, threshold, layer) if count == patience else []

    def _finding(
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


def _middle(ordered: list[float]) -> float:
    """The median of sorted values."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _measured(values: list[float | None]) -> list[tuple[int, float]]:
    """(layer, value) of the layers that have one."""
    return [(i, value) for i, value in enumerate(values) if value is not None]


def health_findings(events: Iterable[Event], init_from: str | None = None) -> list[HealthFired]:
    """All findings in a stream of events, with the default thresholds."""
    monitor = HealthMonitor(HealthConfig(), init_from)
    return [finding for event in events for finding in monitor.observe(event)]

"""Health rules: events in, findings out. Used by the trainer during a run and by the report's gates afterwards.

A pure function of the events: no clocks, files or torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Container, Iterable, Iterator

from tercet.attention.config import BRANCHES
from tercet.telemetry import events
from tercet.telemetry.events import Event, HealthFired

# What a finding of each rule calls for.
FIXES = {
    "loss_spike": "lower train.lr, or resume from an earlier checkpoint",
    "nonfinite": "lower train.lr",
    "zero_grad": "check that the loss depends on the weights",
    "throughput_drop": "see the step time plot; check what else was running",
    "data_starvation": "raise data.prefetch, or tokenize in advance: tercet data prepare",
    "gate_collapse": "lower train.lr, or use model.gate=softmax if it is not",
    "dead_branch": "remove the branch (model.branches), or check that its keys receive gradients",
    "selection_stuck": "raise model.nsa.select_count above the number of forced blocks, or raise data.seq_len",
}

PATIENCE = 3  # consecutive bad intervals of gates, selection, throughput or data
GATE_COLLAPSE_SHARE = 0.5  # of (token, head) pairs with one gate above 95% of the sum of all
DEAD_BRANCH_SHARE = 0.01  # a branch with a smaller mean gate share is dead
SELECTION_FORCED_SHARE = 0.98  # of the selected blocks
SELECTION_OVERLAP = 0.9995  # of a token's freely selected blocks that the previous token also selected
LOSS_SPIKE_NATS = 0.5  # above the median of the last LOSS_WINDOW steps, and
LOSS_SPIKE_DEVIATIONS = 8.0  # this many median absolute deviations, scaled to standard deviations
LOSS_WINDOW = 50
ZERO_GRAD_NORM = 1e-12
THROUGHPUT_SHARE = 0.6  # of the median
DATA_WAIT_SHARE = 0.2  # of the step time

# Values needed before a median means anything.
_MIN_LOSSES = 8
_MIN_SPEEDS = 3
# Standard deviation over median absolute deviation, for a normal distribution.
_MAD_TO_STD = 1.4826

# Rules on every layer: (rule, column of events.LayersObserved, limit, whether it is a minimum, sentence). NaN is bad.
_LAYER_RULES = (
    ("gate_collapse", "gate_collapse", GATE_COLLAPSE_SHARE, False,
     "one gate has over 95% of the weight for {:.0f}% of (token, head) pairs"),
    *(("dead_branch", f"gate_share_{branch}", DEAD_BRANCH_SHARE, True,
       f"the {branch} branch gets {{:.2f}}% of the gate weight") for branch in BRANCHES),
    ("selection_stuck", "selected_forced", SELECTION_FORCED_SHARE, False,
     "{:.1f}% of the selected blocks are forced ones"),
    ("selection_stuck", "selected_overlap", SELECTION_OVERLAP, False,
     "{:.2f}% of the freely selected blocks are the same for consecutive tokens"),
)  # fmt: skip
_OF_GATES = ("gate_collapse", "dead_branch")


class HealthMonitor:
    """Applies the rules to one rank's events. A rule fires once per problem, and again only after it has cleared."""

    def __init__(self, halt: Container[str] = (), init_from: str | None = None) -> None:
        """halt: rules that stop the run. init_from: train.init_from; a file of weights is an import, whose
        gates may be closed by design."""
        self._halt = halt
        self._imported = str(init_from).endswith(".safetensors")
        self._opened: set[object] = set()  # layers, and branches of layers, that have passed their rule once
        self._bad: dict[tuple[str, object], int] = {}  # consecutive bad intervals, by rule and layer
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW)
        self._speeds: deque[float] = deque(maxlen=50)
        self._warming_up = True
        self._stage: int | None = None  # of train.stages

    def observe(self, event: Event) -> list[HealthFired]:
        """New findings due to this event."""
        return list(self._findings(event))

    def _findings(self, event: Event) -> Iterator[HealthFired]:
        if isinstance(event, events.RunStarted | events.StageStarted):
            self._restart(event)
        elif isinstance(event, events.StepLogged):
            yield from self._loss(event)
            yield from self._gradients(event)
            yield from self._speed(event)
            yield from self._data(event)
        elif isinstance(event, events.StepsSkipped):
            steps = ", ".join(map(str, event.steps[:5])) + (" …" if len(event.steps) > 5 else "")
            sentence = f"loss or gradients were not finite in step {steps} ({event.total} so far)"
            yield self._finding(event, "nonfinite", sentence, len(event.steps), 0)
        elif isinstance(event, events.LayersObserved):
            yield from self._layers(event)
        elif isinstance(event, events.RoutesCounted):
            for (layer, branch, route, reason, fallback), calls in event.by_route().items():
                if fallback and self._persists("fallback", (layer, branch, reason), True):
                    sentence = f"layer {layer}: the {branch} branch runs on {route} ({reason})"
                    yield self._finding(event, "fallback", sentence, calls, 0)
        elif isinstance(event, events.GraphCaptureFailed):
            sentence = f"train.cuda_graph=auto fell back to eager execution ({event.reason})"
            yield self._finding(event, "fallback", sentence, 1, 0)

    def _restart(self, event: events.RunStarted | events.StageStarted) -> None:
        """Another process, maybe on another device, or another sequence length: throughput starts over, and the first
        interval is warm-up."""
        self._speeds.clear()
        self._bad.pop(("throughput_drop", None), None)
        self._warming_up = True
        if isinstance(event, events.StageStarted):
            if event.stage != self._stage:  # a process that resumes within a stage repeats its event
                self._losses.clear()
            self._stage = event.stage

    def _loss(self, event: events.StepLogged) -> Iterator[HealthFired]:
        for step, loss in enumerate(event.losses, event.first_step):
            if not math.isfinite(loss):
                continue  # left to the nonfinite rule
            if len(self._losses) >= _MIN_LOSSES:
                median = statistics.median(self._losses)
                limit = median + LOSS_SPIKE_NATS
                if loss > limit:
                    spread = _MAD_TO_STD * statistics.median(abs(x - median) for x in self._losses)
                    limit = max(limit, median + LOSS_SPIKE_DEVIATIONS * spread)
                if self._persists("loss_spike", None, loss > limit):
                    count = f"the median of the last {len(self._losses)} steps"
                    sentence = f"loss {loss:.4f} in step {step}; {count} is {median:.4f}"
                    yield self._finding(event, "loss_spike", sentence, loss, limit)
            self._losses.append(loss)

    def _gradients(self, event: events.StepLogged) -> Iterator[HealthFired]:
        norms, limit = event.grad_norms, ZERO_GRAD_NORM
        if self._persists("zero_grad", None, bool(norms) and max(norms) <= limit):  # False for NaN
            sentence = f"gradient norm was zero in all steps from {event.first_step} to {event.step}"
            yield self._finding(event, "zero_grad", f"{sentence}: nothing is learned", max(norms), limit)

    def _speed(self, event: events.StepLogged) -> Iterator[HealthFired]:
        if self._warming_up:
            self._warming_up = False
            return
        speed = event.tokens_per_s
        if len(self._speeds) < _MIN_SPEEDS:
            self._speeds.append(speed)
            return
        median = statistics.median(self._speeds)
        limit = THROUGHPUT_SHARE * median
        if speed >= limit:
            self._speeds.append(speed)
        if self._persists("throughput_drop", None, speed < limit, PATIENCE):
            sentence = f"{speed:,.0f} tokens/s up to step {event.step}; the median is {median:,.0f}"
            yield self._finding(event, "throughput_drop", sentence, speed, limit)

    def _data(self, event: events.StepLogged) -> Iterator[HealthFired]:
        share = event.data_seconds / event.step_seconds if event.step_seconds else 0.0
        limit = DATA_WAIT_SHARE
        if self._persists("data_starvation", None, share > limit, PATIENCE):
            sentence = f"steps up to {event.step} spent {100 * share:.0f}% of their time waiting for data"
            yield self._finding(event, "data_starvation", sentence, share, limit)

    def _layers(self, event: events.LayersObserved) -> Iterator[HealthFired]:
        for rule, column, limit, minimum, sentence in _LAYER_RULES:
            for layer, share in enumerate(getattr(event, column)):
                if share is None:
                    continue
                bad = not (share >= limit if minimum else share < limit)
                if self._imported and rule in _OF_GATES and not math.isnan(share):
                    # A gate that the import closed counts only after it has opened once.
                    if not bad:
                        self._opened.add((layer, column))
                    bad = (layer, column) in self._opened and bad
                if self._persists(rule, (layer, column), bad, PATIENCE):
                    text = f"layer {layer}: {sentence.format(100 * share)}"
                    yield self._finding(event, rule, text, share, limit, layer)

    def _persists(self, rule: str, key: object, bad: bool, patience: int = 1) -> bool:
        """Whether this is the reading after which `bad` has been true exactly `patience` times in a row."""
        if not bad:
            if self._bad:
                self._bad.pop((rule, key), None)
            return False
        count = self._bad[rule, key] = self._bad.get((rule, key), 0) + 1
        return count == patience

    def _finding(
        self, event: Event, rule: str, sentence: str, value: float, threshold: float, layer: int | None = None
    ) -> HealthFired:
        return HealthFired(
            step=event.step, rank=event.rank, time=event.time, rule=rule, layer=layer, sentence=sentence,
            action="halt" if rule in self._halt else "warn", value=float(value), threshold=float(threshold),
        )  # fmt: skip


def health_findings(stream: Iterable[Event], init_from: str | None = None) -> list[HealthFired]:
    """All findings in a stream of events."""
    monitor = HealthMonitor(init_from=init_from)
    return [finding for event in stream for finding in monitor.observe(event)]

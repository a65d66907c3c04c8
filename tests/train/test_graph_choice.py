"""The decision of train.cuda_graph=auto, with simulated times. Whole runs are in test_graph.py."""

from __future__ import annotations

import pytest
import torch

from stepping import SimulatedClock
from tercet.telemetry.events import GraphChosen
from tercet.train.cuda_graph import STEPS_TO_DECIDE, GraphChoice
from tercet.train.step import MicroBatch

MS = 1e-3


def batch(length: int = 64, longest: int | None = None) -> MicroBatch:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return MicroBatch(tokens, tokens, None, longest)


def decide(clock: SimulatedClock, choice: GraphChoice, batches: list[MicroBatch]) -> GraphChosen:
    """Run steps until there is a decision."""
    for _ in range(STEPS_TO_DECIDE + 10):
        if not choice.uses_graph(batches):
            with choice.measured():
                clock.step()
        if choice.events:
            return choice.events.pop()
    raise AssertionError("no decision")


@pytest.mark.parametrize(
    ("host", "device", "graph"),
    [(60, 8, True), (60, 55, True), (60, 60, True), (60, 65, False), (60, 200, False), (1, 30, False)],
)
@pytest.mark.parametrize("queue", [0.9, 5], ids=["large-model", "small-model"])
def test_graphs_are_used_where_the_host_is_slower(host: float, device: float, graph: bool, queue: float) -> None:
    """The launch queue holds a number of steps. Once it is full, a host that is ahead seems as slow as the device."""
    clock = SimulatedClock(host * MS, device * MS, queue * device * MS)
    choice = GraphChoice(clock, "GPU")
    decision = decide(clock, choice, [batch()])
    assert decision.graph == graph
    assert choice.uses_graph([batch()]) == graph
    assert decision.host_seconds == pytest.approx(host * MS) or not graph
    assert (decision.behind_seconds < 0.1 * host * MS) == graph


def test_with_many_passes_a_host_that_is_ahead_by_one_pass_is_not_the_slower_side() -> None:
    """The launch queue holds about one pass, a small share of a step of 32."""
    device = 320 * MS
    clock = SimulatedClock(100 * MS, device, queue=device / 32)
    assert not decide(clock, GraphChoice(clock, "GPU"), [batch()] * 32).graph


def test_the_device_is_waited_for_once_per_decision() -> None:
    clock = SimulatedClock(60 * MS, 8 * MS)
    choice = GraphChoice(clock, "GPU")
    decide(clock, choice, [batch()])
    for _ in range(20):
        assert choice.uses_graph([batch()])
    assert clock.waits == 1
    assert not choice.events


def test_every_batch_shape_has_its_own_decision() -> None:
    clock = SimulatedClock(60 * MS, 8 * MS)
    choice = GraphChoice(clock, "GPU")
    assert decide(clock, choice, [batch(64)]).graph
    clock.device = clock.queue = 500 * MS
    assert not decide(clock, choice, [batch(512)]).graph
    assert not decide(clock, choice, [batch(64, longest=32)]).graph
    assert choice.uses_graph([batch(64)])
    assert not choice.uses_graph([batch(512)])
    assert not choice.events


def test_a_decision_of_another_device_is_not_repeated() -> None:
    clock = SimulatedClock(60 * MS, 8 * MS)
    choice = GraphChoice(clock, "GPU")
    assert decide(clock, choice, [batch()]).graph
    for device, repeated in (("GPU", True), ("another GPU", False)):
        resumed = GraphChoice(SimulatedClock(60 * MS, 8 * MS), device)
        resumed.made |= choice.made
        assert resumed.uses_graph([batch()]) == repeated

"""Which intervals between log lines tell how fast a run is."""

from __future__ import annotations

import pytest
import torch

from tercet.train.state import Interval
from tercet.train.step import StepResult

ZERO = torch.zeros(())


@pytest.mark.parametrize(("steps", "warm_up"), [([25.0, 1.3, 1.3], True), ([1.5, 1.0, 1.0], False), ([25.0], True)])
def test_an_interval_whose_first_step_takes_much_longer_is_warm_up(monkeypatch, steps, warm_up):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    interval = Interval(torch.device("cpu"))
    for step, seconds in enumerate(steps, start=1):
        now += seconds
        interval.add(step, StepResult(loss=ZERO, grad_norm=ZERO, nonfinite=ZERO))
        if step == 1:
            assert interval.time_first_step() == seconds
    assert interval.is_warm_up == warm_up
    interval.clear()
    now += 1
    interval.add(9, StepResult(loss=ZERO, grad_norm=ZERO, nonfinite=ZERO))
    assert not interval.is_warm_up

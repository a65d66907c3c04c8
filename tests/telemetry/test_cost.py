"""The cost of watching can be measured on any machine; on the GPU it must stay under a hundredth."""

from __future__ import annotations

import pytest

from runs import small
from tercet.bench.telemetry import main, measure


def test_the_bench_takes_turns_and_ends_with_its_figures():
    result = measure(small(log__every=2, train__steps=1000), pairs=2)
    assert result["step_ms_without"] > 0
    assert result["step_ms_with"] > 0
    assert result["extra_percent"] == pytest.approx(100 * result["extra_ms"] / result["step_ms_without"])
    assert result["pairs"] == 2


@pytest.mark.serial
@pytest.mark.gpu
def test_watching_costs_less_than_a_hundredth_of_a_step_on_the_gpu():
    assert main(["--preset", "m7c", "--pairs", "20"]) == 0

"""Telemetry overhead can be measured on any machine; on a GPU it stays under 1%."""

from __future__ import annotations

import pytest

from runs import small
from tercet.bench.telemetry import main, measure


def test_the_benchmark_reports_its_figures():
    result = measure(small(log__every=2, train__steps=1000), pairs=2)
    assert result["step_ms_without"] > 0
    assert result["step_ms_with"] > 0
    assert result["extra_percent"] == pytest.approx(100 * result["extra_ms"] / result["step_ms_without"])
    assert result["pairs"] == 2


@pytest.mark.serial
@pytest.mark.gpu
def test_telemetry_costs_less_than_one_percent_of_a_step_on_a_gpu():
    assert main(["--preset", "m7c", "--pairs", "20"]) == 0

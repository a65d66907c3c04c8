"""The measured speed of a CPU."""

from __future__ import annotations

import itertools

from tercet.telemetry import hardware


def test_the_speed_of_a_cpu_is_that_of_its_fastest_product(monkeypatch):
    # Products that other programs interrupted take long.
    seconds = itertools.cycle([0.25, 0.5, 0.125])
    clock = itertools.accumulate(x for product in seconds for x in (0.0, product))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(clock))
    hardware._core_flops.cache_clear()
    try:
        assert hardware.measured_cpu_flops(1) == 2 * 64**3 / 0.125
        assert hardware.measured_cpu_flops(4) == 4 * hardware.measured_cpu_flops(1)
        assert hardware.measured_cpu_flops() == hardware.usable_cores() * hardware.measured_cpu_flops(1)
    finally:
        hardware._core_flops.cache_clear()

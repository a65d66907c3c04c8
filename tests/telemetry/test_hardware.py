"""The measured speed of a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from tercet.telemetry import hardware
from tercet.train.device import set_arithmetic


def test_the_speed_of_a_cpu_is_that_of_its_fastest_product(monkeypatch):
    # Products that other programs interrupted take long.
    seconds = itertools.cycle([0.25, 0.5, 0.125])
    clock = itertools.accumulate(x for product in seconds for x in (0.0, product))
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: next(clock))
    hardware.measured_cpu_flops.cache_clear()
    try:
        assert hardware.measured_cpu_flops() == hardware.usable_cores() * 2 * 64**3 / 0.125
    finally:
        hardware.measured_cpu_flops.cache_clear()


@pytest.mark.parametrize(("limit", "threads"), [("300000 100000", 3), ("50000 100000", 1), ("max 100000", 4)])
def test_a_run_has_as_many_threads_as_its_container_may_use_cores(monkeypatch, tmp_path, limit, threads):
    given = []
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(hardware, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    set_arithmetic(deterministic=False, threads=None)
    set_arithmetic(deterministic=False, threads=7)
    assert given == [threads, 7]

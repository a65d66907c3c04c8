from __future__ import annotations

import math

import pytest

from tercet.config.sections import TrainConfig
from tercet.train.optim import learning_rate


def test_warmup_is_linear_and_peaks_at_its_last_step() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, lr=2.0)
    assert [learning_rate(config, s) for s in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])


def test_cosine_is_halfway_in_the_middle_and_at_its_floor_at_the_last_step() -> None:
    config = TrainConfig(steps=110, warmup_steps=10, lr=1.0, min_lr_ratio=0.1, schedule="cosine")
    assert learning_rate(config, 60) == pytest.approx(0.55)
    assert learning_rate(config, 35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(config, 110) == pytest.approx(0.1)


def test_wsd_stays_at_its_peak_and_decays_linearly_at_the_end() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.0, schedule="wsd", decay_ratio=0.2)
    assert {learning_rate(config, s) for s in range(10, 81)} == {1.0}
    assert [learning_rate(config, s) for s in (85, 90, 100)] == pytest.approx([0.75, 0.5, 0.0])


def test_constant_stays_constant() -> None:
    config = TrainConfig(steps=100, warmup_steps=0, lr=1.0, schedule="constant")
    assert {learning_rate(config, s) for s in range(1, 101)} == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_warmup_longer_than_the_run_stays_below_the_peak(schedule: str) -> None:
    config = TrainConfig(steps=10, warmup_steps=100, lr=1.0, schedule=schedule)  # type: ignore[arg-type]
    assert learning_rate(config, 10) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_the_rate_is_always_between_zero_and_the_peak(schedule: str) -> None:
    for steps in (1, 2, 7):
        for warmup in (0, 1, 6, 7):
            config = TrainConfig(steps=steps, warmup_steps=warmup, lr=1.0, schedule=schedule)  # type: ignore[arg-type]
            assert all(0 < learning_rate(config, s) <= 1 for s in range(1, steps + 1))

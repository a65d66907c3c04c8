"""NSAConfig: the block arithmetic, and errors that name field, value and rule."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
import tercet
from cases import configs


def test_the_defaults_are_the_papers():
    assert dataclasses.asdict(tercet.NSAConfig()) == {
        "compress_block": 32, "compress_stride": 16, "select_block": 64, "select_count": 16, "select_initial": 1,
        "select_local": 2, "window": 512,
    }  # fmt: skip


def test_a_config_is_frozen_hashable_and_equal_by_value():
    cfg = tercet.NSAConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.window = 3  # type: ignore[misc]
    assert cfg == tercet.NSAConfig()
    assert hash(cfg) == hash(tercet.NSAConfig())
    assert cfg != tercet.NSAConfig(window=511)


REFUSED = [
    ({"compress_stride": 5}, ["compress_stride=5", "compress_block=32"]),
    ({"compress_stride": 32, "select_block": 80}, ["compress_stride=32", "select_block=80"]),
    ({"compress_block": 128}, ["compress_block=128", "select_block=64"]),
    ({"select_initial": -1}, ["select_initial=-1", "0"]),
    ({"select_local": 0}, ["select_local=0", "1"]),
    ({"select_count": 2}, ["select_count=2", "select_initial", "select_local", "3"]),
    ({"window": 0}, ["window=0", "1"]),
    ({"compress_stride": 0}, ["compress_stride=0", "1"]),
    ({"window": 512.0}, ["window=512.0", "integer"]),
    ({"select_initial": True}, ["select_initial=True", "integer"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_an_invalid_config_raises_one_line_with_field_value_and_rule(changes, words):
    with pytest.raises(ValueError) as refused:
        tercet.NSAConfig(**changes)
    message = str(refused.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "changes",
    [
        {"compress_block": 16},
        {"compress_block": 64},
        {"compress_block": 1, "compress_stride": 1, "select_block": 1},
        {"select_initial": 0, "select_local": 1, "select_count": 1},
        {"select_count": 3},
        {"window": 1},
        {"compress_block": 48, "select_block": 48},
    ],
    ids=str,
)
def test_configs_at_the_limits_are_accepted(changes):
    cfg = tercet.NSAConfig(**changes)
    assert all(getattr(cfg, name) == value for name, value in changes.items())


@given(cfg=configs(), length=st.integers(1, 90))
def test_the_block_arithmetic_equals_a_count_by_loops(cfg, length):
    seen = [len(oracle.visible_compressed(t, cfg.compress_block, cfg.compress_stride)) for t in range(length)]
    assert [cfg.num_visible(t) for t in range(length)] == seen
    assert cfg.num_compressed(length) == seen[-1]
    assert cfg.num_blocks(length) == len({t // cfg.select_block for t in range(length)})


@given(cfg=configs(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_compressed_bounds_equal_a_count_by_loops(cfg, lengths):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    bounds = cfg.compressed_cu_seqlens(cu)
    assert bounds.dtype == torch.int32
    assert bounds.shape == cu.shape
    assert int(bounds[0]) == 0
    assert bounds.diff().tolist() == [cfg.num_compressed(n) for n in lengths]

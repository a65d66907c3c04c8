"""The oracle itself, against small examples worked out by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import oracle
import tercet


def test_a_query_sees_a_compressed_token_once_its_last_raw_token_is_read():
    assert [len(oracle.visible_compressed(t, 32, 16)) for t in (0, 30, 31, 46, 47, 62, 63, 95)] == [
        0, 0, 1, 1, 2, 2, 3, 5,
    ]  # fmt: skip


def test_the_default_overlap_weights_are_half_one_one_one_half():
    cfg = tercet.NSAConfig()
    rows = [oracle.overlap(i, 3, cfg.compress_block, cfg.compress_stride, cfg.select_block) for i in range(10, 17)]
    assert [r / cfg.compress_block for r in rows] == [0, 0.5, 1, 1, 1, 0.5, 0]


def test_overlap_weights_of_a_compressed_token_sum_to_one():
    assert sum(oracle.importance([Fraction(1, 5)] * 5, 9, tercet.NSAConfig(6, 2, 6, 4, 1, 1, 8))) == 1


def test_forced_blocks_are_a_set_clipped_to_what_exists():
    cfg = tercet.NSAConfig()
    assert oracle.forced_blocks(0, cfg) == {0}
    assert oracle.forced_blocks(64, cfg) == {0, 1}
    assert oracle.forced_blocks(64 * 9 + 5, cfg) == {0, 8, 9}


def test_ties_go_to_the_lowest_index_and_the_best_score_wins():
    cfg = tercet.NSAConfig(select_count=5)
    t = 64 * 7
    assert oracle.choose([0.0, 0.5, 0.1, 0.5, 0.5, 0.2, 0.0, 0.0], t, cfg).chosen == [0, 1, 3, 6, 7]
    assert oracle.choose([0.0, 0.1, 0.1, 0.1, 0.5, 0.2, 0.0, 0.0], t, cfg).chosen == [0, 4, 5, 6, 7]


def test_near_ties_are_distinguished_from_wrong_selections():
    cfg = tercet.NSAConfig(select_count=4)
    near = oracle.choose([0, 1.0, 1.0 - 1e-7, 0.3, 0, 0], 64 * 5, cfg)
    assert near.accepts([0, 1, 4, 5], 1e-6)
    assert near.accepts([0, 2, 4, 5], 1e-6)
    assert not near.accepts([0, 2, 4, 5], 1e-9)
    assert not near.accepts([0, 3, 4, 5], 1e-6)
    assert not near.accepts([1, 2, 4, 5], 1e-6)
    unseen = oracle.choose([0, 0.0, 0.0, 0.0, 0, 0], 64 * 5, cfg)
    assert not unseen.accepts([0, 2, 4, 5], 1e-3)


def test_two_keys_by_hand():
    q = np.array([1.0, 0.0, 0.0, 0.0])
    out, p = oracle.softmax_attend(q, [4 * math.log(3) * q, 0 * q], [np.array([4.0]), np.array([8.0])], 1)
    assert p == pytest.approx([0.9, 0.1])
    assert out == pytest.approx([4.4])


def test_rope_rotates_component_i_with_component_i_plus_half():
    x = np.zeros((1, 2, 1, 4))
    x[0, 1, 0] = [1.0, 0.0, 0.0, 2.0]
    turned = oracle.rope(x, [0, 3], theta=100.0)[0, 1, 0]
    assert turned == pytest.approx([math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)])


def test_compressed_means_restart_in_each_document():
    cfg = tercet.NSAConfig(2, 1, 2, 2, 0, 1, 4)
    means, positions = oracle.compress_mean(np.arange(7.0).reshape(1, 7, 1, 1), cfg, [0, 3, 4, 7])
    assert means.ravel().tolist() == [0.5, 1.5, 4.5, 5.5]
    assert positions == [1, 2, 1, 2]

"""Law "ties": among exactly equal scores the lowest index wins. Expected sets come from exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import oracle
import tercet
from cases import attend, chosen, config, configs, inputs


def expected_for_equal_probabilities(t: int, cfg: tercet.NSAConfig) -> list[int]:
    seen = len(oracle.visible_compressed(t, cfg.compress_block, cfg.compress_stride))
    scores = oracle.importance([Fraction(1, seen or 1)] * seen, t // cfg.select_block, cfg)
    return oracle.choose(scores, t, cfg).chosen


@given(cfg=configs(), tokens=st.integers(1, 70), per_group=st.integers(1, 3), seed=st.integers(0, 1000))
def test_a_zero_query_selects_the_lowest_indices_for_any_config(cfg, tokens, per_group, seed, backend: str):
    for dtype in (torch.float32, torch.float64):
        x = inputs(cfg, tokens, groups=1, per_group=per_group, key_size=3, value_size=2, dtype=dtype, seed=seed)
        _, aux = attend(x.with_(q=torch.zeros_like(x.q)), cfg, backend, return_aux=True)
        for t in range(tokens):
            assert chosen(aux.block_indices, 0, t, 0) == expected_for_equal_probabilities(t, cfg), (dtype, t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_query_with_the_default_config(dtype: torch.dtype, backend: str):
    cfg = tercet.NSAConfig(select_count=5)
    x = inputs(cfg, 1100, groups=1, per_group=2, key_size=4, value_size=2, dtype=dtype)
    _, aux = attend(x.with_(q=torch.zeros_like(x.q)), cfg, backend, return_aux=True)
    for t in range(0, 1100, 7):
        assert chosen(aux.block_indices, 0, t, 0) == expected_for_equal_probabilities(t, cfg), t


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_keys_select_the_lowest_indices(dtype: torch.dtype, backend: str):
    """All compressed tokens share one key, so every query scores them equally."""
    cfg = config(select_count=6)
    # Small whole numbers and a scale of 1/4, so that each product q.k is exact and the same for every key: a BLAS may
    # add in another order for the last columns of a matrix.
    x = inputs(cfg, 90, groups=2, per_group=3, key_size=16, dtype=dtype)
    q, kc = x.q.round(), x.kc[:, :1].round().expand_as(x.kc)
    _, aux = attend(x.with_(q=q, kc=kc), cfg, backend, return_aux=True)
    for t in range(90):
        for g in range(2):
            assert chosen(aux.block_indices, 0, t, g) == expected_for_equal_probabilities(t, cfg), (t, g)


def test_keys_repeated_block_after_block_tie_between_the_blocks(backend: str):
    """With l = d no compressed token spans two blocks, so a period of one block ties all complete blocks."""
    cfg = config(compress_block=2, compress_stride=2, select_block=6, select_count=5, select_initial=1, select_local=1)
    x = inputs(cfg, 95, groups=1, per_group=3, dtype=torch.float32)
    pattern = x.kc[:, :3].round()
    kc = pattern.repeat(1, 16, 1, 1)[:, : x.kc.shape[1]]
    _, aux = attend(x.with_(q=x.q.round(), kc=kc), cfg, backend, return_aux=True)
    for t in range(95):
        current = t // 6
        expected = sorted({0, current} | set(range(1, min(4, current))))
        assert chosen(aux.block_indices, 0, t, 0) == expected, t


def test_blocks_without_a_compressed_token_tie_at_zero(backend: str):
    """With l = l' and a query early in its block, the latest complete blocks have no score."""
    cfg = config(compress_block=8, compress_stride=8, select_block=8, select_count=3, select_initial=0, select_local=1)
    x = inputs(cfg, 60, groups=1, per_group=1, dtype=torch.float32)
    kc = torch.zeros_like(x.kc)
    kc[:, 2] = 1.0
    q = torch.full_like(x.q, 400.0)  # so sure of token 2 that every other probability underflows to 0
    _, aux = attend(x.with_(q=q, kc=kc), cfg, backend, return_aux=True)
    assert chosen(aux.block_indices, 0, 59, 0) == [0, 2, 7]

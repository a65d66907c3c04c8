"""Law "dense limits": each branch, if it sees everything, is full causal attention."""

from __future__ import annotations

import pytest
import torch

from cases import attend, config, inputs, one_branch
from oracle import causal_attention

TOKENS = 45
LIMITS = {
    "compressed": (0, {"compress_block": 1, "compress_stride": 1}),
    "selected": (1, {"select_count": 12}),
    "window": (2, {"window": TOKENS}),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("value_size", [8, 5])
def test_a_branch_that_sees_everything_is_full_causal_attention(limit: str, value_size: int, backend: str):
    branch, changes = LIMITS[limit]
    cfg = config(**changes)
    x = one_branch(inputs(cfg, TOKENS, batch=2, per_group=3, value_size=value_size, dtype=torch.float32), branch)
    k, v = ((x.kc, x.vc), (x.ks, x.vs), (x.kw, x.vw))[branch]
    dense = torch.from_numpy(causal_attention(x.q, k, v))
    assert (attend(x, cfg, backend).double() - dense).abs().max() < 1e-5


@pytest.mark.parametrize("limit", LIMITS)
def test_one_step_short_of_the_limit_is_not_dense(limit: str, backend: str):
    """The law can fail: a branch that sees slightly less differs."""
    branch, _ = LIMITS[limit]
    short = {
        "compressed": {"compress_block": 2, "compress_stride": 1},
        "selected": {"select_count": 11},
        "window": {"window": TOKENS - 1},
    }[limit]
    cfg = config(**short)
    x = one_branch(inputs(cfg, TOKENS, dtype=torch.float32), branch)
    k, v = ((x.kc, x.vc), (x.ks, x.vs), (x.kw, x.vw))[branch]
    if branch == 0:
        k, v = x.ks, x.vs
    dense = torch.from_numpy(causal_attention(x.q, k, v))
    assert (attend(x, cfg, backend).double() - dense).abs().max() > 1e-4

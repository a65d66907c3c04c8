"""Drawing the next token."""

from __future__ import annotations

import pytest
import torch

from tercet.model.config import Sampling
from tercet.model.sampling import INVALID_TOKEN, sample_token, uniform_draws

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def drawn(sampling: Sampling, count: int = 4000, seen: torch.Tensor | None = None) -> torch.Tensor:
    """How often each token was drawn."""
    uniform = uniform_draws(0, 1, count)[0]
    tokens = sample_token(LOGITS.expand(count, -1), sampling, uniform, None if seen is None else seen.expand(count, -1))
    return torch.bincount(tokens, minlength=5) / count


def test_tokens_are_drawn_as_often_as_their_probability_says():
    assert (drawn(Sampling()) - LOGITS.softmax(-1)).abs().max() < 0.02
    assert (drawn(Sampling(temperature=2.0)) - (LOGITS / 2).softmax(-1)).abs().max() < 0.02


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    assert sample_token(torch.tensor([[1.0, 5.0, 5.0]]), Sampling(temperature=0)).item() == 1


def test_top_k_keeps_the_k_likeliest():
    kept = drawn(Sampling(top_k=2))
    assert kept.nonzero().flatten().tolist() == [1, 3]
    assert (kept[[1, 3]] - LOGITS[[1, 3]].softmax(-1)).abs().max() < 0.02


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    chances = LOGITS.softmax(-1)
    assert chances[1] < 0.7 < chances[1] + chances[3]
    assert drawn(Sampling(top_p=0.7)).nonzero().flatten().tolist() == [1, 3]
    assert drawn(Sampling(top_p=1e-9)).nonzero().flatten().tolist() == [1]


def test_a_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    seen = torch.tensor([False, True, False, False, True])
    plain, less = drawn(Sampling()), drawn(Sampling(repetition_penalty=2.0), seen=seen)
    assert less[1] < plain[1]
    assert less[4] < plain[4]


def test_non_finite_logits_choose_nothing():
    for broken in (torch.nan, torch.inf):
        for temperature in (0.0, 1.0):
            logits = LOGITS.clone()
            logits[2] = broken
            chosen = sample_token(
                torch.stack((LOGITS, logits)), Sampling(temperature), torch.tensor([0.5, 0.5]).double()
            )
            assert chosen[1].item() == INVALID_TOKEN
            assert chosen[0].item() != INVALID_TOKEN


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 1.5}, {"repetition_penalty": 0}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)

"""Laws "oracle" and "selection": every backend equals the loop-written float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings

import tercet
from cases import Case, assert_matches_oracle, attend, cases, config, inputs, judge, one_branch, wrong_sets


@settings(max_examples=80)
@given(case=cases())
@example(case=Case(config(), inputs(config(), 1), None))
@example(case=Case(config(), inputs(config(), 3), None))
@example(case=Case(config(), inputs(config(), 7, documents=(1, 1, 5), padding=2), (1, 1, 5)))
def test_any_shape_config_and_document_split_equals_the_oracle(case: Case, backend: str):
    assert_matches_oracle(case, backend)


@settings(max_examples=20)
@given(case=cases(dtype=torch.float32))
def test_single_precision_equals_the_oracle(case: Case, backend: str):
    assert_matches_oracle(case, backend, near=1e-6, error=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_oracle_within_its_rounding(dtype: torch.dtype, backend: str):
    cfg = config()
    x = inputs(cfg, 37, dtype=dtype)
    out, aux = attend(x, cfg, backend, return_aux=True)
    answer = judge(x, cfg, None, aux.block_indices)
    assert out.dtype == dtype
    assert wrong_sets(answer, aux.block_indices, 1e-3) == []
    reference = torch.from_numpy(answer.out)
    assert (out.double() - reference).norm() / reference.norm() < 1e-2


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_each_branch_alone_equals_the_oracle(branch: int, backend: str):
    cfg = config()
    x = one_branch(inputs(cfg, 41, batch=2), branch)
    answer = judge(x, cfg)
    alone = (answer.compressed, answer.selected, answer.window)[branch]
    torch.testing.assert_close(attend(x, cfg, backend), torch.from_numpy(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_query_without_a_compressed_token_gets_an_exact_zero_there(tokens: int, backend: str):
    cfg = config()
    out = attend(one_branch(inputs(cfg, tokens), 0), cfg, backend)
    assert torch.equal(out, torch.zeros_like(out))


def test_gates_are_not_renormalised_where_a_branch_is_empty(backend: str):
    cfg = config()
    x = inputs(cfg, 1)
    expected = (x.gates[..., 1:2] * x.vs.repeat_interleave(2, 2)) + x.gates[..., 2:] * x.vw.repeat_interleave(2, 2)
    torch.testing.assert_close(attend(x, cfg, backend), expected, rtol=1e-12, atol=1e-12)


def test_the_default_config_equals_the_oracle_when_not_all_blocks_fit(backend: str):
    cfg = tercet.NSAConfig(select_count=4)
    case = Case(cfg, inputs(cfg, 417, groups=1, per_group=2, dtype=torch.float32), None)
    assert_matches_oracle(case, backend, near=1e-6, error=1e-5)

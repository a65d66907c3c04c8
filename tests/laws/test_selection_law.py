"""Laws "selection" and "group consistency": the right blocks, in the right format, one set per group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from cases import Case, attend, cases, chosen, config, cu, inputs, judge, one_branch, wrong_sets
from oracle import forced_blocks
from tercet.attention.layout import Span
from tercet.attention.operator import AttentionInputs
from tercet.attention.operator import attend as run
from tercet.attention.spec import block_sparse


@given(case=cases())
def test_indices_are_ascending_int32_padded_with_minus_one_and_hold_the_forced_blocks(case: Case, backend: str):
    _, aux = attend(case.x, case.cfg, backend, cu_seqlens=cu(case.documents), return_aux=True)
    indices = aux.block_indices
    batch, tokens, groups = case.x.ks.shape[:3]
    assert indices.dtype == torch.int32
    assert indices.shape == (batch, tokens, groups, case.cfg.select_count)
    assert not indices.requires_grad
    positions = [t for n in (case.documents or (tokens,)) for t in range(n)]
    for row, t in enumerate(positions):
        current = t // case.cfg.select_block
        size = min(case.cfg.select_count, current + 1)
        for b in range(batch):
            for g in range(groups):
                slots = indices[b, row, g].tolist()
                blocks = slots[:size]
                assert blocks == sorted(set(blocks))
                assert blocks[0] >= 0
                assert blocks[-1] <= current
                assert slots[size:] == [-1] * (case.cfg.select_count - size)
                assert forced_blocks(t, case.cfg) <= set(blocks)


def test_single_precision_selects_the_same_sets_in_nearly_every_slot(backend: str):
    cfg = config(compress_block=8, compress_stride=4, select_block=8, select_count=6, window=16)
    x = inputs(cfg, 260, per_group=3, dtype=torch.float32, sharpness=1.0)
    _, aux = attend(x, cfg, backend, return_aux=True)
    answer = judge(x, cfg)
    assert wrong_sets(answer, aux.block_indices, 1e-6) == []
    same = sum(len(set(chosen(aux.block_indices, *key)) & set(s.chosen)) for key, s in answer.selections.items())
    slots = sum(len(s.chosen) for s in answer.selections.values())
    assert same / slots >= 0.9995


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_differ_at_near_ties_only(dtype: torch.dtype, backend: str):
    cfg = config(compress_block=8, compress_stride=4, select_block=8, select_count=6, window=16)
    x = inputs(cfg, 120, per_group=3, dtype=dtype)
    _, aux = attend(x, cfg, backend, return_aux=True)
    assert wrong_sets(judge(x, cfg), aux.block_indices, 1e-3) == []


def test_a_nan_compressed_key_shows_in_the_output_and_drops_no_block(backend: str):
    cfg = config(select_count=4)
    x = inputs(cfg, 40)
    x.kc[:, 0] = torch.nan  # seen from the last token of the first compressed block on
    out, aux = attend(x, cfg, backend, return_aux=True)
    assert out[:, cfg.compress_block - 1 :].isnan().all()
    for t in range(40):
        for g in range(x.ks.shape[2]):
            blocks = chosen(aux.block_indices, 0, t, g)
            assert forced_blocks(t, cfg) <= set(blocks)
            assert len(blocks) == min(cfg.select_count, t // cfg.select_block + 1)
    assert not attend(x, cfg, backend, branches=("selected",)).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("apart", [1, 95, 140])
def test_scores_are_ordered_however_far_they_are_below_the_largest(apart: int, dtype: torch.dtype, backend: str):
    """In a whole sequence, and in tokens after a cache. Single precision holds no weight of logits 104 apart."""
    cfg = config(compress_block=4, compress_stride=4, select_count=3, select_initial=1, select_local=1)
    x = inputs(cfg, 40, groups=1, per_group=1, key_size=1, value_size=1, dtype=dtype)
    logits = (
        torch.tensor([0, *range(-apart - 8, -apart), 0]).view(1, 10, 1, 1).to(dtype)
    )  # the forced block 0 dominates
    x = x.with_(q=torch.ones_like(x.q), kc=logits, vc=torch.zeros_like(logits))
    _, aux = attend(x, cfg, backend, return_aux=True)
    assert chosen(aux.block_indices, 0, 39, 0) == [0, 8, 9]
    values = torch.arange(40).view(x.vs.shape).to(dtype) // 4
    last = AttentionInputs(x.q[:, -1:], logits, None, torch.zeros_like(x.ks), values)
    out = run(last, block_sparse(cfg), backend="reference", span=Span(39)).out
    assert out.item() == pytest.approx((0 + 8 + 9) / 3, rel=1e-3)


def test_scores_come_from_the_sum_over_the_heads_of_a_group(backend: str):
    """Two heads prefer different blocks: the one with the higher probability wins for both."""
    cfg = config(select_count=3, select_initial=1, select_local=1)
    x = inputs(cfg, 32, groups=1, per_group=2, key_size=2)
    kc = torch.zeros_like(x.kc)
    # Compressed tokens 4 and 8 lie wholly in blocks 2 and 4.
    kc[0, 4, 0, 0] = 1.0
    kc[0, 8, 0, 1] = 1.0
    q = torch.zeros_like(x.q)
    q[0, 31, 0, 0], q[0, 31, 1, 1] = 9.0, 3.0
    _, aux = attend(x.with_(q=q, kc=kc), cfg, backend, return_aux=True)
    assert chosen(aux.block_indices, 0, 31, 0) == [0, 2, 7]
    q[0, 31, 0, 0], q[0, 31, 1, 1] = 3.0, 9.0
    _, aux = attend(x.with_(q=q, kc=kc), cfg, backend, return_aux=True)
    assert chosen(aux.block_indices, 0, 31, 0) == [0, 4, 7]


def test_heads_of_a_group_read_exactly_the_tokens_of_its_blocks(backend: str):
    cfg = config()
    x = one_branch(inputs(cfg, 40, groups=2, per_group=3, value_size=40), 1)
    # Value s is the s-th unit vector, so that the output is the row of attention weights itself.
    vs = torch.eye(40, dtype=torch.float64)[None, :, None, :].expand(1, 40, 2, 40)
    out, aux = attend(x.with_(vs=vs), cfg, backend, return_aux=True)
    weights = attend(x.with_(vs=vs, vc=x.vc, vw=x.vw), cfg, backend)
    assert torch.equal(weights, out)
    for t in range(40):
        for head in range(6):
            blocks = chosen(aux.block_indices, 0, t, head // 3)
            read = {s for s in range(40) if out[0, t, head, s] != 0}
            assert read == {s for j in blocks for s in range(j * 4, j * 4 + 4) if s <= t}


def test_no_gradient_flows_through_the_indices(backend: str):
    cfg = config()
    x = one_branch(inputs(cfg, 40), 1).leaves()
    attend(x, cfg, backend).square().sum().backward()
    assert x.kc.grad is None or torch.equal(x.kc.grad, torch.zeros_like(x.kc))
    assert x.vc.grad is None or torch.equal(x.vc.grad, torch.zeros_like(x.vc))
    assert x.q.grad is not None
    assert x.q.grad.abs().sum() > 0

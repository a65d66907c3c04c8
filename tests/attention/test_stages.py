"""Each public stage: against the oracle, by float64 gradcheck, and combined into the whole operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

import oracle
import tercet
from cases import Case, attend, cases, chosen, config, cu, inputs, judge, wrong_sets

CFG = config(compress_block=2, compress_stride=1, select_block=2, select_count=3, select_local=1, window=3)


def close(actual: torch.Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


@settings(max_examples=15)
@given(case=cases())
def test_the_stages_equal_the_oracle_branch_by_branch(case: Case):
    x, cfg, bounds = case.x, case.cfg, cu(case.documents)
    compressed, indices = tercet.compressed_attention(x.q, x.kc, x.vc, config=cfg, cu_seqlens=bounds)
    answer = judge(x, cfg, bounds, indices)
    assert wrong_sets(answer, indices, 1e-9) == []
    close(compressed, answer.compressed)
    selected = tercet.selected_attention(x.q, x.ks, x.vs, indices, config=cfg, cu_seqlens=bounds)
    close(selected, answer.selected)
    window = tercet.window_attention(x.q, x.kw, x.vw, config=cfg, cu_seqlens=bounds)
    close(window, answer.window)
    close(tercet.combine(x.gates, compressed, selected, window), answer.out)


@settings(max_examples=15)
@given(case=cases())
def test_scores_equal_the_oracle_and_select_blocks_selects_from_them(case: Case):
    x, cfg, bounds = case.x, case.cfg, cu(case.documents)
    out, scores = tercet.compressed_attention(x.q, x.kc, x.vc, config=cfg, cu_seqlens=bounds, return_scores=True)
    answer = judge(x, cfg, bounds)
    close(out, answer.compressed)
    assert not scores.requires_grad
    for (b, t, g), selection in answer.selections.items():
        np.testing.assert_allclose(scores[b, t, g, : selection.current + 1], selection.scores, rtol=1e-9, atol=1e-12)
    indices = tercet.select_blocks(scores, config=cfg, cu_seqlens=bounds)
    assert indices.dtype == torch.int32
    assert wrong_sets(answer, indices, 1e-9) == []


def test_select_blocks_on_given_scores():
    cfg = config(select_count=4, select_initial=1, select_local=1)
    scores = torch.tensor([0.9, 0.1, 0.3, 0.3, 0.2, 0.3, 0.0, 0.0]).expand(1, 32, 1, 8)
    indices = tercet.select_blocks(scores, config=cfg)
    assert [chosen(indices, 0, t, 0) for t in (0, 7, 15, 19, 27, 31)] == [
        [0], [0, 1], [0, 1, 2, 3], [0, 2, 3, 4], [0, 2, 3, 6], [0, 2, 3, 7]
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 5])
def test_scores_of_any_magnitude_are_ordered_and_drop_no_forced_block(count: int):
    cfg = config(select_count=count, select_initial=1, select_local=1)
    extremes = torch.tensor([torch.inf, torch.finfo(torch.float64).max, 1.0, 5e-324, 0.0, -0.0, -1.0, -torch.inf])
    scores = extremes.double()[torch.randint(len(extremes), (1, 40, 1, 10))]
    indices = tercet.select_blocks(scores, config=cfg)
    for t in range(40):
        assert chosen(indices, 0, t, 0) == oracle.choose(scores[0, t, 0].tolist(), t, cfg).chosen


@pytest.mark.parametrize("documents", [None, (1, 6, 2)], ids=["plain", "packed"])
def test_gradcheck_of_the_stages(documents, fast_mode):
    x = inputs(CFG, 9, groups=2, per_group=2, key_size=3, value_size=2, documents=documents).leaves()
    options = {"config": CFG, "cu_seqlens": cu(documents)}
    _, indices = tercet.compressed_attention(x.q, x.kc, x.vc, **options)
    for stage, tensors in (
        (lambda *qkv: tercet.compressed_attention(*qkv, **options)[0], (x.q, x.kc, x.vc)),
        (lambda *qkv: tercet.selected_attention(*qkv, indices, **options), (x.q, x.ks, x.vs)),
        (lambda *qkv: tercet.window_attention(*qkv, **options), (x.q, x.kw, x.vw)),
        (lambda k: tercet.compress_mean(k, **options), (x.ks,)),
    ):
        assert gradcheck(stage, tensors, atol=1e-7, rtol=1e-5, fast_mode=fast_mode)


def test_scores_of_too_few_blocks_and_branches_of_other_shapes_are_rejected():
    with pytest.raises(ValueError, match="scores has 3 blocks: 8 tokens need 4"):
        tercet.select_blocks(torch.rand(1, 8, 1, 3), config=CFG)
    one, other = torch.rand(1, 8, 2, 4), torch.rand(1, 8, 2, 5)
    with pytest.raises(ValueError, match=r"window has shape \[1, 8, 2, 5\]"):
        tercet.combine(torch.rand(1, 8, 2, 3), one, one, other)


def test_documents_too_short_to_compress_have_means_of_zero():
    cfg = config(compress_block=8, compress_stride=2, select_block=8)
    means = tercet.compress_mean(torch.ones(1, 5, 1, 4), config=cfg, cu_seqlens=cu((5,)))
    assert torch.equal(means, torch.zeros(1, 2, 1, 4))


def test_gradcheck_of_combine():
    parts = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gates = torch.rand(1, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(tercet.combine, (gates, *parts))


@settings(max_examples=15)
@given(case=cases())
def test_compress_mean_is_the_mean_of_each_block(case: Case):
    bounds = cu(case.documents)
    expected, _ = oracle.compress_mean(case.x.ks, case.cfg, bounds)
    means = tercet.compress_mean(case.x.ks, config=case.cfg, cu_seqlens=bounds)
    close(means[:, : expected.shape[1]], expected)
    if bounds is None:
        assert means.shape[1] == case.cfg.num_compressed(case.x.ks.shape[1])
    else:
        assert torch.count_nonzero(means[:, expected.shape[1] :]) == 0


def test_given_indices_are_read_instead_of_selecting():
    cfg = config()
    x = inputs(cfg, 40)
    given_blocks = torch.full((1, 40, 2, cfg.select_count), -1, dtype=torch.int32)
    given_blocks[..., 0] = (torch.arange(40) // cfg.select_block)[None, :, None]
    out, aux = attend(x, cfg, block_indices=given_blocks, return_aux=True)
    close(out, judge(x, cfg, None, given_blocks).out)
    assert torch.equal(aux.block_indices, given_blocks)
    assert not torch.equal(attend(x, cfg), out)


@pytest.mark.parametrize(
    ("documents", "device"),
    [(None, False), ((13, 1, 26), False), ((13, 1, 26), True)],
    ids=["plain", "packed", "packed, bounds not read"],
)
def test_given_blocks_after_the_querys_own_are_not_read(documents, device, request):
    """Giving every query every block is full causal attention, and equals lists cut at each query's own block."""
    if device:
        request.getfixturevalue("as_on_a_device")
    cfg = config(select_count=10)
    x, bounds = inputs(cfg, 40, documents=documents).leaves(), cu(documents)
    every = torch.arange(10, dtype=torch.int32).expand(1, 40, 2, 10)
    start = torch.zeros(40, dtype=torch.int64) if bounds is None else bounds[:-1].repeat_interleave(bounds.diff())
    own = (torch.arange(40) - start) // cfg.select_block
    cut = torch.where(every > own[:, None, None], -1, every)
    wanted = attend(x, cfg, cu_seqlens=bounds, block_indices=cut)
    close(wanted.detach(), judge(x, cfg, bounds, cut).out)
    leaves = (x.q, x.ks, x.vs)
    gradients = torch.autograd.grad(wanted.sum(), leaves)
    for blocks in (every, torch.where(cut < 0, 1 << 27, cut)):
        out = attend(x, cfg, cu_seqlens=bounds, block_indices=blocks, validate=blocks is every)
        assert torch.equal(out, wanted)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), gradients))
        selected = tercet.selected_attention(x.q, x.ks, x.vs, blocks, config=cfg, cu_seqlens=bounds)
        assert torch.equal(selected, tercet.selected_attention(x.q, x.ks, x.vs, cut, config=cfg, cu_seqlens=bounds))


@pytest.mark.parametrize("left_out", ["compressed", "selected", "window"])
def test_omitting_a_branch_equals_a_zero_gate_and_keeps_the_selection(left_out: str):
    cfg = config()
    x = inputs(cfg, 40)
    names = ("compressed", "selected", "window")
    branches = tuple(b for b in names if b != left_out)
    gates = x.gates.clone()
    gates[..., names.index(left_out)] = 0
    out, aux = attend(x, cfg, branches=branches, return_aux=True)
    expected, whole = attend(x.with_(gates=gates), cfg, return_aux=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if left_out != "selected":
        assert torch.equal(aux.block_indices, whole.block_indices)

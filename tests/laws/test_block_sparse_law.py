"""Block-sparse attention obeys the laws: oracle, dense limit, causality, gradients, documents, determinism, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

import oracle
import tercet
from cases import Case, cases, config, cu, inputs, wrong_sets
from tercet.attention.layout import Packing

BOUNDS = (37, 0, 3, 60)


def attend(case: Case, backend: str, dense_below: int = 0, **options):
    x = case.x
    return tercet.block_sparse_attention(
        x.q, x.ks, x.vs, config=case.cfg, dense_below=dense_below, cu_seqlens=cu(case.documents), backend=backend,
        **options,
    )  # fmt: skip


def assert_matches_oracle(case: Case, backend: str, dense_below: int, *, near: float, error: float) -> None:
    out, aux = attend(case, backend, dense_below, return_aux=True)
    arrays = (case.x.q.double().numpy(), case.x.ks.double().numpy(), case.x.vs.double().numpy())
    answer = oracle.block_sparse(*arrays, case.cfg, dense_below, cu(case.documents), aux.block_indices.numpy())
    assert wrong_sets(answer, aux.block_indices, near) == []
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), rtol=error, atol=error)


@settings(max_examples=25)
@given(case=cases(), dense_below=st.integers(0, 30))
@example(case=Case(config(), inputs(config(), 1), None), dense_below=0)
@example(case=Case(config(), inputs(config(), 100, documents=BOUNDS), BOUNDS), dense_below=25)
def test_any_shape_config_and_document_split_equals_the_oracle(case: Case, dense_below: int, backend: str):
    assert_matches_oracle(case, backend, dense_below, near=1e-9, error=1e-10)


@pytest.mark.usefixtures("as_on_a_device")
@settings(max_examples=15)
@given(case=cases(packed=True), dense_below=st.integers(0, 30))
def test_documents_whose_bounds_the_host_does_not_know(case: Case, dense_below: int, backend: str):
    assert_matches_oracle(case, backend, dense_below, near=1e-9, error=1e-10)


@pytest.mark.parametrize("dense_below", [0, 16, 20, 100])
def test_below_dense_below_attention_is_dense(dense_below: int, backend: str):
    # config(): 4 blocks of 4, which cover 16 tokens
    x = inputs(config(), 41, batch=2)
    out = attend(Case(config(), x, None), backend, dense_below)
    full = torch.from_numpy(oracle.causal_attention(x.q, x.ks, x.vs))
    reach = max(dense_below, 16)
    torch.testing.assert_close(out[:, :reach], full[:, :reach], rtol=1e-10, atol=1e-10)
    assert reach >= 41 or not torch.allclose(out[:, reach:], full[:, reach:])


def test_a_packed_batch_equals_its_documents_one_by_one(backend: str):
    cfg = config()
    x = inputs(cfg, sum(BOUNDS), documents=BOUNDS)
    packed = attend(Case(cfg, x, BOUNDS), backend, 20)
    at = 0
    for length in filter(None, BOUNDS):
        rows = slice(at, at + length)
        alone = tercet.block_sparse_attention(
            x.q[:, rows], x.ks[:, rows], x.vs[:, rows], config=cfg, dense_below=20, backend=backend
        )
        torch.testing.assert_close(packed[:, rows], alone, rtol=1e-12, atol=1e-12)
        at += length


@pytest.mark.parametrize("dense_below", [0, 30])
def test_later_tokens_change_nothing_earlier(dense_below: int, backend: str):
    cfg = config()
    x = inputs(cfg, 90)
    before = attend(Case(cfg, x, None), backend, dense_below, return_aux=True)
    for t in (20, 31, 64):
        changed = x.map(lambda a, t=t: torch.cat((a[:, :t], torch.randn_like(a[:, t:])), 1))
        after = attend(Case(cfg, changed, None), backend, dense_below, return_aux=True)
        assert torch.equal(before[1].block_indices[:, :t], after[1].block_indices[:, :t])
        torch.testing.assert_close(before[0][:, :t], after[0][:, :t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dense_below", "documents"), [(0, None), (20, None), (20, (24, 3, 0, 21))])
def test_gradients_equal_finite_differences(dense_below: int, documents: tuple[int, ...] | None, backend: str):
    cfg = config()
    x = inputs(cfg, 48 if documents else 26, documents=documents, key_size=3, value_size=2, groups=1)
    indices = attend(Case(cfg, x, documents), backend, dense_below, return_aux=True)[1].block_indices

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tercet.block_sparse_attention(
            q, k, v, config=cfg, dense_below=dense_below, cu_seqlens=cu(documents), backend=backend,
            block_indices=indices,
        )  # fmt: skip

    leaves = [a.detach().clone().requires_grad_() for a in (x.q, x.ks, x.vs)]
    assert gradcheck(run, leaves, fast_mode=True)


def test_equal_scores_select_the_lowest_index(backend: str):
    cfg = config()
    x = inputs(cfg, 60)
    _, aux = attend(Case(cfg, x.with_(q=torch.zeros_like(x.q)), None), backend, return_aux=True)
    # in the last block of 15 the forced blocks are 0, 13 and 14
    assert aux.block_indices[0, 59, 0].tolist() == [0, 1, 13, 14]


def test_results_are_the_same_bits_and_need_no_initialised_memory(poisoned: None, backend: str):
    cfg = config()
    case = Case(cfg, inputs(cfg, 100, documents=BOUNDS, dtype=torch.float32), BOUNDS)
    first, second = (attend(case, backend, 20) for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_a_selector_chooses_in_place_of_the_means(backend: str):
    cfg = config()
    x = inputs(cfg, 60)
    out = attend(Case(cfg, x, None), backend)
    queries, keys = torch.ones(1, 60, 2, 5, dtype=torch.float64), torch.zeros(1, 60, 2, 5, dtype=torch.float64)
    keys[:, 20:24] = 1  # block 5
    chosen, aux = attend(Case(cfg, x, None), backend, selector=(queries, keys), return_aux=True)
    # in the last block of 15 the forced blocks are 0, 13 and 14
    assert aux.block_indices[0, 59].tolist() == [[0, 5, 13, 14]] * 2
    assert not torch.allclose(out, chosen)
    with pytest.raises(ValueError, match="selector keys have shape"):
        attend(Case(cfg, x, None), backend, selector=(queries, keys[:, 1:]))


OWN_BOUNDS = (37, 0, 3, 20)


@settings(max_examples=20)
@given(case=cases(), given_as=st.sampled_from(["one", "per group", "ranges"]), seed=st.integers(0, 99))
@example(case=Case(config(), inputs(config(), 60, documents=OWN_BOUNDS), OWN_BOUNDS), given_as="per group", seed=0)
def test_own_queries_and_keys_choose_as_the_oracle_says(case: Case, given_as: str, seed: int, backend: str):
    groups, size = case.x.ks.shape[2:]
    generator = torch.Generator().manual_seed(seed)
    channels = torch.stack([torch.randperm(size, generator=generator)[: size // 2 + 1] for _ in range(groups)])
    channels = channels if given_as == "per group" else channels[0]
    passed: Tensor | tuple = channels
    if given_as == "ranges":
        passed, channels = ((size // 2, size), (0, 1)), torch.tensor([*range(size // 2, size), 0])
    out, aux = attend(case, backend, return_aux=True, scorer="own", score_channels=passed)
    arrays = [x.double().numpy() for x in (case.x.q, case.x.ks, case.x.vs)]
    answer = oracle.block_sparse(*arrays, case.cfg, 0, cu(case.documents), aux.block_indices.numpy())
    answer.selections = oracle.own_selections(*arrays[:2], case.cfg, channels.numpy(), cu(case.documents))
    assert wrong_sets(answer, aux.block_indices, 1e-9) == []
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), rtol=1e-10, atol=1e-10)


@settings(max_examples=20)
@given(case=cases(), seed=st.integers(0, 99))
@example(case=Case(config(), inputs(config(), 60, documents=OWN_BOUNDS), OWN_BOUNDS), seed=1)
def test_groups_that_are_not_exact_choose_by_means_of_blocks(case: Case, seed: int, backend: str):
    groups, size = case.x.ks.shape[2], case.cfg.select_block
    exact = tuple(g for g in range(groups) if seed >> g & 1)
    out, aux = attend(case, backend, return_aux=True, scorer="own", exact_groups=exact)
    arrays = [x.double().numpy() for x in (case.x.q, case.x.ks, case.x.vs)]
    by_means = replace(case.cfg, compress_block=size, compress_stride=size)
    answer = oracle.block_sparse(*arrays, by_means, 0, cu(case.documents), aux.block_indices.numpy())
    own = oracle.own_selections(*arrays[:2], case.cfg, None, cu(case.documents))
    answer.selections |= {key: choice for key, choice in own.items() if key[2] in exact}
    assert wrong_sets(answer, aux.block_indices, 1e-9) == []
    torch.testing.assert_close(out.double(), torch.from_numpy(answer.out), rtol=1e-10, atol=1e-10)


def test_all_or_no_exact_groups_are_one_scorer_for_all(backend: str):
    cfg = config()
    case = Case(cfg, inputs(cfg, 100, documents=BOUNDS), BOUNDS)
    by_means = replace(cfg, compress_block=cfg.select_block, compress_stride=cfg.select_block)
    for exact, same in (
        ((0, 1), attend(case, backend, scorer="own")),
        ((), attend(Case(by_means, case.x, BOUNDS), backend, scorer="compressed")),
    ):
        assert torch.equal(attend(case, backend, scorer="own", exact_groups=exact), same)


def test_own_scores_hold_their_order_at_every_magnitude_and_ties_take_the_lowest_index(backend: str):
    cfg = config()  # blocks of 4; in the last one of 15 the forced blocks are 0, 13 and 14

    def chosen(*scores: float) -> list[int]:
        q, k = torch.zeros(1, 60, 2, 8), torch.zeros(1, 60, 1, 8)
        q[..., 0], k[0, 4:52:4, 0, 0] = 1, torch.tensor(scores)
        k[0, :, 0, 0].masked_fill_(torch.arange(60) % 4 > 0, -torch.inf)
        _, aux = tercet.block_sparse_attention(
            q, k, k, config=cfg, scorer="own", score_channels=torch.tensor([0]), backend=backend, return_aux=True
        )
        return [j for j in aux.block_indices[0, 59, 0].tolist() if j not in (0, 13, 14)]

    assert chosen(*[-1e-30, -2e-30, -1e30, -5, -3, -2, -7, -8, -9, -1e-29, -4, -6]) == [1]
    assert chosen(*[-1e30] * 5, -9e29, *[-1e30] * 6) == [6]
    assert chosen(*[1e-30] * 5, 2e-30, *[1e-30] * 6) == [6]
    assert chosen(1e30, *[3e38] * 3, *[1e30] * 8) == [2]
    assert chosen(0.0, *[-0.0] * 11) == [1]
    assert chosen(-0.0, 0.0, *[-1] * 10) == [1]
    assert chosen(torch.nan, -1e30, *[-torch.inf] * 9, torch.nan) == [2]
    assert chosen(*[-torch.inf] * 12) == [1]


def test_wrong_scorers_and_channels_are_named(backend: str):
    case = Case(config(), inputs(config(), 30), None)
    for options, said in (
        ({"scorer": "best"}, "scorer='best' is unknown"),
        ({"exact_groups": (0,)}, "exact_groups=0 needs selector=own"),
        ({"scorer": "own", "exact_groups": (1, 2)}, "exact_groups=1,2: expected of the KV heads 0 … 1"),
        ({"scorer": "own", "exact_groups": (1, 1)}, "at most once"),
        ({"score_channels": torch.arange(2)}, 'use scorer="own"'),
        ({"scorer": "own", "score_channels": torch.tensor([8])}, "channels 0 … 7"),
        ({"scorer": "own", "score_channels": ((6, 9),)}, "channels 0 … 7"),
        ({"scorer": "own", "score_channels": (0, 6)}, "expected \\(\\(first, end\\), …\\)"),
        ({"scorer": "own", "score_channels": torch.arange(2).int()}, "expected int64"),
        ({"scorer": "own", "score_channels": torch.zeros(3, 2).long()}, "expected int64"),
    ):
        with pytest.raises(ValueError, match=said):
            attend(case, backend, **options)


@pytest.mark.parametrize("dense_below", [41, 42, 100])
def test_with_given_blocks_dense_below_may_exceed_the_sequence(dense_below: int, backend: str):
    case = Case(config(), inputs(config(), 41), None)
    _, aux = attend(case, backend, return_aux=True)
    out = attend(case, backend, dense_below, block_indices=aux.block_indices)
    full = torch.from_numpy(oracle.causal_attention(case.x.q, case.x.ks, case.x.vs))
    torch.testing.assert_close(out, full, rtol=1e-10, atol=1e-10)


def test_first_tokens_of_documents_are_found_wherever_the_host_knows_their_lengths(monkeypatch: pytest.MonkeyPatch):
    bounds = cu(BOUNDS)
    known, packing = Packing(bounds, 100, 50, config()).first_tokens(20)
    monkeypatch.setattr("tercet.attention.layout._read_bounds", lambda *_: None)
    unknown, _ = Packing(bounds, 100, 50, config()).first_tokens(20)
    assert packing.cu_seqlens.tolist() == [0, 20, 20, 23, 43]
    assert known.source.tolist() == unknown.source[:43].tolist() == [*range(20), *range(37, 40), *range(40, 60)]
    assert unknown.valid.sum() == 43


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_dense_below_must_be_a_count(value: object):
    x = inputs(config(), 8)
    with pytest.raises(ValueError, match="dense_below"):
        tercet.block_sparse_attention(x.q, x.ks, x.vs, config=config(), dense_below=value)

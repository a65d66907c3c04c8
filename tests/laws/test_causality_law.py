"""Law "causality": tokens after t change neither output nor selection at t."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cases import Case, Inputs, attend, cases, compressed_length, config, cu, inputs


def with_another_future(x: Inputs, t: int, seen: int) -> Inputs:
    """Replace everything after row t, and every compressed token that t does not see."""

    def change(tensor, keep):
        changed = tensor.clone()
        changed[:, keep:] = torch.randn_like(changed[:, keep:]) * 5 + 3
        return changed

    return Inputs(
        change(x.q, t + 1), change(x.kc, seen), change(x.vc, seen), change(x.ks, t + 1), change(x.vs, t + 1),
        change(x.kw, t + 1), change(x.vw, t + 1), change(x.gates, t + 1),
    )  # fmt: skip


# 240 tokens are 60 blocks, of which a query reads 4, and 40 windows: far beyond every limit of the config.
@pytest.mark.parametrize("t", [0, 1, 2, 3, 4, 5, 7, 63, 100, 121, 238])
def test_the_future_changes_nothing(t: int, backend: str):
    cfg = config()
    x = inputs(cfg, 240)
    before, aux_before = attend(x, cfg, backend, return_aux=True)
    after, aux_after = attend(with_another_future(x, t, compressed_length(t + 1, cfg)), cfg, backend, return_aux=True)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert torch.equal(aux_before.block_indices[:, : t + 1], aux_after.block_indices[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], after[:, t + 1 :])


def test_a_longer_sequence_begins_as_the_shorter_one(backend: str):
    cfg = config()
    x = inputs(cfg, 200)
    whole = attend(x, cfg, backend)
    for tokens in (1, 3, 4, 17, 99, 150):
        seen = compressed_length(tokens, cfg)
        head = Inputs(*(v[:, : (seen if i in (1, 2) else tokens)] for i, v in enumerate(x.tensors())))
        torch.testing.assert_close(attend(head, cfg, backend), whole[:, :tokens], rtol=1e-12, atol=1e-12)


@given(case=cases(packed=False), data=st.data())
def test_gradients_of_the_past_do_not_reach_the_future(case: Case, data: st.DataObject, backend: str):
    tokens = case.x.q.shape[1]
    t = data.draw(st.integers(0, tokens - 1))
    x = case.x.leaves()
    attend(x, case.cfg, backend)[:, : t + 1].square().sum().backward()
    seen = compressed_length(t + 1, case.cfg)
    for i, tensor in enumerate(x.tensors()):
        if tensor.grad is not None:
            assert torch.count_nonzero(tensor.grad[:, (seen if i in (1, 2) else t + 1) :]) == 0


@given(case=cases(packed=True))
@example(case=Case(config(), inputs(config(), 5, documents=(3, 2)), (3, 2)))
def test_gradients_of_one_document_do_not_reach_the_others(case: Case, backend: str):
    bounds = cu(case.documents)
    assert bounds is not None
    compressed = [0]
    for n in case.documents or ():
        compressed.append(compressed[-1] + compressed_length(n, case.cfg))
    for i in range(len(bounds) - 1):
        x = case.x.leaves()
        start, end = int(bounds[i]), int(bounds[i + 1])
        attend(x, case.cfg, backend, cu_seqlens=bounds)[:, start:end].square().sum().backward()
        for position, tensor in enumerate(x.tensors()):
            if tensor.grad is None:
                continue
            low, high = (compressed[i], compressed[i + 1]) if position in (1, 2) else (start, end)
            assert torch.count_nonzero(tensor.grad[:, :low]) == 0
            assert torch.count_nonzero(tensor.grad[:, high:]) == 0

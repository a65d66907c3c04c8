"""Laws "determinism", "poison" and "no hidden sync"."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cases import Inputs, attend, config, cu, inputs

DOCUMENTS = (1, 3, 50, 17)


def outcome(x: Inputs, cfg, backend: str, **options) -> list[torch.Tensor]:
    leaves = x.leaves()
    out, aux = attend(leaves, cfg, backend, return_aux=True, **options)
    out.square().sum().backward()
    return [out.detach(), aux.block_indices, *(v.grad for v in leaves.tensors())]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_same_inputs_give_the_same_bits(documents, backend: str):
    cfg = config()
    x = inputs(cfg, 71, documents=documents, dtype=torch.float32)
    first = outcome(x, cfg, backend, cu_seqlens=cu(documents))
    outcome(inputs(cfg, 33, seed=9), cfg, backend)  # calls in between must not matter
    second = outcome(x, cfg, backend, cu_seqlens=cu(documents))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poisoned_memory_changes_nothing(documents, dtype, backend: str, request: pytest.FixtureRequest):
    cfg = config()
    x = inputs(cfg, 71, documents=documents, padding=3 if documents else 0, dtype=dtype)
    clean = outcome(x, cfg, backend, cu_seqlens=cu(documents))
    request.getfixturevalue("poisoned")
    dirty = outcome(x, cfg, backend, cu_seqlens=cu(documents))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.usefixtures("as_on_a_device")
def test_no_step_reads_values_on_the_host(documents, backend: str):
    """Fake tensors hold no values: anything that would synchronise (item, nonzero, tolist) fails on them."""
    cfg = config()
    x = inputs(cfg, 71, documents=documents, dtype=torch.float32)
    bounds = cu(documents)
    mode = FakeTensorMode()
    with mode:
        fake = x.map(lambda v: mode.from_tensor(v).requires_grad_())
        out = attend(fake, cfg, backend, cu_seqlens=None if bounds is None else mode.from_tensor(bounds))
        out.sum().backward()
    assert tuple(out.shape) == (1, 71, 4, 6)
    assert fake.q.grad is not None
    assert fake.q.grad.shape == x.q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_no_synchronisation_on_a_device(documents, backend: str):
    cfg = config()
    x = inputs(cfg, 71, documents=documents, dtype=torch.float32).map(lambda v: v.cuda()).leaves()
    bounds = cu(documents)
    bounds = None if bounds is None else bounds.cuda()
    attend(x, cfg, backend, cu_seqlens=bounds).sum().backward()  # warm-up: lazy initialisation may synchronise
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x, cfg, backend, cu_seqlens=bounds).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

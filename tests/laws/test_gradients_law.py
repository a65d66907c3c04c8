"""Law "gradients": float64 gradcheck of the operator; finite gradients for queries without keys."""

from __future__ import annotations

import pytest
import torch

import tercet
from cases import attend, config, cu, inputs, one_branch


def check(x, cfg, backend: str, fast_mode: bool, **options) -> None:
    tensors = tuple(v.detach().clone().requires_grad_() for v in x.tensors())

    def operator(*values):
        return tercet.nsa_attention(*values, config=cfg, backend=backend, **options)

    assert torch.autograd.gradcheck(operator, tensors, atol=1e-7, rtol=1e-5, fast_mode=fast_mode)


@pytest.mark.parametrize("sizes", [(1, 2, 3, 2), (2, 1, 2, 3), (1, 3, 4, 4)], ids=str)
def test_gradcheck(sizes: tuple[int, int, int, int], backend: str, fast_mode: bool):
    groups, per_group, key_size, value_size = sizes
    cfg = config(compress_block=2, compress_stride=1, select_block=2, select_count=3, select_local=1, window=3)
    shape = {"groups": groups, "per_group": per_group, "key_size": key_size, "value_size": value_size}
    check(inputs(cfg, 9, **shape), cfg, backend, fast_mode)


def test_gradcheck_of_packed_documents_with_padding(backend: str, fast_mode: bool):
    cfg = config(compress_block=2, compress_stride=2, select_block=2, select_count=2, select_local=1, window=2)
    documents = (1, 7)
    x = inputs(cfg, 8, groups=1, key_size=2, value_size=3, documents=documents, padding=2)
    check(x, cfg, backend, fast_mode, cu_seqlens=cu(documents))


def test_gradcheck_of_a_batch(backend: str, fast_mode: bool):
    cfg = config(select_count=3)
    check(inputs(cfg, 6, batch=2, groups=1, key_size=2, value_size=1), cfg, backend, fast_mode)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_finite_where_a_query_sees_no_compressed_token(tokens: int, dtype: torch.dtype, backend: str):
    cfg = config()
    x = inputs(cfg, tokens, dtype=dtype).leaves()
    attend(x, cfg, backend).float().sum().backward()
    for v in x.tensors():
        assert v.grad is None or (torch.isfinite(v.grad).all() and v.grad.dtype == dtype)
    assert torch.count_nonzero(x.gates.grad[:, : cfg.compress_block - 1, :, 0]) == 0


@pytest.mark.parametrize("size", [60.0, 3e4])
def test_large_scores_neither_overflow_nor_poison_gradients(size: float, backend: str):
    cfg = config()
    x = inputs(cfg, 30, dtype=torch.float32)
    x = x.with_(q=x.q * size).leaves()
    out = attend(x, cfg, backend)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(v.grad).all() for v in x.tensors())


def test_the_gate_gradient_is_the_branch_output(backend: str):
    cfg = config()
    x = inputs(cfg, 33).leaves()
    weight = torch.randn(1, 33, 4, 6, dtype=torch.float64)
    (attend(x, cfg, backend) * weight).sum().backward()
    for branch in range(3):
        alone = attend(one_branch(x, branch), cfg, backend)
        torch.testing.assert_close(x.gates.grad[..., branch], (alone * weight).sum(-1), rtol=1e-10, atol=1e-10)


def test_half_precision_gradients_stay_near_those_of_double(backend: str):
    """Within the law's 1e-2, with a config that selects every block, so that both read the same ones."""
    cfg = config(select_count=12)
    rough = inputs(cfg, 40, dtype=torch.bfloat16).leaves()
    exact = rough.map(lambda v: v.detach().double()).leaves()
    weight = torch.randn(1, 40, 4, 6, dtype=torch.float64).bfloat16()
    (attend(rough, cfg, backend) * weight).sum().backward()
    (attend(exact, cfg, backend) * weight.double()).sum().backward()
    for a, b in zip(rough.tensors(), exact.tensors(), strict=True):
        assert (a.grad.double() - b.grad).norm() / b.grad.norm() <= 1e-2

"""Law "any shape": lengths from 1, any heads per group, Dk and Dv unrelated, any memory layout."""

from __future__ import annotations

import pytest
import torch

from cases import Inputs, attend, config, inputs, judge


def assert_right(x: Inputs, cfg, backend: str) -> None:
    out, aux = attend(x, cfg, backend, return_aux=True)
    answer = judge(x, cfg, None, aux.block_indices)
    torch.testing.assert_close(out, torch.from_numpy(answer.out), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_any_number_of_heads_per_group(per_group: int, backend: str):
    cfg = config()
    assert_right(inputs(cfg, 23, groups=2, per_group=per_group, key_size=3, value_size=2), cfg, backend)


@pytest.mark.parametrize("tokens", [*range(1, 14), 31, 32, 33])
def test_any_length_from_one(tokens: int, backend: str):
    cfg = config()
    assert_right(inputs(cfg, tokens, batch=2, key_size=3, value_size=2), cfg, backend)


@pytest.mark.parametrize(("key_size", "value_size"), [(1, 1), (1, 9), (12, 8), (8, 12), (5, 7)])
def test_key_and_value_sizes_are_unrelated(key_size: int, value_size: int, backend: str):
    cfg = config()
    assert_right(inputs(cfg, 21, key_size=key_size, value_size=value_size), cfg, backend)


def head_major(v: torch.Tensor) -> torch.Tensor:
    return v.transpose(1, 2).contiguous().transpose(1, 2)


def batch_strided(v: torch.Tensor) -> torch.Tensor:
    return torch.stack([v, torch.full_like(v, 9.0)], 1)[:, 0]


def last_axis_strided(v: torch.Tensor) -> torch.Tensor:
    return torch.stack([v, torch.full_like(v, 9.0)], -1)[..., 0]


@pytest.mark.parametrize("layout", [head_major, batch_strided, last_axis_strided])
def test_memory_layout_does_not_matter(layout, backend: str):
    cfg = config()
    x = inputs(cfg, 27, batch=2)
    strided = x.map(layout)
    assert not strided.q.is_contiguous()
    torch.testing.assert_close(attend(strided, cfg, backend), attend(x, cfg, backend), rtol=1e-12, atol=1e-12)


def test_a_value_broadcast_over_the_batch_gets_summed_gradients(backend: str):
    cfg = config()
    x = inputs(cfg, 19, batch=2)
    shared = x.ks[:1].clone().requires_grad_()
    attend(x.with_(ks=shared.expand_as(x.ks)), cfg, backend).square().sum().backward()
    apart = x.ks[:1].repeat(2, 1, 1, 1).requires_grad_()
    attend(x.with_(ks=apart), cfg, backend).square().sum().backward()
    torch.testing.assert_close(shared.grad, apart.grad.sum(0, keepdim=True))


def test_inputs_are_not_modified(backend: str):
    cfg = config()
    x = inputs(cfg, 30)
    before = x.map(torch.clone)
    attend(x, cfg, backend)
    assert all(torch.equal(a, b) for a, b in zip(before.tensors(), x.tensors(), strict=True))

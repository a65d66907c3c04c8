"""Window attention as a layer: a loop oracle, packed documents, caches of constant size, and mixed models."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import oracle
import tercet
from cases import config
from layer_oracle import linear, rms_norm

CFG = config()
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CLOSE_TO_ORACLE = {"rtol": 1e-5, "atol": 1e-5}  # cos and sin are fp32 in the layer


def make(**options):
    sizes = {"dim": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "value_dim": 3, "config": CFG, **options}
    layer = tercet.WindowAttention(**sizes).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def looped(layer, x: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Key by key in float64 numpy."""
    x = x.numpy()
    batch, tokens, _ = x.shape
    heads, groups, size, value_size = layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim
    q = linear(layer.q_proj, x).reshape(batch, tokens, heads, size)
    kv = linear(layer.kv_proj, x)
    k = kv[..., : groups * size].reshape(batch, tokens, groups, size)
    v = kv[..., groups * size :].reshape(batch, tokens, groups, value_size)
    if layer.q_norm is not None:
        q, k = rms_norm(layer.q_norm, q), rms_norm(layer.k_norm, k)
    positions = [t for a, b in pairwise(bounds) for t in range(b - a)]
    q, k = oracle.rope(q, positions), oracle.rope(k, positions)
    out = np.zeros((batch, tokens, heads, value_size))
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                g = h // (heads // groups)
                seen = range(max(t - positions[t], t - layer.config.window + 1), t + 1)
                keys, values = ([x[b, s, g] for s in seen] for x in (k, v))
                out[b, t, h], _ = oracle.softmax_attend(q[b, t, h], keys, values, value_size)
    return torch.from_numpy(linear(layer.o_proj, out.reshape(batch, tokens, -1)))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"heads": 3, "kv_heads": 3}, {"bias": True}], ids=str)
def test_the_layer_equals_a_loop_over_keys(options):
    layer = make(**options)
    x = torch.randn(2, 3 * CFG.window + 1, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), looped(layer, x, [0, x.shape[1]]), **CLOSE_TO_ORACLE)


def test_packed_documents_equal_a_loop_over_keys():
    layer, bounds = make(), [0, 1, 20, 20, 53]
    x = torch.randn(1, 53, 12, dtype=torch.float64)
    packed = layer(x, torch.tensor(bounds, dtype=torch.int32))
    torch.testing.assert_close(packed, looped(layer, x, bounds), **CLOSE_TO_ORACLE)


def test_it_has_the_parameters_of_a_dense_layer_and_no_others():
    dense = tercet.DenseAttention(dim=12, heads=4, kv_heads=2, head_dim=4, qk_norm=True)
    window = tercet.WindowAttention(dim=12, heads=4, kv_heads=2, head_dim=4, qk_norm=True)
    assert {name: p.shape for name, p in window.state_dict().items()} == {
        name: p.shape for name, p in dense.state_dict().items()
    }


def test_the_cache_does_not_grow_with_the_sequence():
    layer = make()
    short, long = layer.make_cache(1, 8), layer.make_cache(1, 100_000)
    assert long.nbytes() == short.nbytes() == 8 * 2 * (CFG.window + 1) * (4 + 3)
    grown = layer.make_cache(1)
    with torch.no_grad():
        for part in torch.randn(1, 400, 12, dtype=torch.float64).split(50, 1):
            layer(part, cache=grown)
    assert grown.nbytes() == short.nbytes()


def test_the_route_says_why_the_kernels_did_not_run():
    layer = make()
    layer(torch.randn(1, 9, 12, dtype=torch.float64))
    assert layer.routes == {"window": "reference"}
    assert "CUDA" in layer.routes["window"].reason or "Triton" in layer.routes["window"].reason
    with pytest.raises(RuntimeError, match='backend="triton" cannot run'):
        make(backend="triton")(torch.randn(1, 9, 12, dtype=torch.float64))

"""Window attention as a layer: a loop oracle, packed documents, caches of constant size, and mixed models."""

from __future__ import annotations

import pytest
import torch

import layer_oracle
import tercet
from cases import config, cu

CFG = config()
CLOSE_TO_ORACLE = {"rtol": 1e-5, "atol": 1e-5}  # cos and sin are fp32 in the layer


def make(**options):
    sizes = {"dim": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "value_dim": 3, "config": CFG, **options}
    layer = tercet.WindowAttention(**sizes).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"heads": 3, "kv_heads": 3}, {"bias": True}], ids=str)
@pytest.mark.parametrize("documents", [None, (1, 19, 0, 33)], ids=["whole", "packed"])
def test_the_layer_equals_the_oracle(options, documents):
    layer = make(**options)
    x = torch.randn(1 if documents else 2, sum(documents or [3 * CFG.window + 1]), 12, dtype=torch.float64)
    expected = torch.from_numpy(layer_oracle.one_branch(layer, x, cu(documents)).out)
    torch.testing.assert_close(layer(x, cu(documents)), expected, **CLOSE_TO_ORACLE)


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

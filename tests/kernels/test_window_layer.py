"""A layer with window attention only on the kernels, interpreted: training, chunks after a cache, and decode steps."""

from __future__ import annotations

import pytest
import torch

import tercet
from kernels.test_decode import compare, make, reference  # noqa: F401  (a fixture)

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("bounds", [None, [0, 3, 40, 40, 75]], ids=["whole", "packed"])
def test_outputs_and_gradients_equal_the_reference(bounds):
    layer = make(tercet.WindowAttention)
    x = torch.randn(1 if bounds else 2, 75, 16, requires_grad=True)
    cu = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    dout = torch.randn_like(x)
    results = []
    for backend in ("reference", "triton"):
        layer.backend = backend
        out = layer(x, cu)
        assert layer.routes == {"window": backend}
        results.append((out, *torch.autograd.grad(out, (x, *layer.parameters()), dout)))
    for wanted, found in zip(*results, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5


def test_a_chunk_after_a_cache_equals_the_whole_sequence():
    layer = make(tercet.WindowAttention, backend="triton")
    x = torch.randn(2, 64, 16)
    with torch.no_grad():
        cache = layer.make_cache(2, 64)
        parts = [layer(part, cache=cache) for part in x.split([10, 9, 45], 1)]
        assert layer.routes == {"window": "triton"}
        torch.testing.assert_close(torch.cat(parts, 1), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "bias": True}], ids=str)
def test_decode_steps_equal_the_reference(reference, options):  # noqa: F811
    compare(reference, make(tercet.WindowAttention, **options), [0, 6, 98], [None, [1, 0, 1], None])


def test_a_cache_longer_than_the_block_scores_allow_still_decodes_on_the_kernels():
    layer = make(tercet.WindowAttention)
    cache = layer.make_cache(1, 10_000_000)
    with torch.no_grad():
        layer(torch.randn(1, 1, 16), cache=cache)
    assert layer.routes == {"window": "triton"}

"""The output projection inside the operator: the gated sum is recomputed for the backward pass, not saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

pytest.importorskip("triton")

import tercet
from tercet.model.layers import NativeSparseAttention

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(8, 4, 16, 4, 1, 2, 20)
TOKENS = 40


def make(*, keep_sum: bool, **options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    layer = NativeSparseAttention(24, 6, 2, 16, config=CONFIG, **options)
    torch.nn.init.normal_(layer.gate.proj.weight)
    layer.keep_sum = keep_sum
    return layer


@pytest.mark.parametrize(
    ("options", "packed"),
    [({"bias": True}, True), pytest.param({"branches": ("compressed", "window")}, False, marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_values_and_gradients_equal_the_eager_layer(options: dict[str, Any], packed: bool) -> None:
    results = []
    bounds = torch.tensor([0, 17, TOKENS], dtype=torch.int32) if packed else None
    for compiled in (False, True):
        layer, x = make(keep_sum=not compiled, **options), torch.linspace(-1, 1, TOKENS * 24).view(1, TOKENS, 24).sin()
        torch._dynamo.reset()
        run = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else layer
        leaf = x.requires_grad_()
        out = run(leaf, bounds)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *layer.parameters()])])
        assert layer.routes["compressed"] == "triton"
    torch.testing.assert_close(results[1], results[0])


def test_eager_output_equals_the_projection_of_the_result() -> None:
    x = torch.randn(1, TOKENS, 24)
    torch.testing.assert_close(make(keep_sum=False)(x), make(keep_sum=True)(x))


@pytest.mark.parametrize("keep_sum", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_gated_sum_is_not_saved(keep_sum: bool) -> None:
    kept: list[tuple[int, ...]] = []

    def forward(module: Any, _: Any) -> Any:
        (result,) = (n for n in module.graph.nodes if n.op == "output")
        kept.extend(tuple(n.meta["val"].shape) for n in result.args[0] if n is not None and "val" in n.meta)
        return module

    backend = aot_autograd(fw_compiler=forward, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile(make(keep_sum=keep_sum), backend=backend, fullgraph=True)(torch.randn(1, TOKENS, 24))
    size = TOKENS * 6 * 16
    of_qs_size = sum(torch.Size(shape).numel() == size for shape in kept)
    assert of_qs_size == (5 if keep_sum else 4), kept  # q, the three branches' outputs, and the sum


@pytest.mark.slow
def test_the_bias_gradient_is_not_rounded_to_the_weight_type() -> None:
    layer = make(keep_sum=False, bias=True)
    layer.o_proj.weight.data = layer.o_proj.weight.data.bfloat16()
    torch._dynamo.reset()
    out = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)(torch.randn(1, TOKENS, 24))
    upstream = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, layer.o_proj.bias, upstream)
    torch.testing.assert_close(found, upstream.sum((0, 1)))

"""The gated sum that is made again: the same value and gradients, and not kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

gated_sum = pytest.importorskip("tercet.attention.kernels.gated_sum")


class Attended(torch.autograd.Function):
    """Stands in for the kernels: owns the gradient of the gated sum of what it is given."""

    @staticmethod
    def forward(ctx, gates, *outputs):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gates, *outputs)
        return sum(gates[..., i, None] * o for i, o in enumerate(outputs))

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def]
        gates, *outputs = ctx.saved_tensors
        return torch.stack([(dout * o).sum(-1) for o in outputs], -1), *(
            gates[..., i, None] * dout for i in range(len(outputs))
        )


def projected(outputs: list[Tensor], gates: Tensor, weight: Tensor, again: bool) -> Tensor:
    out = Attended.apply(gates, *outputs)
    kept = [o.detach() for o in outputs]
    mixed = gated_sum.made_again(out, kept, gates) if again else out
    return mixed.flatten(2) @ weight


def inputs() -> tuple[list[Tensor], Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 64, 3, 8, generator=g).requires_grad_() for _ in range(3)]
    gates = torch.rand(2, 64, 3, 3, generator=g).requires_grad_()
    return outputs, gates, torch.randn(24, 16, generator=g).requires_grad_()


def test_value_and_gradients_are_those_of_the_sum_that_is_kept():
    results = []
    for again in (False, True):
        outputs, gates, weight = inputs()
        compiled = torch.compile(projected, backend="aot_eager_decomp_partition", fullgraph=True)
        y = compiled(outputs, gates, weight, again)
        y.square().sum().backward()
        results.append([y.detach(), *(x.grad for x in (*outputs, gates, weight))])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("again", [False, True])
def test_the_sum_is_not_kept(again: bool):
    kept: list[int] = []

    def forward(module, _):  # type: ignore[no-untyped-def]
        (result,) = (n for n in module.graph.nodes if n.op == "output")
        computed = [
            n for n in result.args[0] if n is not None and not n.name.startswith(("primals", "alias", "detach"))
        ]
        kept.extend(n.meta["val"].numel() for n in computed)
        return module

    backend = aot_autograd(fw_compiler=forward, partition_fn=min_cut_rematerialization_partition)
    outputs, gates, weight = inputs()
    torch._dynamo.reset()
    torch.compile(projected, backend=backend, fullgraph=True)(outputs, gates, weight, again)
    size = outputs[0].numel()
    assert kept.count(size) == (0 if again else 1), kept

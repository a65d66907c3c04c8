"""One product taken apart by the kernel: what several products give, values and gradients; fp32, interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tercet
from tercet.attention.kernels import heads
from tercet.attention.layout import Packing
from tercet.model import projection
from tercet.model.attention import NativeSparseAttention, turns_of

CONFIG = tercet.NSAConfig(8, 4, 16, 4, 1, 2, 20)


def make(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    sizes = {"dim": 24, "heads": 6, "kv_heads": 2, "head_dim": 16} | options
    layer = NativeSparseAttention(**sizes, config=CONFIG)
    layer.init_weights(0.3, 0.3)
    for parameter in layer.parameters():  # nothing stays at the zeros that gates and φ start with
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def both_ways(
    layer: NativeSparseAttention, x: torch.Tensor, bounds: list[int] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Everything the operator takes, then gradients of x and all parameters: by one product, and by several."""
    packing = None
    if bounds is not None:
        packing = Packing(torch.tensor(bounds, dtype=torch.int32), x.shape[1], x.shape[1] // 4, CONFIG)
    turns = turns_of(layer.rotary, x, packing, CONFIG)
    assert projection.takes_one_product(layer, x)
    found = []
    for project in (projection.one_product, NativeSparseAttention._apart):
        leaf = x.clone().requires_grad_()
        parts = project(layer, leaf, packing, turns)
        # another weight for each number, so that nothing can be exchanged unseen
        loss = sum((part * torch.linspace(-1, 1, part.numel()).view(part.shape)).sum() for part in parts)
        used = [p for n, p in layer.named_parameters() if not n.startswith("o_proj")]
        found.append([*parts, *torch.autograd.grad(loss, [leaf, *used])])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 33),
        ({"heads": 3, "kv_heads": 1, "head_dim": 24, "bias": True}, 40),
        ({"compression": "mean", "gate": "softmax"}, 9),
    ],
)
def test_one_product_taken_apart_is_what_several_give(options: dict[str, Any], tokens: int) -> None:
    one, several = both_ways(make(**options), torch.randn(2, tokens, 24))
    torch.testing.assert_close(one, several, rtol=2e-5, atol=2e-5)


def test_packed_documents_too() -> None:
    # a document of less than a chunk, one that has tokens over, one of no tokens, and chunks at the end that are none
    one, several = both_ways(make(), torch.randn(1, 70, 24), [0, 3, 34, 34, 70])
    torch.testing.assert_close(one, several, rtol=2e-5, atol=2e-5)


def test_the_operator_and_its_gradient_keep_their_promises() -> None:
    y = torch.randn(2, 20, heads.columns(6, 2, 16), requires_grad=True)
    turn = [torch.randn(20, 1, 8) for _ in range(2)]
    arguments = (y, *turn, None, None, None, None, [6, 2, 16, 4])
    torch.library.opcheck(torch.ops.tercet.heads_apart, arguments)


def test_angles_of_other_tokens_are_refused() -> None:
    y = torch.randn(2, 20, heads.columns(6, 2, 16))
    turn = [torch.randn(19, 1, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"cos has shape \[19, 1, 8\]: 20 tokens and heads of 16"):
        heads.heads_apart(y, *turn, None, None, None, None, [6, 2, 16, 4])


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"shared_kv": True},
        {"value_dim": 8},
        {"backend": "reference"},
        {"heads": 9, "kv_heads": 9},  # compiles for minutes
    ],
)
def test_what_the_kernel_does_not_know_is_projected_apart(options: dict[str, Any]) -> None:
    assert not projection.takes_one_product(make(**options), torch.randn(1, 40, 24))


def test_eight_kv_heads_are_still_one_product() -> None:
    assert projection.takes_one_product(make(heads=8, kv_heads=8), torch.randn(1, 40, 24))


class Adapted(torch.nn.Linear):
    """As a LoRA adapter: it does something that its weight does not say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


def replace(layer: NativeSparseAttention, name: str) -> None:
    linear = layer.get_submodule(name)
    adapted = Adapted(linear.in_features, linear.out_features, bias=linear.bias is not None)
    adapted.load_state_dict(linear.state_dict())
    layer.set_submodule(name, adapted)


def hook(layer: NativeSparseAttention, name: str) -> None:
    layer.get_submodule(name).register_forward_hook(lambda _, given, out: out + given[0].mean(-1, keepdim=True))


def hook_before(layer: NativeSparseAttention, name: str) -> None:
    layer.get_submodule(name).register_forward_pre_hook(lambda _, given: (given[0].sin(),))


def parametrize(layer: NativeSparseAttention, name: str) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer.get_submodule(name))
    with torch.no_grad():
        layer.get_submodule(name).parametrizations.weight.original0.mul_(2)


@pytest.mark.parametrize("keep_sum", [True, False])
@pytest.mark.parametrize("name", ["q_proj", "kv_proj", "gate.proj", "o_proj", "compress_k.up", "compress_v.down"])
@pytest.mark.parametrize("change", [replace, hook, hook_before, parametrize])
def test_what_stands_in_a_linear_layers_place_is_called_on_every_backend(
    change: Callable[[NativeSparseAttention, str], None], name: str, keep_sum: bool
) -> None:
    x, outs = torch.randn(1, 20, 24), []
    for backend in ("auto", "reference"):
        layer = make(backend=backend)
        layer.keep_sum = keep_sum
        before = layer(x)
        change(layer, name)
        outs.append(layer(x))
        assert layer.routes["selected"] == ("triton" if backend == "auto" else "reference")
        assert not torch.allclose(outs[-1], before, atol=1e-3)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


def test_an_adapted_layer_is_one_graph_too() -> None:
    layer, x = make(), torch.randn(1, 20, 24)
    replace(layer, "kv_proj")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))

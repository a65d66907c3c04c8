"""One product taken apart by the kernel: what several products give, values and gradients; fp32, interpreted."""

from __future__ import annotations

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
    "options", [{"qk_norm": True}, {"shared_kv": True}, {"value_dim": 8}, {"backend": "reference"}]
)
def test_what_the_kernel_does_not_know_is_projected_apart(options: dict[str, Any]) -> None:
    assert not projection.takes_one_product(make(**options), torch.randn(1, 40, 24))

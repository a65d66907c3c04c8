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


SHARED: list[dict[str, bool]] = [{}, {"shared_kv": True}, {"compress_selected_keys": True}]


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 33),
        ({"heads": 3, "kv_heads": 1, "head_dim": 24, "bias": True}, 40),
        ({"compression": "mean", "gate": "softmax"}, 9),
        ({"heads": 16, "kv_heads": 16, "head_dim": 4}, 9),
    ],
)
@pytest.mark.parametrize("shared", SHARED)
def test_one_product_taken_apart_is_what_several_give(
    options: dict[str, Any], tokens: int, shared: dict[str, bool]
) -> None:
    one, several = both_ways(make(**options, **shared), torch.randn(2, tokens, 24))
    torch.testing.assert_close(one, several, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"heads": 3, "kv_heads": 3, "head_dim": 6, "bias": True}])
@pytest.mark.parametrize("shared", SHARED)
def test_packed_documents_too(options: dict[str, Any], shared: dict[str, bool]) -> None:
    # a document of less than a chunk, one that has tokens over, one of no tokens, and chunks at the end that are none
    one, several = both_ways(make(**options, **shared), torch.randn(1, 70, 24), [0, 3, 34, 34, 70])
    torch.testing.assert_close(one, several, rtol=2e-5, atol=2e-5)


# H, G, D, d; the sets come behind
SIZES = [([6, 2, 16, 4], 20), ([3, 1, 96, 4], 19), ([16, 16, 8, 4], 9), ([5, 5, 6, 16], 18)]


def plainly(y: torch.Tensor, turn: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    """What heads.apart gives, by indexing."""
    n, g, size, stride, sets = sizes
    q, *parts, logits, rest = y.split(
        [n * size, *[g * size] * (2 * sets), 3 * n, y.shape[2] - (n + 2 * sets * g) * size - 3 * n], -1
    )
    assert 0 <= rest.shape[2] < 64
    q, *parts = (x.unflatten(2, (-1, size)) for x in (q, *parts))
    ks, vs, kw, vw = parts[2:] if sets == 3 else parts * 2

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]), -1)

    full = y.shape[1] // stride * stride
    chunks = torch.stack([x[:, :full].unflatten(1, (-1, stride)).transpose(2, 3) for x in parts[:2]])
    return [turned(q), turned(ks), vs, turned(kw), vw, chunks, logits]


@pytest.mark.parametrize(("sizes", "tokens"), SIZES)
@pytest.mark.parametrize("sets", [3, 1])
def test_parts_and_the_gradient_are_those_of_plain_indexing(sizes: list[int], tokens: int, sets: int) -> None:
    torch.manual_seed(0)
    n, g, size, _ = sizes
    y = torch.randn(2, tokens, heads.columns(n, g, size, sets), requires_grad=True)
    turn = [torch.randn(tokens, 1, size // 2) for _ in range(2)]
    found = heads.apart(y, turn, (None,) * 4, [*sizes, sets])
    wanted = plainly(y, turn, [*sizes, sets])
    torch.testing.assert_close(list(found), wanted)
    grads = [torch.randn_like(x) for x in wanted]
    torch.testing.assert_close(torch.autograd.grad(found, y, grads), torch.autograd.grad(wanted, y, grads))


def test_shared_keys_and_values_are_kept_once_and_their_gradients_arrive_one_by_one() -> None:
    y = torch.randn(2, 20, heads.columns(6, 2, 16, 1), requires_grad=True)
    turn = [torch.randn(20, 1, 8) for _ in range(2)]
    _, ks, vs, kw, vw, _, _ = heads.apart(y, turn, (None,) * 4, [6, 2, 16, 4, 1])
    assert (ks.data_ptr(), vs.data_ptr()) == (kw.data_ptr(), vw.data_ptr())
    assert ks.grad_fn is kw.grad_fn
    assert ks.output_nr != kw.output_nr


def test_gradients_of_shared_keys_are_added_before_they_are_rounded() -> None:
    y = torch.zeros(1, 16, heads.columns(2, 1, 16, 1), dtype=torch.bfloat16, requires_grad=True)
    turn = [torch.ones(16, 1, 8), torch.zeros(16, 1, 8)]
    found = heads.apart(y, turn, (None,) * 4, [2, 1, 16, 4, 1])
    # 1 + 2^-8 is 1 in bf16, and 1 + 2^-8 + 2^-8 is not
    sizes = (0.0, 1.0, 1.0, 2.0**-8, 2.0**-8, 2.0**-8, 0.0)
    (dy,) = torch.autograd.grad(found, y, [torch.full_like(x, size) for x, size in zip(found, sizes, strict=True)])
    assert (dy[..., 32:64] == 1 + 2.0**-7).all()
    assert not dy[..., :32].any()
    assert not dy[..., 64:].any()


def test_the_operators_keep_their_promises() -> None:
    sizes = [3, 1, 16, 4, 1]
    y = torch.randn(1, 20, heads.columns(3, 1, 16, 1))
    turn = [torch.randn(20, 1, 8) for _ in range(2)]
    torch.library.opcheck(torch.ops.tercet.heads_apart.default, (y, *turn, None, None, sizes))
    grads = [torch.randn_like(x) for x in heads.apart(y, turn, (None,) * 4, sizes)]
    torch.library.opcheck(torch.ops.tercet.heads_together.default, (grads, *turn, None, None, sizes))


def test_angles_of_other_tokens_are_refused() -> None:
    y = torch.randn(2, 20, heads.columns(6, 2, 16, 3))
    turn = [torch.randn(19, 1, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"cos has shape \[19, 1, 8\]: 20 tokens and heads of 16"):
        heads.heads_apart(y, *turn, None, None, [6, 2, 16, 4, 3])


@pytest.mark.parametrize(("bounds", "compiled"), [(None, False), ([0, 3, 20, 20, 38], True)])
def test_a_layer_of_shared_keys_and_values_is_that_of_the_reference(bounds: list[int] | None, compiled: bool) -> None:
    x = torch.randn(1, 38, 24)
    packing = None
    if bounds is not None:
        packing = Packing(torch.tensor(bounds, dtype=torch.int32), 38, 9, CONFIG)
    found = []
    for backend in ("auto", "reference"):
        layer = make(heads=4, shared_kv=True, bias=True, backend=backend)
        leaf = x.clone().requires_grad_()
        layer.keep_sum = not compiled
        run = layer
        if compiled and backend == "auto":
            torch._dynamo.reset()
            run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        out = run(leaf, packing)
        assert layer.routes["selected"] == ("triton" if backend == "auto" else "reference")
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], noise)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"value_dim": 8},
        {"backend": "reference"},
    ],
)
def test_what_the_kernel_does_not_know_is_projected_apart(options: dict[str, Any]) -> None:
    assert not projection.takes_one_product(make(**options), torch.randn(1, 40, 24))


@pytest.mark.parametrize("options", [{"shared_kv": True}, {"heads": 32, "kv_heads": 32}])
def test_shared_keys_and_any_number_of_them_are_one_product(options: dict[str, Any]) -> None:
    assert projection.takes_one_product(make(**options), torch.randn(1, 40, 24))


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

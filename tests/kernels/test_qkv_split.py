"""The fused QKV projection and its split: values and gradients equal separate projections; fp32, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

import tercet
from tercet.attention.kernels import qkv_split
from tercet.attention.layout import Packing
from tercet.model.layers import NativeSparseAttention
from tercet.model.rope import rope_cache

pytestmark = pytest.mark.interpreter

CONFIG = tercet.NSAConfig(8, 4, 16, 4, 1, 2, 20)


def make(**options: Any) -> NativeSparseAttention:
    torch.manual_seed(0)
    sizes = {"dim": 24, "heads": 6, "kv_heads": 2, "head_dim": 16, "config": CONFIG} | options
    layer = NativeSparseAttention(**sizes)
    layer.init_weights(0.3, 0.3)
    for parameter in layer.parameters():  # nothing stays at the zeros that gates and φ start with
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def both_ways(
    layer: NativeSparseAttention, x: torch.Tensor, bounds: list[int] | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The operator's inputs, then gradients of x and all parameters: of the fused projection, and of separate ones."""
    packing = None
    if bounds is not None:
        packing = Packing(torch.tensor(bounds, dtype=torch.int32), x.shape[1], x.shape[1] // 4, layer.config)
    rope = rope_cache(layer.rotary, x, packing, layer.config)
    assert layer.can_fuse(x)
    found = []
    for project in (NativeSparseAttention.fused_inputs, NativeSparseAttention.separate_inputs):
        leaf = x.clone().requires_grad_()
        parts = [part for part in project(layer, leaf, packing, rope) if part is not None]
        # a different weight for each number, so that swapped values are noticed
        loss = sum((part * torch.linspace(-1, 1, part.numel()).view(part.shape)).sum() for part in parts)
        used = [p for n, p in layer.named_parameters() if not n.startswith("o_proj")]
        found.append([*parts, *torch.autograd.grad(loss, [leaf, *used])])
    return found[0], found[1]


UNCOMPRESSED = {"branches": ("selected", "window"), "selector": "own"}
SHARED: list[dict[str, Any]] = [{}, {"shared_kv": True}, {"compress_selected_keys": True}, UNCOMPRESSED]
# blocks that do not overlap, like m7c's
APART = tercet.NSAConfig(4, 4, 16, 4, 1, 2, 20)


def cells(rows: list[Any], columns: list[Any]) -> list[Any]:
    """The first row, the fifth (packed) and the diagonal; the other pairs are slow."""
    return [
        pytest.param(row, column, marks=[] if i in (0, 4) or i % len(columns) == j else pytest.mark.slow)
        for (i, row), (j, column) in product(enumerate(rows), enumerate(columns))
    ]


# a document shorter than a chunk, one with a partial chunk, an empty one, and unused chunks at the end
PACKED = [0, 3, 34, 34, 70]
LAYERS: list[tuple[dict[str, Any], int | list[int]]] = [  # with tokens of two sequences, or bounds of documents
    ({}, 33),
    ({"heads": 3, "kv_heads": 1, "head_dim": 24, "bias": True}, 40),
    ({"compression": "mean", "gate": "softmax"}, 9),
    ({"heads": 16, "kv_heads": 16, "head_dim": 4}, 9),
    ({}, PACKED),
    ({"heads": 3, "kv_heads": 3, "head_dim": 6, "bias": True}, PACKED),
    ({"compression": "mean", "config": APART}, PACKED),
]


@pytest.mark.parametrize(("layer", "shared"), cells(LAYERS, SHARED))
def test_a_fused_projection_equals_separate_ones(layer, shared: dict[str, Any]) -> None:
    options, tokens = layer
    shape, bounds = ((2, tokens, 24), None) if isinstance(tokens, int) else ((1, tokens[-1], 24), tokens)
    one, several = both_ways(make(**options, **shared), torch.randn(*shape), bounds)
    torch.testing.assert_close(one, several, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("shared", "lengths"), [({}, [26, 26]), *((shared, [9, 26]) for shared in SHARED)])
def test_a_fused_prefill_equals_two_chunks_on_the_reference(shared: dict[str, Any], lengths: list[int]) -> None:
    layer, x = make(bias=True, **shared), torch.randn(2, 26, 24)
    assert layer.can_fuse(x)
    fused = layer.make_cache(2, 32)
    counts = torch.tensor(lengths)
    out = layer(x, cache=fused, lengths=counts)
    layer.backend, chunked = "reference", layer.make_cache(2, 32)
    parts = [layer(x[:, :1], cache=chunked), layer(x[:, 1:], cache=chunked, lengths=counts - 1)]
    for row, wanted, n in zip(out, torch.cat(parts, 1), lengths, strict=True):
        torch.testing.assert_close(row[:n], wanted[:n], rtol=2e-5, atol=2e-5)
    for name, store in fused._stores.items():  # without the slot that takes padding
        torch.testing.assert_close(store[:, :-1], chunked._stores[name][:, :-1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [{}, {"compress_selected_keys": True}], ids=str)
def test_a_layer_without_gradients_gives_the_same_bits(shared: dict[str, Any]) -> None:
    layer, x = make(**shared), torch.randn(2, 40, 24)
    wanted = layer(x)
    assert wanted.requires_grad
    with torch.no_grad():
        found = layer(x)
    assert torch.equal(found, wanted)


def test_keys_that_two_branches_read_are_projected_once() -> None:
    x, flops = torch.randn(1, 10, 24, requires_grad=True), {}
    for tied in (False, True):
        layer = make(head_dim=64, compression="mean", bias=True, compress_selected_keys=tied)
        rope = rope_cache(layer.rotary, x, None, CONFIG)
        with FlopCounterMode(display=False) as counter:
            sum(part.sum() for part in layer.fused_inputs(x, None, rope)).backward()
        flops[tied] = counter.get_total_flops()
    # 2 heads of 64 columns, forwards and for the gradients of x and of the weight
    assert flops[False] - flops[True] == 3 * (2 * 10 * 24 * 128)


def test_shared_keys_and_values_are_stored_once_and_get_separate_gradients() -> None:
    y = torch.randn(2, 20, qkv_split.columns(6, 2, 16, 1), requires_grad=True)
    cos_sin = [torch.randn(20, 1, 8) for _ in range(2)]
    _, ks, vs, kw, vw, _, _ = qkv_split.split_qkv(y, cos_sin, (None,) * 4, [6, 2, 16, 4, 1])
    assert (ks.data_ptr(), vs.data_ptr()) == (kw.data_ptr(), vw.data_ptr())
    assert ks.grad_fn is kw.grad_fn
    assert ks.output_nr != kw.output_nr


def test_gradients_of_selected_keys_that_compression_reads_are_summed_before_rounding() -> None:
    y = torch.zeros(1, 18, qkv_split.columns(2, 1, 16, 2), dtype=torch.bfloat16, requires_grad=True)
    cos_sin = [torch.full((18, 1, 8), 1 + 2.0**-8), torch.zeros(18, 1, 8)]
    found = qkv_split.split_qkv(y, cos_sin, (None,) * 4, [2, 1, 16, 4, 2])
    # rotated, 1 becomes 1 + 2^-8, which rounds to 1 in bf16; another 2^-8 does not
    sizes = (0.0, 1.0, 3.0, 0.0, 5.0, 2.0**-8, 0.0)
    (dy,) = torch.autograd.grad(found, y, [torch.full_like(x, size) for x, size in zip(found, sizes, strict=True)])
    vc, ks, vs, kw, vw = dy[0, :, 32:112].unflatten(1, (5, 16)).unbind(1)
    assert (vc[:16] == 2.0**-8).all()
    assert (ks[:16] == 1 + 2.0**-7).all()
    # of tokens in no chunk only the selected keys were read
    assert not vc[16:].any()
    assert (ks[16:] == 1).all()
    assert (vs == 3).all()
    assert not kw.any()
    assert (vw == 5).all()
    assert not dy[..., :32].any()
    assert not dy[..., 112:].any()


@pytest.mark.parametrize("key_sets", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_operators_pass_opcheck(key_sets: int) -> None:
    sizes = [3, 1, 16, 4, key_sets]
    y = torch.randn(1, 20, qkv_split.columns(3, 1, 16, key_sets))
    cos_sin = [torch.randn(20, 1, 8) for _ in range(2)]
    torch.library.opcheck(torch.ops.tercet.heads_apart.default, (y, *cos_sin, None, None, sizes))
    grads = [torch.randn_like(x) for x in qkv_split.split_qkv(y, cos_sin, (None,) * 4, sizes)]
    torch.library.opcheck(torch.ops.tercet.heads_together.default, (grads, *cos_sin, None, None, sizes))


def test_a_rope_cache_of_another_length_is_refused() -> None:
    y = torch.randn(2, 20, qkv_split.columns(6, 2, 16, 3))
    cos_sin = [torch.randn(19, 1, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"cos has shape \[19, 1, 8\]: 20 tokens and heads of 16"):
        qkv_split.heads_apart(y, *cos_sin, None, None, [6, 2, 16, 4, 3])


TIED = {"compress_selected_keys": True, "compression": "mean", "config": APART}


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ({"shared_kv": True}, None),
        (TIED, [0, 3, 20, 20, 38]),
        # the chunks for compressed tokens are laid out, but nothing reads them
        ({"shared_kv": True, **UNCOMPRESSED}, [0, 3, 20, 20, 38]),
    ],
)
def test_a_layer_with_shared_keys_equals_the_reference(options: dict[str, Any], bounds: list[int] | None) -> None:
    x, found = torch.randn(1, 38, 24), []
    for backend in ("auto", "reference"):
        layer = make(heads=4, bias=True, backend=backend, **options)
        packing = None
        if bounds is not None:
            packing = Packing(torch.tensor(bounds, dtype=torch.int32), 38, 9, layer.config)
        leaf = x.clone().requires_grad_()
        out = layer(leaf, packing)
        assert layer.routes["selected"] == ("triton" if backend == "auto" else "reference")
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found.append([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], noise)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_layers_that_the_kernel_does_not_support_use_separate_projections() -> None:
    norm = {"qk_norm": True}
    for options in (norm, norm | {"compress_selected_keys": True}, {"value_dim": 8}, {"backend": "reference"}):
        assert not make(**options).can_fuse(torch.randn(1, 40, 24)), options
    for options in ({"shared_kv": True}, {"heads": 32, "kv_heads": 32}):
        assert make(**options).can_fuse(torch.randn(1, 40, 24)), options


class Adapted(torch.nn.Linear):
    """Like a LoRA adapter: it computes more than its weight says."""

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


NAMES = ["q_proj", "kv_proj", "gate.proj", "o_proj", "compress_k.up", "compress_v.down"]
CHANGES = [replace, hook, hook_before, parametrize]
X = torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))


def changes() -> Iterator[Any]:
    """Every change of every layer, with and without the output projection in the operator (not keep_sum).

    One change each of the layers, and all of o_proj, are quick.
    """
    for (i, name), (j, change), keep_sum in product(enumerate(NAMES), enumerate(CHANGES), (True, False)):
        quick = keep_sum == ((i + j) % 2 == 0) and (name == "o_proj" or j == i % len(CHANGES))
        yield pytest.param(change, name, keep_sum, marks=[] if quick else pytest.mark.slow)


@cache
def unchanged(backend: str, keep_sum: bool) -> torch.Tensor:
    layer = make(backend=backend)
    layer.keep_sum = keep_sum
    return layer(X)


@pytest.mark.parametrize(("change", "name", "keep_sum"), list(changes()))
def test_replaced_and_hooked_linear_layers_are_called_on_every_backend(
    change: Callable[[NativeSparseAttention, str], None], name: str, keep_sum: bool
) -> None:
    outs = []
    for backend in ("auto", "reference"):
        layer = make(backend=backend)
        layer.keep_sum = keep_sum
        change(layer, name)
        outs.append(layer(X))
        assert layer.routes["selected"] == ("triton" if backend == "auto" else "reference")
        assert not torch.allclose(outs[-1], unchanged(backend, keep_sum), atol=1e-3)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_an_adapted_layer_compiles_to_one_graph() -> None:
    layer, x = make(), torch.randn(1, 20, 24)
    replace(layer, "kv_proj")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))

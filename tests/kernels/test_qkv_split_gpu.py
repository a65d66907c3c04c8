"""Around the attention kernels on a GPU: the split of the fused projection equals separate projections, bitwise from
run to run; the gradient of SwiGLU; gradients of a compiled layer, its output projection included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tercet
from rounding import check_as_near, distance
from tercet.attention.layout import Packing
from tercet.bench.attention import relative_error
from tercet.model.layers import NativeSparseAttention
from tercet.model.rope import rope_cache

pytestmark = pytest.mark.gpu
BOUNDS = [0, 13, 2000, 2000, 4111, 5000]


def made(layer: NativeSparseAttention, x: torch.Tensor, packing: Packing | None, *, one: bool) -> list[torch.Tensor]:
    """What the operator takes and, for random gradients of it, those of x and the parameters."""
    leaf = x.clone().requires_grad_()
    rope = rope_cache(layer.rotary, x, packing, layer.config)
    project = NativeSparseAttention.fused_inputs if one else NativeSparseAttention.separate_inputs
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        parts = [part for part in project(layer, leaf, packing, rope) if part is not None]
    noise = torch.Generator(device="cuda").manual_seed(1)
    grads = [torch.randn(p.shape, device="cuda", generator=noise).to(p.dtype) for p in parts]
    used = [p for n, p in layer.named_parameters() if not n.startswith("o_proj")]
    return [*parts, *torch.autograd.grad(parts, [leaf, *used], grads)]


# m7c's: blocks that do not overlap, chosen by the mean of the keys that will be read
TIED: dict[str, Any] = {"compress_selected_keys": True, "compression": "mean", "config": tercet.NSAConfig(16)}
TWO_BRANCHES = {"branches": ("selected", "window"), "selector": "own"}
SHARED: list[dict[str, Any]] = [{}, {"shared_kv": True}, {"compress_selected_keys": True}, TIED, TWO_BRANCHES]
NAMES = ["apart", "shared", "tied", "m7c", "two branches"]


SIZES, BF16, FP32 = [(12, 2, 64), (6, 1, 96), (16, 4, 128), (32, 32, 32)], (torch.bfloat16, 1e-2), (torch.float32, 1e-4)


@pytest.mark.parametrize(
    ("heads", "groups", "size", "shared", "packed", "dtype", "limit"),
    [
        *((*SIZES[0], shared, packed, *BF16) for shared in SHARED for packed in (False, True)),
        *((*size, {}, packed, *FP32) for size in SIZES[1:] for packed in (False, True)),
    ],
)
def test_one_product_is_what_several_give(
    heads: int, groups: int, size: int, shared: dict[str, Any], packed: bool, dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    layer = NativeSparseAttention(256, heads, groups, size, **shared).cuda()
    layer.init_weights(0.05, 0.05)
    for parameter in layer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(1 if packed else 3, 5000, 256, device="cuda", dtype=dtype)
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")
    packing = Packing(bounds, 5000, 312, layer.config) if packed else None
    found, wanted = (made(layer, x, packing, one=one) for one in (True, False))
    again = made(layer, x, packing, one=True)
    assert max(relative_error(a, b) for a, b in zip(found, wanted, strict=True)) < limit
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_keys_that_two_branches_read_take_the_memory_of_one() -> None:
    """The product is narrower by the compressed branch's keys, and no more than without the tie is kept of it."""
    x = torch.randn(1, 65536, 256, device="cuda", dtype=torch.bfloat16)
    kept, most = {}, {}
    for tied in (False, True):
        layer = NativeSparseAttention(256, 12, 2, 64, **TIED | {"compress_selected_keys": tied}).cuda()
        rope = rope_cache(layer.rotary, x, None, layer.config)
        for _ in range(2):  # the second time nothing is set up
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                parts = layer.fused_inputs(x, None, rope)
            after = torch.cuda.memory_stats()
            kept[tied] = after["requested_bytes.all.current"] - before
            most[tied] = after["requested_bytes.all.peak"] - before
            del parts
    assert kept[True] <= kept[False]
    assert most[True] <= most[False] - 65536 * 128 * 2


def test_swiglus_gradient_is_that_of_the_formula() -> None:
    from tercet.model.swiglu import swiglu_gradient

    y, dh = torch.randn(777, 4100, device="cuda"), torch.randn(777, 2050, device="cuda")
    exact = y.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    (wanted,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, exact, dh.double())
    for dtype, limit in ((torch.bfloat16, 5e-3), (torch.float32, 1e-6)):
        assert relative_error(swiglu_gradient(y.to(dtype), dh.to(dtype)), wanted) < limit


class Layer:
    """A layer and its compiled copy, which share parameters. No document has more blocks than are selected, so that
    selection cannot depend on rounding (random keys have many near-ties)."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.layer = NativeSparseAttention(256, 12, 2, 64, bias=True, **options).cuda()
        self.layer.keep_sum = False
        torch._dynamo.reset()
        self.compiled = torch.compile(self.layer, fullgraph=True)
        self.x = torch.randn(1, 1024, 256, device="cuda")
        # as the trainer does it: where documents stand is worked out before, and not compiled
        bounds = torch.tensor([0, 300, 1024], dtype=torch.int32, device="cuda")
        self.packing = Packing(bounds, 1024, 64, self.layer.config)

    def gradients(self, *, compiled: bool, narrow: bool = True) -> dict[str, torch.Tensor]:
        """The result, and the gradients of x and of every parameter."""
        leaf = self.x.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=narrow):
            out = (self.compiled if compiled else self.layer)(leaf, self.packing)
        noise = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        named = {"x": leaf, **dict(self.layer.named_parameters())}
        found = torch.autograd.grad(out, list(named.values()), noise.to(out.dtype))
        return {"out": out.detach(), **dict(zip(named, found, strict=True))}


@pytest.mark.parametrize("options", SHARED, ids=NAMES)
def test_a_compiled_layer_has_the_gradients_of_the_same_uncompiled(options: dict[str, Any]) -> None:
    case = Layer(**options)
    for parameter in case.layer.parameters():
        if not parameter.any():  # where φ and the gates begin, many gradients are zero
            torch.nn.init.normal_(parameter, std=0.05)
    exact = case.gradients(compiled=False, narrow=False)
    in_fp32 = case.gradients(compiled=True, narrow=False)
    for name, wanted in exact.items():
        assert distance(in_fp32[name], wanted) < 1e-4, name
    check_as_near(case.gradients(compiled=True), case.gradients(compiled=False), exact)

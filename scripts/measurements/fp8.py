"""Would FP8 linear layers pay? One layer of each shape of the 1b preset, forward and backward, bf16 against float8.

Only a measurement: Tercet trains in bf16. Weights are fp32, as in training; casts, amax and transposed copies are part
of the time. Per-tensor scaling: e4m3 forward, e5m2 for the gradient of the output. Row-wise scaling: e4m3 everywhere,
one scale per row and matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from measurements.part import Warmup, compile_job, free, raise_clocks
from tercet.bench.attention import relative_error
from tercet.bench.timing import milliseconds
from tercet.config.load import load
from tercet.model.cost import attention_matrices

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PRESET, TOKENS = "1b", 65536
BUDGET = 0.2


def fp8(quick: bool) -> Iterator[dict[str, Any]]:
    raise_clocks()
    yield from _rows({"toy": (32, 48)} if quick else layers(), 64 if quick else TOKENS, BUDGET)


def layers() -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a block's linear layers; the largest first."""
    model = load(preset=PRESET).config.model
    heads = model.heads * model.head_value_dim
    qkv = attention_matrices(model, "nsa") // model.dim - heads  # and gates
    return {
        "FFN up": (model.dim, 2 * model.ffn_dim), "FFN down": (model.ffn_dim, model.dim),
        "QKV and gates": (model.dim, qkv), "attention output": (heads, model.dim),
    }  # fmt: skip


def _rows(shapes: dict[str, tuple[int, int]], tokens: int, budget: float) -> Iterator[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (inputs, outputs) in shapes.items():
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(tokens, inputs, device=device, generator=generator).bfloat16()
        w = torch.randn(outputs, inputs, device=device, generator=generator) * inputs**-0.5
        g = torch.randn(tokens, outputs, device=device, generator=generator).bfloat16()
        flops = 6 * tokens * inputs * outputs
        row: dict[str, Any] = {"layer": name, "inputs": inputs, "outputs": outputs, "tokens": tokens, "preset": PRESET}
        expected = bf16(x, w, g)
        row |= _figures("bf16", milliseconds(lambda x=x, w=w, g=g: bf16(x, w, g), budget), flops)
        for scaling, quantize in (("tensor", per_tensor), ("row", row_wise)):
            try:
                found = matrix_products(quantize(x, w, g))
                row[f"{scaling}_error"] = max(map(relative_error, found, expected))
                whole = milliseconds(lambda x=x, w=w, g=g, q=quantize: matrix_products(q(x, w, g)), budget)
                row |= _figures(scaling, whole, flops)
                cast = quantize(x, w, g)
                alone = milliseconds(lambda cast=cast: matrix_products(cast), budget)
                row |= _figures(f"{scaling}_matmul", alone, flops)
            except (RuntimeError, ValueError) as error:  # this torch or device does not support it
                row[f"{scaling}_rejected"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        yield row
        del x, w, g, expected
        free()


def _figures(name: str, ms: float, flops: int) -> dict[str, float]:
    return {f"{name}_ms": ms, f"{name}_tflops": flops / ms / 1e9}


def bf16(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer under autocast: output, gradients of input and weight."""
    w = w.bfloat16()
    return x @ w.t(), g @ w, g.t() @ x


class Operand(NamedTuple):
    values: Tensor
    scale: Tensor


class Product(NamedTuple):
    """values [M, K] times those of `right`, [N, K], transposed: both contiguous along K, as _scaled_mm wants it."""

    left: Operand
    right: Operand
    fast: bool  # less exact accumulation, usual in the forward pass


def matrix_products(products: list[Product]) -> list[Tensor]:
    return [
        torch._scaled_mm(
            left.values, right.values.t(), left.scale, right.scale.t() if right.scale.dim() else right.scale,
            out_dtype=torch.bfloat16, use_fast_accum=fast,
        )
        for left, right, fast in products
    ]  # fmt: skip


def per_tensor(x: Tensor, w: Tensor, g: Tensor) -> list[Product]:
    cast = _on_gpu(_cast_both_ways)
    return _products(cast(x, E4M3), cast(w, E4M3), cast(g, E5M2))


def row_wise(x: Tensor, w: Tensor, g: Tensor) -> list[Product]:
    cast = _on_gpu(_cast_rows_both_ways)
    return _products(cast(x, E4M3), cast(w, E4M3), cast(g, E4M3))


def _products(*cast: tuple[Tensor, ...]) -> list[Product]:
    """Those of a linear layer's forward and backward pass. cast: of x, w and g, see _cast_both_ways."""
    (x, xt), (w, wt), (g, gt) = ((Operand(*found[:2]), Operand(*found[2:])) for found in cast)
    return [Product(x, w, True), Product(g, wt, False), Product(gt, xt, False)]


def _cast_both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(x, its scale, x transposed, its scale): one scale."""
    values, scale = _cast(x, x.abs().amax(), dtype)
    return values, scale, values.t().contiguous(), scale


def _cast_rows_both_ways(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(x, its scales, x transposed, its scales): one scale per row of each."""
    size = x.abs()
    rows, scale = _cast(x, size.amax(1, keepdim=True), dtype)
    columns, other = _cast(x, size.amax(0, keepdim=True), dtype)
    return rows, scale, columns.t().contiguous(), other.view(-1, 1)


def _cast(x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    most = torch.finfo(dtype).max
    scale = largest.float().clamp(min=1e-12) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _on_gpu(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for any size on a GPU, where eager casts would be several passes over memory."""
    if not torch.cuda.is_available():
        return cast
    if cast not in _COMPILED:
        _COMPILED[cast] = torch.compile(cast, dynamic=True)
    return _COMPILED[cast]


def warmups() -> list[Warmup]:
    return [compile_job("fp8", "casts", 20, 30.0)]


def compile_casts(_: str) -> None:
    list(_rows(layers(), TOKENS, 0.0))

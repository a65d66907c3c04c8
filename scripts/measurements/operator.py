"""The operator against dense attention (cuDNN), with random, recorded and smooth inputs, and over the length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from measurements.part import CORRELATION, Warmup, compile_job, free, raise_clocks
from tercet.attention.config import NSAConfig
from tercet.attention.functional import nsa_attention
from tercet.bench import attention

SHAPES = ("P64k", "C8x2k", "P8k", "C1x16k", "C4x4k", "P16k", "P32k", "M4x4k")


def operator(quick: bool) -> Iterator[dict[str, Any]]:
    # By importance: a part that is cut off loses the last kind.
    for row in _rows(SHAPES if not quick else toy_shapes(), ("random", "recorded", "smooth"), quick):
        row.pop("layers", None)  # `tercet bench attention --inputs recorded` prints each layer
        yield row


def growth(quick: bool) -> Iterator[dict[str, Any]]:
    shapes = [f"C1x{n}k" for n in (8, 16, 32, 64, 128, 256, 512, 1024)]
    yield from _rows(shapes if not quick else toy_shapes(), ("random",), quick, graph=False, dense_limit=131072)


def _rows(
    shapes: Sequence[str], kinds: Sequence[str], quick: bool, *, graph: bool = True, dense_limit: int = 65536
) -> Iterator[dict[str, Any]]:
    """Rows of `tercet bench attention`, all shapes with one kind of inputs before the next kind.

    graph: time random inputs as a CUDA graph too.
    """
    torch.autograd.set_multithreading_enabled(False)  # as in `tercet bench attention`
    options = attention.Options(CORRELATION, ("math" if quick else "cudnn",), dense_limit, rows=8, budget=0.25)
    dense: dict[str, dict[str, Any] | None] = {}
    raise_clocks()
    for kind in kinds:
        options = replace(options, graph=graph and kind == "random")
        for name in shapes:
            row = attention.bench(name, kind, NSAConfig(), options, dense.get(name))
            row["tokens"] = attention.SHAPES[name].T
            found = {k: v for k, v in row.items() if k.startswith(("cudnn_", "math_")) and "graph" not in k}
            dense[name] = found or None
            yield row
            free()


def toy_shapes() -> list[str]:
    """Register shapes small enough for a CPU."""
    toys = {"C8x2k": attention.Shape(1, 256, 4, 2, 32), "P8k": attention.Shape(1, 320, 4, 1, 32)}
    attention.SHAPES.update(toys)
    return list(toys)


def operator_warmups() -> list[Warmup]:
    jobs = (
        ("P64k", 14.0), ("P32k", 8.0), ("P16k,P8k", 5.0), ("C8x2k,C4x4k", 3.0), ("C1x16k", 4.0), ("M4x4k", 3.0)
    )  # fmt: skip
    return [compile_job("operator", names, 40, gib) for names, gib in jobs]


def growth_warmups() -> list[Warmup]:
    jobs = (("C1x8k,C1x16k,C1x32k", 4.0), ("C1x64k,C1x128k", 6.0), ("C1x256k,C1x512k,C1x1024k", 20.0))
    return [compile_job("growth", names, 40, gib) for names, gib in jobs]


def compile_shapes(names: str) -> None:
    for name in names.split(","):
        shape = attention.SHAPES[name]
        for tokens, batch in ((shape.T, shape.B), (min(shape.T, 4096), 1)):
            compile_shape(attention.Shape(batch, tokens, shape.H, shape.G, shape.D))


def compile_shape(shape: attention.Shape) -> None:
    leaves = [t.requires_grad_() for t in attention.make_inputs(shape, NSAConfig(), "random", 0.0)]
    out, _ = nsa_attention(*leaves, config=NSAConfig(), return_aux=True)
    torch.autograd.grad(out, leaves, torch.randn_like(out))
    torch.cuda.synchronize()

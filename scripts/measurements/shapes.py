"""The operator over heads, head sizes and odd lengths: is any shape slower than its neighbours predict?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from measurements.operator import compile_shape
from measurements.part import Warmup, compile_job, free, raise_clocks
from tercet.attention.config import NSAConfig
from tercet.attention.functional import nsa_attention
from tercet.bench import attention
from tercet.bench.attention import Shape
from tercet.bench.timing import graphed, measure, milliseconds

HEADS = ((8, 1), (16, 1), (32, 8), (64, 4))  # query heads, KV heads
SIZES = ((64, 64), (96, 96), (128, 128), (192, 128))  # of keys, of values
LENGTHS = (2048, 3001, 8192, 12345, 32768)
DENSE_LENGTHS = (2048, 8192)
TOKENS = 32768
BUDGET = 0.15  # seconds per timing
# Below this many milliseconds the host may be the slower side: the time of a CUDA graph is the kernels' own.
HOST_BOUND_MS = 8.0


def shapes(quick: bool) -> Iterator[dict[str, Any]]:
    torch.autograd.set_multithreading_enabled(False)
    raise_clocks()
    families = [(heads, sizes) for heads in HEADS for sizes in SIZES]
    lengths = LENGTHS
    if quick:
        families, lengths = [((4, 1), (16, 16)), ((4, 2), (24, 16))], (128, 200, 256)
    for (H, G), (D, Dv) in families:
        error: float | None = None
        for length in lengths:
            shape = Shape(max(1, round(TOKENS / length)) if not quick else 1, length, H, G, D, Dv)
            row: dict[str, Any] = {"heads": H, "kv_heads": G, "head": D, "value": Dv, "length": length}
            row["tokens"] = shape.B * length
            try:
                if error is None:  # once for all lengths
                    error = _error(shape)
                row |= {"worst_error": error, "correct": error <= 1e-2}
                row |= _times(shape, dense=length in DENSE_LENGTHS)
            except RuntimeError as failure:  # e.g. out of memory; the other shapes are measured
                row["failed"] = _first_line(failure)
            yield row
        free()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _error(shape: Shape) -> float:
    """Worst relative error of output and gradients against the reference."""
    device, backend = attention._device(), attention._backend()
    found = attention.check_gradients(shape, NSAConfig(), "random", 0.0, backend=backend, device=device)
    return max(found.values())


def _times(shape: Shape, dense: bool) -> dict[str, Any]:
    x = attention.make_inputs(shape, NSAConfig(), "random", 0.0, device=attention._device())
    leaves = [t.requires_grad_() for t in x]
    dout = torch.randn(shape.B, shape.T, shape.H, shape.Dv or shape.D, dtype=x.q.dtype, device=x.q.device)

    def forward() -> torch.Tensor:
        return nsa_attention(*leaves, config=NSAConfig(), backend=attention._backend())

    found: dict[str, Any] = {
        f"nsa_{key}": value for key, value in measure(forward, leaves, dout, False, BUDGET).items()
    }
    found["ms"] = found["nsa_both_ms"]
    if torch.cuda.is_available() and found["ms"] < HOST_BOUND_MS:
        try:
            replay = graphed(lambda: torch.autograd.grad(forward(), leaves, dout))
            found["ms"] = found["nsa_graph_both_ms"] = milliseconds(replay, BUDGET)
        except RuntimeError as failure:
            found["graph_failed"] = _first_line(failure)
    if dense:
        kind = SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH
        known = attention.dense(x, kind, dout, False, BUDGET) or {}  # cuDNN rejects some sizes
        found |= {f"dense_{key}": value for key, value in known.items()}
    return found | {"ms_per_1k_tokens": found["ms"] / (shape.B * shape.T) * 1000}


def warmups() -> list[Warmup]:
    jobs = []
    for H, G in HEADS:
        for D, Dv in SIZES:
            padded = 1 << (D - 1).bit_length()
            jobs.append(compile_job("shapes", f"{H},{G},{D},{Dv}", 90, 1.5 + 8 * H / 64 * padded / 128))
    return jobs


def compile_family(names: str) -> None:
    H, G, D, Dv = map(int, names.split(","))
    compile_shape(Shape(1, 2048, H, G, D, Dv))  # as the check
    for length in LENGTHS:
        compile_shape(Shape(round(TOKENS / length), length, H, G, D, Dv))

"""Benchmark the NSA operator against dense attention (`tercet bench attention`).

Checks correctness first: output and all gradients against the fp32 reference at up to 4,096 tokens, then sampled rows
and their selected blocks against fp64 at full length. A shape that fails gets no speed-up, and the exit code is 1. The
last line of output is one JSON object.

Inputs. "random": q, k and v are independent normal numbers; neighbouring queries select mostly different blocks.
"smooth": q is a first-order autoregression along the sequence; neighbouring queries share about nine blocks in ten (the
share is printed). k and v stay random. The operator computes the selection in both cases.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention import reference
from tercet.attention.config import NSAConfig
from tercet.attention.layout import Span
from tercet.attention.operator import nsa_attention
from tercet.bench.timing import device_name, measure, print_profile
from tercet.doctor.kernels import MIN_EQUAL_BLOCKS, TOLERANCE, compare, relative_error
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import check_known
from tercet.model.config import ModelConfig

CORRELATION = 0.996  # of successive queries in smooth inputs


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H query heads, G KV heads, head size D; Dv: size of value heads, if another."""

    B: int
    T: int
    H: int
    G: int
    D: int
    Dv: int | None = None


@dataclass(frozen=True)
class Options:
    """How to check and time a shape; commands.py describes the fields."""

    dense: Sequence[str] = ("cudnn", "flash")
    dense_limit: int = 65536
    rows: int = 24
    budget: float = 0.6
    profile: bool = False
    graph: bool = True


_HEADS = {"P": (64, 4, 128), "C": (12, 2, 64), "M": (16, 1, 64)}


def shape_of(name: str) -> Shape:
    """P64k, C8x2k, M1x16k: heads, sequences x tokens. Or all numbers, BxTxHxGxD or BxTxHxGxDxDv."""
    sizes = [int(size) for size in name.split("x")] if re.fullmatch(r"\d+(x\d+){4,5}", name) else []
    if match := re.fullmatch(r"([PCM])(?:(\d+)x)?(\d+)k", name):
        sizes = [int(match[2] or 1), int(match[3]) * 1024, *_HEADS[match[1]]]
    if not sizes or min(sizes) < 1 or sizes[2] % sizes[3]:
        raise UsageError(
            f"--shapes {name} is unknown: give P64k, C8x2k, M4x4k or sizes BxTxHxGxD such as 1x8192x64x4x128, H a "
            "multiple of G"
        )
    return Shape(*sizes)


class Inputs(NamedTuple):
    """The operator's inputs, in its order."""

    q: Tensor  # [B, T, H, D]
    kc: Tensor
    vc: Tensor
    ks: Tensor
    vs: Tensor
    kw: Tensor
    vw: Tensor
    gates: Tensor  # [B, T, H, 3]


def make_inputs(
    shape: Shape,
    config: NSAConfig,
    kind: str,
    correlation: float = CORRELATION,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cuda",
) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(tokens: int, heads: int, size: int) -> Tensor:
        return torch.randn(shape.B, tokens, heads, size, device=device, dtype=dtype, generator=generator)

    compressed, sizes = config.num_compressed(shape.T), (shape.D, shape.Dv or shape.D)
    q = normal(shape.T, shape.H, shape.D)
    if kind == "smooth":
        q = smooth(q, correlation)
    keys = [normal(n, shape.G, size) for n in (compressed, shape.T, shape.T) for size in sizes]
    gates = torch.rand(shape.B, shape.T, shape.H, 3, device=device, dtype=dtype, generator=generator)
    kc, vc, ks, vs, kw, vw = keys
    return Inputs(q, kc, vc, ks, vs, kw, vw, gates)


def smooth(noise: Tensor, correlation: float) -> Tensor:
    """x_t = ρ x_{t-1} + √(1-ρ²) noise_t along dim 1, by doubling: after k rounds x_t sums its last 2^k terms."""
    out = torch.empty_like(noise)
    for b in range(noise.shape[0]):
        for h in range(noise.shape[2]):
            x = noise[b, :, h].float()
            x[1:] *= (1 - correlation**2) ** 0.5
            step, weight = 1, correlation
            while step < x.shape[0] and weight > 1e-8:
                x[step:] += weight * x[:-step].clone()
                step, weight = 2 * step, weight * weight
            out[b, :, h] = x.to(noise.dtype)
    return out


# ------------------------------------------------------------ correctness


def check_rows(x: Inputs, config: NSAConfig, out: Tensor, indices: Tensor, rows: Sequence[int]) -> tuple[float, float]:
    """Compare rows at full length with the reference in fp64: (worst relative error, share of equal blocks)."""
    worst, same, slots = 0.0, 0, 0
    for t in rows:
        row, span = (slice(t % x.q.shape[0], t % x.q.shape[0] + 1), slice(t, t + 1)), Span(t)
        seen = (row[0], slice(config.num_compressed(t + 1)))
        q, gates, chosen = x.q[row].double(), x.gates[row].double(), indices[row]
        kc, vc = x.kc[seen].double(), x.vc[seen].double()
        compressed, best, _ = reference.compressed_attention(q, kc, vc, config, span=span)
        assert best is not None
        ks, vs, kw, vw = (keys[row[0], : t + 1].double() for keys in (x.ks, x.vs, x.kw, x.vw))
        outs = {
            "compressed": compressed,
            "selected": reference.selected_attention(q, ks, vs, chosen, config, None, span),
            "window": reference.window_attention(q, kw, vw, config, None, span),
        }
        worst = max(worst, relative_error(out[row], reference.combine(gates, outs)))
        wanted = best >= 0
        same += int(((best[..., None] == chosen[..., None, :]).any(-1) & wanted).sum())
        slots += int(wanted.sum())
    return worst, same / slots


def agreement(indices: Tensor) -> float:
    """Share of a query's blocks that the query before it selected too, over the second half of the sequence."""
    T = indices.shape[1]
    now, before = indices[:, T // 2 + 1 :], indices[:, T // 2 : -1]
    kept = (now.unsqueeze(-1) == before.unsqueeze(-2)).any(-1) & (now >= 0)
    return (kept.sum() / (now >= 0).sum()).item()


# ------------------------------------------------------------ time


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _backend() -> str:
    return "triton" if torch.cuda.is_available() else "reference"


_DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,  # dry runs on a CPU
}


def _time_dense(x: Inputs, label: str, dout: Tensor, graph: bool, budget: float) -> dict[str, float]:
    """Time causal `scaled_dot_product_attention` on this backend; nothing if the backend rejects the shape."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.ks, x.vs)]

    def forward() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        with sdpa_kernel(_DENSE[label]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    try:
        found = measure(forward, leaves, dout, graph, budget)
    except RuntimeError as error:
        print(f"  {label}: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    return {f"{label}_{key}": value for key, value in found.items()}


@lru_cache
def _compared(shape: Shape, config: NSAConfig) -> tuple[float, float, float]:
    """Cached: lengths that share the same heads are checked once."""
    model = ModelConfig(nsa=config, heads=shape.H, kv_heads=shape.G, head_dim=shape.D, value_dim=shape.Dv)
    return compare(model, torch.bfloat16, device=_device(), length=shape.T, backend=_backend(), packed=False)


def _check(x: Inputs, shape: Shape, config: NSAConfig, rows: int) -> dict[str, Any]:
    """Errors of the operator on these inputs."""
    *errors, equal = _compared(replace(shape, B=1, T=min(shape.T, 4096)), config)
    with torch.no_grad():
        out, aux = nsa_attention(*x, config=config, backend=_backend(), return_aux=True)
    assert aux.block_indices is not None
    at = [config.compress_block, *torch.linspace(shape.T // 3, shape.T - 1, rows).long().tolist()]
    row_error, same = check_rows(x, config, out, aux.block_indices, at)
    correct = max(errors) <= TOLERANCE["bfloat16"] and row_error <= 1.5e-2 and min(same, equal) >= MIN_EQUAL_BLOCKS
    return {
        "worst_error": max(errors), "row_error": row_error, "slots_equal": min(same, equal),
        "agreement": agreement(aux.block_indices), "correct": correct,
    }  # fmt: skip


def bench(
    name: str, kind: str, config: NSAConfig, options: Options, dense: dict[str, float] | None = None
) -> dict[str, Any]:
    """Check and time one shape with one kind of inputs, random or smooth.

    dense: timings of dense attention at this shape, to copy instead of measuring them again.
    """
    shape = shape_of(name)
    graph = options.graph and shape.D <= 64 and torch.cuda.is_available()
    x = make_inputs(shape, config, kind, device=_device())
    row: dict[str, Any] = {"shape": name, "inputs": kind, **_check(x, shape, config, options.rows)}
    if not row["correct"]:
        return row
    leaves = [t.detach().requires_grad_() for t in x]
    dout = torch.randn(shape.B, shape.T, shape.H, shape.Dv or shape.D, dtype=x.q.dtype, device=x.q.device)

    def forward() -> Tensor:
        return nsa_attention(*leaves, config=config, backend=_backend())

    row |= {f"nsa_{key}": ms for key, ms in measure(forward, leaves, dout, graph, options.budget).items()}
    if options.profile:
        print_profile(lambda: torch.autograd.grad(forward(), leaves, dout))
    if dense is None:
        dense = {}
        for label in options.dense if options.dense_limit >= shape.T else ():
            dense |= _time_dense(x, label, dout, graph, options.budget)
    row |= dense
    for key, ratio in (("both_ms", "speedup"), ("graph_both_ms", "graph_speedup")):
        if known := [dense[f"{label}_{key}"] for label in _DENSE if f"{label}_{key}" in dense]:
            row[ratio] = min(known) / row[f"nsa_{key}"]
    return row


_COLUMNS = (
    ("shape", "shape"), ("inputs", "inputs"), ("agreement", "agree"), ("nsa_forward_ms", "nsa fwd"),
    ("nsa_both_ms", "nsa f+b"), ("cudnn_forward_ms", "cudnn fwd"), ("cudnn_both_ms", "cudnn f+b"),
    ("flash_both_ms", "flash f+b"), ("speedup", "× dense"), ("nsa_graph_both_ms", "nsa graph"),
    ("cudnn_graph_both_ms", "cudnn graph"), ("graph_speedup", "× graph"), ("nsa_peak_gib", "nsa GiB"),
    ("cudnn_peak_gib", "cudnn GiB"), ("worst_error", "error"), ("slots_equal", "slots"),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(label.rjust(max(7, len(label))) for _, label in _COLUMNS)]
    for row in rows:
        cells = []
        for key, label in _COLUMNS:
            value = row.get(key, "–" if row["correct"] else "WRONG")
            if isinstance(value, float):
                value = f"{value:.{ {'slots_equal': 5, 'worst_error': 4}.get(key, 3) }f}"
            cells.append(str(value).rjust(max(7, len(label))))
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def main(names: Sequence[str], kinds: Sequence[str], options: Options) -> int:
    check_known("--inputs", kinds, ("random", "smooth"))
    check_known("--dense", options.dense, ("cudnn", "flash"), may_be_empty=True)
    if not [shape_of(name) for name in names]:
        raise UsageError("--shapes is empty: give P64k, C8x2k, …")
    if not torch.cuda.is_available():
        raise TercetError("tercet bench attention needs a CUDA device and none is visible")
    config = NSAConfig()
    # A model's backward switches to autograd's thread once, not once per operator.
    torch.autograd.set_multithreading_enabled(False)
    print(f"{device_name()}, torch {torch.__version__}, bf16, {config}")
    results: list[dict[str, Any]] = []
    for name in names:
        dense = None  # timed once per shape
        for kind in kinds:
            row = bench(name, kind, config, options, dense)
            if row["correct"]:
                dense = {key: value for key, value in row.items() if key.startswith(("cudnn_", "flash_"))}
            results.append(row)
            torch.cuda.empty_cache()
            print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))
    correct = all(r["correct"] for r in results)
    print(json.dumps({"bench": "attention", "device": device_name(), "correct": correct, "results": results}))
    return 0 if correct else 1

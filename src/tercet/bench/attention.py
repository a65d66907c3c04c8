"""Benchmark the operator against dense attention (`tercet bench attention`): NSA, or block-sparse attention by its own
queries and keys (`--scorer own`). The choice of blocks is part of the time.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention import reference
from tercet.attention.config import NSAConfig
from tercet.attention.layout import Span
from tercet.attention.operator import block_sparse_attention, nsa_attention
from tercet.attention.selector import (
    TokenScorer,
    choose_blocks,
    own_scorer,
    pool_keys,
    select_by_keys,
    slow_channels,
)
from tercet.attention.spec import AttentionSpec, block_sparse
from tercet.bench.timing import device_name, measure, milliseconds, print_profile
from tercet.doctor.kernels import MIN_EQUAL_BLOCKS, TOLERANCE, compare, relative_error
from tercet.errors import TercetError, UsageError
from tercet.inference.arguments import check_known
from tercet.model.config import ModelConfig
from tercet.terminal import Columns, table

# A model's settings for attention by its own queries and keys.
OWN: dict[str, Any] = {
    "gate": "none", "branches": ("selected",), "shared_kv": True, "compression": "mean", "selector": "own",
}  # fmt: skip
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


class Options(NamedTuple):
    """How to check and time a shape; commands.py describes the fields."""

    scorer: str = "compressed"
    exact_groups: int | None = None
    dense: Sequence[str] = ("cudnn", "flash")
    rows: int = 24
    budget: float = 0.6
    profile: bool = False


_HEADS = {"P": (64, 4, 128), "C": (12, 2, 64), "M": (16, 1, 64), "L": (32, 8, 128)}
SHAPES = {"compressed": ("P8k", "P64k", "C8x2k", "C4x4k", "C1x16k"), "own": ("L16k", "L32k", "L64k", "L128k")}


def shape_of(name: str) -> Shape:
    """P64k, C8x2k, M1x16k: heads, sequences x tokens. Or all numbers, BxTxHxGxD or BxTxHxGxDxDv."""
    sizes = [int(size) for size in name.split("x")] if re.fullmatch(r"\d+(x\d+){4,5}", name) else []
    if match := re.fullmatch(r"([PCML])(?:(\d+)x)?(\d+)k", name):
        sizes = [int(match[2] or 1), int(match[3]) * 1024, *_HEADS[match[1]]]
    if not sizes or min(sizes) < 1 or sizes[2] % sizes[3]:
        raise UsageError(
            f"--shapes {name} is unknown: give P64k, L64k, C8x2k, M4x4k or sizes BxTxHxGxD such as 1x8192x64x4x128, H "
            "a multiple of G"
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


def check_rows(
    x: Inputs, config: NSAConfig, out: Tensor, indices: Tensor, rows: Sequence[int], own: AttentionSpec | None = None
) -> tuple[float, float]:
    """Compare rows at full length with the reference in fp64: (worst relative error, share of equal blocks). own: the
    form of attention whose own queries and keys choose, instead of NSA."""
    worst, same, slots = 0.0, 0, 0
    for t in rows:
        row, span = (slice(t % x.q.shape[0], t % x.q.shape[0] + 1), slice(t, t + 1)), Span(t)
        q, chosen = x.q[row].double(), indices[row]
        ks, vs, kw, vw = (keys[row[0], : t + 1].double() for keys in (x.ks, x.vs, x.kw, x.vw))
        expected = reference.selected_attention(q, ks, vs, chosen, config, None, span)
        if own is not None:
            best = _choose_exactly(_own_scores(x.q[row], x.ks[row[0], : t + 1], own), config, span)
        else:
            seen = (row[0], slice(config.num_compressed(t + 1)))
            kc, vc = x.kc[seen].double(), x.vc[seen].double()
            compressed, selected, _ = reference.compressed_attention(q, kc, vc, config, span=span)
            assert selected is not None
            window = reference.window_attention(q, kw, vw, config, None, span)
            outs = {"compressed": compressed, "selected": expected, "window": window}
            best, expected = selected, reference.combine(x.gates[row].double(), outs)
        worst = max(worst, relative_error(out[row], expected))
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


def _own_scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> TokenScorer:
    """The queries and keys that choose blocks: the slowest 16 planes."""
    return own_scorer(q, k, slow_channels(q.shape[-1]), spec)


def _choose_exactly(scorer: TokenScorer, config: NSAConfig, span: Span) -> Tensor:
    """In fp64; the KV heads that choose by means of keys come last, and read the means that the kernels read."""
    best = reference.select_by_tokens(scorer.queries.double(), scorer.keys.double(), config, None, span, "own")
    if (pooled := scorer.pooled) is None:
        return best
    means = pool_keys(pooled.keys, pooled.config).double()
    others = select_by_keys(
        pooled.queries.double(), means, config=pooled.config, packing=None, backend="reference", span=span
    )
    return torch.cat([best, others], 2)


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


def _time_dense(qkv: Sequence[Tensor], label: str, dout: Tensor, budget: float) -> dict[str, float]:
    """Time causal `scaled_dot_product_attention` on this backend; nothing if the backend rejects the shape."""
    leaves = [t.detach().requires_grad_() for t in qkv]

    def forward() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        with sdpa_kernel(_DENSE[label]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    try:
        found = measure(forward, leaves, dout, budget)
    except RuntimeError as error:
        print(f"  {label}: {str(error).splitlines()[0]}", file=sys.stderr)
        return {}
    return {f"{label}_{key}": value for key, value in found.items()}


@lru_cache
def _compared(shape: Shape, config: NSAConfig, scorer: str) -> tuple[float, float, float]:
    """Cached: lengths that share the same heads are checked once."""
    sizes: dict[str, Any] = {"heads": shape.H, "kv_heads": shape.G, "head_dim": shape.D, "value_dim": shape.Dv}
    model = ModelConfig(nsa=config, **sizes, **(OWN if scorer == "own" else {}))
    return compare(model, torch.bfloat16, device=_device(), length=shape.T, backend=_backend(), packed=False)


def bench(
    name: str, kind: str, config: NSAConfig, options: Options, dense: dict[str, float] | None = None
) -> dict[str, Any]:
    """Check and time one shape with one kind of inputs, random or smooth.

    dense: timings of dense attention at this shape, to copy instead of measuring them again.
    """
    shape, own = shape_of(name), options.scorer == "own"
    x = make_inputs(shape, config, kind, device=_device())
    operator: Callable[..., Any] = partial(nsa_attention, config=config, backend=_backend())
    read, label, spec = list(x), "nsa", None
    if own:
        exact = None if options.exact_groups is None else tuple(range(options.exact_groups))
        spec, channels = block_sparse(config, "own", 0, exact), slow_channels(shape.D)
        operator = partial(
            block_sparse_attention, config=config, backend=_backend(), scorer="own", score_channels=channels,
            exact_groups=exact,
        )  # fmt: skip
        read, label = [x.q, x.ks, x.vs], "own"
    *errors, equal = _compared(replace(shape, B=1, T=min(shape.T, 4096)), config, options.scorer)
    with torch.no_grad():
        out, aux = operator(*read, return_aux=True)
    at = [config.compress_block, *torch.linspace(shape.T // 3, shape.T - 1, options.rows).long().tolist()]
    row_error, same = check_rows(x, config, out, aux.block_indices, at, spec)
    same = min(same, equal)
    correct = max(errors) <= TOLERANCE["bfloat16"] and row_error <= 1.5e-2 and same >= MIN_EQUAL_BLOCKS
    row: dict[str, Any] = {
        "shape": name, "inputs": kind, "scorer": options.scorer, "exact_groups": options.exact_groups,
        "worst_error": max(errors), "row_error": row_error, "slots_equal": same,
        "agreement": agreement(aux.block_indices), "correct": correct,
    }  # fmt: skip
    if not correct:
        return row
    leaves = [t.detach().requires_grad_() for t in read]
    dout = torch.randn(shape.B, shape.T, shape.H, shape.Dv or shape.D, dtype=x.q.dtype, device=x.q.device)

    def forward() -> Tensor:
        return operator(*leaves)

    row |= {f"{label}_{key}": ms for key, ms in measure(forward, leaves, dout, options.budget).items()}
    if spec is not None:
        row["choice_ms"] = milliseconds(partial(_choose_own, x.q, x.ks, spec), options.budget)
    if options.profile:
        print_profile(lambda: torch.autograd.grad(forward(), leaves, dout))
    if dense is None:
        dense = {}
        for backend in options.dense:
            dense |= _time_dense((x.q, x.ks, x.vs), backend, dout, options.budget)
    row |= dense
    for key, ratio in (("forward_ms", "forward_speedup"), ("both_ms", "speedup")):
        if known := [dense[f"{backend}_{key}"] for backend in _DENSE if f"{backend}_{key}" in dense]:
            row[ratio] = min(known) / row[f"{label}_{key}"]
    return row


@torch.no_grad()
def _choose_own(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    return choose_blocks(_own_scores(q, k, spec), config=spec.blocks, backend=_backend())


COLUMNS: Columns = {
    "shape": ("shape", str), "inputs": ("inputs", str), "correct": ("check", lambda ok: "ok" if ok else "WRONG"),
    **{f"{name}_{key}": (f"{name} {about}", "{:.3f}".format) for name in ("nsa", "own", "cudnn", "flash")
       for key, about in (("forward_ms", "fwd, ms"), ("both_ms", "f+b, ms"), ("peak_gib", "GiB"))},
    "choice_ms": ("choice, ms", "{:.3f}".format), "forward_speedup": ("× fwd", "{:.2f}".format),
    "speedup": ("× f+b", "{:.2f}".format), "agreement": ("agree", "{:.3f}".format),
    "worst_error": ("error", "{:.4f}".format), "slots_equal": ("slots", "{:.5f}".format),
}  # fmt: skip


def main(names: Sequence[str], kinds: Sequence[str], options: Options) -> int:
    names = names or SHAPES[options.scorer]
    check_known("--inputs", kinds, ("random", "smooth"))
    check_known("--dense", options.dense, ("cudnn", "flash"), may_be_empty=True)
    for name in names:
        if options.exact_groups is not None and not 1 <= options.exact_groups <= shape_of(name).G:
            raise UsageError(f"--exact_groups {options.exact_groups} must be from 1 to the KV heads of {name}")
        if options.scorer == "own" and shape_of(name).Dv:
            raise UsageError(f"--shapes {name} has values of another size, which --scorer own does not time: drop it")
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
            print(table(results[-1:], COLUMNS), flush=True)
    print(f"\n{table(results, COLUMNS)}")
    correct = all(r["correct"] for r in results)
    print(json.dumps({"bench": "attention", "device": device_name(), "correct": correct, "results": results}))
    return 0 if correct else 1

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
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention import reference
from tercet.attention.config import NSAConfig
from tercet.attention.layout import WHOLE, Span
from tercet.attention.operator import block_sparse_attention, nsa_attention
from tercet.attention.selector import choose_blocks, own_scorer, pool_keys, slow_channels
from tercet.attention.spec import block_sparse
from tercet.bench.timing import device_name, measure, milliseconds, print_profile
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

    scorer: str = "compressed"
    exact_groups: Fraction = Fraction(1)
    dense: Sequence[str] = ("cudnn", "flash")
    dense_limit: int = 131072
    rows: int = 24
    budget: float = 0.6
    profile: bool = False
    graph: bool = True


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


class Own:
    """Block-sparse attention chosen by its own queries and keys, of the slowest 16 planes.

    exact_groups: the part of the KV heads that score single tokens; the others choose by the means of their blocks.
    """

    def __init__(self, shape: Shape, config: NSAConfig, exact_groups: Fraction) -> None:
        self.config, self.groups = config, max(1, round(exact_groups * shape.G))
        self.channels = slow_channels(shape.D, torch.device(_device()))
        exact = tuple(range(self.groups)) if self.groups < shape.G else None
        self.options: dict[str, Any] = {"scorer": "own", "score_channels": self.channels, "exact_groups": exact}
        self.spec = block_sparse(config, "own", 0, exact)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, config=self.config, backend=_backend(), **self.options)

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> Tensor:
        scorer = own_scorer(q, k, self.channels, self.spec)
        return choose_blocks(scorer, config=self.config, backend=_backend())

    @torch.no_grad()
    def choose_exactly(self, q: Tensor, k: Tensor, span: Span = WHOLE) -> Tensor:
        """By the reference in fp64, from the same means."""
        scorer = own_scorer(q, k, self.channels, self.spec)
        queries, keys, pooled = scorer.queries.double(), scorer.keys.double(), scorer.pooled
        chosen = [reference.select_by_tokens(queries, keys, self.config, None, span, "own")]
        if pooled is not None:
            means = pool_keys(pooled.keys, pooled.config).double()
            _, others, _ = reference.compressed_attention(
                pooled.queries.double(), means, means[..., :0], pooled.config, None, span=span
            )
            assert others is not None
            chosen.append(others)
        return torch.cat(chosen, 2)

    def compared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
        """On the first 4,096 tokens of one sequence: (largest relative error of output and gradients over the same
        blocks against the reference in fp32, share of equal blocks)."""
        x = [y[:1, :4096].detach().requires_grad_() for y in (q, k, v)]
        exact = [y.detach().float().requires_grad_() for y in x]
        blocks, weight, found = self.choose_exactly(x[0], x[1]), torch.randn_like(exact[0]), []
        for inputs, backend in ((x, _backend()), (exact, "reference")):
            out = block_sparse_attention(*inputs, config=self.config, backend=backend, block_indices=blocks)
            found.append([out, *torch.autograd.grad((out.float() * weight).sum(), inputs)])
        error = max(relative_error(got, wanted) for got, wanted in zip(*found, strict=True))
        return error, _equal(blocks, self.choose(x[0], x[1]))

    def check_rows(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, indices: Tensor, rows: Sequence[int]
    ) -> tuple[float, float]:
        """Compare rows at full length with the reference in fp64: (worst relative error, share of equal blocks)."""
        worst, wanted, chosen = 0.0, [], []
        for t in rows:
            b, span = slice(t % q.shape[0], t % q.shape[0] + 1), Span(t)
            row, keys, values = q[b, t : t + 1], k[b, : t + 1], v[b, : t + 1]
            wanted.append(self.choose_exactly(row, keys, span))
            chosen.append(indices[b, t : t + 1])
            exact = reference.selected_attention(
                row.double(), keys.double(), values.double(), chosen[-1], self.config, None, span
            )
            worst = max(worst, relative_error(out[b, t : t + 1], exact))
        return worst, _equal(torch.cat(wanted), torch.cat(chosen))


def _equal(wanted: Tensor, chosen: Tensor) -> float:
    """The share of the wanted blocks that are chosen."""
    real = wanted >= 0
    return float(((wanted[..., None] == chosen[..., None, :]).any(-1) & real).sum() / real.sum())


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


def _time_dense(qkv: Sequence[Tensor], label: str, dout: Tensor, graph: bool, budget: float) -> dict[str, float]:
    """Time causal `scaled_dot_product_attention` on this backend; nothing if the backend rejects the shape."""
    leaves = [t.detach().requires_grad_() for t in qkv]

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


def _check(
    x: Inputs, shape: Shape, config: NSAConfig, options: Options
) -> tuple[dict[str, Any], Callable[..., Tensor], list[Tensor]]:
    """Errors of the operator on these inputs; the operator, and those of the inputs that it reads."""
    at = [config.compress_block, *torch.linspace(shape.T // 3, shape.T - 1, options.rows).long().tolist()]
    operator: Callable[..., Tensor]
    if options.scorer == "own":
        own, qkv = Own(shape, config, options.exact_groups), (x.q, x.ks, x.vs)
        error, equal = own.compared(*qkv)
        indices = own.choose(x.q, x.ks)
        with torch.no_grad():
            row_error, same = own.check_rows(*qkv, own(*qkv), indices, at)
        row = {"exact_groups": own.groups} if own.groups < shape.G else {}
        operator, read = own, list(qkv)
    else:
        *errors, equal = _compared(replace(shape, B=1, T=min(shape.T, 4096)), config)
        nsa = partial(nsa_attention, config=config, backend=_backend())
        operator, read, error, row = nsa, list(x), max(errors), {}
        with torch.no_grad():
            out, aux = nsa(*x, return_aux=True)
        indices = aux.block_indices
        row_error, same = check_rows(x, config, out, indices, at)
    same = min(same, equal)
    correct = error <= TOLERANCE["bfloat16"] and row_error <= 1.5e-2 and same >= MIN_EQUAL_BLOCKS
    found = {"worst_error": error, "row_error": row_error, "slots_equal": same, "agreement": agreement(indices)}
    return {**row, **found, "correct": correct}, operator, read


def bench(
    name: str, kind: str, config: NSAConfig, options: Options, dense: dict[str, float] | None = None
) -> dict[str, Any]:
    """Check and time one shape with one kind of inputs, random or smooth.

    dense: timings of dense attention at this shape, to copy instead of measuring them again.
    """
    shape, label = shape_of(name), "own" if options.scorer == "own" else "nsa"
    graph = options.graph and shape.D <= 64 and torch.cuda.is_available()
    x = make_inputs(shape, config, kind, device=_device())
    checked, operator, read = _check(x, shape, config, options)
    row: dict[str, Any] = {"shape": name, "inputs": kind, "scorer": options.scorer, **checked}
    if not row["correct"]:
        return row
    leaves = [t.detach().requires_grad_() for t in read]
    dout = torch.randn(shape.B, shape.T, shape.H, shape.Dv or shape.D, dtype=x.q.dtype, device=x.q.device)

    def forward() -> Tensor:
        return operator(*leaves)

    row |= {f"{label}_{key}": ms for key, ms in measure(forward, leaves, dout, graph, options.budget).items()}
    if isinstance(operator, Own):
        row["choice_ms"] = milliseconds(lambda: operator.choose(*leaves[:2]), options.budget)
    if options.profile:
        print_profile(lambda: torch.autograd.grad(forward(), leaves, dout))
    if dense is None:
        dense = {}
        for backend in options.dense if options.dense_limit >= shape.T else ():
            dense |= _time_dense((x.q, x.ks, x.vs), backend, dout, graph, options.budget)
    row |= dense
    for key, ratio in (("forward_ms", "forward_speedup"), ("both_ms", "speedup"), ("graph_both_ms", "graph_speedup")):
        if known := [dense[f"{backend}_{key}"] for backend in _DENSE if f"{backend}_{key}" in dense]:
            row[ratio] = min(known) / row[f"{label}_{key}"]
    return row


_COLUMNS = (
    ("shape", "shape"), ("inputs", "inputs"), ("agreement", "agree"), ("nsa_forward_ms", "nsa fwd"),
    ("nsa_both_ms", "nsa f+b"), ("own_forward_ms", "own fwd"), ("own_both_ms", "own f+b"), ("choice_ms", "choice"),
    ("cudnn_forward_ms", "cudnn fwd"), ("cudnn_both_ms", "cudnn f+b"), ("flash_forward_ms", "flash fwd"),
    ("flash_both_ms", "flash f+b"), ("forward_speedup", "× fwd"), ("speedup", "× f+b"),
    ("nsa_graph_both_ms", "nsa graph"), ("cudnn_graph_both_ms", "cudnn graph"), ("graph_speedup", "× graph"),
    ("nsa_peak_gib", "nsa GiB"), ("own_peak_gib", "own GiB"), ("cudnn_peak_gib", "cudnn GiB"),
    ("worst_error", "error"), ("slots_equal", "slots"),
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Columns that no row has are left out; the ratios are to the fastest dense attention."""
    scorers = {"own" if row.get("scorer") == "own" else "nsa" for row in rows}
    columns = [
        (key, label)
        for key, label in _COLUMNS
        if any(key in row for row in rows) or key in ("forward_speedup", "speedup", *(f"{s}_both_ms" for s in scorers))
    ]
    lines = [" | ".join(label.rjust(max(7, len(label))) for _, label in columns)]
    for row in rows:
        cells = []
        for key, label in columns:
            value = row.get(key, "–" if row["correct"] else "WRONG")
            if isinstance(value, float):
                value = f"{value:.{ {'slots_equal': 5, 'worst_error': 4}.get(key, 3) }f}"
            cells.append(str(value).rjust(max(7, len(label))))
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def main(names: Sequence[str], kinds: Sequence[str], options: Options) -> int:
    names = names or SHAPES[options.scorer]
    check_known("--inputs", kinds, ("random", "smooth"))
    check_known("--dense", options.dense, ("cudnn", "flash"), may_be_empty=True)
    for name in names:
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
            print(table(results[-1:]), flush=True)
    print(table(results))
    correct = all(r["correct"] for r in results)
    print(json.dumps({"bench": "attention", "device": device_name(), "correct": correct, "results": results}))
    return 0 if correct else 1

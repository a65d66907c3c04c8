"""Benchmark the NSA operator against dense attention (`tercet bench attention`).

Checks correctness first: output and all gradients against the fp32 reference at up to 4,096 tokens, then sampled rows
and their selected blocks against fp64 at full length. A shape that fails gets no speed-up, and the exit code is 1. The
last line of output is one JSON object.

Inputs. "random": q, k and v are independent normal numbers; neighbouring queries select mostly different blocks.
"smooth": q is a first-order autoregression along the sequence (`--correlation`), as in hidden states of text;
neighbouring queries share about nine blocks in ten (the share is printed). k and v stay random. The operator computes
the selection in both cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention.config import NSAConfig
from tercet.attention.functional import nsa_attention
from tercet.errors import EXIT_FAILURE, EXIT_USAGE


@dataclass(frozen=True)
class Shape:
    """B sequences of T tokens, H query heads, G KV heads, head size D."""

    B: int
    T: int
    H: int
    G: int
    D: int


def _shapes() -> dict[str, Shape]:
    k = 1024
    shapes = {f"P{n}k": Shape(1, n * k, 64, 4, 128) for n in (8, 16, 32, 64)}
    shapes |= {f"C{16 // n}x{n}k": Shape(16 // n, n * k, 12, 2, 64) for n in (2, 4, 8, 16)}
    shapes |= {f"C{64 // n}x{n}k": Shape(64 // n, n * k, 12, 2, 64) for n in (2, 4, 8, 16, 32)}
    shapes |= {f"C1x{n}k": Shape(1, n * k, 12, 2, 64) for n in (8, 32, 64, 128, 256, 512, 1024)}
    shapes |= {f"M{16 // n}x{n}k": Shape(16 // n, n * k, 16, 1, 64) for n in (4, 16)}
    return shapes


SHAPES = _shapes()


@dataclass
class Inputs:
    q: Tensor  # [B, T, H, D]
    kc: Tensor
    vc: Tensor
    ks: Tensor
    vs: Tensor
    kw: Tensor
    vw: Tensor
    gates: Tensor  # [B, T, H, 3]

    def all(self) -> list[Tensor]:
        return [self.q, self.kc, self.vc, self.ks, self.vs, self.kw, self.vw, self.gates]


def make_inputs(
    shape: Shape,
    config: NSAConfig,
    kind: str,
    correlation: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cuda",
) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn(shape.B, tokens, heads, shape.D, device=device, dtype=dtype, generator=generator)

    compressed = config.num_compressed(shape.T)
    q = normal(shape.T, shape.H)
    if kind == "smooth":
        q = smooth(q, correlation)
    keys = [normal(n, shape.G) for n in (compressed, compressed, shape.T, shape.T, shape.T, shape.T)]
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


def relative_error(found: Tensor, wanted: Tensor) -> float:
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    return error if error == error else float("inf")


def check_gradients(
    shape: Shape,
    config: NSAConfig,
    kind: str,
    correlation: float,
    *,
    packed: bool = False,
    backend: str = "triton",
    device: str = "cuda",
) -> dict[str, float]:
    """Relative error of the output and of each gradient against the fp32 reference, at up to 4,096 tokens.

    packed: three documents, one of them too short for a compressed token.
    """
    small = Shape(1, min(shape.T, 4096), shape.H, shape.G, shape.D)
    x = make_inputs(small, config, kind, correlation, seed=7, device=device).all()
    bounds = longest = None
    if packed:
        first = min(config.compress_block - 1, small.T // 4)
        bounds = torch.tensor([0, first, first + small.T // 4, small.T], dtype=torch.int32, device=device)
        longest = small.T - small.T // 4 - first
    leaves = [t.detach().requires_grad_() for t in x]
    documents: dict[str, Any] = {"cu_seqlens": bounds, "max_seqlen": longest}
    out, aux = nsa_attention(*leaves, config=config, **documents, backend=backend, return_aux=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    exact = [t.detach().float().requires_grad_() for t in x]
    wanted = nsa_attention(*exact, config=config, **documents, backend="reference", block_indices=aux.block_indices)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.float())
    names = ("dq", "dkc", "dvc", "dks", "dvs", "dkw", "dvw", "dgates")
    errors = {"out": relative_error(out, wanted)}
    return errors | {n: relative_error(g, w) for n, g, w in zip(names, grads, wanted_grads, strict=True)}


@lru_cache
def _gradients_at(shape: Shape, config: NSAConfig, kind: str, correlation: float) -> dict[str, float]:
    """Cached: lengths that share the same heads are checked once."""
    return check_gradients(shape, config, kind, correlation, backend=_backend(), device=_device())


def check_rows(x: Inputs, config: NSAConfig, out: Tensor, indices: Tensor, rows: Sequence[int]) -> tuple[float, float]:
    """Compare rows at full length with fp64: (worst relative error, share of selected blocks that agree)."""
    B, _, H, D = x.q.shape
    G = x.ks.shape[2]
    h = H // G
    l, d, block = config.compress_block, config.compress_stride, config.select_block
    worst, same, slots = 0.0, 0, 0
    for t in rows:
        b = t % B
        q = x.q[b, t].double().view(G, h, D) * D**-0.5
        wanted = torch.zeros(G, h, D, dtype=torch.float64, device=q.device)
        gates = x.gates[b, t].double().view(G, h, 3)
        seen = config.num_visible(t)
        blocks = t // block + 1
        p = torch.einsum("ghd,sgd->ghs", q, x.kc[b, :seen].double()).softmax(-1)
        wanted += gates[..., :1] * torch.einsum("ghs,sgd->ghd", p, x.vc[b, :seen].double())
        i = torch.arange(seen, device=q.device)[:, None] * d
        j = torch.arange(blocks, device=q.device)[None] * block
        overlap = (torch.minimum(i + l, j + block) - torch.maximum(i, j)).clamp(min=0).double() / l
        importance = (p @ overlap).sum(1) if seen else torch.zeros(G, blocks, device=q.device, dtype=torch.float64)
        importance[:, : config.select_initial] = 1e30
        importance[:, max(0, blocks - config.select_local) :] = 1e30
        best = importance.sort(dim=-1, descending=True, stable=True).indices[:, : config.select_count]
        for g in range(G):
            chosen = [c for c in indices[b, t, g].tolist() if c >= 0]
            same += len(set(chosen) & set(best[g].tolist()))
            slots += best.shape[1]
            tokens = torch.cat([torch.arange(c * block, min((c + 1) * block, t + 1)) for c in chosen]).to(q.device)
            s = (q[g] @ x.ks[b, tokens, g].double().T).softmax(-1)
            wanted[g] += gates[g, :, 1:2] * (s @ x.vs[b, tokens, g].double())
        window = slice(max(0, t - config.window + 1), t + 1)
        p = torch.einsum("ghd,sgd->ghs", q, x.kw[b, window].double()).softmax(-1)
        wanted += gates[..., 2:] * torch.einsum("ghs,sgd->ghd", p, x.vw[b, window].double())
        worst = max(worst, relative_error(out[b, t].view(G, h, D), wanted))
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


def milliseconds(call: Callable[[], Any], budget: float = 0.6) -> float:
    """Median over back-to-back calls, by CUDA events: includes launch overhead where the host is the bottleneck."""
    if not torch.cuda.is_available():
        return _cpu_milliseconds(call, budget)
    call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    count = max(3, min(200, int(budget * 1000 / once)))
    for _ in range(0 if once > 200 else 2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def _cpu_milliseconds(call: Callable[[], Any], budget: float) -> float:
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < min(budget, 0.1):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def host_milliseconds(call: Callable[[], Any], count: int = 20) -> float:
    """Launch overhead: how long the host takes to enqueue a call (mean of the faster half)."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.mean(sorted(times)[: count // 2]) * 1000


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(
    forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor, graph: bool, budget: float
) -> dict[str, float]:
    def both() -> Any:
        return torch.autograd.grad(forward(), leaves, dout)

    def forward_only() -> Any:
        with torch.no_grad():
            return forward()

    found = {"forward_ms": milliseconds(forward_only, budget)}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    found["both_ms"] = milliseconds(both, budget)
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if graph:
        found["graph_both_ms"] = milliseconds(graphed(both), budget)
    return found


def profile(call: Callable[[], Any], repeats: int = 3) -> list[tuple[float, int, str]]:
    """(milliseconds, launches, kernel name) of one call, longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    call()
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as events:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found = [
        (e.self_device_time_total / 1000 / repeats, e.count // repeats, e.key)
        for e in events.key_averages()
        if e.self_device_time_total
    ]
    return sorted(found, reverse=True)


_DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,  # dry runs on a CPU
}


def dense(x: Inputs, backend: SDPBackend, dout: Tensor, graph: bool, budget: float) -> dict[str, float] | None:
    """Time causal `scaled_dot_product_attention` on this backend; None if the backend rejects the shape."""
    leaves = [t.detach().requires_grad_() for t in (x.q, x.ks, x.vs)]

    def forward() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in leaves)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    try:
        return measure(forward, leaves, dout, graph, budget)
    except RuntimeError as error:
        print(f"  {backend.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def bench(
    name: str, kind: str, config: NSAConfig, args: argparse.Namespace, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Check and time one shape with one kind of inputs.

    known: dense timings of this shape to copy instead of measuring dense again.
    """
    shape = SHAPES[name]
    graph = args.graph and shape.D <= 64 and torch.cuda.is_available()
    row: dict[str, Any] = {"shape": name, "inputs": kind}
    errors = _gradients_at(replace(shape, B=1, T=min(shape.T, 4096)), config, kind, args.correlation)
    x = make_inputs(shape, config, kind, args.correlation, device=_device())
    leaves = [t.detach().requires_grad_() for t in x.all()]
    with torch.no_grad():
        out, aux = nsa_attention(*x.all(), config=config, backend=_backend(), return_aux=True)
    assert aux.block_indices is not None
    rows = [config.compress_block, *torch.linspace(shape.T // 3, shape.T - 1, args.rows).long().tolist()]
    row_error, same = check_rows(x, config, out, aux.block_indices, rows)
    row |= {"worst_error": max(errors.values()), "row_error": row_error, "slots_equal": same}
    row["agreement"] = agreement(aux.block_indices)
    row["correct"] = max(errors.values()) <= 1e-2 and row_error <= 1.5e-2 and same >= 0.9995
    if not row["correct"]:
        row["errors"] = errors
        return row
    dout = torch.randn_like(out)
    del out, aux

    def forward() -> Tensor:
        return nsa_attention(*leaves, config=config, backend=_backend())

    row |= {f"nsa_{key}": value for key, value in measure(forward, leaves, dout, graph, args.budget).items()}
    if args.profile:

        def both() -> Any:
            return torch.autograd.grad(forward(), leaves, dout)

        print(f"  launch overhead: {host_milliseconds(both):.3f} ms for forward and backward")
        for ms, launches, kernel in profile(both):
            print(f"  {ms:9.4f} ms {launches:4d} × {kernel[:90]}")
    if known is not None:
        row |= known
    else:
        for label, backend in _DENSE.items():
            if label in args.dense.split(",") and args.dense_limit >= shape.T:
                row |= {
                    f"{label}_{key}": value
                    for key, value in (dense(x, backend, dout, graph, args.budget) or {}).items()
                }
    fastest = min((row[f"{n}_both_ms"] for n in _DENSE if f"{n}_both_ms" in row), default=None)
    if fastest is not None:
        row["speedup"] = fastest / row["nsa_both_ms"]
    if "cudnn_graph_both_ms" in row:
        row["graph_speedup"] = row["cudnn_graph_both_ms"] / row["nsa_graph_both_ms"]
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
                digits = {"slots_equal": 5, "worst_error": 4}.get(key, 3)
                value = f"{value:.{digits}f}"
            cells.append(str(value).rjust(max(7, len(label))))
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tercet bench attention", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", default="P8k,P64k,C8x2k,C4x4k,C1x16k", help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--inputs", default="random,smooth", help="random, smooth or both")
    parser.add_argument("--correlation", type=float, default=0.996, help="of successive queries in smooth inputs")
    parser.add_argument("--dense", default="cudnn,flash", help="cudnn, flash or both; empty for none")
    parser.add_argument("--dense-once", action="store_true", help="time dense once per shape, not once per input kind")
    parser.add_argument("--dense-limit", type=int, default=65536, help="skip dense beyond this length")
    parser.add_argument("--rows", type=int, default=24, help="rows to check against fp64 at full length")
    parser.add_argument("--budget", type=float, default=0.6, help="seconds per timing; at least 3 calls are timed")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs at head 64")
    args = parser.parse_args(argv)
    names, kinds = args.shapes.split(","), args.inputs.split(",")
    dense_kinds = [name for name in args.dense.split(",") if name]
    asked = {"--shapes": (names, SHAPES), "--inputs": (kinds, ("random", "smooth"))}
    for flag, (given, known) in (asked | {"--dense": (dense_kinds, ("cudnn", "flash"))}).items():
        if unknown := [name for name in given if name not in known]:
            print(f"error: {flag} {unknown[0]} is unknown: pick from {', '.join(known)}", file=sys.stderr)
            return EXIT_USAGE
    if not torch.cuda.is_available():
        print("error: tercet bench attention needs a CUDA device and none is visible", file=sys.stderr)
        return EXIT_FAILURE
    config = NSAConfig()
    device = torch.cuda.get_device_name()
    # A model's backward switches to autograd's thread once, not once per operator.
    torch.autograd.set_multithreading_enabled(False)
    print(f"{device}, torch {torch.__version__}, bf16, {config}")
    results: list[dict[str, Any]] = []
    for name in names:
        for kind in kinds:
            known = None
            if args.dense_once and results and results[-1]["shape"] == name and results[-1]["correct"]:
                known = {k: v for k, v in results[-1].items() if k.startswith(("cudnn_", "flash_"))}
            results.append(bench(name, kind, config, args, known))
            torch.cuda.empty_cache()
            print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))
    correct = all(r["correct"] for r in results)
    print(json.dumps({"bench": "attention", "device": device, "correct": correct, "results": results}))
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())

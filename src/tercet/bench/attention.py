"""Benchmark the NSA operator against dense attention (`tercet bench attention`).

Checks correctness first: output and all gradients against the fp32 reference at up to 4,096 tokens, then sampled rows
and their selected blocks against fp64 at full length. A shape that fails gets no speed-up, and the exit code is 1. The
last line of output is one JSON object.

Inputs. "random": q, k and v are independent normal numbers; neighbouring queries select mostly different blocks.
"smooth": q is a first-order autoregression along the sequence (`--correlation`); neighbouring queries share about nine
blocks in ten (the share is printed). k and v stay random. The operator computes the selection in both cases.
"recorded": random inputs, and blocks that layers of a trained model selected in text (`tercet eval selections`), where
neighbours share half to three quarters. The operator scores and selects as usual, so that this is timed too, and then
reads the recorded blocks instead. Times are means over the recorded layers; `layers` in the JSON line has each.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention.block_sparse import block_sparse_attention
from tercet.attention.config import NSAConfig
from tercet.attention.functional import nsa_attention
from tercet.attention.stages import compressed_attention
from tercet.bench.timing import measure, print_profile
from tercet.errors import TercetError
from tercet.inference.arguments import check_known
from tercet.inference.recorded_selections import Recording, check_fits
from tercet.inference.recorded_selections import load as load_recording


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

    correlation: float = 0.996
    dense: Sequence[str] = ("cudnn", "flash")
    dense_limit: int = 65536
    rows: int = 24
    budget: float = 0.6
    profile: bool = False
    graph: bool = True


def _shapes() -> dict[str, Shape]:
    k = 1024
    shapes = {f"P{n}k": Shape(1, n * k, 64, 4, 128) for n in (8, 16, 32, 64)}
    shapes |= {f"C{16 // n}x{n}k": Shape(16 // n, n * k, 12, 2, 64) for n in (2, 4, 8, 16)}
    shapes |= {f"C{64 // n}x{n}k": Shape(64 // n, n * k, 12, 2, 64) for n in (2, 4, 8, 16, 32)}
    shapes |= {f"C1x{n}k": Shape(1, n * k, 12, 2, 64) for n in (8, 32, 64, 128, 256, 512, 1024)}
    shapes |= {f"M{16 // n}x{n}k": Shape(16 // n, n * k, 16, 1, 64) for n in (4, 16)}
    return shapes


SHAPES = _shapes()


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
    correlation: float,
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
    given: Tensor | None = None,
    block_sparse: bool = False,
) -> dict[str, float]:
    """Relative error of the output and of each gradient against the fp32 reference, at up to 4,096 tokens.

    packed: three documents, one of them too short for a compressed token. given: blocks to read. block_sparse: check
    block-sparse attention instead of NSA.
    """
    small = replace(shape, B=1, T=min(shape.T, 4096))
    given = None if given is None else given[:1, : small.T].contiguous()
    inputs = make_inputs(small, config, kind, correlation, seed=7, device=device)
    operator: Callable[..., Any]
    if block_sparse:
        operator, x, names = block_sparse_attention, [inputs.q, inputs.ks, inputs.vs], ["dq", "dk", "dv"]
    else:
        operator, x = nsa_attention, list(inputs)
        names = ["dq", "dkc", "dvc", "dks", "dvs", "dkw", "dvw", "dgates"]
    bounds = longest = None
    if packed:
        first = min(config.compress_block - 1, small.T // 4)
        bounds = torch.tensor([0, first, first + small.T // 4, small.T], dtype=torch.int32, device=device)
        longest = small.T - small.T // 4 - first
    leaves = [t.detach().requires_grad_() for t in x]
    documents: dict[str, Any] = {"cu_seqlens": bounds, "max_seqlen": longest}
    documents |= {"backend": backend, "block_indices": given}
    out, aux = operator(*leaves, config=config, **documents, return_aux=True)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    exact = [t.detach().float().requires_grad_() for t in x]
    documents |= {"backend": "reference", "block_indices": aux.block_indices}
    wanted = operator(*exact, config=config, **documents)
    wanted_grads = torch.autograd.grad(wanted, exact, dout.float())
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


# ------------------------------------------------------------ one shape


# The model of docs/results/retrieval.md, by `tercet eval selections RUN OUT --kv-heads 1`.
RECORDED = Path(__file__).with_name("selections.npz")


@lru_cache
def recording(file: str) -> Recording:
    """The recording in `file`; that of this package if empty."""
    return load_recording(Path(file) if file else RECORDED)


def choice_pass(x: Inputs, config: NSAConfig) -> Callable[[], Any]:
    """The pass of the operator that scores and selects blocks."""
    if _backend() == "reference":
        return lambda: compressed_attention(x.q, x.kc, x.vc, config=config)
    from tercet.attention.kernels import ops

    numbers = ops.Numbers(config, [], None)
    _, lse = ops.compressed_attention(x.q, x.kc, x.vc, None, None, numbers)
    return lambda: ops.select_blocks(x.q, x.kc, lse, None, None, numbers)


def _check(
    x: Inputs, shape: Shape, config: NSAConfig, kind: str, options: Options, given: Tensor | None = None
) -> dict[str, Any]:
    """Errors of the operator on these inputs. given: blocks to read instead of selecting."""
    if given is None:
        errors = _gradients_at(replace(shape, B=1, T=min(shape.T, 4096)), config, kind, options.correlation)
    else:
        errors = check_gradients(
            shape, config, kind, options.correlation, backend=_backend(), device=_device(), given=given
        )
    with torch.no_grad():
        out, aux = nsa_attention(*x, config=config, backend=_backend(), return_aux=True, block_indices=given)
    assert aux.block_indices is not None
    rows = [config.compress_block, *torch.linspace(shape.T // 3, shape.T - 1, options.rows).long().tolist()]
    row_error, same = check_rows(x, config, out, aux.block_indices, rows)
    found: dict[str, Any] = {"worst_error": max(errors.values()), "row_error": row_error}
    found |= {"slots_equal": same} if given is None else {}
    found["agreement"] = agreement(aux.block_indices)
    found["correct"] = max(errors.values()) <= 1e-2 and row_error <= 1.5e-2 and (same >= 0.9995 or given is not None)
    if not found["correct"]:
        found["errors"] = errors
    return found


def bench(
    name: str, kind: str, config: NSAConfig, options: Options, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Check and time one shape with one kind of inputs: random, smooth, recorded or recorded:FILE.

    known: dense timings of this shape to copy instead of measuring dense again.
    """
    shape, (kind, _, file) = SHAPES[name], kind.partition(":")
    graph = options.graph and shape.D <= 64 and torch.cuda.is_available()
    drawn = "random" if kind == "recorded" else kind
    x = make_inputs(shape, config, drawn, options.correlation, device=_device())
    row: dict[str, Any] = {"shape": name, "inputs": kind, **_check(x, shape, config, drawn, options)}
    if not row["correct"]:
        return row
    leaves = [t.detach().requires_grad_() for t in x]
    dout = torch.randn_like(x.q)

    def times(forward: Callable[[], Tensor]) -> dict[str, float]:
        found = measure(forward, leaves, dout, graph, options.budget)
        if options.profile:
            print_profile(forward, leaves, dout)
        return {f"nsa_{key}": value for key, value in found.items()}

    if kind != "recorded":
        row |= times(lambda: nsa_attention(*leaves, config=config, backend=_backend()))
    else:
        choose = choice_pass(x, config)
        row["layers"] = []
        for i, layer in enumerate(recording(file).layers):
            given = recording(file).block_indices(i, shape.T, shape.G, shape.B).to(x.q.device)
            found = {"layer": layer, **_check(x, shape, config, drawn, options, given)}
            row["layers"].append(found)
            if not found["correct"]:
                return row | {"correct": False, "worst_error": found["worst_error"], "errors": found["errors"]}

            def forward(given: Tensor = given) -> Tensor:
                choose()
                return nsa_attention(*leaves, config=config, backend=_backend(), block_indices=given)

            found |= times(forward)
        row |= _mean_of_layers(row["layers"])
    if known is not None:
        row |= known
    else:
        for label, backend in _DENSE.items():
            if label in options.dense and options.dense_limit >= shape.T:
                times_of = dense(x, backend, dout, graph, options.budget) or {}
                row |= {f"{label}_{key}": value for key, value in times_of.items()}
    fastest = min((row[f"{n}_both_ms"] for n in _DENSE if f"{n}_both_ms" in row), default=None)
    if fastest is not None:
        row["speedup"] = fastest / row["nsa_both_ms"]
    if "cudnn_graph_both_ms" in row:
        row["graph_speedup"] = row["cudnn_graph_both_ms"] / row["nsa_graph_both_ms"]
    return row


def _mean_of_layers(layers: list[dict[str, Any]]) -> dict[str, float]:
    """Mean times and agreement; greatest errors and memory."""
    means = [key for key in layers[0] if key.endswith("_ms") or key == "agreement"]
    most = [key for key in layers[0] if key.endswith(("_error", "_gib"))]
    return {key: statistics.fmean(layer[key] for layer in layers) for key in means} | {
        key: max(layer[key] for layer in layers) for key in most
    }


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


def main(names: Sequence[str], kinds: Sequence[str], options: Options, dense_once: bool) -> int:
    """names: of SHAPES. kinds: of inputs. dense_once: time dense once per shape, not once per kind of inputs."""
    named = ["recorded" if kind.startswith("recorded:") else kind for kind in kinds]
    check_known("--shapes", names, SHAPES)
    check_known("--inputs", named, ("random", "smooth", "recorded"))
    check_known("--dense", options.dense, ("cudnn", "flash"), may_be_empty=True)
    config = NSAConfig()
    recorded = {kind: kind.partition(":")[2] for kind in kinds if kind.startswith("recorded")}
    for file in recorded.values():
        for name in names:
            check_fits(recording(file), Path(file) if file else RECORDED, config, SHAPES[name].T, f"--shapes {name}")
    if not torch.cuda.is_available():
        raise TercetError("tercet bench attention needs a CUDA device and none is visible")
    device = torch.cuda.get_device_name()
    # A model's backward switches to autograd's thread once, not once per operator.
    torch.autograd.set_multithreading_enabled(False)
    print(f"{device}, torch {torch.__version__}, bf16, {config}")
    for kind, file in recorded.items():
        print(f"{kind}: {recording(file).about}, layers {', '.join(map(str, recording(file).layers))}")
    results: list[dict[str, Any]] = []
    for name in names:
        for kind in kinds:
            known = None
            if dense_once and results and results[-1]["shape"] == name and results[-1]["correct"]:
                known = {k: v for k, v in results[-1].items() if k.startswith(("cudnn_", "flash_"))}
            results.append(bench(name, kind, config, options, known))
            torch.cuda.empty_cache()
            print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))
    correct = all(r["correct"] for r in results)
    print(json.dumps({"bench": "attention", "device": device, "correct": correct, "results": results}))
    return 0 if correct else 1

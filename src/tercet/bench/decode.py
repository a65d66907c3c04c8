"""Benchmark decoding, one token at a time, against dense attention (`tercet bench decode`).

Measures a whole model (decode_model.py), then, on a GPU, the attention step alone: RoPE, cache update, compression,
attention and gates, for NSA and dense as CUDA graphs. The step rotates over several caches, as the layers of a model
do, so that keys do not stay in L2. Compares the step with the reference first; if they differ, no ratio is printed and
the exit code is 1. The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.bench.decode_model import correct as is_correct
from tercet.bench.decode_model import model_rows, step_error
from tercet.bench.timing import profile as profile_kernels
from tercet.errors import UsageError
from tercet.model.nsa import NativeSparseAttention

HEADS = {"P": (64, 4, 128), "C": (12, 2, 64)}
_ROUND_BYTES = 256 << 20  # read by one round over all caches: several times the L2
_MOST_COPIES, _MOST_MEMORY = 16, 24 << 30
_REPLAYS, _REPEATS = 32, 5  # replays are a multiple of compress_stride, so the mean includes compression steps
# SDPA backends that support grouped-query attention
_DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def main(
    *, batches: Sequence[int], contexts: Sequence[int], heads: str, attention: bool, preset: str,
    model_batches: Sequence[int], model_contexts: Sequence[int], steps: int, profile: bool = False,
    selector: str | None = None, settings: dict[str, str] | None = None,
) -> int:  # fmt: skip
    model = bool(model_contexts and model_batches)
    if not (attention or model):
        raise UsageError("--no-attention without --model-contexts or --model-batches: nothing to measure")
    if attention and (short := [n for n in contexts if n <= _MARGIN]):
        raise UsageError(
            f"--contexts {short[0]} is too short: the attention step appends {_MARGIN} tokens while it is timed; "
            f"give at least {_MARGIN + 1}, or --no-attention"
        )
    cuda = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{name}, torch {torch.__version__}")
    if model:
        print(f"model: {_work(model_contexts, model_batches)}; {steps} tokens per timing")
    if attention:
        print(f"attention step: {_work(contexts, batches)}" if cuda else "attention step skipped: it needs a GPU")
    result: dict[str, Any] = {"bench": "decode", "device": name, "torch": torch.__version__}
    if selector is not None:
        result["selector"] = selector
    if settings:
        result["settings"] = settings
    if model:
        result["model"] = model_rows(preset, model_batches, model_contexts, steps, selector, settings)
    if attention and cuda:
        result["attention"] = attention_rows(HEADS[heads], batches, contexts, profile, selector or "compressed")
    rows = (*result.get("model", ()), *result.get("attention", ()))
    checked = [row["correct"] for row in rows if "correct" in row]
    correct = all(checked) if checked else None  # None: nothing was compared with the reference
    print(json.dumps({**result, "correct": correct}))
    return 1 if correct is False else 0


def _work(contexts: Sequence[int], batches: Sequence[int]) -> str:
    return f"NSA and dense at contexts {', '.join(map(str, contexts))} with batches {', '.join(map(str, batches))}"


# ------------------------------------------------------------ the attention step


@dataclass
class _Caches:
    """Inputs of one measurement: caches of random tokens, and the projections of one new token for each."""

    layer: NativeSparseAttention
    caches: list[Any]
    q: Tensor
    kv: Tensor
    dense_kv: Tensor
    gates: Tensor
    scored: tuple[Tensor, Tensor] | None  # a learned selector's queries and keys


def attention_rows(
    heads: tuple[int, int, int],
    batches: Sequence[int],
    contexts: Sequence[int],
    profile: bool,
    selector: str = "compressed",
) -> list[dict[str, Any]]:
    H, G, D = heads
    print(
        f"attention step, bf16, {H} query heads, {G} KV heads, head {D}, selector {selector}, CUDA graphs, "
        "random normal caches"
    )
    print(
        f"{'batch':>6} {'context':>8} {'error':>8} {'NSA ms':>8} {'dense ms':>9} {'× dense':>8} {'keys':>7} "
        f"{'of':>8} {'read':>6}  dense (all, ms)"
    )
    rows = []
    for context in contexts:
        for batch in batches:
            rows.append(_attention_at(heads, batch, context, profile, selector))
            torch.cuda.empty_cache()
    return rows


def _attention_at(
    heads: tuple[int, int, int], batch: int, context: int, profile: bool, selector: str = "compressed"
) -> dict[str, Any]:
    config = NSAConfig()
    torch.manual_seed(0)
    made = _make(heads, config, batch, context, selector)
    error = step_error(made.layer, made.caches[0])
    correct = is_correct(error)
    nsa = _graph_ms([_nsa(made, i) for i in range(len(made.caches))])
    read = float(made.caches[0].reads.double().mean())
    _rewind(made, context)
    dense = {"ours": _graph_ms([_dense(made, i) for i in range(len(made.caches))])}
    dense |= _sdpa_ms(made, context - _MARGIN // 2)
    best = min(dense, key=lambda name: dense[name])
    row: dict[str, Any] = {
        "batch": batch, "context": context, "error": error, "correct": correct, "nsa_ms": nsa,
        "dense_ms": dense[best], "dense": best, "dense_all_ms": dense, "caches": len(made.caches),
        "times_dense": dense[best] / nsa if correct else None, "keys_read": read, "keys_dense": context - _MARGIN // 2,
    }  # fmt: skip
    if made.layer.selector is not None:
        row |= made.layer.selector.cache_key()  # how many of its channels are rotated
    every_dense = ", ".join(f"{name} {ms:.4f}" for name, ms in dense.items())
    ratio = f"{dense[best] / nsa:8.2f}" if correct else "   WRONG"
    print(
        f"{batch:6d} {context:8d} {error:8.1e} {nsa:8.4f} {dense[best]:9.4f} {ratio} {read:7.0f} "
        f"{row['keys_dense']:8d} {read / row['keys_dense']:6.1%}  {every_dense}",
        flush=True,
    )
    if profile:
        _rewind(made, context)  # the timing filled the caches
        _print_kernels(_nsa(made, 0))
    return row


def _rewind(made: _Caches, context: int) -> None:
    """Make room for the tokens of the next measurement: the kernels do not check for it."""
    for cache in made.caches:
        cache.lengths.fill_(context - _MARGIN)


# Tokens appended to a cache during a measurement: warm-up, capture, replays.
_MARGIN = _REPLAYS * (_REPEATS + 1) + 8


def _make(heads: tuple[int, int, int], config: NSAConfig, batch: int, context: int, selector: str) -> _Caches:
    H, G, D = heads
    layer = NativeSparseAttention(64, H, G, D, config=config, selector=selector).to("cuda", torch.bfloat16)
    layer.init_weights(std=0.1, output_std=0.1)
    for phi in (layer.compress_k, layer.compress_v):
        torch.nn.init.normal_(phi.down.weight, std=D**-0.5)  # a trained φ is no plain mean
    per_token, size = 2 * G * D * 2, layer.selector_size()
    own = batch * context * G * size * 2  # a learned selector's keys
    touched = batch * per_token * (config.num_compressed(context) + config.select_count * 64 + config.window) + own
    held = batch * per_token * (context + config.num_compressed(context)) + own
    copies = max(1, min(_MOST_COPIES, -(-_ROUND_BYTES // touched), _MOST_MEMORY // held))
    caches = [layer.make_cache(batch, context) for _ in range(copies)]
    for cache in caches:
        for store in cache._stores.values():
            store.normal_()
        cache.lengths.fill_(context - _MARGIN)
        cache.host_lengths = type(cache.host_lengths)((context - _MARGIN,) * batch)

    def normal(size: int) -> Tensor:
        return torch.randn(copies, batch, 1, size, device="cuda", dtype=torch.bfloat16)

    # as the layer projects them: slices of one row
    queries, keys, gates = normal(2 * G * size + 3 * H).split([G * size, G * size, 3 * H], -1)
    scored = (queries, keys) if size else None
    return _Caches(layer, caches, normal(H * D), normal(6 * G * D), normal(2 * G * D), gates, scored)


def _nsa(made: _Caches, i: int) -> Callable[[], Any]:
    from tercet.attention.kernels import decode
    from tercet.model.decode import kernel_cache, kernel_heads, phi_weights

    layer, cache = made.layer, made.caches[i]
    held, heads = kernel_cache(cache), kernel_heads(layer)
    scored = None if made.scored is None else (made.scored[0][i], made.scored[1][i])
    phi = (phi_weights(layer.compress_k), phi_weights(layer.compress_v))

    def step() -> None:
        _, read, _ = decode.nsa_step(
            made.q[i], made.kv[i], made.gates[i], held, None, layer.config, heads, branches=BRANCHES, shared=False,
            softmax_gate=False, norms=None, phi=phi, selector=scored,
        )  # fmt: skip
        cache.set_partial_reads(read)

    return step


def _dense(made: _Caches, i: int) -> Callable[[], Any]:
    from tercet.attention.kernels import decode

    layer, cache = made.layer, made.caches[i]
    held = decode.Held(cache.lengths, cache.rope_frequencies(), cache.capacity, selected=cache.selected())
    heads = decode.Heads(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim)
    return lambda: decode.dense_step(made.q[i], made.dense_kv[i], held, None, heads, norms=None)


def _sdpa_ms(made: _Caches, keys: int) -> dict[str, float]:
    """SDPA on the same keys: attention alone, without RoPE and cache update."""
    layer = made.layer
    times = {}
    for name, backend in _DENSE.items():
        steps: list[Callable[[], Any]] = []
        for i, cache in enumerate(made.caches):
            k, v = (x[:, :keys].transpose(1, 2) for x in cache.selected())
            q = made.q[i].view(-1, 1, layer.heads, layer.head_dim).transpose(1, 2)
            steps.append(partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True))
        try:
            with sdpa_kernel(backend):
                times[name] = _graph_ms(steps)
        except RuntimeError:  # this backend rejects the shape
            continue
    return times


@torch.no_grad()
def _graph_ms(steps: list[Callable[[], Any]]) -> float:
    """Milliseconds per step, all steps captured in one CUDA graph; median over repeats."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    times = []
    for _ in range(_REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / _REPLAYS / len(steps))
    return statistics.median(times[1:])


@torch.no_grad()
def _print_kernels(step: Callable[[], Any]) -> None:
    """Print the time of each kernel in an eager step. It rereads the same keys, so some come from L2."""
    for ms, launches, kernel in profile_kernels(step, 16):
        print(f"        {1e3 * ms:8.1f} us, {launches} ×  {kernel[:60]}")

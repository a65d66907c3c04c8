"""Benchmark decoding (`tercet bench decode`): a whole model's first token, tokens/s and cache size, or one layer.

On a GPU, a step of the first sparse layer is compared with the reference before it is timed; if they differ, no ratio
is printed and the exit code is 1. The last line of output is one JSON object.

`--layer`: a token in one layer of 32 query heads on 8 KV heads of 128, blocks chosen by the model's own queries and
keys, without projections: rotate the token, write it to the cache, choose, attend. Dense attention is ours, which does
the same, and PyTorch's over the same cache, which neither rotates nor writes; the ratio is to the fastest. All as CUDA
graphs.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tercet.attention.config import NSAConfig
from tercet.attention.selector import take_channels
from tercet.bench.settings import KINDS, check_kinds
from tercet.bench.timing import device_name, graphed, milliseconds
from tercet.config.load import load
from tercet.doctor.kernels import relative_error
from tercet.errors import UsageError
from tercet.inference.decoder import CachedDecoder
from tercet.model.attention import Attention
from tercet.model.cache import Cache, HostLengths
from tercet.model.decode import kernel_cache, kernel_heads
from tercet.model.layers import BlockSparseAttention, DenseAttention
from tercet.model.transformer import Transformer
from tercet.terminal import Columns, table

_LONG = 131072
# Prompt length of the warm-up before a long prompt.
_WARM = 8192
# Largest relative error of a decode step in bf16.
ERROR_LIMIT = 1e-2
COLUMNS: Columns = {
    "kind": ("kind", str), "context": ("context", str), "batch": ("batch", str),
    "out_of_memory": ("", lambda _: "out of memory"), "first_token_s": ("first token, s", "{:.4f}".format),
    "tokens_per_s": ("tokens/s", "{:,.1f}".format), "ms_per_step": ("ms/step", "{:.3f}".format),
    "times_dense": ("× dense", "{:.2f}".format), "keys_per_token": ("keys/token", "{:,.0f}".format),
    "cache_bytes_per_token": ("cache, B/token", "{:.1f}".format), "error": ("error", "{:.1e}".format),
    "correct": ("check", lambda ok: "ok" if ok else "WRONG"), "graph": ("CUDA graph", str),
}  # fmt: skip
LAYER_COLUMNS: Columns = {
    "context": ("context", str), "batch": ("batch", str), "error": ("error", "{:.1e}".format),
    "correct": ("check", lambda ok: "ok" if ok else "WRONG"),
    **{f"{name}_ms": (f"{name}, ms", "{:.4f}".format) for name in ("sparse", "ours", "cudnn", "flash")},
    "times_dense": ("× dense", "{:.2f}".format),
}  # fmt: skip


def main(
    batches: Sequence[int], contexts: Sequence[int], preset: str, kinds: Sequence[str], *, steps: int,
    settings: Mapping[str, Any],
) -> int:  # fmt: skip
    check_kinds(preset, [kind for kind in kinds if kind != "dense"] or ["nsa"], settings)
    if not (batches and contexts):
        raise UsageError("--batches or --contexts is empty: nothing to measure")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(
        f"{device_name()}, torch {torch.__version__}; {preset}, {str(dtype).removeprefix('torch.')}, random weights "
        f"and prompts; {', '.join(kinds)} at contexts {', '.join(map(str, contexts))} with batches "
        f"{', '.join(map(str, batches))}; {steps} tokens per timing; first token at batch 1"
    )
    models = {}
    for kind in sorted(kinds, key=lambda kind: kind != "dense"):  # first, for the ratios
        torch.manual_seed(0)
        config = load(preset=preset, flags={**KINDS[kind], **settings}).config.model
        if kind == "dense":
            config = config.model_copy(update={"attention": "dense"})
        models[kind] = Transformer(config).to(device, dtype).eval()
    rows: list[dict[str, Any]] = []
    # All kinds at one context before the next, so that an interrupted run has complete ratios.
    for i, context in enumerate(contexts):
        for kind, model in models.items():
            for row in _at(model, context, batches, steps, warm=i > 0):
                row = {"kind": kind, "selector": model.config.selector if kind != "dense" else None} | row
                rows.append(row | {"times_dense": _times_dense(row, rows)})
                speed = f"{row['tokens_per_s']:,.1f} tokens/s" if "tokens_per_s" in row else "out of memory"
                print(f"{kind} at {context}, batch {row['batch']}: {speed}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"\n{table(rows, COLUMNS)}\n")
    checked = [row["correct"] for row in rows if "correct" in row]
    correct = all(checked) if checked else None  # None: nothing was compared with the reference
    record = {"bench": "decode", "device": device_name(), "torch": torch.__version__, "preset": preset}
    print(json.dumps({**record, "results": rows, "correct": correct}))
    return 1 if correct is False else 0


def _times_dense(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Tokens/s against dense at the same context and batch; None for dense, and if the step is wrong."""
    if row["kind"] == "dense" or not row.get("correct", True) or "tokens_per_s" not in row:
        return None
    place = {"kind": "dense", "context": row["context"], "batch": row["batch"]}
    dense = (r for r in rows if place.items() <= r.items() and "tokens_per_s" in r)
    return next((row["tokens_per_s"] / r["tokens_per_s"] for r in dense), None)


@torch.no_grad()
def _at(
    model: Transformer, context: int, batches: Sequence[int], steps: int, *, warm: bool
) -> Iterator[dict[str, Any]]:
    room = context + 4 * (1 + _steps_per_run(steps)) * len(batches)
    row: dict[str, Any] = {"context": context}
    try:
        decoder, token, seconds = _first_token(model, context, room, warm=warm)
    except torch.OutOfMemoryError:
        yield from (row | {"batch": batch, "out_of_memory": True} for batch in batches)
        return
    held = sum(cache.nbytes() for cache in decoder.cache) / room
    row |= {"first_token_s": seconds, "cache_bytes_per_token": held}
    layers = zip(model.attention_layers(), decoder.cache, strict=True)
    sparse = next((x for x in layers if x[0].spec.sparse), None)
    if token.is_cuda and sparse is not None:
        error = step_error(*sparse)  # type: ignore[arg-type]
        row |= {"error": error, "correct": error is not None and error <= ERROR_LIMIT}  # False for NaN
    for batch in batches:
        row["batch"] = batch
        try:
            decoder.take_rows(torch.zeros(batch, dtype=torch.int64, device=token.device))
            decoder.prepare()
            tokens = token[:1].expand(batch).contiguous()
            active = torch.ones(batch, dtype=torch.int32, device=token.device)
            ms = _step_ms(decoder, tokens, active, steps)
        except torch.OutOfMemoryError:
            yield row | {"out_of_memory": True}
            return  # the decoder's state is undefined now
        read = decoder.keys_read()
        yield row | {
            "ms_per_step": ms, "tokens_per_s": 1e3 * batch / ms,
            "keys_per_token": None if read is None else read / batch, "graph": decoder.graph_reason or "captured",
        }  # fmt: skip


def step_error(layer: Attention, cache: Cache, *, random: bool = True) -> float | None:
    """Relative error of one decode step on the kernels against the reference, in a copy of at most two rows of the
    cache; None if the reference ran. random: with random values in the copy."""
    rows, found = copy.copy(cache), {}
    rows.take_rows(torch.arange(min(len(cache.lengths), 2), device=cache.lengths.device))
    for store in rows._stores.values() if random else ():
        store.normal_()
    x = torch.randn(len(rows.lengths), 1, layer.dim, device=rows.lengths.device, dtype=torch.bfloat16)
    for backend in ("triton", "reference"):
        layer.backend = backend
        found[backend] = layer(x, cache=copy.deepcopy(rows))
        if backend == "triton" and "reference" in layer.routes.values():
            return None
    layer.backend = "auto"
    return relative_error(found["triton"], found["reference"])


def _first_token(
    model: Transformer, context: int, room: int, *, warm: bool
) -> tuple[CachedDecoder, torch.Tensor, float]:
    """Prefill a random prompt: (decoder, first token, median seconds)."""
    prompt = torch.randint(0, model.config.vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    if context >= _LONG and not warm:
        CachedDecoder(model, 1, room, chunk=context).prefill([prompt[:_WARM]])
    # The first pass compiles and warms up. Long prompts run once, warmed up by shorter ones.
    times = []
    for _ in range(4 if context < _LONG else 1):
        decoder = CachedDecoder(model, 1, room, chunk=context)
        _wait()
        started = time.perf_counter()
        token = decoder.prefill([prompt]).argmax(-1)
        token.item()
        times.append(time.perf_counter() - started)
    return decoder, token, statistics.median(times[1:] or times)


def _step_ms(decoder: CachedDecoder, tokens: torch.Tensor, active: torch.Tensor, steps: int) -> float:
    """Milliseconds per greedy decode step; median of four runs after a warm-up."""
    per_run = _steps_per_run(steps)
    times = []
    for run in range(5):
        _wait()
        started = time.perf_counter()
        for _ in range(per_run if run else 4):
            tokens = decoder.step(tokens, active).argmax(-1)
        _wait()
        times.append(1e3 * (time.perf_counter() - started) / per_run)
    return statistics.median(times[1:])


def _steps_per_run(steps: int) -> int:
    return max(1, steps // 4)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


HEADS, GROUPS, SIZE, DIM = 32, 8, 128, 64
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def layer_main(batches: Sequence[int], contexts: Sequence[int], budget: float = 0.3) -> int:
    if not torch.cuda.is_available():
        raise UsageError("bench decode --layer needs a CUDA device: none was found")
    print(
        f"{device_name()}, torch {torch.__version__}, bf16, {HEADS} heads, {GROUPS} KV heads of {SIZE}, one token a row"
    )
    results = []
    for context, batch in itertools.product(contexts, batches):
        results.append(_layer_at(batch, context, budget))
        print(table(results[-1:], LAYER_COLUMNS), flush=True)
    print(f"\n{table(results, LAYER_COLUMNS)}\n")
    correct = all(row["correct"] for row in results)
    print(json.dumps({"bench": "decode layer", "device": device_name(), "correct": correct, "results": results}))
    return 0 if correct else 1


@torch.no_grad()
def _layer_at(batch: int, context: int, budget: float) -> dict[str, Any]:
    torch.manual_seed(0)
    sparse = BlockSparseAttention(DIM, HEADS, GROUPS, SIZE, config=NSAConfig(), selector="own").to(
        "cuda", torch.bfloat16
    )
    dense = DenseAttention(DIM, HEADS, GROUPS, SIZE).to("cuda", torch.bfloat16)
    caches = [_filled(layer, batch, context) for layer in (sparse, dense)]
    error = step_error(sparse, caches[0], random=False)
    error = math.inf if error is None else error
    q, kv = (torch.randn(batch, 1, n, device="cuda", dtype=torch.bfloat16) for n in (HEADS * SIZE, 2 * GROUPS * SIZE))
    ms = {
        f"{name}_ms": milliseconds(graphed(_layer_step(layer, cache, q, kv)), budget)
        for name, layer, cache in zip(("sparse", "ours"), (sparse, dense), caches, strict=True)
    }
    k, v = (store[:, :context].transpose(1, 2) for store in caches[1].stores()["selected"])
    rows = q.view(batch, GROUPS, HEADS // GROUPS, SIZE)  # the heads of a group as queries: nothing to mask
    for name, backend in _BACKENDS.items():
        with suppress(RuntimeError), sdpa_kernel(backend):  # not every version runs every shape
            ms[f"{name}_ms"] = milliseconds(graphed(lambda: scaled_dot_product_attention(rows, k, v)), budget)
    fastest, correct = min(value for name, value in ms.items() if name != "sparse_ms"), error <= ERROR_LIMIT
    ratio = fastest / ms["sparse_ms"] if correct else None
    return {"context": context, "batch": batch, "error": error, "correct": correct, **ms, "times_dense": ratio}


def _filled(layer: Attention, batch: int, context: int) -> Cache:
    """A cache of random keys and values, as if `context` tokens had been read, with room for those that are timed."""
    cache = layer.make_cache(batch, context + 1024)
    for store in cache._stores.values():
        store.normal_()
    if cache.scored_channels is not None:
        cache._stores["selector"].copy_(take_channels(cache._stores["k_selected"], cache.scored_channels))
    cache.lengths.fill_(context)
    cache.host_lengths = HostLengths((context,) * batch)
    return cache


def _layer_step(layer: Attention, cache: Cache, q: Tensor, kv: Tensor) -> Callable[[], Tensor]:
    """A step without projections; every call is the next token."""
    from tercet.attention.kernels import decode

    held, heads = kernel_cache(cache), kernel_heads(layer, cache)

    def step() -> Tensor:
        if layer.spec.dense:
            return decode.dense_step(q, kv, held, None, heads, norms=None)[0]
        out, _, _ = decode.nsa_step(
            q, kv, None, held, None, layer.config, heads, branches=layer.spec.branches, shared=True,
            softmax_gate=False, norms=None, phi=None,
        )  # fmt: skip
        return out

    return step

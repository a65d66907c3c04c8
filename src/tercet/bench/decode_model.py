"""Benchmark decoding with a whole model: time to first token, tokens/s, cache size; NSA and dense.

On a GPU, a step of the first layer is compared with the reference before it is timed.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tercet.errors import UsageError
from tercet.inference.decoder import CachedDecoder
from tercet.model.block_sparse import BlockSparseAttention
from tercet.model.cache import Cache
from tercet.model.config import is_all_dense
from tercet.model.nsa import NativeSparseAttention
from tercet.model.transformer import Transformer

_LONG = 131072
# Prompt length of the warm-up before a long prompt.
_WARM = 8192
# Largest relative error of a decode step in bf16.
ERROR_LIMIT = 1e-2


def model_rows(
    preset: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
    selector: str | None = None,
    settings: dict[str, str] | None = None,
    kinds: Sequence[str] = ("nsa", "dense"),
) -> list[dict[str, Any]]:
    from tercet.config.load import load

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = load(preset=preset, flags=settings).config.model
    if "nsa" in kinds and is_all_dense(config.attention):
        raise UsageError(f"--preset {preset} with model.attention={config.attention}: give a preset with sparse layers")
    if selector is not None:
        config = config.model_copy(update={"selector": selector})
    print(
        f"model {preset}, gate {config.gate}, selector {config.selector}, {str(dtype).removeprefix('torch.')}, "
        "random weights and prompts; first token at batch 1"
    )
    print(
        f"{'kind':>6} {'context':>8} {'first token s':>14} {'batch':>6} {'tokens/s':>10} {'ms/step':>8} "
        f"{'keys/token':>11} {'cache B/token':>14} {'error':>8}  step"
    )
    models = {}
    for kind in kinds:
        torch.manual_seed(0)
        shown = config.model_copy(update={"attention": "dense"}) if kind == "dense" else config
        models[kind] = Transformer(shown).to(device, dtype).eval()
    rows = []
    # Both kinds at one context before the next, so that an interrupted run has complete pairs.
    for i, context in enumerate(contexts):
        for kind, model in models.items():
            for row in _at(model, kind, context, batches, steps, warm=i > 0):
                print(_line(row), flush=True)
                rows.append(row)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def _at(
    model: Transformer, kind: str, context: int, batches: Sequence[int], steps: int, *, warm: bool
) -> Iterator[dict[str, Any]]:
    room = context + 4 * (1 + _steps_per_run(steps)) * len(batches)
    row: dict[str, Any] = {"kind": kind, "context": context}
    try:
        decoder, token, seconds = _first_token(model, context, room, warm=warm)
    except torch.OutOfMemoryError:
        yield from (row | {"batch": batch, "out_of_memory": True} for batch in batches)
        return
    held = sum(cache.nbytes() for cache in decoder.cache) / room
    row |= {"first_token_s": seconds, "cache_bytes_per_token": held}
    layers = zip(model.attention_layers(), decoder.cache, strict=True)
    sparse = next((x for x in layers if isinstance(x[0], NativeSparseAttention | BlockSparseAttention)), None)
    if token.is_cuda and sparse is not None:
        error = step_error(*sparse)  # type: ignore[arg-type]
        row |= {"error": error, "correct": correct(error)}
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


@torch.no_grad()
def step_error(layer: NativeSparseAttention | BlockSparseAttention, cache: Cache) -> float:
    """Relative error of one decode step on the kernels against the reference, with random values in a copy of at most
    two rows of the cache."""
    mine = copy.copy(cache)
    mine.take_rows(torch.arange(min(len(cache.lengths), 2), device=cache.lengths.device))
    for store in mine._stores.values():
        store.normal_()
    theirs = copy.deepcopy(mine)
    x = torch.randn(len(mine.lengths), 1, layer.dim, device=mine.lengths.device, dtype=torch.bfloat16)
    layer.backend = "triton"
    found = layer(x, cache=mine).double()
    layer.backend = "reference"
    wanted = layer(x, cache=theirs).double()
    layer.backend = "auto"
    return float((found - wanted).norm() / wanted.norm())


def correct(error: float) -> bool:
    return math.isfinite(error) and error <= ERROR_LIMIT


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


def _line(row: dict[str, Any]) -> str:
    begin = f"{row['kind']:>6} {row['context']:8d}"
    if "out_of_memory" in row:
        return f"{begin} {'':14} {row['batch']:6d} out of memory"
    error = f"{row['error']:.1e}" if row.get("correct") else "WRONG" if "error" in row else "–"
    return (
        f"{begin} {row['first_token_s']:14.4f} {row['batch']:6d} {row['tokens_per_s']:10.1f} {row['ms_per_step']:8.3f} "
        f"{row['keys_per_token'] or 0:11,.0f} {row['cache_bytes_per_token']:14.1f} {error:>8}  graph: {row['graph']}"
    )


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

"""Benchmark decoding with a whole model (`tercet bench decode`): time to the first token, tokens/s, cache size.

On a GPU, a step of the first sparse layer is compared with the reference before it is timed; if they differ, no ratio
is printed and the exit code is 1. The last line of output is one JSON object.
"""

from __future__ import annotations

import copy
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tercet.bench.settings import KINDS, check_kinds
from tercet.bench.timing import device_name, print_profile, reference_error
from tercet.config.load import load
from tercet.errors import UsageError
from tercet.inference.decoder import CachedDecoder
from tercet.model.attention import Attention
from tercet.model.cache import Cache
from tercet.model.transformer import Transformer

_LONG = 131072
# Prompt length of the warm-up before a long prompt.
_WARM = 8192
# Largest relative error of a decode step in bf16.
ERROR_LIMIT = 1e-2


def main(
    *, batches: Sequence[int], contexts: Sequence[int], preset: str, kinds: Sequence[str], steps: int,
    settings: Mapping[str, Any], profile: bool,
) -> int:  # fmt: skip
    check_kinds(preset, [kind for kind in kinds if kind != "dense"] or ["nsa"], settings)
    if not (batches and contexts):
        raise UsageError("--batches or --contexts is empty: nothing to measure")
    if profile and not torch.cuda.is_available():
        raise UsageError("--profile needs a GPU: leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(
        f"{device_name()}, torch {torch.__version__}; {preset}, {str(dtype).removeprefix('torch.')}, random weights "
        f"and prompts; {', '.join(kinds)} at contexts {', '.join(map(str, contexts))} with batches "
        f"{', '.join(map(str, batches))}; {steps} tokens per timing; first token at batch 1"
    )
    print(
        f"{'kind':>12} {'context':>8} {'first token s':>14} {'batch':>6} {'tokens/s':>10} {'ms/step':>8} "
        f"{'× dense':>8} {'keys/token':>11} {'cache B/token':>14} {'error':>8}  step"
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
            for row in _at(model, context, batches, steps, warm=i > 0, profile=profile):
                row = {"kind": kind, "selector": model.config.selector if kind != "dense" else None} | row
                rows.append(row | {"times_dense": _times_dense(row, rows)})
                print(_line(rows[-1]), flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
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
    model: Transformer, context: int, batches: Sequence[int], steps: int, *, warm: bool, profile: bool
) -> Iterator[dict[str, Any]]:
    room = context + 4 * (1 + _steps_per_run(steps)) * len(batches) + 32 * profile * len(batches)
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
            if profile:
                print_profile(lambda now=tokens, on=active: decoder.step(now, on), 16)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            yield row | {"out_of_memory": True}
            return  # the decoder's state is undefined now
        read = decoder.keys_read()
        yield row | {
            "ms_per_step": ms, "tokens_per_s": 1e3 * batch / ms,
            "keys_per_token": None if read is None else read / batch, "graph": decoder.graph_reason or "captured",
        }  # fmt: skip


def step_error(layer: Attention, cache: Cache) -> float | None:
    """Relative error of one decode step on the kernels against the reference, with random values in a copy of at most
    two rows of the cache."""
    rows = copy.copy(cache)
    rows.take_rows(torch.arange(min(len(cache.lengths), 2), device=cache.lengths.device))
    for store in rows._stores.values():
        store.normal_()
    x = torch.randn(len(rows.lengths), 1, layer.dim, device=rows.lengths.device, dtype=torch.bfloat16)
    return reference_error(layer, lambda: layer(x, cache=copy.deepcopy(rows)), backend="triton")


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


def _line(row: Mapping[str, Any]) -> str:
    begin = f"{row['kind']:>12} {row['context']:8d}"
    if "out_of_memory" in row:
        return f"{begin} {'':14} {row['batch']:6d} out of memory"
    error = f"{row['error']:.1e}" if row.get("correct") else "WRONG" if "error" in row else "–"
    ratio = "" if row["times_dense"] is None else f"{row['times_dense']:.2f}"
    return (
        f"{begin} {row['first_token_s']:14.4f} {row['batch']:6d} {row['tokens_per_s']:10.1f} {row['ms_per_step']:8.3f} "
        f"{ratio:>8} {row['keys_per_token'] or 0:11,.0f} {row['cache_bytes_per_token']:14.1f} {error:>8}  "
        f"graph: {row['graph']}"
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

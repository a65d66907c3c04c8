"""Benchmark a decoded token in one attention layer (`tercet bench decode --layer`).

32 query heads on 8 KV heads of 128, blocks chosen by the model's own queries and keys, without projections: rotate the
token, write it to the cache, choose, attend. Dense attention is ours, which does the same, and PyTorch's over the same
cache, which neither rotates nor writes; the ratio is to the fastest. All as CUDA graphs. A step is compared with the
reference first.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tercet.attention.config import NSAConfig
from tercet.bench.timing import device_name, graphed, milliseconds
from tercet.doctor.kernels import relative_error
from tercet.errors import UsageError
from tercet.model.attention import Attention
from tercet.model.cache import Cache, HostLengths
from tercet.model.decode import kernel_cache, kernel_heads
from tercet.model.layers import BlockSparseAttention, DenseAttention

HEADS, GROUPS, SIZE, DIM = 32, 8, 128, 64
_TOLERANCE = 1e-2
_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def main(batches: Sequence[int], contexts: Sequence[int], budget: float = 0.3) -> int:
    if not torch.cuda.is_available():
        raise UsageError("bench decode --layer needs a CUDA device: none was found")
    print(
        f"{device_name()}, torch {torch.__version__}, bf16, {HEADS} heads, {GROUPS} KV heads of {SIZE}, one token a row"
    )
    print(f"{'context':>8} {'batch':>6} {'error':>8} {'sparse ms':>10} {'dense ms':>9}  {'fastest':8} {'× dense':>8}")
    results = [_at(batch, context, budget) for context in contexts for batch in batches]
    correct = all(row["correct"] for row in results)
    print(json.dumps({"bench": "decode layer", "device": device_name(), "correct": correct, "results": results}))
    return 0 if correct else 1


@torch.no_grad()
def _at(batch: int, context: int, budget: float) -> dict[str, Any]:
    torch.manual_seed(0)
    sparse = BlockSparseAttention(DIM, HEADS, GROUPS, SIZE, config=NSAConfig(), selector="own").to(
        "cuda", torch.bfloat16
    )
    dense = DenseAttention(DIM, HEADS, GROUPS, SIZE).to("cuda", torch.bfloat16)
    caches = [_filled(layer, batch, context) for layer in (sparse, dense)]
    error = _error(sparse, caches[0])
    q, kv = (torch.randn(batch, 1, n, device="cuda", dtype=torch.bfloat16) for n in (HEADS * SIZE, 2 * GROUPS * SIZE))
    ms = {
        name: milliseconds(graphed(_step(layer, cache, q, kv)), budget)
        for name, layer, cache in zip(("sparse", "ours"), (sparse, dense), caches, strict=True)
    }
    k, v = (store[:, :context].transpose(1, 2) for store in caches[1].selected())
    rows = q.view(batch, GROUPS, HEADS // GROUPS, SIZE)  # the heads of a group as queries: nothing to mask
    for name, backend in _BACKENDS.items():
        with suppress(RuntimeError), sdpa_kernel(backend):  # not every version runs every shape
            ms[name] = milliseconds(graphed(lambda: scaled_dot_product_attention(rows, k, v)), budget)
    fastest = min((name for name in ms if name != "sparse"), key=ms.__getitem__)
    correct = error <= _TOLERANCE
    ratio = ms[fastest] / ms["sparse"] if correct else None
    shown = "WRONG" if ratio is None else f"{ratio:.2f}"
    print(
        f"{context:8d} {batch:6d} {error:8.1e} {ms['sparse']:10.4f} {ms[fastest]:9.4f}  {fastest:8} {shown:>8}",
        flush=True,
    )
    return {"context": context, "batch": batch, "error": error, "correct": correct, "ms": ms, "times_dense": ratio}


def _filled(layer: Attention, batch: int, context: int) -> Cache:
    """A cache of random keys and values, as if `context` tokens had been read, with room for those that are timed."""
    cache = layer.make_cache(batch, context + 1024)
    for store in cache._stores.values():
        store.normal_()
    if cache.scored_channels is not None:
        cache._stores["selector"].copy_(cache._stores["k_selected"].index_select(-1, cache.scored_channels))
    cache.lengths.fill_(context)
    cache.host_lengths = HostLengths((context,) * batch)
    return cache


def _error(layer: Attention, cache: Cache) -> float:
    """Of the first row's next token on the kernels, against the reference."""
    first = copy.copy(cache)
    first.take_rows(torch.zeros(1, dtype=torch.int64, device="cuda"))
    x, found = torch.randn(1, 1, DIM, device="cuda", dtype=torch.bfloat16), {}
    for backend in ("triton", "reference"):
        layer.backend = backend
        found[backend] = layer(x, cache=copy.deepcopy(first))
    layer.backend = "auto"
    return relative_error(found["triton"], found["reference"])


def _step(layer: Attention, cache: Cache, q: Tensor, kv: Tensor) -> Callable[[], Tensor]:
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

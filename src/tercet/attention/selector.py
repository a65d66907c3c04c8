"""Block selection by a learned selector, from its own queries and keys, one per token and KV group (docs/nsa.md).

queries [B, T, G, size]; keys [B, T, G, size], the rows of the selected branch's keys.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from tercet.attention import checks, reference
from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import choose_backend, without_autocast
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import (
    WHOLE,
    Packing,
    Span,
    document_buckets,
    keep_selection,
    kernel_layout,
    why_no_query_range,
)


def choose_blocks(
    queries: Tensor,
    keys: Tensor,
    *,
    config: NSAConfig,
    packing: Packing | None = None,
    span: Span = WHOLE,
    backend: str = "auto",
) -> Tensor:
    """block_indices, int32 [B, T, G, n]. With a span, the queries are a query range, and the keys start at
    `span.first_key`."""
    queries, keys = queries.detach(), keys.detach()
    tensors = {"q": queries, "k_selected": keys, "v_selected": keys}
    backend, _ = choose_backend(backend, tensors, config, why_no_query_range(span, packing, ("selected",)))
    with without_autocast(queries.device.type):
        if backend == "triton":
            from tercet.attention import kernels

            return kernels.select_by_tokens(queries, keys, config, kernel_layout(queries, packing, span, keys))
        if (buckets := document_buckets(packing, span)) is not None:
            return keep_selection(buckets.run(partial(reference.select_by_tokens, config=config), queries, keys))
        return keep_selection(reference.select_by_tokens(queries, keys, config, packing, span))


def check_selector(queries: Tensor, keys: Tensor, q: Tensor, k_selected: Tensor) -> None:
    """A selector's queries and keys must belong to the same tokens and groups as q and k_selected."""
    checks.check_tensors({"selector queries": queries, "selector keys": keys})
    for name, x, tokens in (("queries", queries, q), ("keys", keys, k_selected)):
        expected = [*tokens.shape[:2], k_selected.shape[2], queries.shape[-1]]
        if list(x.shape) != expected:
            raise ValueError(
                f"selector {name} have shape {list(x.shape)}: expected {expected}, one vector per token and KV head"
            )


# Bytes of a block's keys, and numbers of one key, that the kernels have room for.
_BLOCK_BYTES, _MOST_CHANNELS = 64 << 10, 256


def block_lse(
    q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int, backend: str = "auto"
) -> Tensor:
    """`reference.block_lse`, on the kernels where they run; with gradients for one query head per group."""
    size = q.shape[-1]
    fits = size <= _MOST_CHANNELS and block * size * q.element_size() <= _BLOCK_BYTES
    with without_autocast(q.device.type):
        if backend == "reference" or not fits or not kernels_run_on(q):
            return reference.block_lse(q, k, row, position, blocks, block)
        from tercet.attention.kernels import block_lse as kernels

        return kernels.block_lse(q, k.to(q.dtype), row, position, block, blocks)

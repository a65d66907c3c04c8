"""Block selection by queries and keys of single tokens (docs/nsa.md): a learned selector's, or the model's own.

queries [B, T, G, size], of own ones [B, T, H, size]; keys [B, T, G, size], the rows of the selected branch's keys.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
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


class TokenScorer(NamedTuple):
    """What scores blocks by single tokens."""

    queries: Tensor
    keys: Tensor
    kind: str = "learned"  # or "own"


def slow_channels(size: int, device: torch.device, planes: int = 16) -> Tensor | None:
    """Channels of the slowest planes of RoPE's half-rotation, which need no calibration; None for all of them."""
    half = size // 2
    if half <= planes:
        return None
    slow = torch.arange(half - planes, half, device=device)
    return torch.cat((slow, slow + half))


def check_channels(channels: Tensor, groups: int, size: int) -> None:
    if channels.dtype != torch.int64 or channels.dim() not in (1, 2) or channels.shape[:-1] not in ((), (groups,)):
        found = f"{str(channels.dtype).removeprefix('torch.')} {list(channels.shape)}"
        raise ValueError(f"score_channels is {found}: expected int64 [c] or [{groups}, c]")
    if not channels.shape[-1]:
        raise ValueError("score_channels names no channel: give at least one, or None for all of them")
    if not channels.is_cuda and not 0 <= int(channels.min()) <= int(channels.max()) < size:
        raise ValueError(f"score_channels={channels.flatten().tolist()} must be channels 0 … {size - 1} of q and k")


def own_scorer(q: Tensor, k: Tensor, channels: Tensor | None = None) -> TokenScorer:
    """The scorer `own`: the branch's rotated queries and keys, of some channels [c] or [G, c]; None: all."""
    q, k = q.detach(), k.detach()
    if channels is None:
        return TokenScorer(q, k, "own")
    if channels.dim() == 1:
        return TokenScorer(q.index_select(-1, channels), k.index_select(-1, channels), "own")
    of_heads = channels.repeat_interleave(q.shape[2] // k.shape[2], 0)
    return TokenScorer(
        q.gather(-1, of_heads.expand(*q.shape[:-1], -1)), k.gather(-1, channels.expand(*k.shape[:-1], -1)), "own"
    )


def choose_blocks(
    queries: Tensor,
    keys: Tensor,
    scorer: str = "learned",
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

            return kernels.select_by_tokens(
                queries, keys, config, kernel_layout(queries, packing, span, keys), scorer == "own"
            )
        if (buckets := document_buckets(packing, span)) is not None:
            select = partial(reference.select_by_tokens, config=config, scorer=scorer)
            return keep_selection(buckets.run(select, queries, keys))
        return keep_selection(reference.select_by_tokens(queries, keys, config, packing, span, scorer))


def check_selector(selector: TokenScorer, q: Tensor, k_selected: Tensor) -> None:
    """A selector's queries and keys must belong to the same tokens and groups as q and k_selected."""
    queries, keys, kind = selector
    checks.check_tensors({"selector queries": queries, "selector keys": keys})
    for name, x, tokens in (("queries", queries, q), ("keys", keys, k_selected)):
        heads = tokens.shape[2] if kind == "own" else k_selected.shape[2]
        expected = [*tokens.shape[:2], heads, queries.shape[-1]]
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

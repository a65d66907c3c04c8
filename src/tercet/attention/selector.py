"""Block selection by queries and keys of single tokens (docs/nsa.md): a learned selector's, or the model's own.

queries [B, T, G, size], of own ones [B, T, H, size]; keys [B, T, G, size], the rows of the selected branch's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention import checks, reference
from tercet.attention.config import SLOW_PLANES, NSAConfig
from tercet.attention.dispatch import choose_backend, without_autocast
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import (
    WHOLE,
    Packing,
    Span,
    document_buckets,
    keep_selection,
    kernel_layout,
    move_rows,
    why_no_query_range,
)
from tercet.attention.spec import SCORERS, AttentionSpec, without_kernel
from tercet.attention.tiling import compute_dtype


class PooledGroups(NamedTuple):
    """KV heads that choose by the means of their blocks of keys, beside others that choose by single tokens."""

    exact: tuple[int, ...]
    """The others, in ascending order."""
    queries: Tensor
    """[B, T, H, D] of the attention, of these heads only."""
    keys: Tensor
    config: NSAConfig
    """One compressed token per selection block."""


class TokenScorer(NamedTuple):
    """What scores blocks by single tokens."""

    queries: Tensor
    keys: Tensor
    kind: str = "learned"
    """Its name in `spec.SCORERS`."""
    pooled: PooledGroups | None = None

    def with_keys(self, fetch: Callable[[Tensor], Tensor]) -> TokenScorer:
        """`fetch` of all keys at once, as rows."""
        parts = [self.keys] if self.pooled is None else [self.keys, self.pooled.keys]
        fetched = fetch(torch.cat([x[0].flatten(1) for x in parts], 1)).split([x[0, 0].numel() for x in parts], 1)
        keys, *more = (rows.unflatten(1, x.shape[2:])[None] for rows, x in zip(fetched, parts, strict=True))
        return self._replace(keys=keys, pooled=self.pooled and self.pooled._replace(keys=more[0]))

    def of_rows(self, queries: slice, keys: slice, batch: slice = slice(None)) -> TokenScorer:
        pooled = self.pooled
        if pooled is not None:
            pooled = pooled._replace(queries=pooled.queries[batch, queries], keys=pooled.keys[batch, keys])
        return self._replace(queries=self.queries[batch, queries], keys=self.keys[batch, keys], pooled=pooled)


Ranges = tuple[tuple[int, int], ...]
"""Channels from the first of each pair up to the second."""


def slow_channels(size: int, planes: int = SLOW_PLANES) -> Ranges | None:
    """Channels of the slowest planes of RoPE's half-rotation, which need no calibration; None for all of them."""
    half = size // 2
    return None if half <= planes else ((half - planes, half), (size - planes, size))


def check_channels(channels: Tensor | Ranges, groups: int, size: int) -> None:
    if not isinstance(channels, Tensor):
        pairs = isinstance(channels, tuple) and all(isinstance(x, tuple) and len(x) == 2 for x in channels)
        numbers = pairs and all(type(n) is int for x in channels for n in x)
        if not channels or not numbers or not all(0 <= first < end <= size for first, end in channels):
            raise ValueError(f"score_channels={channels!r}: expected ((first, end), …) of channels 0 … {size - 1}")
        return
    if channels.dtype != torch.int64 or channels.dim() not in (1, 2) or channels.shape[:-1] not in ((), (groups,)):
        found = f"{str(channels.dtype).removeprefix('torch.')} {list(channels.shape)}"
        raise ValueError(f"score_channels is {found}: expected int64 [c] or [{groups}, c]")
    if not channels.shape[-1]:
        raise ValueError("score_channels names no channel: give at least one, or None for all of them")
    if not channels.is_cuda and not 0 <= int(channels.min()) <= int(channels.max()) < size:
        raise ValueError(f"score_channels={channels.flatten().tolist()} must be channels 0 … {size - 1} of q and k")


def take_channels(x: Tensor, channels: Ranges) -> Tensor:
    """Without an index, which would be one more tensor to make and to read."""
    parts = [x[..., first:end] for first, end in channels]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def own_scorer(q: Tensor, k: Tensor, channels: Tensor | Ranges | None, spec: AttentionSpec) -> TokenScorer:
    """A scorer like `own`: the branch's rotated queries and keys, of some channels, as `score_channels` gives them."""
    q, k = q.detach(), k.detach()
    groups, pooled = k.shape[2], None
    if spec.exact_groups is not None and len(spec.exact_groups) < groups:
        exact = tuple(sorted(spec.exact_groups))
        others = [g for g in range(groups) if g not in exact]
        pooled = PooledGroups(exact, _of_groups(q, others, groups), _of_groups(k, others, groups), spec.means)
        q, k = _of_groups(q, exact, groups), _of_groups(k, exact, groups)
        if isinstance(channels, Tensor) and channels.dim() == 2:
            channels = _of_groups(channels[None, None], exact, groups)[0, 0]
    if isinstance(channels, tuple):
        q, k = take_channels(q, channels), take_channels(k, channels)
    elif channels is not None and channels.dim() == 1:
        q, k = q.index_select(-1, channels), k.index_select(-1, channels)
    elif channels is not None:
        of_heads = channels.repeat_interleave(q.shape[2] // max(k.shape[2], 1), 0)
        q, k = q.gather(-1, of_heads.expand(*q.shape[:-1], -1)), k.gather(-1, channels.expand(*k.shape[:-1], -1))
    return TokenScorer(q, k, spec.scorer, pooled)


def _of_groups(x: Tensor, groups: Sequence[int], among: int) -> Tensor:
    """The heads of some KV heads: [B, T, heads, D]. By slices: an index from the host would synchronise."""
    parts = x.unflatten(2, (among, -1)).unbind(2)
    return torch.cat([parts[g] for g in groups], 2) if groups else x[:, :, :0]


def _merge_groups(exact: Tensor | None, others: Tensor, groups: tuple[int, ...]) -> Tensor:
    """block_indices of all KV heads, from those of `groups` and those of the others."""
    if exact is None:
        return others
    own, rest = iter(exact.unbind(2)), iter(others.unbind(2))
    return torch.stack([next(own if g in groups else rest) for g in range(exact.shape[2] + others.shape[2])], 2)


def choose_blocks(
    scorer: TokenScorer,
    *,
    config: NSAConfig,
    packing: Packing | None = None,
    span: Span = WHOLE,
    backend: str = "auto",
) -> Tensor:
    """block_indices, int32 [B, T, G, n]. With a span, the queries are a query range, and the keys start at
    `span.first_key`."""
    pooled, exact = scorer.pooled, None
    if pooled is None or pooled.exact:
        exact = _choose_by_tokens(scorer, config, packing, span, backend)
    if pooled is None:
        assert exact is not None
        return exact
    packing = None if packing is None else packing.with_sizes(pooled.config)
    means = pool_keys(pooled.keys, pooled.config, packing, span)
    options: Any = {"packing": packing, "span": span, "backend": backend}
    return _merge_groups(exact, select_by_keys(pooled.queries, means, config=pooled.config, **options), pooled.exact)


def _choose_by_tokens(
    scorer: TokenScorer, config: NSAConfig, packing: Packing | None, span: Span, backend: str
) -> Tensor:
    queries, keys = scorer.queries.detach(), scorer.keys.detach()
    tensors = {"q": queries, "k_selected": keys, "v_selected": keys}
    obstacle = without_kernel(scorer.kind) or why_no_query_range(span, packing, ("selected",))
    backend, _ = choose_backend(backend, tensors, config, obstacle)
    with without_autocast(queries.device.type):
        if backend == "triton":
            from tercet.attention import kernels

            return kernels.select_by_tokens(
                queries, keys, config, kernel_layout(queries, packing, span, keys), scorer.kind == "own"
            )
        if (buckets := document_buckets(packing, span)) is not None:
            select = partial(reference.select_by_tokens, config=config, scorer=scorer.kind)
            return keep_selection(buckets.run(select, queries, keys))
        return keep_selection(reference.select_by_tokens(queries, keys, config, packing, span, scorer.kind))


def check_selector(selector: TokenScorer, q: Tensor, k_selected: Tensor) -> None:
    """A selector's queries and keys must belong to the same tokens and groups as q and k_selected."""
    queries, keys, kind, pooled = selector
    if pooled is not None:  # made from q and k_selected
        return
    checks.check_tensors({"selector queries": queries, "selector keys": keys})
    for name, x, tokens in (("queries", queries, q), ("keys", keys, k_selected)):
        heads = tokens.shape[2] if SCORERS[kind].reads == "branch" else k_selected.shape[2]
        expected = [*tokens.shape[:2], heads, queries.shape[-1]]
        if list(x.shape) != expected:
            raise ValueError(
                f"selector {name} have shape {list(x.shape)}: expected {expected}, one vector per token and KV head"
            )


# ------------------------------------------------------------ blocks chosen by means of keys


def select_by_keys(
    q: Tensor, keys: Tensor, *, config: NSAConfig, packing: Packing | None, backend: str, span: Span
) -> Tensor:
    """block_indices of queries q by the scores of `keys`, one per compressed token of the whole sequence: steps 2 to 5
    of docs/nsa.md."""
    q, keys = q.detach(), keys.detach()
    backend, _ = choose_backend(backend, {"q": q, "k_selected": keys}, config)

    def select(q: Tensor, keys: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
        _, indices, _ = reference.compressed_attention(q, keys, keys[..., :0], config, packing, span=span)
        assert indices is not None
        return indices

    with without_autocast(q.device.type):
        if backend == "triton":
            from tercet.attention import kernels

            return kernels.select_by_keys(q, keys, config, kernel_layout(q, packing, span))
        if (buckets := document_buckets(packing, span)) is not None:
            found = [select(bucket.rows(q), bucket.compressed_rows(keys)) for bucket in buckets.buckets]
            return keep_selection(buckets.unpack(found))
        return keep_selection(select(q, keys, packing, span))


def pool_keys(k: Tensor, config: NSAConfig, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
    """Means of the l keys of every compressed token, without a gradient. [B, T, G, D] -> [B, Tc, G, D]

    With a span of packed documents, those whose keys are not given are meaningless.
    """
    l, d = config.compress_block, config.compress_stride
    k = k.detach()
    if packing is not None and span is not WHOLE:
        first = packing.compressed_first_token - span.first_key
        given = (first[:, None] + torch.arange(l, device=k.device)).clamp(0, k.shape[1] - 1)
        return k[:, given].to(compute_dtype(k)).mean(2).to(k.dtype)
    if k.shape[1] < l:
        return k.new_zeros(k.shape[0], 0 if packing is None else packing.compressed_length, *k.shape[2:])
    if packing is None:
        chunks = k[:, : k.shape[1] // d * d].unflatten(1, (-1, d))
    else:
        chunks = move_rows(k[0], packing.tokens_to_chunks).unflatten(0, (-1, d))[None]
    sums = chunks.sum(2, dtype=compute_dtype(k))
    places, count = l // d, chunks.shape[1] - l // d + 1
    total = sums[:, :count]
    for place in range(1, places):
        total = total + sums[:, place : place + count]
    means = (total / l).to(k.dtype)
    return means if packing is None else move_rows(means[0], packing.chunks_to_compressed)[None]


# ------------------------------------------------------------ attention to blocks, by their log-sum-exp

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

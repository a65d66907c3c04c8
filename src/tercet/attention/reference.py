"""Native Sparse Attention in plain PyTorch, one function per equation of arXiv 2502.11089.

This is the definition that every other backend is tested against, and the path that CPU training takes. Each branch
says which keys a query sees and yields tiles of queries and keys; `tiling` computes attention over them.

Axes: q [B, T, H, Dk]; k, v [B, T, G, D*], compressed ones [B, Tc, G, D*]; h = H / G heads per group; a tile has C
queries and S keys. t, s, i, j are positions of queries, keys, compressed tokens and selection blocks in a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.layout import WHOLE, Packing, Span
from tercet.attention.spec import SCORERS, AttentionSpec
from tercet.attention.tiling import Tile, compute_dtype, segments, tiled_attention

# Logits that block_lse computes at once.
_LOGITS = 1 << 24


# ------------------------------------------------------------ Equation 5: gated sum


def combine(gates: Tensor, branches: dict[str, Tensor]) -> Tensor:
    """out = Σ_c g_c · branch_c (Eq. 5). gates: [B, T, H, 3], in the order compressed, selected, window."""
    total: Tensor | None = None
    for name, branch in branches.items():
        gated = gates[..., BRANCHES.index(name), None] * branch
        total = gated if total is None else total + gated
    assert total is not None
    return total


# ------------------------------------------------------------ Equations 7 to 11: compressed branch and selection


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: NSAConfig,
    packing: Packing | None = None,
    *,
    want_indices: bool = True,
    want_scores: bool = False,
    span: Span = WHOLE,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The compressed branch (Eq. 7, 8), and the blocks selected from its probabilities (Eq. 9 to 11).

    k and v cover the whole sequence (without a packing: at least everything the queries see). Returns out
    [B, T, H, Dv], block_indices [B, T, G, n] if want_indices, and scores [B, T, G, NB] if want_scores.
    """
    batch, length = q.shape[:2]
    groups = k.shape[2]
    if packing is not None and packing.bounds is None:
        # padding may hold NaN, and 0 · NaN is NaN: masking the scores alone is not enough
        real = (packing.compressed_document < packing.num_documents)[:, None, None]
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)
    num_blocks = config.num_blocks(span.first_query + length)
    indices = scores = None
    on_tile = None
    if want_indices:
        indices = torch.empty(batch, length, groups, config.select_count, dtype=torch.int32, device=q.device)
    if want_scores:
        scores = torch.zeros(batch, length, groups, num_blocks, dtype=compute_dtype(q), device=q.device)
    if want_indices or want_scores:

        def on_tile(tile: Tile, p: Tensor) -> None:
            # p: [B, G, C, h, S]; Eq. 10 before Eq. 9: both are linear, and this order costs h times less
            group_p = sum_over_group(p)
            blocks = config.num_blocks(tile.last_position + 1)
            importance = block_importance(group_p, tile.first_key, blocks, config)
            if scores is not None:
                scores[:, tile.queries, :, :blocks] = importance.transpose(1, 2)
            if indices is not None:
                indices[:, tile.queries] = select(importance, tile.t, config).transpose(1, 2)

    out = tiled_attention(q, k, v, lambda: _compressed_tiles(q, k.shape[1], config, packing, span), on_tile)
    return out, indices, scores


def visible_compressed(t: Tensor, i: Tensor, config: NSAConfig) -> Tensor:
    """Query t sees compressed token i once its last token is present: i·d + l ≤ t + 1. [C, S]"""
    return i * config.compress_stride + config.compress_block <= t[:, None] + 1


def _compressed_tiles(
    q: Tensor, compressed_length: int, config: NSAConfig, packing: Packing | None, span: Span
) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(count, packing, span):
        for first, end in segment.query_tiles(batch * heads, stride=config.compress_stride):
            queries, t = segment.queries(first, end), segment.position(first, end, q.device)
            if segment.packing is None:
                seen = config.num_compressed(end - segment.first)
                keys = slice(segment.compressed_first, segment.compressed_first + seen)
                mask = visible_compressed(t, torch.arange(seen, device=q.device), config)
                yield Tile(queries, keys, t, mask, first_key=0, last_position=end - 1 - segment.first)
            else:
                packed = segment.packing
                document = packed.document[first:end, None]
                mask = visible_compressed(t, packed.compressed_index, config)
                mask = mask & (document == packed.compressed_document)
                first_key = packed.compressed_cu_seqlens[document].long()
                yield Tile(queries, slice(0, compressed_length), t, mask, first_key, last_position=segment.end - 1)


def overlap_weights(config: NSAConfig) -> list[tuple[int, float]]:
    """(o, weight): compressed token b·j + o gives `weight` of its probability to block j, where b = l'/d (Eq. 9).

    In units of d tokens, compressed token i covers units i … i+a-1 and block j covers units b·j … b·j+b-1, with
    a = l/d; the weight is the number of shared units over a. The defaults give ½, 1, 1, 1, ½ for o = -1 … 3. The
    paper prints index j-m-n, which points at earlier blocks; this is the true overlap.
    """
    a = config.compress_block // config.compress_stride
    b = config.select_block // config.compress_stride
    return [(o, (min(o + a, b) - max(o, 0)) / a) for o in range(1 - a, b)]


def block_importance(p: Tensor, first: Tensor | int, num_blocks: int, config: NSAConfig) -> Tensor:
    """P[j] = Σ_i p[i] · |cmp_i ∩ block_j| / l (Eq. 9). p: [..., C, S] -> [..., C, num_blocks].

    `first` is the column of p with the document's compressed token 0: one number, or one per row [C, 1].
    Terms are added in the same order for every block, so blocks with equal probabilities get bit-equal scores. A
    matrix product would not guarantee that, and ties are broken by index.
    """
    importance = p.new_zeros(*p.shape[:-1], num_blocks)
    if p.shape[-1] == 0:
        return importance
    b = config.select_block // config.compress_stride
    column = first + b * torch.arange(num_blocks, device=p.device)
    for o, weight in overlap_weights(config):
        at = column + o
        # only the document's own compressed tokens: not before its first, not past the last column
        inside = (at >= first) & (at < p.shape[-1])
        at = torch.where(inside, at, 0)
        term = p.index_select(-1, at) if at.dim() == 1 else p.gather(-1, at.expand(importance.shape))
        importance += weight * torch.where(inside, term, 0)
    return importance


def sum_over_group(p: Tensor) -> Tensor:
    """One score per group: the sum over its heads (Eq. 10). [B, G, C, h, S] -> [B, G, C, S]"""
    return p.sum(3)


def select(scores: Tensor, t: Tensor, config: NSAConfig) -> Tensor:
    """I_t (Eq. 11): forced blocks, then the best others by (score descending, index ascending), up to min(n, c+1).

    scores: [..., C, NB]; t: [C], or one row of it per leading axis.
    Returns int32 [..., C, n], ascending, padded with -1.
    """
    num_blocks, n = scores.shape[-1], config.select_count
    j = torch.arange(num_blocks, device=scores.device)
    c = (t // config.select_block)[..., None]
    forced = (j < config.select_initial) | (j > c - config.select_local)
    free = (j <= c) & ~forced
    # NaN counts as 0, as in the kernels: it equals nothing
    key = torch.where(free & ~scores.isnan(), scores, torch.where(free, 0, -torch.inf))
    # topk may break ties either way: use it only for the score of the last free block that is chosen
    wanted = n - config.forced_blocks
    last = key.topk(min(max(wanted, 1), num_blocks), dim=-1).values[..., -1:]
    above = free & (key > last)
    tied = free & (key == last)
    best = above | (tied & (tied.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))
    chosen = (j <= c) & (forced | best | (c < n))
    ascending = torch.where(chosen, j, num_blocks).sort(-1).values[..., :n]
    ascending = torch.where(ascending == num_blocks, -1, ascending).int()
    return torch.nn.functional.pad(ascending, (0, n - ascending.shape[-1]), value=-1)


# ------------------------------------------------------------ blocks chosen by a selector


def block_lse(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
    """Log-sum-exp of each query's logits in every block of its document. -> fp32 [S, G, h, blocks]

    q: [S, H, Dk]; k: [rows, G, Dk]; row [S]: the row of k that belongs to the query's own token; position [S]: the
    query's position in its document. Only keys up to the query count: -inf for blocks after it.
    """
    logits = _logits_by_block(q, k, row, position, blocks, block)
    return torch.cat([x.logsumexp(-1) for x in logits])


def _logits_by_block(
    q: Tensor, k: Tensor, row: Tensor | None, position: Tensor, blocks: int, block: int
) -> Iterator[Tensor]:
    """[S, G, h, blocks, block] as in `block_lse`, a few queries at a time; -inf for keys after the query. row None: k
    begins with the document of all queries."""
    keys, s = k.to(compute_dtype(q)), torch.arange(blocks * block, device=q.device)
    queries = q.unflatten(1, (k.shape[1], -1)).to(keys.dtype) * q.shape[-1] ** -0.5
    step = max(1, _LOGITS // (q.shape[1] * k.shape[0]))
    for first in range(0, q.shape[0], step):
        t = position[first : first + step]
        logits = torch.einsum("sghd,tgd->sght", queries[first : first + step], keys)
        if row is None:
            logits = torch.nn.functional.pad(logits, (0, blocks * block - k.shape[0]))
        else:
            token = ((row[first : first + step] - t)[:, None] + s).clamp(max=k.shape[0] - 1)
            logits = logits.gather(-1, token[:, None, None].expand(*logits.shape[:-1], -1))
        logits = logits.masked_fill((s > t[:, None])[:, None, None], -torch.inf)
        yield logits.unflatten(-1, (blocks, block))


def selector_weight(logits: Tensor) -> Tensor:
    """The approximation of exp with which a learned selector scores blocks (docs/nsa.md).

    2^y, y = logit · log2(e) between -127 and 119, in steps of 2^-13, linear between integers; NaN counts as y = -127.
    """
    y = (logits * math.log2(math.e)).nan_to_num(nan=-torch.inf).clamp(-127, 119)
    y = (y * 8192).round() / 8192
    below = y.floor()
    return torch.ldexp(1 + y - below, below)


def selector_scores(q: Tensor, k: Tensor, row: Tensor | None, position: Tensor, blocks: int, block: int) -> Tensor:
    """A selector's scores of blocks: the sum of its weights. -> [S, G, blocks]; arguments of `_logits_by_block`."""
    logits = _logits_by_block(q, k, row, position, blocks, block)
    return torch.cat([selector_weight(x[:, :, 0]).sum(-1) for x in logits])


def own_scores(q: Tensor, k: Tensor, row: Tensor | None, position: Tensor, blocks: int, block: int) -> Tensor:
    """Scores of blocks by own queries and keys: the largest product of any head of the group with any token; NaN counts
    as lowest. -> [S, G, blocks]; arguments of `_logits_by_block`."""
    logits = _logits_by_block(q, k, row, position, blocks, block)
    return torch.cat([x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax((2, -1)) for x in logits])


def _token_scores(scorer: str) -> Callable[..., Tensor]:
    return SCORERS[scorer].score or {"learned": selector_scores, "own": own_scores}[scorer]


@torch.no_grad()
def select_by_tokens(
    q: Tensor, k: Tensor, config: NSAConfig, packing: Packing | None = None, span: Span = WHOLE, scorer: str = "learned"
) -> Tensor:
    """I_t by queries [B, T, G, size] of a selector, or the model's own [B, T, H, size], and keys [B, T, G, size]; of
    the tokens that q and k of the selected branch have."""
    batch, count, heads, _ = q.shape
    indices = torch.empty(batch, count, k.shape[2], config.select_count, dtype=torch.int32, device=q.device)
    for segment in segments(count, packing, span):
        start = max(segment.first, span.first_key)
        for first, end in segment.query_tiles(batch * heads):
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, blocks = segment.position(first, end, q.device), config.num_blocks(end - segment.first)
            row = torch.arange(first, end, device=q.device) - start
            known = None if segment.packing is None and start == segment.first else row
            for b in range(batch):
                scores = _token_scores(scorer)(q[b, queries], k[b, keys], known, t, blocks, config.select_block)
                indices[b, queries] = select(scores.transpose(0, 1), t, config).transpose(0, 1)
    return indices


# ------------------------------------------------------------ Equation 12: selected branch


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    config: NSAConfig,
    packing: Packing | None = None,
    span: Span = WHOLE,
) -> Tensor:
    """The selected branch (Eq. 12): tokens of I_t up to t, including the current incomplete block.

    With a span, keys before `span.first_key` are missing: no query may select a block that contains one.
    """
    if q.shape[1] == 1 and packing is None and config.selected_tokens < k.shape[1]:
        return _selected_of_one(q, k, v, block_indices, config, span)
    return tiled_attention(q, k, v, lambda: _selected_tiles(q, block_indices, config, packing, span))


def _selected_of_one(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, span: Span) -> Tensor:
    """`selected_attention` of a single query, over copies of the blocks that it reads: decoding reads nothing else."""
    inside = torch.arange(config.select_block, device=q.device)
    token = (block_indices[:, 0, :, :, None] * config.select_block + inside).flatten(2)  # [B, G, n·l']
    visible = (token >= 0) & (token <= span.first_query)
    at = torch.where(visible, token - span.first_key, 0).long()
    row, group = (torch.arange(n, device=q.device) for n in (q.shape[0], k.shape[2]))
    k, v = (x[row[:, None, None], at, group[:, None]].transpose(1, 2) for x in (k, v))
    t = torch.full((1,), span.first_query, device=q.device)
    tile = Tile(slice(0, 1), slice(0, token.shape[2]), t, visible[:, :, None])
    return tiled_attention(q, k, v, lambda: iter([tile]))


def in_selected(t: Tensor, s: Tensor, block_indices: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """Query t sees the tokens up to itself in the blocks that its group selected. [B, G, C, S]

    block_indices: [B, C, G, n], padded with -1; blocks after the queries are not read.
    """
    chosen = torch.zeros(*block_indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=s.device)
    unread = (block_indices < 0) | (block_indices >= num_blocks)
    chosen.scatter_(-1, torch.where(unread, num_blocks, block_indices).long(), True)
    chosen = chosen.transpose(1, 2)
    return chosen.index_select(-1, s // config.select_block) & (s <= t[:, None])


def _selected_tiles(
    q: Tensor, block_indices: Tensor, config: NSAConfig, packing: Packing | None, span: Span
) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(count, packing, span):
        start = max(segment.first, span.first_key)
        for first, end in segment.query_tiles(batch * heads):
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
            num_blocks = config.num_blocks(end - segment.first)
            mask = in_selected(t, s, block_indices[:, queries], num_blocks, config)
            yield Tile(queries, keys, t, segment.mask_documents(mask, (first, end), (start, end)))


# ------------------------------------------------------------ window branch


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, packing: Packing | None = None, span: Span = WHOLE
) -> Tensor:
    """The window branch: tokens max(0, t-w+1) … t. With a span, k and v hold at least these."""
    return tiled_attention(q, k, v, lambda: _window_tiles(q, config, packing, span))


def in_window(t: Tensor, s: Tensor, config: NSAConfig) -> Tensor:
    """Query t sees the w tokens that end with itself. [C, S]"""
    back = t[:, None] - s
    return (back >= 0) & (back < config.window)


def _window_tiles(q: Tensor, config: NSAConfig, packing: Packing | None, span: Span) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(count, packing, span):
        for first, end in segment.query_tiles(batch * heads, most=config.window):
            start = max(segment.first, first - config.window + 1, span.first_key)
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
            mask = segment.mask_documents(in_window(t, s, config), (first, end), (start, end))
            yield Tile(queries, keys, t, mask)


# ------------------------------------------------------------ counts


def count_keys(
    inputs: Any, spec: AttentionSpec, branches: tuple[str, ...], block_indices: Tensor | None, span: Span
) -> Tensor:
    """Keys that each query of a query range read, counted from the masks of `branches`: int64 [B, C, G]."""
    q, config = inputs.q, spec.blocks
    t = torch.arange(span.first_query, span.first_query + q.shape[1], device=q.device)
    every = (t + 1)[None, :, None]
    keys: Tensor = inputs.k_window if inputs.k_selected is None else inputs.k_selected
    count = torch.zeros(q.shape[0], q.shape[1], keys.shape[2], dtype=torch.int64, device=q.device)
    if "dense" in branches:
        return count + every
    tiles: list[Iterator[Tile]] = []
    if "compressed" in branches or (spec.selects and not spec.by_tokens):
        tiles.append(_compressed_tiles(q, inputs.k_compressed.shape[1], config, None, span))
    if block_indices is not None:
        tiles.append(_selected_tiles(q, block_indices, config, None, span))
    if "window" in branches:
        tiles.append(_window_tiles(q, config, None, span.of_window))
    for tile in chain.from_iterable(tiles):
        visible = tile.mask.sum(-1)
        count[:, tile.queries] += visible.movedim(-1, 1) if visible.dim() == 3 else visible[:, None]
    beyond = spec.dense_below > config.selected_tokens
    return torch.where(t[:, None] < spec.dense_below, every, count) if beyond else count

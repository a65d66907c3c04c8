"""Native Sparse Attention in plain PyTorch, one function per equation of arXiv 2502.11089: the definition that every
other backend is held to, and the path that CPU training takes.

Axes: q [B, T, H, Dk]; k, v [B, T, G, D*], compressed ones [B, Tc, G, D*]; h = H / G heads per group; a tile has C
queries and S keys. t, s, i, j are positions of queries, keys, compressed tokens and selection blocks in a document.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tercet.attention.layout import WHOLE, Packing, Span
from tercet.attention.spec import BRANCHES, NSAConfig
from tercet.attention.tiled import Tile, attend, compute_dtype, segments

# ------------------------------------------------------------ who sees whom


def visible_compressed(t: Tensor, i: Tensor, config: NSAConfig) -> Tensor:
    """Query t sees compressed token i once the last token under it has come: i·d + l ≤ t + 1. [C, S]"""
    return i * config.compress_stride + config.compress_block <= t[:, None] + 1


def in_window(t: Tensor, s: Tensor, config: NSAConfig) -> Tensor:
    """Query t sees the w tokens that end with itself. [C, S]"""
    back = t[:, None] - s
    return (back >= 0) & (back < config.window)


def in_selected(t: Tensor, s: Tensor, block_indices: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """Query t sees the tokens up to itself of the blocks that its group selected. [B, G, C, S]

    block_indices: [B, C, G, n], padded with -1; blocks after the queries are not read.
    """
    chosen = torch.zeros(*block_indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=s.device)
    unread = (block_indices < 0) | (block_indices >= num_blocks)
    chosen.scatter_(-1, torch.where(unread, num_blocks, block_indices).long(), True)
    chosen = chosen.transpose(1, 2)
    return chosen.index_select(-1, s // config.select_block) & (s <= t[:, None])


# ------------------------------------------------------------ Equations 9 to 11


def overlap_weights(config: NSAConfig) -> list[tuple[int, float]]:
    """(o, weight): compressed token b·j + o gives `weight` of its probability to block j, where b = l'/d.

    In units of d tokens, compressed token i covers units i … i+a-1 and block j covers units b·j … b·j+b-1, with
    a = l/d: the shared units over a. The defaults give ½, 1, 1, 1, ½ for o = -1 … 3. (Eq. 9; the paper's index
    j-m-n points at earlier blocks. This is the true overlap.)
    """
    a = config.compress_block // config.compress_stride
    b = config.select_block // config.compress_stride
    return [(o, (min(o + a, b) - max(o, 0)) / a) for o in range(1 - a, b)]


def block_importance(p: Tensor, first: Tensor | int, num_blocks: int, config: NSAConfig) -> Tensor:
    """P[j] = Σ_i p[i] · |cmp_i ∩ block_j| / l (Eq. 9). p: [..., C, S] -> [..., C, num_blocks].

    `first` is the column of p that holds the document's compressed token 0: one number, or one for each row [C, 1].
    Terms are added in the same order for every block, so that blocks of equal probabilities have equal scores to
    the last bit; a matrix product would not promise that, and ties are decided by index.
    """
    importance = p.new_zeros(*p.shape[:-1], num_blocks)
    if p.shape[-1] == 0:
        return importance
    b = config.select_block // config.compress_stride
    column = first + b * torch.arange(num_blocks, device=p.device)
    for o, weight in overlap_weights(config):
        at = column + o
        # a document's own tokens only: neither before its first, nor past the last column
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

    scores: [..., C, NB]; t: [C], or one row of it for each leading axis.
    Returns int32 [..., C, n], ascending, padded with -1.
    """
    num_blocks, n = scores.shape[-1], config.select_count
    j = torch.arange(num_blocks, device=scores.device)
    c = (t // config.select_block)[..., None]
    forced = (j < config.select_initial) | (j > c - config.select_local)
    key = torch.where(forced, torch.inf, scores)
    key = torch.where(j > c, -torch.inf, key)
    # topk itself may break ties either way: it only tells the n-th best score
    nth = key.topk(min(n, num_blocks), dim=-1).values[..., -1:]
    above = key > nth
    level = (key == nth) & (j <= c)
    room = n - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room))
    ascending = torch.where(chosen, j, num_blocks).sort(-1).values[..., :n]
    ascending = torch.where(ascending == num_blocks, -1, ascending).int()
    return torch.nn.functional.pad(ascending, (0, n - ascending.shape[-1]), value=-1)


# ------------------------------------------------------------ the three branches


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
    """The compressed branch (Eq. 7, 8), and from its own probabilities the blocks to read in full (Eq. 9 to 11).

    k and v are those of the whole sequence (or, without a packing, of at least all that the queries see).
    Returns out [B, T, H, Dv], block_indices [B, T, G, n] and scores [B, T, G, NB] (only where wanted: NB grows with T).
    """
    batch, length = q.shape[:2]
    groups = k.shape[2]
    if packing is not None and packing.bounds is None:
        # padding may hold anything, and 0 · NaN is NaN: a mask on the scores alone would let it through
        real = (packing.compressed_document < packing.num_documents)[:, None, None]
        k, v = torch.where(real, k, 0), torch.where(real, v, 0)
    num_blocks = config.num_blocks(span.first_query + length)
    indices = scores = None
    observe = None
    if want_indices:
        indices = torch.empty(batch, length, groups, config.select_count, dtype=torch.int32, device=q.device)
    if want_scores:
        scores = torch.zeros(batch, length, groups, num_blocks, dtype=compute_dtype(q), device=q.device)
    if want_indices or want_scores:

        def observe(tile: Tile, p: Tensor) -> None:
            # p: [B, G, C, h, S]; Eq. 10's sum comes first because Eq. 9 is linear, and costs h times less after it
            group_p = sum_over_group(p)
            blocks = config.num_blocks(tile.last_position + 1)
            importance = block_importance(group_p, tile.first_key, blocks, config)
            if scores is not None:
                scores[:, tile.queries, :, :blocks] = importance.transpose(1, 2)
            if indices is not None:
                indices[:, tile.queries] = select(importance, tile.t, config).transpose(1, 2)

    out = attend(q, k, v, lambda: _compressed_tiles(q, k.shape[1], config, packing, span), observe)
    return out, indices, scores


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    config: NSAConfig,
    packing: Packing | None = None,
    span: Span = WHOLE,
) -> Tensor:
    """The selected branch (Eq. 12): the tokens of I_t up to t, the current incomplete block included.

    With a span, keys before `span.first_key` are missing: no query may select a block that has one.
    """
    return attend(q, k, v, lambda: _selected_tiles(q, block_indices, config, packing, span))


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, packing: Packing | None = None, span: Span = WHOLE
) -> Tensor:
    """The window branch: tokens max(0, t-w+1) … t. With a span, k and v hold at least these."""
    return attend(q, k, v, lambda: _window_tiles(q, config, packing, span))


def combine(gates: Tensor, branches: dict[str, Tensor]) -> Tensor:
    """out = Σ_c g_c · branch_c (Eq. 5). gates: [B, T, H, 3], in the order compressed, selected, window."""
    total: Tensor | None = None
    for name, branch in branches.items():
        gated = gates[..., BRANCHES.index(name), None] * branch
        total = gated if total is None else total + gated
    assert total is not None
    return total


# ------------------------------------------------------------ each branch's tiles


def _compressed_tiles(
    q: Tensor, compressed_length: int, config: NSAConfig, packing: Packing | None, span: Span
) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    length = span.first_query + count
    for segment in segments(length, compressed_length, packing, span, count):
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
                yield Tile(queries, slice(0, compressed_length), t, mask, first_key, last_position=length - 1)


def _selected_tiles(
    q: Tensor, block_indices: Tensor, config: NSAConfig, packing: Packing | None, span: Span
) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(span.first_query + count, 0, packing, span, count):
        start = max(segment.first, span.first_key)
        for first, end in segment.query_tiles(batch * heads):
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
            num_blocks = config.num_blocks(end - segment.first)
            mask = in_selected(t, s, block_indices[:, queries], num_blocks, config)
            yield Tile(queries, keys, t, segment.keep_apart(mask, (first, end), (start, end)))


def _window_tiles(q: Tensor, config: NSAConfig, packing: Packing | None, span: Span) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(span.first_query + count, 0, packing, span, count):
        for first, end in segment.query_tiles(batch * heads, most=config.window):
            start = max(segment.first, first - config.window + 1, span.first_key)
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
            yield Tile(queries, keys, t, segment.keep_apart(in_window(t, s, config), (first, end), (start, end)))

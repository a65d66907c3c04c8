"""Native Sparse Attention in plain PyTorch, one function per equation of arXiv 2502.11089.

This is the definition that every other backend is tested against, and the path that CPU training takes. The equations
come first, in the paper's order; the tiling that keeps memory linear in T is at the end.

Axes: q [B, T, H, Dk]; k, v [B, T, G, D*], compressed ones [B, Tc, G, D*]; h = H / G heads per group; a tile has C
queries and S keys. t, s, i, j are positions of queries, keys, compressed tokens and selection blocks in a document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.first_order import first_order
from tercet.attention.layout import WHOLE, Packing, Span

# Elements in one tile of scores: 8 MiB of fp32 fits in a CPU's outer caches.
TILE_NUMBERS = 1 << 21
# Logits that block_lse computes at once.
_LOGITS = 1 << 24


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp32 for half-precision inputs, otherwise the inputs' own precision: softmax and sums run in this dtype."""
    return torch.promote_types(x.dtype, torch.float32)


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
    # NaN counts as 0, as in the kernels: topk ranks it above the forced blocks, and it equals nothing
    key = torch.where(forced, torch.inf, torch.where(scores.isnan(), 0, scores))
    key = torch.where(j > c, -torch.inf, key)
    # topk may break ties either way: use it only for the n-th best score
    nth = key.topk(min(n, num_blocks), dim=-1).values[..., -1:]
    above = key > nth
    tied = (key == nth) & (j <= c)
    left = n - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1) <= left))
    ascending = torch.where(chosen, j, num_blocks).sort(-1).values[..., :n]
    ascending = torch.where(ascending == num_blocks, -1, ascending).int()
    return torch.nn.functional.pad(ascending, (0, n - ascending.shape[-1]), value=-1)


# ------------------------------------------------------------ blocks chosen by a selector


def block_lse(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
    """Log-sum-exp of the logits of queries in every block of their documents. -> fp32 [S, G, h, blocks]

    q: [S, H, Dk]; k: rows of keys, [rows, G, Dk]; row [S]: that of each query's own token; position [S]: that in its
    document. Only keys up to the query count: -inf for blocks after it.
    """
    logits = _logits_by_block(q, k, row, position, blocks, block)
    return torch.cat([x.logsumexp(-1) for x in logits])


def _logits_by_block(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int) -> Iterator[Tensor]:
    """[S, G, h, blocks, block] as in `block_lse`, a few queries at a time; -inf for keys after the query."""
    keys, s = k.to(compute_dtype(q)), torch.arange(blocks * block, device=q.device)
    queries = q.unflatten(1, (k.shape[1], -1)).to(keys.dtype) * q.shape[-1] ** -0.5
    step = max(1, _LOGITS // (q.shape[1] * k.shape[0]))
    for own, at, t in zip(queries.split(step), row.split(step), position.split(step), strict=True):
        logits = torch.einsum("sghd,tgd->sght", own, keys)
        token = ((at - t)[:, None] + s).clamp(max=k.shape[0] - 1)
        logits = logits.gather(-1, token[:, None, None].expand(*logits.shape[:-1], -1))
        logits = logits.masked_fill((s > t[:, None])[:, None, None], -torch.inf)
        yield logits.unflatten(-1, (blocks, block))


def selector_weight(logits: Tensor) -> Tensor:
    """exp of a selector's logits as it is computed in choosing blocks; NaN counts as 0.

    2^y, y = logit · log2(e) between -127 and 119, in steps of 2^-13, linear between integers.
    """
    y = (logits * math.log2(math.e)).nan_to_num(nan=-torch.inf).clamp(-127, 119)
    y = (y * 8192).round() / 8192
    below = y.floor()
    return torch.ldexp(1 + y - below, below)


def selector_scores(q: Tensor, k: Tensor, row: Tensor, position: Tensor, blocks: int, block: int) -> Tensor:
    """A selector's scores of blocks: the sum of its weights. -> [S, G, blocks]; arguments of `block_lse`."""
    logits = _logits_by_block(q, k, row, position, blocks, block)
    return torch.cat([selector_weight(x[:, :, 0]).sum(-1) for x in logits])


@torch.no_grad()
def select_by_tokens(
    q: Tensor, k: Tensor, config: NSAConfig, packing: Packing | None = None, span: Span = WHOLE
) -> Tensor:
    """I_t by a selector's queries and keys [B, T, G, size], of the tokens that q and k of the selected branch have."""
    batch, count, groups, _ = q.shape
    indices = torch.empty(batch, count, groups, config.select_count, dtype=torch.int32, device=q.device)
    for segment in segments(span.first_query + count, 0, packing, span, count):
        start = max(segment.first, span.first_key)
        for first, end in segment.query_tiles(batch * groups):
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t = segment.position(first, end, q.device)
            row, blocks = torch.arange(first, end, device=q.device) - start, config.num_blocks(end - segment.first)
            for b in range(batch):
                scores = selector_scores(q[b, queries], k[b, keys], row, t, blocks, config.select_block)
                indices[b, queries] = select(scores.transpose(0, 1), t, config).transpose(0, 1)
    return indices


@torch.no_grad()
def select_at(q: Tensor, k: Tensor, t: Tensor, config: NSAConfig) -> Tensor:
    """`select_by_tokens` for queries [B, C, G, size] at positions t [B, C] of whole rows of keys [B, T, G, size]."""
    blocks, found = config.num_blocks(k.shape[1]), []
    for own_q, own_k, own_t in zip(q, k, t, strict=True):
        scores = selector_scores(own_q, own_k, own_t, own_t, blocks, config.select_block)
        found.append(select(scores.transpose(0, 1), own_t, config).transpose(0, 1))
    return torch.stack(found)


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
    return tiled_attention(q, k, v, lambda: _selected_tiles(q, block_indices, config, packing, span))


def in_selected(t: Tensor, s: Tensor, block_indices: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """Query t sees the tokens up to itself in the blocks that its group selected. [B, G, C, S]

    block_indices: [B, C, G, n], padded with -1; blocks after the queries are not read.
    """
    chosen = torch.zeros(*block_indices.shape[:-1], num_blocks + 1, dtype=torch.bool, device=s.device)
    unread = (block_indices < 0) | (block_indices >= num_blocks)
    chosen.scatter_(-1, torch.where(unread, num_blocks, block_indices).long(), True)
    chosen = chosen.transpose(1, 2)
    return chosen.index_select(-1, s // config.select_block) & (s <= t[:, None])


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


# ------------------------------------------------------------ tiling
#
# Attention runs over tiles of queries, each with the keys that it could see. A tile of C queries against S keys is one
# matrix product per (batch, group): rows [B·G, C·h, D]. Only (out, log-sum-exp) is kept of a tile and the backward pass
# recomputes its probabilities; letting autograd keep them would cost H·T·(Tc + T + w) numbers per layer.


@dataclass(frozen=True)
class Tile:
    """C queries and the S keys that they could see; `mask` (True: visible) broadcasts to [B, G, C, S]."""

    queries: slice
    keys: slice
    t: Tensor  # [C] positions of the queries in their documents
    mask: Tensor
    first_key: Tensor | int = 0  # column of the document's first key; see block_importance
    last_position: int = 0


Tiles = Callable[[], Iterator[Tile]]
"""Iterates over a branch's tiles: once in the forward and once in the backward pass."""


@dataclass(frozen=True)
class Segment:
    """A range of tokens that attends only to itself: a whole batch, or one document of a packed sequence.

    With `packing`, the range holds all documents and masks separate them, as on a device, where reading the bounds
    would synchronise. All bounds are token indices of the whole sequence; q starts at `span.first_query` and the keys
    at `span.first_key`.
    """

    first: int
    end: int
    compressed_first: int
    compressed_end: int
    first_query: int
    end_query: int
    span: Span = WHOLE
    packing: Packing | None = None

    def queries(self, first: int, end: int) -> slice:
        """Rows of q that hold these tokens."""
        return slice(first - self.span.first_query, end - self.span.first_query)

    def keys(self, first: int, end: int) -> slice:
        """Rows of the keys that hold these tokens."""
        return slice(first - self.span.first_key, end - self.span.first_key)

    def position(self, first: int, end: int, device: torch.device) -> Tensor:
        """Positions of tokens within their documents."""
        if self.packing is not None:
            return self.packing.position[first:end]
        return torch.arange(first - self.first, end - self.first, device=device)

    def mask_documents(self, mask: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Restrict a mask [..., C, S] to pairs within one document."""
        if self.packing is None:
            return mask
        document = self.packing.document
        return mask & (document[slice(*queries), None] == document[slice(*keys)])

    def query_tiles(self, rows: int, stride: int = 1, most: int | None = None) -> Iterator[tuple[int, int]]:
        """Bounds of query tiles whose scores have about TILE_NUMBERS numbers.

        Each query has `rows` rows and sees one key per `stride` tokens: those of its tile and at most `most` before.
        """
        limit = TILE_NUMBERS * stride // rows
        first = self.first_query
        while first < self.end_query:
            before = self.end - self.first if self.packing is not None else first - self.first
            if most is not None:
                before = min(before, most)
            # the largest size with size · (before + size) <= limit
            size = (math.isqrt(before * before + 4 * limit) - before) // 2
            # half of a tile's own square is masked: keep it small relative to what comes before
            size = min(size, max(64, before // 2))
            end = min(first + max(size // 16 * 16, 16), self.end_query)
            yield first, end
            first = end


def segments(
    length: int, compressed_length: int, packing: Packing | None, span: Span = WHOLE, queries: int | None = None
) -> list[Segment]:
    """Segments of a sequence of `length` tokens that overlap the `queries` tokens in q (default: up to the end)."""
    first, end = span.first_query, length if queries is None else span.first_query + queries
    if packing is None or packing.bounds is None:
        return [Segment(0, length, 0, compressed_length, first, end, span, packing)]
    found = []
    for a, b, compressed_a, compressed_b in packing.bounds:
        if max(a, first) < min(b, end):
            found.append(Segment(a, b, compressed_a, compressed_b, max(a, first), min(b, end), span))
    return found


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
            yield Tile(queries, keys, t, segment.mask_documents(mask, (first, end), (start, end)))


def _window_tiles(q: Tensor, config: NSAConfig, packing: Packing | None, span: Span) -> Iterator[Tile]:
    batch, count, heads, _ = q.shape
    for segment in segments(span.first_query + count, 0, packing, span, count):
        for first, end in segment.query_tiles(batch * heads, most=config.window):
            start = max(segment.first, first - config.window + 1, span.first_key)
            queries, keys = segment.queries(first, end), segment.keys(start, end)
            t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
            mask = segment.mask_documents(in_window(t, s, config), (first, end), (start, end))
            yield Tile(queries, keys, t, mask)


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, on_tile: Callable[[Tile, Tensor], None] | None = None
) -> Tensor:
    """softmax(q kᵀ · Dk^-½) v over each tile's visible keys; 0 for a query that sees none.

    `on_tile` is called in the forward pass with each tile and its probabilities [B, G, C, h, S].
    """
    return _TiledAttention.apply(q, k, v, tiles, on_tile)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, on_tile: Callable[[Tile, Tensor], None] | None
    ) -> Tensor:
        batch, length, heads, width = q.shape
        groups = k.shape[2]
        h = heads // groups
        rows, values = _by_group(q, groups) * width**-0.5, _by_group(v, groups)
        columns = _columns(_by_group(k, groups))
        out = rows.new_zeros(batch * groups, length * h, v.shape[-1])
        # +inf makes p = exp(-inf) = 0 in the backward pass for rows without keys
        lse = rows.new_full((batch * groups, length * h), torch.inf)
        scratch = _Scratch(rows)
        for tile in tiles():
            count, keys = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
            mine = slice(tile.queries.start * h, tile.queries.stop * h)
            if keys == 0:
                if on_tile is not None:
                    on_tile(tile, rows.new_zeros(batch, groups, count, h, 0))
                continue
            s = _scores(rows[:, mine], columns[..., tile.keys], tile, (batch, groups, h), scratch)
            highest = s.amax(-1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)
            p = s.sub_(highest).exp_()
            total = p.sum(-1, keepdim=True)
            share = torch.where(total > 0, total, 1).reciprocal_()
            torch.bmm(p, values[:, tile.keys], out=out[:, mine])
            out[:, mine] *= share
            lse[:, mine] = torch.where(total > 0, highest + total.log(), torch.inf)[..., 0]
            if on_tile is not None:
                on_tile(tile, p.mul_(share).view(batch, groups, count, h, keys))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles = tiles
        return _from_group(out, batch, length).to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        batch, length, heads, width = q.shape
        groups = k.shape[2]
        h = heads // groups
        rows, keys, values = _by_group(q, groups) * width**-0.5, _by_group(k, groups), _by_group(v, groups)
        columns, value_columns = _columns(keys), _columns(values)
        d_out = _by_group(grads[0], groups)
        d_rows, d_keys, d_values = torch.zeros_like(rows), torch.zeros_like(keys), torch.zeros_like(values)
        delta = (d_out * out).sum(-1, keepdim=True)
        scratch, d_scratch = _Scratch(rows), _Scratch(rows)
        for tile in ctx.tiles():
            if tile.keys.stop == tile.keys.start:
                continue
            mine = slice(tile.queries.start * h, tile.queries.stop * h)
            mine_rows, mine_out = rows[:, mine], d_out[:, mine]
            s = _scores(mine_rows, columns[..., tile.keys], tile, (batch, groups, h), scratch)
            p = s.sub_(lse[:, mine, None]).exp_()
            d_values[:, tile.keys].baddbmm_(p.mT, mine_out)
            d_p = torch.bmm(mine_out, value_columns[..., tile.keys], out=d_scratch.take(*p.shape))
            d_s = d_p.sub_(delta[:, mine]).mul_(p)
            torch.bmm(d_s, keys[:, tile.keys], out=d_rows[:, mine])
            d_keys[:, tile.keys].baddbmm_(d_s.mT, mine_rows)
        d_q = _from_group(d_rows.mul_(width**-0.5), batch, length).to(q.dtype)
        d_k, d_v = _from_group(d_keys, batch, k.shape[1]), _from_group(d_values, batch, v.shape[1])
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), None, None


class _Scratch:
    """Reused storage for score tiles: fresh pages for each would cost more than the arithmetic."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._store = like.new_empty(0)

    def take(self, *shape: int) -> Tensor:
        numbers = math.prod(shape)
        if self._store.numel() < numbers:
            self._store = self._like.new_empty(numbers)
        return self._store[:numbers].view(shape)


def _scores(rows: Tensor, columns: Tensor, tile: Tile, shape: tuple[int, int, int], scratch: _Scratch) -> Tensor:
    """q kᵀ, with -inf where masked; rows are already scaled by Dk^-½. [B·G, C·h, S]"""
    batch, groups, h = shape
    s = scratch.take(rows.shape[0], rows.shape[1], columns.shape[2])
    torch.bmm(rows, columns, out=s)
    hidden = ~tile.mask
    hidden = hidden.view(*(1,) * (4 - hidden.dim()), *hidden.shape)
    s.view(batch, groups, -1, h, columns.shape[2]).masked_fill_(hidden[:, :, :, None], -torch.inf)
    return s


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, T, G·h, D] -> [B·G, T·h, D] in the compute dtype, so that a query tile's rows are one slice."""
    batch, length, heads, width = x.shape
    x = x.to(compute_dtype(x)).view(batch, length, groups, heads // groups, width)
    return x.permute(0, 2, 1, 3, 4).reshape(batch * groups, length * (heads // groups), width)


def _columns(x: Tensor) -> Tensor:
    """[B·G, S, D] -> [B·G, D, S], copied: CPU matrix products are up to 10× slower with a transposed operand."""
    return x.mT.contiguous()


def _from_group(x: Tensor, batch: int, length: int) -> Tensor:
    """[B·G, T·h, D] -> [B, T, G·h, D]"""
    groups, h = x.shape[0] // batch, x.shape[1] // length if length else 1
    x = x.view(batch, groups, length, h, x.shape[-1])
    return x.permute(0, 2, 1, 3, 4).reshape(batch, length, groups * h, x.shape[-1])

"""Attention over tiles of queries, each with the keys that it could see: what the reference's branches share.

Axes: q [B, T, H, Dk]; k [B, S, G, Dk]; v [B, S, G, Dv]; h = H / G heads per group. Inside, a tile of C queries against
S keys is one matrix product per (batch, group): rows [B·G, C·h, D].

Memory grows with T: only (out, log-sum-exp) is kept of a tile, and the backward pass makes its probabilities again.
Letting autograd keep them costs H·T·(Tc + T + w) numbers a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.layout import WHOLE, Packing, Span

# Numbers in one tile of scores: 8 MiB of fp32 stays within a CPU's outer caches.
TILE_NUMBERS = 1 << 21


@dataclass(frozen=True)
class Tile:
    """C queries and the S keys that they could see; `mask` (True: sees) broadcasts to [B, G, C, S]."""

    queries: slice
    keys: slice
    t: Tensor  # [C] positions of the queries in their documents
    mask: Tensor
    first_key: Tensor | int = 0  # the column of the document's first key; see block_importance
    last_position: int = 0


@dataclass(frozen=True)
class Segment:
    """A stretch of tokens worked on alone: a whole batch, or one document of a packed sequence.

    With `packing`, the stretch holds all documents at once and masks keep them apart: the way on a device, where
    reading the documents' bounds would synchronise. All bounds count in the whole sequence, of which q holds the
    tokens from `span.first_query` and the keys those from `span.first_key`.
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
        """Tokens of the sequence as rows of q."""
        return slice(first - self.span.first_query, end - self.span.first_query)

    def keys(self, first: int, end: int) -> slice:
        """Tokens of the sequence as rows of the keys at hand."""
        return slice(first - self.span.first_key, end - self.span.first_key)

    def position(self, first: int, end: int, device: torch.device) -> Tensor:
        """Positions of tokens within their documents."""
        if self.packing is not None:
            return self.packing.position[first:end]
        return torch.arange(first - self.first, end - self.first, device=device)

    def keep_apart(self, mask: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """A mask [..., C, S] of tokens, cut at document bounds."""
        if self.packing is None:
            return mask
        document = self.packing.document
        return mask & (document[slice(*queries), None] == document[slice(*keys)])

    def query_tiles(self, rows: int, stride: int = 1, most: int | None = None) -> Iterator[tuple[int, int]]:
        """Bounds of query tiles, of a size that keeps their scores within about TILE_NUMBERS.

        Each query has `rows` rows, and sees a key per `stride` tokens: those of its own tile, and `most` before it.
        """
        room = TILE_NUMBERS * stride // rows
        first = self.first_query
        while first < self.end_query:
            before = self.end - self.first if self.packing is not None else first - self.first
            if most is not None:
                before = min(before, most)
            # the largest size with size · (before + size) <= room
            size = (math.isqrt(before * before + 4 * room) - before) // 2
            # half of a tile's own square lies in the future: small beside what lies before, it costs little
            size = min(size, max(64, before // 2))
            end = min(first + max(size // 16 * 16, 16), self.end_query)
            yield first, end
            first = end


def segments(
    length: int, compressed_length: int, packing: Packing | None, span: Span = WHOLE, queries: int | None = None
) -> list[Segment]:
    """Of a sequence of `length` tokens; with `queries`, of which q holds only that many."""
    first, end = span.first_query, length if queries is None else span.first_query + queries
    if packing is None or packing.bounds is None:
        return [Segment(0, length, 0, compressed_length, first, end, span, packing)]
    found = []
    for a, b, compressed_a, compressed_b in packing.bounds:
        if max(a, first) < min(b, end):
            found.append(Segment(a, b, compressed_a, compressed_b, max(a, first), min(b, end), span))
    return found


# The tiles of one branch, walked once in the forward and once in the backward pass.
Walk = Callable[[], Iterator[Tile]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Walk, observe: Callable[[Tile, Tensor], None] | None = None
) -> Tensor:
    return _MaskedAttention.apply(q, k, v, tiles, observe)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Softmax and sums are in fp32 for half-precision inputs, and in the inputs' own precision from there up."""
    return torch.promote_types(x.dtype, torch.float32)


class _Scratch:
    """Reused storage: score tiles are large, and fresh pages for each cost more than the arithmetic on them."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._store = like.new_empty(0)

    def take(self, *shape: int) -> Tensor:
        numbers = 1
        for size in shape:
            numbers *= size
        if self._store.numel() < numbers:
            self._store = self._like.new_empty(numbers)
        return self._store[:numbers].view(shape)


class _MaskedAttention(torch.autograd.Function):
    """softmax(q kᵀ · Dk^-½) v over each tile's visible keys. A query that sees none gives exactly 0, and no NaN."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Walk, observe: Callable[[Tile, Tensor], None] | None
    ) -> Tensor:
        batch, length, heads, width = q.shape
        groups = k.shape[2]
        h = heads // groups
        rows, values = _by_group(q, groups) * width**-0.5, _by_group(v, groups)
        columns = _columns(_by_group(k, groups))
        out = rows.new_zeros(batch * groups, length * h, v.shape[-1])
        # +inf, so that a row without keys has p = exp(-inf) = 0 in the backward pass as well
        lse = rows.new_full((batch * groups, length * h), torch.inf)
        scratch = _Scratch(rows)
        for tile in tiles():
            count, span = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
            mine = slice(tile.queries.start * h, tile.queries.stop * h)
            if span == 0:
                if observe is not None:
                    observe(tile, rows.new_zeros(batch, groups, count, h, 0))
                continue
            s = _scores(rows[:, mine], columns[..., tile.keys], tile, (batch, groups, h), scratch)
            highest = s.amax(-1, keepdim=True).clamp_(min=torch.finfo(s.dtype).min)
            p = s.sub_(highest).exp_()
            total = p.sum(-1, keepdim=True)
            share = torch.where(total > 0, total, 1).reciprocal_()
            torch.bmm(p, values[:, tile.keys], out=out[:, mine])
            out[:, mine] *= share
            lse[:, mine] = torch.where(total > 0, highest + total.log(), torch.inf)[..., 0]
            if observe is not None:
                observe(tile, p.mul_(share).view(batch, groups, count, h, span))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles = tiles
        return _from_group(out, batch, length).to(v.dtype)

    @staticmethod
    @once_differentiable
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


def _scores(rows: Tensor, columns: Tensor, tile: Tile, shape: tuple[int, int, int], scratch: _Scratch) -> Tensor:
    """q kᵀ (rows come scaled by Dk^-½), -inf where a query may not look. [B·G, C·h, S]"""
    batch, groups, h = shape
    s = scratch.take(rows.shape[0], rows.shape[1], columns.shape[2])
    torch.bmm(rows, columns, out=s)
    hidden = ~tile.mask
    hidden = hidden.view(*(1,) * (4 - hidden.dim()), *hidden.shape)
    s.view(batch, groups, -1, h, columns.shape[2]).masked_fill_(hidden[:, :, :, None], -torch.inf)
    return s


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, T, G·h, D] -> [B·G, T·h, D] in the compute dtype: the rows of a query tile are then one slice."""
    batch, length, heads, width = x.shape
    x = x.to(compute_dtype(x)).view(batch, length, groups, heads // groups, width)
    return x.permute(0, 2, 1, 3, 4).reshape(batch * groups, length * (heads // groups), width)


def _columns(x: Tensor) -> Tensor:
    """[B·G, S, D] -> [B·G, D, S], copied: CPU matrix products are up to ten times slower with a transposed operand."""
    return x.mT.contiguous()


def _from_group(x: Tensor, batch: int, length: int) -> Tensor:
    """[B·G, T·h, D] -> [B, T, G·h, D]"""
    groups, h = x.shape[0] // batch, x.shape[1] // length if length else 1
    x = x.view(batch, groups, length, h, x.shape[-1])
    return x.permute(0, 2, 1, 3, 4).reshape(batch, length, groups * h, x.shape[-1])


# ------------------------------------------------------------------------------------------------
# Native Sparse Attention in plain PyTorch, one function per equation of arXiv 2502.11089: the definition that every
# other backend is held to, and the path that CPU training takes.
#
# Axes: q [B, T, H, Dk]; k, v [B, T, G, D*], compressed ones [B, Tc, G, D*]; h = H / G heads per group; a tile has C
# queries and S keys. t, s, i, j are positions of queries, keys, compressed tokens and selection blocks in a document.

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

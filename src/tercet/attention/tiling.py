"""Tiled attention: a tile of queries, the keys visible to it, and a mask. Memory is linear in T, backward included.

A tile of C queries against S keys is one matrix product per (batch, group): rows [B·G, C·h, D]. Only (out,
log-sum-exp) is kept of a tile and the backward pass recomputes its probabilities; letting autograd keep them would cost
H·T·(Tc + T + w) numbers per layer. Axes: as in reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.attention.layout import Packing, Span

# Elements in one tile of scores: 8 MiB of fp32 fits in a CPU's outer caches.
TILE_NUMBERS = 1 << 21


def compute_dtype(x: Tensor) -> torch.dtype:
    """fp32 for half-precision inputs, otherwise the inputs' own precision: softmax and sums run in this dtype."""
    return torch.promote_types(x.dtype, torch.float32)


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
    first_query: int
    end_query: int
    span: Span
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


def segments(queries: int, packing: Packing | None, span: Span) -> list[Segment]:
    """Segments that overlap the `queries` tokens in q."""
    first, end = span.first_query, span.first_query + queries
    if packing is None or packing.bounds is None:
        return [Segment(0, end, 0, first, end, span, packing)]
    return [
        Segment(a, b, compressed, max(a, first), min(b, end), span)
        for a, b, compressed, _ in packing.bounds
        if max(a, first) < min(b, end)
    ]


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, on_tile: Callable[[Tile, Tensor], None] | None = None
) -> Tensor:
    """softmax(q kᵀ · Dk^-½) v over each tile's visible keys; 0 for a query that sees none.

    `on_tile` is called in the forward pass with each tile and its probabilities, fp64 [B, G, C, h, S].
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
        # 0 · NaN is NaN: values that are not finite become 0, and queries that give them any weight NaN
        finite = values.isfinite().all(-1, keepdim=True)
        readable = type(v) is Tensor and finite.device.type == "cpu" and not torch.compiler.is_compiling()
        spoiled = None if readable and finite.all() else (~finite).to(values.dtype)
        values = values if spoiled is None else torch.where(finite, values, 0)
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
            s.sub_(highest)
            # in fp32, weights would lose their order below 1e-38 of the largest, logits 87 apart
            wide = None if on_tile is None else s.double().exp()
            p = s.exp_()
            total = p.sum(-1, keepdim=True)
            share = torch.where(total > 0, total, 1).reciprocal_()
            found = torch.bmm(p, values[:, tile.keys]) * share  # not in place: checkpointing may keep the product
            if spoiled is not None:
                found = found.masked_fill(torch.bmm(p, spoiled[:, tile.keys]) != 0, torch.nan)
            out[:, mine] = found
            lse[:, mine] = torch.where(total > 0, highest + total.log(), torch.inf)[..., 0]
            if on_tile is not None and wide is not None:
                on_tile(tile, wide.mul_(share).view(batch, groups, count, h, keys))
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
            d_rows[:, mine] = torch.bmm(d_s, keys[:, tile.keys])
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

"""Packed documents and query ranges: how each program finds the document of its tile.

There is no table of tiles, no extra launch and no synchronisation. A *tile* is `ROWS` consecutive rows (tokens or
compressed tokens) of one document; tiles never cross documents. In a plain batch every sequence is a document, and the
tile's position is computed. In a packed batch document i owns the tiles from `cu[i] // ROWS + i` on: at least
ceil(size / ROWS) of them, the last of which may be idle. A program finds its document by binary search in `cu`, which
is small and stays in L1.

Rows are *flat*: token t of sequence b is row b·T + t. Packed documents follow one another.

*Query range*: q, and everything of its shape, may hold only tokens first_query … first_query + queries - 1 of those
that the keys hold (in a plain batch: of each sequence). Tiles of keys are unaffected. Kernels take a QUERY_RANGE flag;
when it is off, the code of whole sequences is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def locate(CU, docs, tile, length, per_sequence, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """The document of a tile: (doc, start, size, first).

    doc: its number. start: flat row of its first row. size: its rows. first: position within the document of the tile's
    first row, a multiple of ROWS; `first >= size` marks an idle tile. CU is None and docs unused unless PACKED.
    """
    if PACKED:
        doc = 0
        above = docs
        while above - doc > 1:
            middle = (doc + above) // 2
            if tl.load(CU + middle) // ROWS + middle <= tile:
                doc = middle
            else:
                above = middle
        start = tl.load(CU + doc)
        size = tl.load(CU + doc + 1) - start
        first = (tile - doc - start // ROWS) * ROWS
    else:
        doc = tile // per_sequence
        start = doc * length
        size = length
        first = (tile - doc * per_sequence) * ROWS
    return doc, start, size, first


@triton.jit
def locate_queries(CU, docs, tile, length, per_sequence, first_query, queries, ROWS: tl.constexpr,
                   PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr):  # fmt: skip
    """The document of a tile of queries: (doc, start, rows, end, first).

    Like `locate`, for q that may be a query range. `rows + position` is the row in q of the query at `position` of its
    document; `end` is one past the document's last query in q; `first` is the position of the tile's first query, not
    necessarily a multiple of ROWS. start: flat row of the document's first key.
    """
    if QUERY_RANGE:
        if PACKED:
            # documents that the query range cuts count as documents of their own
            doc = 0
            above = docs
            while above - doc > 1:
                middle = (doc + above) // 2
                if tl.minimum(tl.maximum(tl.load(CU + middle) - first_query, 0), queries) // ROWS + middle <= tile:
                    doc = middle
                else:
                    above = middle
            start = tl.load(CU + doc)
            cut = tl.minimum(tl.maximum(start - first_query, 0), queries)
            rows = start - first_query
            end = tl.minimum(tl.load(CU + doc + 1), first_query + queries) - start
            first = (tile - doc - cut // ROWS) * ROWS + cut - rows
        else:
            doc = tile // per_sequence
            start = doc * length
            rows = doc * queries - first_query
            end = first_query + queries
            first = first_query + (tile - doc * per_sequence) * ROWS
    else:
        doc, start, end, first = locate(CU, docs, tile, length, per_sequence, ROWS, PACKED)
        rows = start
    return doc, start, rows, end, first


@triton.jit
def queries_of_keys(doc, start, size, first_query, queries, PACKED: tl.constexpr, QUERY_RANGE: tl.constexpr):
    """The queries of a document of keys that q holds: (rows, begin, end). Positions begin … end - 1; none if
    begin >= end. `rows + position` is the row in q of the query at `position`."""
    if QUERY_RANGE:
        if PACKED:
            rows = start - first_query
            begin = tl.maximum(first_query - start, 0)
            end = tl.minimum(first_query + queries - start, size)
        else:
            rows = doc * queries - first_query
            begin = first_query
            end = first_query + queries
    else:
        rows = start
        begin = 0
        end = size
    return rows, begin, end


@triton.jit
def visible(position, L: tl.constexpr, S: tl.constexpr):
    """num_cmp(t): how many compressed tokens the query at `position` sees."""
    return tl.where(position + 1 < L, 0, (position + 1 - L) // S + 1)


@dataclass(frozen=True)
class Documents:
    """What a launch needs to know of a batch's documents: host numbers and device bounds, never device values.

    Kernels take `*documents.tokens(rows)` as (CU, docs, length, per_sequence) with a grid of
    `documents.token_tiles(rows)`. `compressed` and `compressed_tiles` are the same over compressed tokens;
    `query_tokens`, which ends with first_query and queries, and `query_tiles` over queries.
    """

    batch: int
    length: int  # T: keys per sequence
    compressed_length: int  # Tc, padding included
    cu: Tensor | None  # int32 [docs + 1], bounds of the keys; None in a plain batch
    ccu: Tensor | None  # int32 [docs + 1], bounds of the compressed tokens
    first_query: int = 0  # token of the first query
    queries: int = -1  # per sequence; T unless given
    longest: int = -1  # upper bound on document lengths; T unless given

    def __post_init__(self) -> None:
        if self.queries < 0:
            object.__setattr__(self, "queries", self.length)
        if self.cu is None or not 0 <= self.longest <= self.length:
            object.__setattr__(self, "longest", self.length)

    @property
    def packed(self) -> bool:
        return self.cu is not None

    @property
    def query_range(self) -> bool:
        return self.first_query != 0 or self.queries != self.length

    @property
    def count(self) -> int:
        return self.batch if self.cu is None else self.cu.shape[0] - 1

    def token_tiles(self, rows: int) -> int:
        return self._tiles(self.length, rows)

    def compressed_tiles(self, rows: int) -> int:
        return self._tiles(self.compressed_length, rows)

    def query_tiles(self, rows: int) -> int:
        return self._tiles(self.queries, rows)

    def tokens(self, rows: int) -> tuple[Tensor | None, int, int, int]:
        return self.cu, self.count, self.length, -(-self.length // rows)

    def compressed(self, rows: int) -> tuple[Tensor | None, int, int, int]:
        return self.ccu, self.count, self.compressed_length, max(1, -(-self.compressed_length // rows))

    def query_tokens(self, rows: int) -> tuple[Tensor | None, int, int, int, int, int]:
        return self.cu, self.count, self.length, -(-self.queries // rows), self.first_query, self.queries

    def _tiles(self, length: int, rows: int) -> int:
        if self.cu is None:
            return self.batch * -(-length // rows)
        return length // rows + self.count

"""Context parallelism: which tokens of a sequence each rank owns, and which rows it must fetch from other ranks.

Host arithmetic on document bounds, done once per batch. Every rank computes the same plans, so nothing about them is
communicated and nothing synchronises with the device.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tercet.attention.config import NSAConfig
from tercet.errors import UsageError
from tercet.model.cost import compressed_pairs, window_pairs


@dataclass(frozen=True)
class Piece:
    """`count` contiguous rows of a fetched buffer."""

    at: int  # first row in the buffer
    owner: int  # rank that owns the rows
    local: int  # first row among the owner's rows
    count: int


@dataclass(frozen=True)
class FetchPlan:
    """What every rank fetches: pieces[rank] fill that rank's buffer of rows[rank] rows; other rows stay zero."""

    pieces: tuple[tuple[Piece, ...], ...]
    rows: tuple[int, ...]

    def received(self, rank: int, owner: int) -> int:
        """Rows that `rank` gets from `owner`."""
        return sum(p.count for p in self.pieces[rank] if p.owner == owner)

    def fetched(self, rank: int) -> int:
        """Rows that `rank` gets from other ranks."""
        return sum(p.count for p in self.pieces[rank] if p.owner != rank)


@dataclass(frozen=True)
class TokenRange:
    """Tokens [first, end) of the sequence, stored from row `at` of a rank's fetched buffer."""

    first: int
    end: int
    at: int

    @property
    def rows(self) -> slice:
        return slice(self.at, self.at + self.end - self.first)


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, end) of the sequence, which one rank owns."""

    first: int
    end: int
    rows: slice  # among that rank's tokens
    ranges: dict[str, TokenRange]
    """By purpose: the part of a fetched buffer that holds the chunk and the tokens before it."""


@dataclass(frozen=True)
class ContextLayout:
    """A sequence of packed documents in 2R equal chunks, two for each of R ranks.

    A query's cost grows with its position in its document (the compressed branch), so the cheapest chunk is paired
    with the most expensive one, the second cheapest with the second most expensive, and so on. For one long document
    that is the usual zig-zag assignment.
    """

    bounds: tuple[int, ...]
    ranks: int
    config: NSAConfig

    def __post_init__(self) -> None:
        if self.length % (2 * self.ranks):
            above = -(-self.length // (2 * self.ranks)) * 2 * self.ranks
            raise UsageError(
                f"{self.length} tokens cannot be split into two equal chunks for each of {self.ranks} context ranks: "
                f"make micro_batch × seq_len a multiple of {2 * self.ranks}, such as {above}"
            )

    @property
    def length(self) -> int:
        return self.bounds[-1]

    @property
    def chunk(self) -> int:
        """Tokens per chunk."""
        return self.length // (2 * self.ranks)

    @cached_property
    def owned(self) -> tuple[tuple[int, int], ...]:
        """The two chunks of each rank, ascending."""
        order = sorted(range(2 * self.ranks), key=lambda c: (self.cost(c), c))
        pairs = ((order[r], order[-1 - r]) for r in range(self.ranks))
        return tuple(sorted((min(pair), max(pair)) for pair in pairs))

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        ranks = {c: r for r, pair in enumerate(self.owned) for c in pair}
        return tuple(ranks[c] for c in range(2 * self.ranks))

    def tokens(self, chunk: int) -> tuple[int, int]:
        """[first, end) of a chunk."""
        return chunk * self.chunk, (chunk + 1) * self.chunk

    def cost(self, chunk: int) -> int:
        """Keys that the chunk's queries read, over all three branches."""
        total = 0
        for document, a, b in _overlaps(self.bounds, *self.tokens(chunk)):
            start = self.bounds[document]
            total += _keys_read(b - start, self.config) - _keys_read(a - start, self.config)
        return total

    def document_start(self, token: int) -> int:
        return self.bounds[bisect.bisect_right(self.bounds, token) - 1]

    # Compressed tokens. A chunk owns those that end in it; they are contiguous.

    @cached_property
    def compressed_bounds(self) -> tuple[int, ...]:
        """Document bounds in compressed tokens."""
        counts = (self.config.num_compressed(b - a) for a, b in itertools.pairwise(self.bounds))
        return tuple(itertools.accumulate(counts, initial=0))

    @cached_property
    def compressed_edges(self) -> tuple[int, ...]:
        """Bounds of chunks in compressed tokens."""
        return tuple(self._compressed_before(c * self.chunk) for c in range(2 * self.ranks + 1))

    def _compressed_before(self, token: int) -> int:
        """Number of compressed tokens of the whole sequence that end before `token`."""
        if token >= self.length:
            return self.compressed_bounds[-1]
        document = bisect.bisect_right(self.bounds, token) - 1
        return self.compressed_bounds[document] + self.config.num_compressed(token - self.bounds[document])

    def first_tokens(self, chunk: int) -> list[tuple[int, int]]:
        """The chunk's compressed tokens as (first token of the first one, count), one entry per document; stride d."""
        bounds, stride = self.compressed_bounds, self.config.compress_stride
        return [
            (self.bounds[document] + (a - bounds[document]) * stride, b - a)
            for document, a, b in _overlaps(bounds, *self.compressed_edges[chunk : chunk + 2])
        ]

    # Fetch plans

    @property
    def lookback(self) -> dict[str, int | None]:
        """How many tokens before each chunk are fetched, by purpose; None: all of its document."""
        return {"raw": self.config.compress_block - 1, "window": self.config.window - 1, "selected": None}

    def lookback_plan(self, tokens: int | None) -> FetchPlan:
        """Each rank's chunks and up to `tokens` tokens before them (None: all) within their first document."""
        ranges = [self.lookback_ranges(rank, tokens) for rank in range(self.ranks)]
        return self._plan(ranges, [own[-1].rows.stop for own in ranges])

    def lookback_ranges(self, rank: int, tokens: int | None) -> list[TokenRange]:
        """The token ranges that `lookback_plan` fetches for this rank. Ranges that touch are merged."""
        ranges: list[tuple[int, int]] = []
        for chunk in self.owned[rank]:
            first, end = self.tokens(chunk)
            start = self.document_start(first)
            if tokens is not None:
                start = max(start, first - tokens)
            if ranges and start <= ranges[-1][1]:
                start = min(start, ranges.pop()[0])
            ranges.append((start, end))
        offsets = itertools.accumulate((end - first for first, end in ranges), initial=0)
        return [TokenRange(first, end, at) for (first, end), at in zip(ranges, offsets, strict=False)]

    def compressed_plan(self) -> FetchPlan:
        """All compressed tokens that a rank's queries can see, at their positions in the whole sequence."""
        wanted = []
        for rank in range(self.ranks):
            ranges: list[TokenRange] = []
            for chunk in self.owned[rank]:
                first, end = self.tokens(chunk)
                document = bisect.bisect_right(self.bounds, first) - 1
                a, b = self.compressed_bounds[document], self._compressed_before(end)
                a = max(a, ranges[-1].end) if ranges else a
                if a < b:
                    ranges.append(TokenRange(a, b, a))
            wanted.append(ranges)
        return self._plan(wanted, [self.compressed_bounds[-1]] * self.ranks, self.compressed_edges)

    def previous_token_plan(self) -> FetchPlan:
        """The token before each chunk if it is in the same document; row i of the buffer is for the i-th chunk."""
        starts = [[(self.tokens(chunk)[0], at) for at, chunk in enumerate(pair)] for pair in self.owned]
        wanted = [[TokenRange(t - 1, t, at) for t, at in own if self.document_start(t) < t] for own in starts]
        return self._plan(wanted, [2] * self.ranks)

    def _plan(
        self, wanted: Sequence[Sequence[TokenRange]], rows: Sequence[int], edges: Sequence[int] = ()
    ) -> FetchPlan:
        """wanted[rank]: what that rank's buffer of rows[rank] rows is filled with. edges: bounds of chunks, if not in
        tokens."""
        edges = edges or range(0, self.length + 1, self.chunk)
        offset = {}  # first row of a chunk among its owner's rows
        for a, b in self.owned:
            offset[a], offset[b] = 0, edges[a + 1] - edges[a]
        pieces = (
            tuple(
                Piece(r.at + low - r.first, self.owner[chunk], offset[chunk] + low - edges[chunk], high - low)
                for r in ranges
                for chunk, low, high in _overlaps(edges, r.first, r.end)
            )
            for ranges in wanted
        )
        return FetchPlan(tuple(pieces), tuple(rows))


def _overlaps(bounds: Sequence[int], first: int, end: int) -> list[tuple[int, int, int]]:
    """(i, from, to) for each range bounds[i], bounds[i+1] that overlaps [first, end)."""
    indices = range(bisect.bisect_right(bounds, first) - 1, bisect.bisect_left(bounds, end))
    parts = ((i, max(first, bounds[i]), min(end, bounds[i + 1])) for i in indices)
    return [(i, a, b) for i, a, b in parts if a < b]


def _keys_read(length: int, config: NSAConfig) -> int:
    """Keys that the queries of a document's first `length` tokens read: Σ num_cmp + min(n·l', t+1) + min(w, t+1)."""
    return (
        compressed_pairs(config, length)
        + window_pairs(config.selected_tokens, length)
        + window_pairs(config.window, length)
    )

"""Which tokens of a sequence each rank holds under context parallelism, and which rows it must fetch from others.

Host arithmetic on the documents' bounds, done once per batch: every rank computes the same plan, so that nothing about
it has to be communicated, and nothing synchronises with the device.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tercet.attention.config import NSAConfig
from tercet.errors import UsageError


@dataclass(frozen=True)
class Piece:
    """`count` rows of a fetched buffer: where they go in it, who has them, and where among the owner's rows."""

    at: int
    owner: int
    local: int
    count: int


@dataclass(frozen=True)
class Plan:
    """What every rank fetches: pieces[rank] fill that rank's buffer of rows[rank] rows; the rest of it stays zero."""

    pieces: tuple[tuple[Piece, ...], ...]
    rows: tuple[int, ...]

    def received(self, rank: int, owner: int) -> int:
        """Rows that `rank` gets from `owner`."""
        return sum(p.count for p in self.pieces[rank] if p.owner == owner)

    def fetched(self, rank: int) -> int:
        """Rows that `rank` gets from others."""
        return sum(p.count for p in self.pieces[rank] if p.owner != rank)


@dataclass(frozen=True)
class Buffer:
    """A contiguous stretch of the sequence among a rank's fetched rows."""

    first: int
    end: int
    at: int


@dataclass(frozen=True)
class Layout:
    """A sequence of packed documents in 2R equal chunks, two for each of R ranks.

    A query's cost grows with its position in its document (the compressed branch), so the lightest chunk goes with the
    heaviest, the second lightest with the second heaviest, and so on. For one long document that is the zig-zag deal.
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
    def documents(self) -> list[tuple[int, int]]:
        """Each document's first token and the one after its last."""
        return list(itertools.pairwise(self.bounds))

    @property
    def chunk(self) -> int:
        """Tokens of one chunk."""
        return self.length // (2 * self.ranks)

    @cached_property
    def owned(self) -> tuple[tuple[int, int], ...]:
        """The two chunks of each rank, ascending."""
        order = sorted(range(2 * self.ranks), key=lambda c: (self.cost(c), c))
        pairs = (sorted((order[r], order[-1 - r])) for r in range(self.ranks))
        return tuple((a, b) for a, b in sorted(pairs))

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """The rank of each chunk."""
        ranks = {c: r for r, pair in enumerate(self.owned) for c in pair}
        return tuple(ranks[c] for c in range(2 * self.ranks))

    def tokens(self, chunk: int) -> tuple[int, int]:
        return chunk * self.chunk, (chunk + 1) * self.chunk

    def spans(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """(document, from, to) of the documents' parts within [first, end)."""
        document = bisect.bisect_right(self.bounds, first) - 1
        found = []
        while document < len(self.bounds) - 1 and self.bounds[document] < end:
            a, b = max(first, self.bounds[document]), min(end, self.bounds[document + 1])
            if a < b:
                found.append((document, a, b))
            document += 1
        return found

    def cost(self, chunk: int) -> int:
        """Keys that the chunk's queries read, over all three branches."""
        total = 0
        for document, a, b in self.spans(*self.tokens(chunk)):
            start = self.bounds[document]
            total += _keys_read(b - start, self.config) - _keys_read(a - start, self.config)
        return total

    def imbalance(self) -> float:
        """The busiest rank's cost over the mean."""
        costs = [sum(self.cost(c) for c in pair) for pair in self.owned]
        return max(costs) * len(costs) / sum(costs)

    def document_start(self, token: int) -> int:
        return self.bounds[bisect.bisect_right(self.bounds, token) - 1]

    # ------------------------------------------------------------ tokens and compressed tokens as rows

    def token_rows(self) -> list[tuple[int, int]]:
        """Each chunk's tokens."""
        return [self.tokens(c) for c in range(2 * self.ranks)]

    @cached_property
    def compressed_bounds(self) -> tuple[int, ...]:
        counts = (self.config.num_compressed(b - a) for a, b in itertools.pairwise(self.bounds))
        return tuple(itertools.accumulate(counts, initial=0))

    @cached_property
    def compressed_rows(self) -> list[tuple[int, int]]:
        """Each chunk's compressed tokens: those whose last token it holds. They are contiguous, as last tokens rise."""
        edges = [self._compressed_before(c * self.chunk) for c in range(2 * self.ranks + 1)]
        return list(itertools.pairwise(edges))

    def _compressed_before(self, token: int) -> int:
        """How many compressed tokens of the whole sequence end before this token."""
        if token >= self.length:
            return self.compressed_bounds[-1]
        document = bisect.bisect_right(self.bounds, token) - 1
        return self.compressed_bounds[document] + self.config.num_compressed(token - self.bounds[document])

    def first_tokens(self, chunk: int) -> list[tuple[int, int]]:
        """(first token of the first, count) of the chunk's compressed tokens, one entry per document; stride d."""
        first, end = self.compressed_rows[chunk]
        found = []
        for document, start in enumerate(self.bounds[:-1]):
            a, b = max(first, self.compressed_bounds[document]), min(end, self.compressed_bounds[document + 1])
            if a < b:
                i = a - self.compressed_bounds[document]
                found.append((start + i * self.config.compress_stride, b - a))
        return found

    # ------------------------------------------------------------ what is fetched

    def reach_back(self, tokens: int | None) -> Plan:
        """Each rank's chunks, with up to `tokens` before them (None: all) as far as their first document goes."""
        buffers = [self.buffers(rank, tokens) for rank in range(self.ranks)]
        wanted = [[(b.first, b.end, b.at) for b in mine] for mine in buffers]
        rows = [mine[-1].at + mine[-1].end - mine[-1].first for mine in buffers]
        return self._plan(self.token_rows(), wanted, rows)

    def buffers(self, rank: int, tokens: int | None) -> list[Buffer]:
        """The stretches that `reach_back` gives this rank; chunks whose stretches meet share one."""
        stretches: list[tuple[int, int]] = []
        for chunk in self.owned[rank]:
            first, end = self.tokens(chunk)
            start = self.document_start(first)
            if tokens is not None:
                start = max(start, first - tokens)
            if stretches and start <= stretches[-1][1]:
                start = min(start, stretches[-1][0])
                stretches[-1] = (start, end)
            else:
                stretches.append((start, end))
        ends = itertools.accumulate((end - first for first, end in stretches), initial=0)
        return [Buffer(first, end, at) for (first, end), at in zip(stretches, ends, strict=False)]

    def compressed_plan(self) -> Plan:
        """All compressed tokens that a rank's queries may see, at their places in the whole sequence's."""
        wanted = []
        for rank in range(self.ranks):
            stretches: list[tuple[int, int, int]] = []
            for chunk in self.owned[rank]:
                first, end = self.tokens(chunk)
                document = bisect.bisect_right(self.bounds, first) - 1
                a, b = self.compressed_bounds[document], self._compressed_before(end)
                a = max(a, stretches[-1][1]) if stretches else a
                if a < b:
                    stretches.append((a, b, a))
            wanted.append(stretches)
        return self._plan(self.compressed_rows, wanted, [self.compressed_bounds[-1]] * self.ranks)

    def rows_before(self) -> Plan:
        """The one token before each chunk, where it is of the same document; row c of the buffer for the c-th chunk."""
        wanted = []
        for rank in range(self.ranks):
            mine = []
            for at, chunk in enumerate(self.owned[rank]):
                first, _ = self.tokens(chunk)
                if self.document_start(first) < first:
                    mine.append((first - 1, first, at))
            wanted.append(mine)
        return self._plan(self.token_rows(), wanted, [2] * self.ranks)

    def _plan(
        self, chunks: Sequence[tuple[int, int]], wanted: Sequence[Sequence[tuple[int, int, int]]], rows: Sequence[int]
    ) -> Plan:
        """`chunks`: each chunk's rows of the whole; wanted[rank]: (first, end, at) stretches of them."""
        offset = {}
        for pair in self.owned:
            here = 0
            for chunk in pair:
                offset[chunk] = here
                here += chunks[chunk][1] - chunks[chunk][0]
        pieces = []
        for stretches in wanted:
            mine = []
            for first, end, at in stretches:
                for chunk, (a, b) in enumerate(chunks):
                    low, high = max(first, a), min(end, b)
                    if low < high:
                        mine.append(Piece(at + low - first, self.owner[chunk], offset[chunk] + low - a, high - low))
            pieces.append(tuple(mine))
        return Plan(tuple(pieces), tuple(rows))


def _keys_read(length: int, config: NSAConfig) -> int:
    """Keys that the queries of a document's first `length` tokens read: Σ num_cmp + min(n·l', t+1) + min(w, t+1)."""
    return (
        _compressed_read(length, config)
        + _capped_sum(length, config.select_count * config.select_block)
        + _capped_sum(length, config.window)
    )


def _capped_sum(length: int, cap: int) -> int:
    """Σ min(cap, t + 1) for t < length."""
    rising = min(length, cap)
    return rising * (rising + 1) // 2 + (length - rising) * cap


def _compressed_read(length: int, config: NSAConfig) -> int:
    """Σ num_cmp(t) for t < length: compressed token i is read by the length - (i·d + l - 1) queries after it."""
    count = config.num_compressed(length)
    return count * (length - config.compress_block + 1) - config.compress_stride * (count * (count - 1) // 2)

"""The plan of a selected-branch call: tile sizes, ranges and grids, from shapes and settings alone.

Never from device values, so that planning does not synchronise. Plans are cached. Glossary: selected/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from tercet.attention.kernels.launch import power_of_2
from tercet.attention.kernels.table import SelectedSettings

_identities: dict[tuple, int] = {}


class Plan:
    """`identity` is a number for everything that kernels are specialised on. The document count is not part of it: it
    changes with every batch."""

    def __init__(
        self, shape: tuple[int, ...], itemsize: int, documents: int | None, blocks: tuple[int, int, int],
        settings: SelectedSettings, longest: int | None = None,
    ) -> None:  # fmt: skip
        """`longest`: an upper bound on document lengths; T unless given."""
        B, Q, T, H, G, n, dk, dv = shape
        self.T, self.queries, self.G, self.n, self.dk, self.dv = T, Q, G, n, dk, dv  # queries: per sequence
        self.select_block, self.initial, self.local = select_block, initial, local = blocks
        self.N, self.h = N, h = B * Q, H // G  # queries of the whole batch, heads per group
        if max(N * G * n, B * T) >= 1 << 31:
            raise ValueError(f"B*T*G*n={max(N * G * n, B * T)} does not fit 31 bits: split the batch or the sequence")
        if select_block & (select_block - 1) or not 16 <= select_block <= 128:
            raise ValueError(
                f"select_block={select_block} is not a power of two in 16..128: the kernels take only those"
            )
        if max(dk, dv) > 256:
            raise ValueError(f"head sizes Dk={dk}, Dv={dv} exceed 256: the kernels hold a whole head in registers")
        if n > 1023:
            raise ValueError(f"select_count={n} exceeds 1023: the kernels keep slot numbers in 10 bits")
        self.head_tile = min(h, settings.tile_rows)
        self.head_tiles = -(-h // self.head_tile)
        self.tile_tokens = min(settings.tile_rows // self.head_tile, 32)  # queries per tile
        self.tile_rows = max(16, power_of_2(self.tile_tokens * self.head_tile))
        self.tiles = -(-N // self.tile_tokens)
        self.kv_head_tile = min(h, settings.kv_forward_rows, settings.dkv_rows, settings.dkv_dq_rows)
        self.kv_head_tiles = -(-h // self.kv_head_tile)
        self.segment = max(1, settings.segment_rows // self.kv_head_tile)  # most entries per piece
        self.blocks_per_sequence = -(-T // select_block)
        limits = (settings.forward_limit * n, settings.backward_limit * n)
        piece_bytes = select_block * (dk + dv) * 4 * self.kv_head_tiles / self.segment
        ranges, range_tokens = self._cut(max(h * max(dk, dv) * itemsize, piece_bytes), settings.range_bytes)
        # The largest possible mean length of a tile list. Over a whole document, a tile sees half of the blocks on
        # average.
        longest = T if longest is None else longest
        largest_mean: float = -(-longest // select_block)
        if Q == T:
            whole = range_tokens // longest if ranges > 1 else 1  # complete documents of this length in a range
            over = ranges > 1
            largest_mean = (whole * (largest_mean / 2 + 1.5) + over * largest_mean) / (whole + over)
        largest_mean = min(largest_mean, self.tile_tokens * n)
        self.query_major_only = largest_mean <= min(limits)
        self.query_major_forward_only = largest_mean <= limits[0]  # whatever the backward is
        # where KV-major is not launched, it must not be chosen
        self.limits = (math.inf, limits[1]) if self.query_major_forward_only else limits
        if self.query_major_only:
            ranges, range_tokens = self._cut(piece_bytes, settings.range_bytes)
        self.ranges, self.range_tokens = ranges, range_tokens
        # Pieces are long for the backward's sake, which writes a sum for each. In the forward, where most lists are
        # longer than a piece, two programs share one, so that all end more nearly together.
        mean_list = range_tokens * n // -(-max(range_tokens, longest) // select_block)
        self.forward_parts = 2 if mean_list >= self.segment else 1  # programs per piece of Hopper's scattered forward
        self.packed = documents is not None
        self.documents = B if documents is None else documents
        self.steps = 0 if documents is None else documents.bit_length()  # of a binary search over the documents
        # block numbers, the last one for padding
        self.L = (B * self.blocks_per_sequence if documents is None else T // select_block + documents) + 1
        # most forced blocks per query; 0 where no kernel needs them separately
        self.forced = 0 if self.query_major_only else min(initial + local, n)
        self.lists, self.entries = ranges * G * self.L, N * G * n
        self.slots = self.range_slots(min(range_tokens, N))
        specialised = (shape, itemsize, self.packed, blocks, settings, self.query_major_only)
        self.identity = _identities.setdefault(specialised, len(_identities))

    def _cut(self, entry_bytes: float, most_bytes: int) -> tuple[int, int]:
        """Ranges of entries of this size, and the queries of one."""
        most = max(self.tile_tokens, int(most_bytes / (entry_bytes * self.G * self.n)))
        tokens = -(-self.N // -(-self.N // most))
        tokens = -(-tokens // self.tile_tokens) * self.tile_tokens
        return -(-self.N // tokens), tokens

    @property
    def tile_lists(self) -> tuple[int, int, int]:
        return self.G, self.tiles, 2 * self.tile_tokens * (self.n + self.forced)

    def range_slots(self, tokens: int) -> int:
        """Piece slots of a range with this many tokens."""
        return tokens * self.G * self.n // self.segment + self.G * self.L

    def each_range(self) -> Iterator[tuple[int, int, int]]:
        for r in range(self.ranges):
            yield r, r * self.range_tokens, min((r + 1) * self.range_tokens, self.N)

    def new_keys(self, r: int, keys: int, first_query: int) -> tuple[int, int]:
        """First token, and past the last, of the blocks that range r adds to the sums. Ranges cover all blocks."""

        def token(query: int) -> int:
            return query + query // self.queries * (self.T - self.queries) + first_query

        begin = token(r * self.range_tokens) if r else 0
        return begin, token((r + 1) * self.range_tokens) if r < self.ranges - 1 else keys


make_plan = lru_cache(maxsize=1024)(Plan)

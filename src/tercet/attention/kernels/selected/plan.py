"""The plan of a selected-branch call: tile sizes, ranges and grids, from shapes and settings alone.

Never from device values, so that planning does not synchronise. Plans are cached. Glossary: selected/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tercet.attention.kernels.launch import power_of_2
from tercet.attention.kernels.table import SelectedSettings

_identities: dict[tuple, int] = {}


@dataclass(frozen=True, eq=False)
class Plan:
    """`identity` is a number for everything that kernels are specialised on. The document count is not part of it: it
    changes with every batch."""

    identity: int
    N: int  # queries of the whole batch
    T: int  # keys per sequence
    queries: int  # per sequence; less than T for a query range (varlen.py)
    G: int
    h: int
    n: int
    dk: int
    dv: int
    select_block: int
    initial: int
    local: int
    head_tile: int
    head_tiles: int
    tile_tokens: int  # queries per tile
    tile_rows: int
    tiles: int
    kv_head_tile: int
    kv_head_tiles: int
    segment: int  # most entries per piece
    forward_parts: int  # programs per piece of Hopper's scattered forward
    ranges: int
    range_tokens: int
    documents: int
    packed: bool
    steps: int  # of a binary search over the documents
    blocks_per_sequence: int
    L: int  # block numbers, the last one for padding
    query_major_only: bool
    query_major_forward_only: bool  # the forward is query-major, whatever the backward is
    limits: tuple[float, float]
    forced: int  # most forced blocks per query; 0 where no kernel needs them separately
    lists: int
    entries: int
    slots: int

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


@lru_cache(maxsize=1024)
def make_plan(
    shape: tuple[int, ...],
    itemsize: int,
    documents: int | None,
    blocks: tuple[int, int, int],
    settings: SelectedSettings,
    longest: int | None = None,
) -> Plan:
    """`longest`: an upper bound on document lengths; T unless given."""
    B, Q, T, H, G, n, dk, dv = shape
    select_block, initial, local = blocks
    N, h = B * Q, H // G
    if max(N * G * n, B * T) >= 1 << 31:
        raise ValueError(f"B*T*G*n={max(N * G * n, B * T)} does not fit 31 bits: split the batch or the sequence")
    if select_block & (select_block - 1) or not 16 <= select_block <= 128:
        raise ValueError(f"select_block={select_block} is not a power of two in 16..128: the kernels take only those")
    if max(dk, dv) > 256:
        raise ValueError(f"head sizes Dk={dk}, Dv={dv} exceed 256: the kernels hold a whole head in registers")
    if n > 1023:
        raise ValueError(f"select_count={n} exceeds 1023: the kernels keep slot numbers in 10 bits")
    head_tile = min(h, settings.tile_rows)
    head_tiles = -(-h // head_tile)
    tile_tokens = min(settings.tile_rows // head_tile, 32)
    kv_head_tile = min(h, settings.kv_forward_rows, settings.dkv_rows, settings.dkv_dq_rows)
    kv_head_tiles = -(-h // kv_head_tile)
    segment = max(1, settings.segment_rows // kv_head_tile)
    blocks_per_sequence = -(-T // select_block)
    limits = (settings.forward_limit * n, settings.backward_limit * n)

    def cut(entry_bytes: float) -> tuple[int, int]:
        most = max(tile_tokens, int(settings.range_bytes / (entry_bytes * G * n)))  # tokens
        ranges = -(-N // most)
        tokens = -(-N // ranges)
        tokens = -(-tokens // tile_tokens) * tile_tokens
        return -(-N // tokens), tokens

    piece_bytes = select_block * (dk + dv) * 4 * kv_head_tiles / segment
    ranges, range_tokens = cut(max(h * max(dk, dv) * itemsize, piece_bytes))
    # The largest possible mean length of a tile list. Over a whole document, a tile sees half of the blocks on average.
    longest = T if longest is None else longest
    largest_mean: float = -(-longest // select_block)
    if Q == T:
        whole = range_tokens // longest if ranges > 1 else 1  # complete documents of this length in a range
        over = ranges > 1
        largest_mean = (whole * (largest_mean / 2 + 1.5) + over * largest_mean) / (whole + over)
    largest_mean = min(largest_mean, tile_tokens * n)
    query_major_only, query_major_forward_only = largest_mean <= min(limits), largest_mean <= limits[0]
    if query_major_forward_only:
        limits = (math.inf, limits[1])  # KV-major is not launched, so it must not be chosen
    if query_major_only:
        ranges, range_tokens = cut(piece_bytes)
    # Pieces are long for the backward's sake, which writes a sum for each. In the forward, where most lists are longer
    # than a piece, two programs share one, so that all end more nearly together.
    mean_list = range_tokens * n // -(-max(range_tokens, longest) // select_block)
    forward_parts = 2 if mean_list >= segment else 1
    L = (B * blocks_per_sequence if documents is None else T // select_block + documents) + 1
    return Plan(
        identity=_identities.setdefault(
            (shape, itemsize, documents is None, blocks, settings, query_major_only), len(_identities)
        ),
        N=N,
        T=T,
        queries=Q,
        G=G,
        h=h,
        n=n,
        dk=dk,
        dv=dv,
        select_block=select_block,
        initial=initial,
        local=local,
        head_tile=head_tile,
        head_tiles=head_tiles,
        tile_tokens=tile_tokens,
        tile_rows=max(16, power_of_2(tile_tokens * head_tile)),
        tiles=-(-N // tile_tokens),
        kv_head_tile=kv_head_tile,
        kv_head_tiles=kv_head_tiles,
        segment=segment,
        forward_parts=forward_parts,
        ranges=ranges,
        range_tokens=range_tokens,
        documents=B if documents is None else documents,
        packed=documents is not None,
        steps=0 if documents is None else documents.bit_length(),
        blocks_per_sequence=blocks_per_sequence,
        L=L,
        query_major_only=query_major_only,
        query_major_forward_only=query_major_forward_only,
        limits=limits,
        forced=0 if query_major_only else min(initial + local, n),
        lists=ranges * G * L,
        entries=N * G * n,
        slots=min(range_tokens, N) * G * n // segment + G * L,
    )

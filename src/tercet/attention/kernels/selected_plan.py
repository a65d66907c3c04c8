"""What the selected branch's launches follow from: shapes and settings, never device values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from tercet.attention.kernels.settings import power_of_2


@dataclass(frozen=True)
class SelectedSettings:
    """Sizes and launches. Warps and stages of the kernels of union.py and kv_major.py; measured on an H200."""

    rows: int = 64  # (query, head) rows of a union tile
    attend_rows: int = 64  # of a step of the KV-major forward,
    backward_rows: int = 64  # of the backward without dq,
    fused_rows: int = 64  # and with it
    segment_rows: int = 2048  # rows that one KV-major program works through at most
    warps: int = 4
    union_stages: int = 3
    union_dq_stages: int = 2
    union_registers: int = 0  # at most so many per thread, for more blocks on a multiprocessor; 0: as it comes
    union_dq_registers: int = 0
    keys_down: bool = False  # the backward without dq has keys down the rows (kv_keys.py)
    attend_stages: int = 1
    backward_stages: int = 2
    fused_stages: int = 1
    gluon: bool = True  # Hopper's own kernel for dk and dv (hopper_selected.py), where it takes the call
    tma: bool = True  # the copy engine loads K and V, where the device has one and strides allow it
    # KV-major runs above this many union blocks per tile, as a multiple of select_count.
    forward_limit: float = 3.0
    backward_limit: float = 2.9
    range_bytes: int = 1 << 30  # what the KV-major design may keep per range


@lru_cache(maxsize=64)
def default_settings(dk: int, dv: int, dtype: torch.dtype, select_block: int) -> SelectedSettings:
    if dtype == torch.float32:
        # Right, not fast: no tensor cores in full precision, and twice the bytes.
        return SelectedSettings(
            rows=32,
            attend_rows=32,
            backward_rows=32,
            fused_rows=32,
            union_stages=1,
            union_dq_stages=1,
            backward_stages=1,
        )
    if max(dk, dv) > 128 or select_block > 64:
        return SelectedSettings(warps=8, union_stages=2, union_dq_stages=1, backward_stages=1)
    if max(dk, dv) <= 64:
        return SelectedSettings(
            keys_down=True, backward_stages=3, union_stages=2, union_dq_registers=128, attend_stages=3,
            fused_stages=2, segment_rows=4096, forward_limit=2.6, backward_limit=1.6,
        )  # fmt: skip
    return SelectedSettings()


_identities: dict[tuple, int] = {}


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a call that follows from shapes.

    `identity` stands for all that kernels are specialised on: the number of documents, new in every batch, is not.
    """

    identity: int
    N: int  # queries, over the batch
    T: int  # keys of a sequence
    queries: int  # of a sequence: T, unless they are a stretch of it
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
    tile_tokens: int  # queries per union tile
    tile_rows: int
    tiles: int
    kv_head_tile: int
    kv_head_tiles: int
    segment: int  # entries per piece, at most
    ranges: int
    range_tokens: int
    documents: int
    packed: bool
    steps: int  # of a bisection over the documents
    blocks_per_sequence: int
    L: int  # block numbers, the padding's included
    union_only: bool
    union_forward: bool  # union tiles in the forward pass for sure, whatever the backward pass takes
    limits: tuple[float, float]
    forced: int  # forced blocks per query, at most; 0 where no design needs them apart
    lists: int
    entries: int
    slots: int

    @property
    def tile_lists(self) -> tuple[int, int, int]:
        return self.G, self.tiles, 2 * self.tile_tokens * (self.n + self.forced)

    def range_slots(self, tokens: int) -> int:
        """Room for the pieces of a range of so many tokens."""
        return tokens * self.G * self.n // self.segment + self.G * self.L

    def each_range(self) -> Iterator[tuple[int, int, int]]:
        for r in range(self.ranges):
            yield r, r * self.range_tokens, min((r + 1) * self.range_tokens, self.N)

    def new_keys(self, r: int, keys: int, first_query: int) -> tuple[int, int]:
        """First and past the last token whose blocks come to be known with range r: all, over the ranges."""

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
    """`longest`: no document has more tokens; T unless given."""
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
    head_tile = min(h, settings.rows)
    head_tiles = -(-h // head_tile)
    tile_tokens = min(settings.rows // head_tile, 32)
    kv_head_tile = min(h, settings.attend_rows, settings.backward_rows, settings.fused_rows)
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
    # Over a whole document, a tile sees half of its blocks on average; shorter documents have fewer.
    longest = T if longest is None else longest
    largest_mean: float = -(-longest // select_block)
    if Q == T:
        whole = range_tokens // longest if ranges > 1 else 1  # documents of this length that a range holds for sure
        over = ranges > 1
        largest_mean = (whole * (largest_mean / 2 + 1.5) + over * largest_mean) / (whole + over)
    largest_mean = min(largest_mean, tile_tokens * n)
    union_only, union_forward = largest_mean <= min(limits), largest_mean <= limits[0]
    if union_forward:
        limits = (math.inf, limits[1])  # what is not launched must not be chosen
    if union_only:
        ranges, range_tokens = cut(piece_bytes)
    L = (B * blocks_per_sequence if documents is None else T // select_block + documents) + 1
    return Plan(
        identity=_identities.setdefault(
            (shape, itemsize, documents is None, blocks, settings, union_only), len(_identities)
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
        ranges=ranges,
        range_tokens=range_tokens,
        documents=B if documents is None else documents,
        packed=documents is not None,
        steps=0 if documents is None else documents.bit_length(),
        blocks_per_sequence=blocks_per_sequence,
        L=L,
        union_only=union_only,
        union_forward=union_forward,
        limits=limits,
        forced=0 if union_only else min(initial + local, n),
        lists=ranges * G * L,
        entries=N * G * n,
        slots=min(range_tokens, N) * G * n // segment + G * L,
    )

"""The selected branch: softmax over the tokens of each query's blocks (Eq. 12), forward and backward.

Two designs compute the same thing. *Union tiles* (union.py) win where neighbouring queries agree and on short
sequences; *KV-major* (kv_major.py) wins where selections are scattered over a long sequence. The mean size of a
tile's union, known on the device, decides for each slab of this very call: both designs are launched and one leaves
at once. Where even the largest possible union is small, shapes alone decide and the other is not launched.

# q: [B, T, H, Dk]   k: [B, T, G, Dk]   v: [B, T, G, Dv]   block_indices: int32 [B, T, G, n]   N = B * T
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from tercet.attention.kernels import index, kv_major, union

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class SelectedSettings:
    """How the kernels are cut and launched. `stages` and `warps` in the order of the kernels' names."""

    rows: int = 64  # (query, head) rows of a tile
    segment_rows: int = 2048  # rows that one KV-major program works through
    warps: int = 4
    union_stages: int = 3
    union_dq_stages: int = 2
    attend_stages: int = 1
    merge_stages: int = 2
    backward_stages: int = 2
    merge_warps: int = 4
    sum_dq_warps: int = 4
    # KV-major runs above this many union blocks per tile, as a multiple of select_count.
    forward_limit: float = 2.4
    backward_limit: float = 1.9
    slab_bytes: int = 1 << 30  # what the KV-major design may keep per slab


def default_settings(dk: int, dv: int, dtype: torch.dtype, select_block: int) -> SelectedSettings:
    if dtype == torch.float32:
        return SelectedSettings(rows=32, union_stages=1, union_dq_stages=1, merge_stages=1, backward_stages=1)
    wide = max(dk, dv) > 128 or select_block > 64
    if wide:
        return SelectedSettings(warps=8, union_stages=2, union_dq_stages=1, backward_stages=1, merge_warps=8)
    if max(dk, dv) <= 64:
        return SelectedSettings(union_stages=2, forward_limit=3.4, backward_limit=1.9)
    return SelectedSettings()


class Plan(NamedTuple):
    """Everything about a call that follows from shapes."""

    N: int
    T: int
    G: int
    h: int
    n: int
    dk: int
    dv: int
    head_tile: int
    head_tiles: int
    tile_tokens: int  # queries per union tile
    tile_rows: int
    queries: int  # queries per KV-major step
    tiles: int
    segment: int
    GL: int
    ranges: int
    slab_tokens: int
    documents: int
    packed: bool
    blocks_per_sequence: int
    L: int
    forced: int
    union_only: bool
    limits: tuple[float, float]

    @property
    def slabs(self) -> int:
        return self.G // self.GL * self.ranges

    @property
    def lists(self) -> int:
        return self.slabs * self.GL * self.L

    @property
    def entries(self) -> int:
        return self.N * self.G * self.n

    def each_slab(self) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """(slab, first KV head, range, first token, past the last token, first entry, entries)."""
        slab = 0
        for group in range(0, self.G, self.GL):
            for r in range(self.ranges):
                begin = r * self.slab_tokens
                end = min(begin + self.slab_tokens, self.N)
                per_token = self.GL * self.n
                yield slab, group, r, begin, end, group * self.N * self.n + begin * per_token, (end - begin) * per_token
                slab += 1


@lru_cache(maxsize=256)
def make_plan(
    shape: tuple[int, int, int, int, int, int, int],
    itemsize: int,
    documents: int | None,
    blocks: tuple[int, int, int],
    settings: SelectedSettings,
) -> Plan:
    B, T, H, G, n, dk, dv = shape
    select_block, initial, local = blocks
    N = B * T
    h = H // G
    if N * G * n >= 1 << 31:
        raise ValueError(f"B*T*G*n={N * G * n} does not fit 31 bits: split the batch or the sequence")
    if select_block & (select_block - 1) or not 16 <= select_block <= 128:
        raise ValueError(f"select_block={select_block} is not a power of two in 16..128: the kernels take only those")
    if max(dk, dv) > 256:
        raise ValueError(f"head sizes Dk={dk}, Dv={dv} exceed 256: the kernels hold a whole head in registers")
    if n > 1023:
        raise ValueError(f"select_count={n} exceeds 1023: the kernels keep slot numbers in 10 bits")
    head_tile = min(h, settings.rows)
    head_tiles = -(-h // head_tile)
    queries = settings.rows // head_tile
    tile_tokens = min(queries, 32)
    tile_rows = max(16, triton.next_power_of_2(tile_tokens * head_tile))
    segment = max(queries, settings.segment_rows // head_tile)
    blocks_per_sequence = -(-T // select_block)
    limits = (settings.forward_limit * n, settings.backward_limit * n)

    # A whole sequence in one slab sees at most half its blocks per tile on average.
    def slab(entry_bytes: float) -> tuple[int, int, int]:
        most = max(1, int(settings.slab_bytes / entry_bytes))
        GL = max([d for d in range(1, G + 1) if G % d == 0 and N * d * n <= most], default=1)
        ranges = -(-N * GL * n // max(most, 64 * GL * n))
        tokens = -(-N // ranges)
        tokens = -(-tokens // tile_tokens) * tile_tokens
        return GL, -(-N // tokens), tokens

    piece_bytes = select_block * (dk + dv) * 4 * head_tiles / segment
    partial_bytes = h * (max(dk, dv) * itemsize + 4)
    GL, ranges, slab_tokens = slab(max(partial_bytes, piece_bytes))
    largest_mean = blocks_per_sequence / 2 + 1.5 if ranges == 1 else blocks_per_sequence
    union_only = min(largest_mean, tile_tokens * n) <= min(limits)
    if union_only:
        GL, ranges, slab_tokens = slab(piece_bytes)
    numbers = N // select_block + documents if documents is not None else B * blocks_per_sequence
    return Plan(
        N=N, T=N if documents is not None else T, G=G, h=h, n=n, dk=dk, dv=dv,
        head_tile=head_tile, head_tiles=head_tiles, tile_tokens=tile_tokens, tile_rows=tile_rows,
        queries=queries, tiles=-(-N // tile_tokens), segment=segment, GL=GL, ranges=ranges,
        slab_tokens=slab_tokens, documents=documents or B, packed=documents is not None,
        blocks_per_sequence=blocks_per_sequence, L=numbers + 1, forced=min(initial + local, n),
        union_only=union_only, limits=limits,
    )  # fmt: skip


class Call(NamedTuple):
    """A plan with this call's tensors and constants."""

    plan: Plan
    settings: SelectedSettings
    indices: torch.Tensor
    cu_seqlens: torch.Tensor
    steps: int
    select_block: int
    initial: int
    local: int


def _call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, config: Any, tiles: Any,
    settings: SelectedSettings | None,
) -> Call:  # fmt: skip
    B, T, H, dk = q.shape
    G, dv = v.shape[2], v.shape[3]
    if settings is None:
        settings = default_settings(dk, dv, q.dtype, config.select_block)
    cu_seqlens = None if tiles is None else tiles.cu
    documents = None if cu_seqlens is None else cu_seqlens.numel() - 1
    plan = make_plan(
        (B, T, H, G, block_indices.shape[-1], dk, dv), q.element_size(), documents,
        (config.select_block, config.select_initial, config.select_local), settings,
    )  # fmt: skip
    indices = block_indices.contiguous()
    return Call(
        plan, settings, indices, indices if cu_seqlens is None else cu_seqlens,
        0 if documents is None else documents.bit_length(),
        config.select_block, config.select_initial, config.select_local,
    )  # fmt: skip


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch excess, token and head strides of [B, T, heads, ...]."""
    if x.dim() == 4 and x.stride(3) != 1:
        raise ValueError(f"last dimension has stride {x.stride(3)}: the kernels need 1, call .contiguous()")
    b, t, h = x.stride()[:3]
    return (b - x.shape[1] * t if x.shape[0] > 1 else 0), t, h


def _lists_like(c: Call) -> tuple[torch.Tensor, ...]:
    p, device = c.plan, c.indices.device
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    union_lists = (new(p.G, p.tiles, 2, p.tile_tokens * p.n), new(p.G, p.tiles))
    if p.union_only:
        return union_lists
    return (*union_lists, new(2, p.slabs), *_index_like(c))


def _index_like(c: Call) -> tuple[torch.Tensor, ...]:
    p, device = c.plan, c.indices.device
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    return new(p.entries), new(p.entries), new(3, p.lists), new(p.N, p.G)


def _build_lists(c: Call, with_forced: bool) -> tuple[torch.Tensor, ...]:
    p = c.plan
    lists, counts = _lists_like(c)[:2]
    forced, forced_counts = lists, counts
    if with_forced:
        forced = torch.empty(p.G, p.tiles, 2, p.tile_tokens * p.forced, dtype=torch.int32, device=lists.device)
        forced_counts = torch.empty_like(counts)
    padded = triton.next_power_of_2(p.tile_tokens)
    together = max(1, 128 // padded)
    union.build_lists[(-(-p.tiles // together), p.G)](
        c.indices, c.cu_seqlens, lists, counts, forced, forced_counts, p.N, p.T, p.documents, c.steps, p.tiles,
        p.G, p.n, p.tile_tokens, padded, together, c.select_block, c.initial, c.local, p.forced, p.packed,
        with_forced, num_warps=max(1, min(4, together * padded // 32)),
    )  # fmt: skip
    return lists, counts, forced, forced_counts


def _build_index(c: Call) -> tuple[torch.Tensor, ...]:
    p = c.plan
    keys = torch.empty(p.entries, dtype=torch.int32, device=c.indices.device)
    _, entries, lists, span = _index_like(c)
    slots = triton.next_power_of_2(p.n)
    rows = max(1, 1024 // slots)
    index.make_keys[(-(-p.N * p.G // rows),)](
        c.indices, c.cu_seqlens, keys, span, p.N, p.T, p.documents, c.steps, p.blocks_per_sequence, p.L, p.ranges,
        p.slab_tokens, p.G, p.GL, p.n, slots, rows, c.select_block, c.initial, c.local, p.packed,
    )  # fmt: skip
    keys, order = torch.sort(keys, stable=True)
    lists.zero_()
    index.find_lists[(-(-p.entries // 1024),)](
        c.indices, c.cu_seqlens, keys, order, entries, lists, p.entries, p.lists, p.T, p.documents, c.steps,
        p.G, p.n, c.select_block, 1024, p.packed,
    )  # fmt: skip
    return keys, entries, lists, span


def _decide(c: Call, counts: torch.Tensor) -> torch.Tensor:
    p = c.plan
    decision = torch.empty(2, p.slabs, dtype=torch.int32, device=counts.device)
    index.decide[(p.slabs,)](
        counts, decision, p.tiles, p.slab_tokens // p.tile_tokens, p.ranges, *p.limits, p.GL, 1024
    )
    return decision


def selected_saved_like(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, config: Any, tiles: Any,
    settings: SelectedSettings | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Uninitialised tensors shaped like what `selected_forward` saves, for fake implementations."""
    return _lists_like(_call(q, k, v, block_indices, config, tiles, settings))


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, config: Any, tiles: Any,
    settings: SelectedSettings | None = None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Output [B, T, H, Dv], log-sum-exp fp32 [B, T, H], and what the backward reuses.

    The log-sum-exp is base 2 of logits times Dk^-½; a query without blocks has output 0 and 1e30 there.
    """
    c = _call(q, k, v, block_indices, config, tiles, settings)
    p, s = c.plan, c.settings
    B, T, H, dk = q.shape
    o = torch.empty(B, T, H, p.dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, T, H, dtype=torch.float32, device=q.device)
    lists, counts, forced, forced_counts = _build_lists(c, with_forced=not p.union_only)
    strides = (*_strides(q), *_strides(k), *_strides(v))
    scale = LOG2E / math.sqrt(dk)
    dkp, dvp = _padded(dk), _padded(p.dv)
    shape = (p.G, p.h, p.head_tile, p.tile_tokens, p.tile_rows, p.n, c.select_block, dk, p.dv, dkp, dvp, p.GL)
    saved: tuple[torch.Tensor, ...] = (lists, counts)
    decision = counts
    if not p.union_only:
        decision = _decide(c, counts)
        saved = (lists, counts, decision, *_build_index(c))
    union.tile_forward[(p.tiles, p.G, p.head_tiles)](
        q, k, v, lists, counts, decision, o, lse, counts, o, lse, 0, 0, 0, p.N, p.ranges, p.slab_tokens,
        p.T, p.tiles, scale, *strides, *shape, p.tile_tokens * p.n, not p.union_only, False,
        num_warps=s.warps, num_stages=s.union_stages,
    )  # fmt: skip
    if p.union_only:
        return o, lse, saved
    keys, entries, list_table, span = saved[3:]
    most = p.slab_tokens * p.GL * p.n * p.h
    partial = torch.empty(most, p.dv, dtype=q.dtype, device=q.device)
    partial_lse = torch.empty(most, dtype=torch.float32, device=q.device)
    for slab, group, _, begin, end, base, count in p.each_slab():
        kv_major.attend[(-(-count // p.segment), p.head_tiles)](
            q, k, v, keys, entries, list_table[2], decision, partial, partial_lse, slab, group, begin, base, count,
            p.L, p.T, scale, *strides, p.G, p.GL, p.h, p.head_tile, p.queries, s.rows, p.n, c.select_block, dk, p.dv,
            dkp, dvp, p.segment, triton.next_power_of_2(p.segment), _wide(p, q),
            num_warps=s.warps, num_stages=s.attend_stages,
        )  # fmt: skip
        union.tile_forward[(-(-(end - begin) // p.tile_tokens), p.GL, p.head_tiles)](
            q, k, v, forced, forced_counts, decision, partial, partial_lse, span, o, lse, slab, group, begin, end,
            p.ranges, p.slab_tokens, p.T, p.tiles, scale, *strides, *shape, p.tile_tokens * p.forced, True, True,
            num_warps=s.merge_warps, num_stages=s.merge_stages,
        )  # fmt: skip
    return o, lse, saved


def selected_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, gate: torch.Tensor | None, row_sum: torch.Tensor, config: Any, tiles: Any,
    saved: Sequence[torch.Tensor] = (), settings: SelectedSettings | None = None, dq: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv for the gated branch: dout is the gradient of gate * output, row_sum = dout · output (ungated).

    A given dq (contiguous) is added to in place.
    """
    c = _call(q, k, v, block_indices, config, tiles, settings)
    p, s = c.plan, c.settings
    if saved:
        lists, counts, *rest = saved
    else:
        lists, counts, *_ = _build_lists(c, with_forced=False)
        rest = [] if p.union_only else [_decide(c, counts), *_build_index(c)]
    decision, keys, entries, list_table, span = rest if rest else (counts, *_build_index(c))
    if not p.union_only:
        decision = decision[1]
    add = dq is not None
    if dq is None:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    gates = dout if gate is None else gate
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(gates))
    scale, softmax_scale = LOG2E / math.sqrt(p.dk), 1 / math.sqrt(p.dk)
    dkp, dvp = _padded(p.dk), _padded(p.dv)
    dynamic = not p.union_only
    rows = (q, k, v, dout, lse, row_sum, gates)
    union.tile_dq[(p.tiles, p.G, p.head_tiles)](
        *rows, lists, counts, decision, dq, p.ranges, p.slab_tokens, p.N, p.T, p.tiles, scale, softmax_scale, *strides,
        p.G, p.h, p.head_tile, p.tile_tokens, p.tile_rows, c.select_block, p.dk, p.dv, dkp, dvp, p.GL,
        p.tile_tokens * p.n, dynamic, gate is not None, add, num_warps=s.warps, num_stages=s.union_dq_stages,
    )  # fmt: skip
    slab_entries = p.slab_tokens * p.GL * p.n
    fp32 = lambda *shape: torch.empty(shape, dtype=torch.float32, device=q.device)
    pieces = fp32(-(-slab_entries // p.segment) + p.GL * p.L, p.head_tiles, c.select_block, p.dk + p.dv)
    partial = torch.empty(slab_entries * p.h, p.dk, dtype=q.dtype, device=q.device) if dynamic else dq
    carry = p.ranges > 1
    sums = fp32(p.GL, p.L - 1, c.select_block, p.dk + p.dv) if carry else pieces
    heads = min(triton.next_power_of_2(p.h), 64)
    sum_rows = max(1, 16 // heads)
    columns = triton.next_power_of_2(p.dk + p.dv)
    some_keys = min(16, c.select_block)
    for slab, group, r, begin, end, base, count in p.each_slab():
        slab_list = slab * p.GL * p.L
        for with_dq in (False, True) if dynamic else (False,):
            kv_major.backward[(-(-count // p.segment), p.head_tiles)](
                *rows, keys, entries, list_table[2], decision, partial, pieces, slab, group, begin, base, count,
                slab_list, p.L, p.T, scale, *strides, p.G, p.GL, p.h, p.head_tile, p.queries, s.rows, p.n,
                c.select_block, p.dk, p.dv, dkp, dvp, p.segment, triton.next_power_of_2(p.segment),
                _wide(p, q, dout, gates), dynamic, with_dq,
                gate is not None, num_warps=s.warps, num_stages=s.backward_stages,
            )  # fmt: skip
        if dynamic:
            pairs = (end - begin) * p.GL
            kv_major.sum_dq[(-(-pairs // sum_rows), -(-p.h // heads))](
                partial, span, decision, dq, slab, group, begin, pairs, softmax_scale, p.G, p.GL, p.h, p.n, p.dk, dkp,
                heads, sum_rows, add, num_warps=s.sum_dq_warps,
            )  # fmt: skip
        kv_major.sum_dkv[(p.L - 1, p.GL, c.select_block // some_keys)](
            pieces, list_table, c.cu_seqlens, sums, dk, dv, slab_list, group, base, begin, end, p.lists, p.L, p.T,
            p.documents, c.steps, p.blocks_per_sequence, softmax_scale, p.G, p.GL, c.select_block, p.dk, p.dv,
            p.head_tiles, p.segment, some_keys, columns, p.packed, carry, r == p.ranges - 1, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv


def _wide(p: Plan, *tensors: torch.Tensor) -> bool:
    """Whether offsets within a slab need 64 bits for some tensor."""
    return any(p.slab_tokens * x.stride(1) + p.h * x.stride(2) >= 1 << 31 for x in tensors)


def _padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))

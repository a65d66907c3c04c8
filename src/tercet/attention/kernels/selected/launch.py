"""Launches of the selected branch (Eq. 12): plan, lists, forward and backward.

q: [B, Q, H, Dk]   k: [B, T, G, Dk]   v: [B, T, G, Dv]   block_indices: int32 [B, Q, G, n]   N = B·Q

Q < T where q holds a query range (varlen.py). The two designs and the words used here: selected/__init__.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention.kernels import table
from tercet.attention.kernels.combine import row_shape
from tercet.attention.kernels.launch import LOG2E, descriptors, launch, padded, power_of_2
from tercet.attention.kernels.selected import inverted_lists, kv_major, query_major, reduce
from tercet.attention.kernels.selected.plan import Plan, make_plan
from tercet.attention.kernels.table import Launch, SelectedSettings, gluon_launch, selected_settings


class Saved(NamedTuple):
    """Index tensors that the forward hands to the backward. The query-major design alone needs only the first two."""

    tile_lists: Tensor | None = None  # int32 [G, tiles, 2 · queries · (n + forced)]
    tile_counts: Tensor | None = None  # int32 [2, G, tiles]
    decision: Tensor | None = None  # int32 [2, ranges]: 1 where KV-major runs, forward and backward
    order: Tensor | None = None  # int64 [entries]
    lists: Tensor | None = None  # int32 [4, ranges · G · L]
    pieces: Tensor | None = None  # int32 [2, ranges, slots]
    spans: Tensor | None = None  # int32 [N, G]


class Call:
    """One call: its plan, its tensors, and the key of its compiled kernels."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: Any, documents: Any,
        settings: SelectedSettings | None, strided: tuple[Tensor, ...] = (), contiguous: tuple[Tensor, ...] = (), *,
        backward: bool = True,
    ) -> None:  # fmt: skip
        B, Q, H, dk = q.shape
        T, G, dv = v.shape[1:]
        cu = None if documents is None else documents.cu
        self.first_query = 0 if documents is None else documents.first_query
        self.query_range = Q != T
        shared = table.shared_memory(q.device)
        parts, blocks = _split_blocks(config)
        self.settings = settings or selected_settings(dk, dv, q.dtype, blocks[0], shared)
        if not backward:
            self.settings = table.without_backward(self.settings, B * T)
        self.plan = make_plan(
            (B, Q, T, H, G, block_indices.shape[-1] * parts, dk, dv), q.element_size(),
            None if cu is None else cu.numel() - 1, blocks, self.settings, None if cu is None else documents.longest,
        )  # fmt: skip
        self.q, self.k, self.v = q, k, v
        self.indices = block_indices.contiguous()
        if parts > 1:
            each = [parts * self.indices + i for i in range(parts)]
            self.indices = torch.stack(each, -1).flatten(-2).clamp(min=-1)  # -1 remains padding
        self.cu = self.indices if cu is None else cu
        self.device = q.device
        tensors = (q, k, v, *strided)
        self.strides = tuple(s for x in tensors for s in _strides(x))
        pointers = (*tensors, *contiguous, self.indices, self.cu)
        layout = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in pointers) if q.is_cuda else ()
        # a small number instead of the tuple: every launch looks it up
        self.key = _layouts.setdefault((self.plan.identity, self.strides, layout, q.device), len(_layouts))
        self.k_tiles, self.v_tiles = self._descriptors()

    def _descriptors(self) -> tuple[Any, Any]:
        s, flat = self.settings, self.strides[3] == 0 == self.strides[6]
        if not (s.tma and flat and table.generation(self.q) >= 9):
            return None, None
        return descriptors(True, self.plan.select_block, self.k, self.v)

    @property
    def tma(self) -> bool:
        return self.k_tiles is not None

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: tuple, *variant: Any, **options: Any) -> None:
        """`variant`: what the constants depend on besides the plan and the layout of the inputs."""
        launch(_compiled, (kernel.__name__, self.key, self.tma, variant), kernel, grid, args, options)

    @property
    def tokens(self) -> tuple[int, int, int]:
        """Arguments of `query_major.token_of`."""
        return self.plan.T, self.plan.queries, self.first_query

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def _split_blocks(config: Any) -> tuple[int, tuple[int, int, int]]:
    """How many blocks the kernels read in place of one, their size, and how many of them are initial and local."""
    parts = table.block_parts(config)
    return parts, (config.select_block // parts, config.select_initial * parts, config.select_local * parts)


_compiled: dict = {}
_layouts: dict[tuple, int] = {}


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(excess of the batch stride over T token strides, token stride, head stride) of [B, T, heads, ...]."""
    if x.dim() == 4 and x.stride(3) != 1:
        raise ValueError(f"last dimension has stride {x.stride(3)}: the kernels need 1, call .contiguous()")
    b, t, h = x.stride()[:3]
    return (b - x.shape[1] * t if x.shape[0] > 1 else 0), t, h


def selected_saved_like(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: Any, documents: Any,
    settings: SelectedSettings | None = None,
) -> Saved:  # fmt: skip
    """Uninitialised tensors shaped like what `selected_forward` saves, for fake implementations.

    The document count may be symbolic: it only adds to sizes.
    """
    B, Q, H, dk, T, G, dv, n = map(int, (*q.shape, *v.shape[1:], block_indices.shape[-1]))
    cu = None if documents is None else documents.cu
    parts, blocks = _split_blocks(config)
    settings = settings or selected_settings(dk, dv, q.dtype, blocks[0], table.shared_memory(q.device))
    p = make_plan(
        (B, Q, T, H, G, n * parts, dk, dv), q.element_size(), None if cu is None else 1, blocks, settings,
        None if cu is None else int(documents.longest),
    )  # fmt: skip
    more = 0 if cu is None else cu.shape[0] - 2

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    tile_lists = (new(*p.tile_lists), new(2, p.G, p.tiles))
    if p.query_major_only:
        return Saved(*tile_lists)
    return Saved(
        *tile_lists,
        decision=new(2, p.ranges),
        order=new(p.entries, dtype=torch.int64),
        lists=new(4, p.lists + p.ranges * p.G * more),
        pieces=new(2, p.ranges, p.slots + p.G * more),
        spans=new(p.N, p.G),
    )


def _build_tile_lists(c: Call) -> tuple[Tensor, Tensor]:
    p = c.plan
    lists, counts = c.empty(*p.tile_lists), c.empty(2, p.G, p.tiles)
    wide = power_of_2(p.tile_tokens)
    together = max(1, 32 // wide)  # one warp: several would wait for each other at every entry
    args = (
        c.indices, c.cu, lists, counts, p.N, *c.tokens, p.documents, p.steps, p.tiles,
        p.G, p.n, p.tile_tokens, wide, together, p.select_block, p.initial, p.local, p.forced, p.packed,
        c.query_range,
    )  # fmt: skip
    c.launch(
        query_major.build_tile_lists, (-(-p.tiles // together), p.G, 1), args, num_warps=max(1, together * wide // 32)
    )
    return lists, counts


def _choose_design(c: Call, counts: Tensor) -> Tensor:
    p = c.plan
    decision = c.empty(2, p.ranges)
    args = (counts, decision, p.tiles, p.range_tokens // p.tile_tokens, *p.limits, p.G, 1024)
    c.launch(inverted_lists.choose_design, (p.ranges, 1, 1), args)
    return decision


def _build_inverted_lists(c: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last four of a Saved."""
    p = c.plan
    # int16 keys, where they fit, halve the passes of the sort
    short = 2 * p.lists < 1 << 15
    keys = c.empty(p.entries, dtype=torch.int16 if short else torch.int32)
    lists, spans = c.empty(4, p.lists), c.empty(p.N, p.G)
    pieces = torch.zeros(2, p.ranges, p.slots, dtype=torch.int32, device=c.device)
    slots = power_of_2(p.n)
    rows = max(1, 1024 // slots)
    args = (
        c.indices, c.cu, keys, spans, p.N, *c.tokens, p.documents, p.steps, p.blocks_per_sequence, p.L, p.range_tokens,
        p.G, p.n, slots, rows, p.select_block, p.initial, p.local, p.packed, c.query_range,
    )  # fmt: skip
    c.launch(inverted_lists.make_sort_keys, (-(-p.N * p.G // rows), 1, 1), args, short)
    keys, order = torch.sort(keys, stable=True)
    steps = (p.range_tokens * p.G * p.n).bit_length()
    args = (
        c.indices, c.cu, keys, order, lists, pieces, p.lists, p.slots, p.N, *c.tokens, p.range_tokens, p.documents,
        p.steps, steps, p.L, p.G, p.n, p.select_block, p.segment, 128, p.packed, c.query_range,
    )  # fmt: skip
    c.launch(inverted_lists.cut_lists, (-(-p.lists // 128), 1, 1), args, short)
    return order, lists, pieces, spans


def selected_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: Any, documents: Any,
    settings: SelectedSettings | None = None, *, backward: bool = True,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """(output [B, Q, H, Dv], log-sum-exp [B, Q, H], tensors that the backward reuses, if one follows)."""
    c = Call(q, k, v, block_indices, config, documents, settings, backward=backward)
    p, s = c.plan, c.settings
    o = c.empty(*q.shape[:3], p.dv, dtype=q.dtype)
    lse = c.empty(*row_shape("selected", *q.shape[:3]), dtype=torch.float32)
    scale = LOG2E / math.sqrt(p.dk)
    sizes = (p.n, p.select_block, p.dk, p.dv, padded(p.dk), padded(p.dv))
    lists, counts = _build_tile_lists(c)
    if p.query_major_only:
        decision, saved = counts, Saved(lists, counts)  # the kernel does not read the decision
    else:
        decision = _choose_design(c, counts)
        saved = Saved(lists, counts, decision, *_build_inverted_lists(c))
    args = (
        q, k, v, c.k_tiles, c.v_tiles, lists, counts, decision, o, lse, p.N, *c.tokens, p.tiles, p.range_tokens,
        scale, *c.strides, p.G, p.h, p.head_tile, p.tile_tokens, p.tile_rows, p.n, p.forced, *sizes[1:], c.tma,
        c.query_range,
    )  # fmt: skip
    grid = (p.tiles, p.G, p.head_tiles)
    options = _options(s.forward_warps, s.forward_stages, s.forward_registers)
    c.launch(query_major.query_major_forward, grid, args, **options)
    if p.query_major_forward_only:
        return o, lse, saved
    rows = min(p.range_tokens, p.N) * p.G * p.n * p.h
    partial = c.empty(rows, p.dv, dtype=q.dtype)
    partial_lse = c.empty(rows, dtype=torch.float32)
    wide = _wide(c, q)
    heads, slots = _merge_tile(p)
    hopper = _gluon(c, "selected_partials")
    for r, begin, end in p.each_range():
        tables = (saved.order, saved.pieces, saved.lists, decision, partial, partial_lse, r, begin, p.lists, p.slots)
        grid = (p.range_slots(end - begin), p.kv_head_tiles, 1)
        if hopper is not None:
            from tercet.attention.kernels.hopper.selected_forward import hopper_selected_forward

            qb, qt, qh, *keys = c.strides
            args = (
                q, k, v, *tables, p.L, p.T, scale, qb, *keys, qt, qh, p.G, p.h, hopper.rows, p.n, p.select_block, p.dk,
                padded(p.dk), p.segment, hopper.stages, hopper.gathering, p.forward_parts,
            )  # fmt: skip
            grid = (p.forward_parts * grid[0], 1, 1)
            c.launch(hopper_selected_forward, grid, args, p.forward_parts, **hopper.gluon_options)
        else:
            args = (
                q, k, v, *tables, p.L, p.T, scale, *c.strides, p.G, p.h, p.kv_head_tile,
                s.kv_forward_rows // p.kv_head_tile, s.kv_forward_rows, *sizes, p.segment, wide,
            )  # fmt: skip
            c.launch(kv_major.kv_major_forward, grid, args, num_warps=s.forward_warps, num_stages=s.kv_forward_stages)
        total = (end - begin) * p.G
        args = (
            partial, partial_lse, saved.spans, decision, o, lse, r, begin, total, p.G, p.h, p.n, p.dv, padded(p.dv),
            heads, slots,
        )  # fmt: skip
        grid = (min(total, -(-_MERGE_PROGRAMS * heads // p.h)), p.h // heads, 1)
        c.launch(reduce.merge_partials, grid, args, num_warps=1)
    return o, lse, saved


def selected_backward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, lse: Tensor, dout: Tensor, gate: Tensor | None,
    delta: Tensor, config: Any, documents: Any, saved: Sequence[Tensor | None] = (),
    settings: SelectedSettings | None = None, dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of the gated branch: dout is the gradient of gate · output, delta = dout · output, ungated.

    `saved`: a Saved, or empty to rebuild it. A given dq must be contiguous and is added to in place.
    """
    gated, add = gate is not None, dq is not None
    gates = dout if gate is None else gate
    given = (lse, delta) if dq is None else (lse, delta, dq)
    c = Call(q, k, v, block_indices, config, documents, settings, (dout, gates), given)
    p, s = c.plan, c.settings
    kept = Saved(*saved) if saved else Saved(*_build_tile_lists(c))
    lists, counts = kept.tile_lists, kept.tile_counts
    chosen = counts  # with one design the kernels do not read the decision
    if not p.query_major_only:
        chosen = (kept.decision if saved else _choose_design(c, counts))[1]
    if p.query_major_only or not saved:
        kept = Saved(lists, counts, None, *_build_inverted_lists(c))
    dq = c.empty(*q.shape, dtype=q.dtype) if dq is None else dq
    dk, dv = c.empty(*k.shape, dtype=k.dtype), c.empty(*v.shape, dtype=v.dtype)
    scale, softmax_scale = LOG2E / math.sqrt(p.dk), 1 / math.sqrt(p.dk)
    sizes = (p.select_block, p.dk, p.dv, padded(p.dk), padded(p.dv))
    inputs = (q, k, v, c.k_tiles, c.v_tiles, dout, lse, delta, gates)
    hopper = _gluon(c, "selected_key_gradients", dout)
    records = c.empty(*q.shape[:3], 4, dtype=torch.float32) if hopper or s.dkv_transposed else None
    args = (
        *inputs, lists, counts, chosen, dq, records, p.N, *c.tokens, p.tiles, p.range_tokens, scale, softmax_scale,
        *c.strides, p.G, p.h, p.head_tile, p.tile_tokens, p.tile_rows, p.n, p.forced, *sizes, c.tma, gated, add,
        c.query_range,
    )  # fmt: skip
    grid = (p.tiles, p.G, p.head_tiles)
    options = _options(s.backward_warps, s.dq_stages, s.dq_registers)
    c.launch(query_major.query_major_dq, grid, args, gated, add, **options)
    sums = c.empty(p.slots + p.G * p.L, p.kv_head_tiles, p.select_block, p.dk + p.dv, dtype=torch.float32)
    partial = dq if p.query_major_only else c.empty(min(p.range_tokens, p.N) * p.G * p.n * p.h, p.dk, dtype=q.dtype)
    heads, pairs = _sum_tile(p.h)
    wide = _wide(c, q, dout, gates, *(() if records is None else (records,)))
    size = p.select_block * (p.dk + p.dv)
    chunk = min(4096, power_of_2(size))
    for r, begin, end in p.each_range():
        known, past = p.new_keys(r, k.shape[0] * p.T, c.first_query)
        grid = (p.range_slots(end - begin), p.kv_head_tiles, 1)
        tables = (kept.order, kept.pieces, kept.lists, chosen)
        where = (r, begin, known, p.lists, p.slots, p.L, *c.tokens, scale)
        for with_dq in (False,) if p.query_major_only else (False, True):
            if hopper is not None:
                from tercet.attention.kernels.hopper.selected_dkv import hopper_selected_dkv

                qb, qt, qh, *keys, ob, ot, oh = c.strides[:12]
                args = (
                    q, k, v, dout, records, *tables, partial, sums, *where, qb, ob, *keys, qt, qh, ot, oh, p.G, p.h,
                    hopper.rows, p.n, p.select_block, p.dk, padded(p.dk), p.segment, hopper.stages,
                    hopper.gathering, not p.query_major_only, with_dq, c.query_range,
                )  # fmt: skip
                c.launch(hopper_selected_dkv, grid, args, with_dq, **hopper.gluon_options)
            elif s.dkv_transposed and not with_dq:
                args = (
                    q, k, v, dout, records, *tables, sums, *where, *c.strides[:12], p.G, p.h, p.kv_head_tile,
                    s.dkv_rows, p.n, *sizes, p.segment, wide, not p.query_major_only, c.query_range,
                )  # fmt: skip
                options = {"num_warps": s.backward_warps, "num_stages": s.dkv_stages}
                c.launch(kv_major.kv_major_dkv_transposed, grid, args, wide, **options)
            else:
                rows, stages = (s.dkv_dq_rows, s.dkv_dq_stages) if with_dq else (s.dkv_rows, s.dkv_stages)
                args = (
                    q, k, v, dout, lse, delta, gates, *tables, partial, sums, *where, *c.strides, p.G, p.h,
                    p.kv_head_tile, rows // p.kv_head_tile, rows, p.n, *sizes, p.segment, wide, not p.query_major_only,
                    with_dq, gated, c.query_range,
                )  # fmt: skip
                options = {"num_warps": s.backward_warps, "num_stages": stages}
                c.launch(kv_major.kv_major_dkv, grid, args, with_dq, gated, wide, **options)
        if not p.query_major_only:
            total = (end - begin) * p.G
            args = (
                partial, kept.spans, chosen, dq, r, begin, total, softmax_scale, p.G, p.h, p.n, p.dk, padded(p.dk),
                heads, pairs, 16, add,
            )  # fmt: skip
            grid = _sum_grid(total, pairs, p.h, heads)
            c.launch(reduce.sum_dq, grid, args, add, num_warps=_sum_warps(p, p.dk))
        last = r == p.ranges - 1
        args = (
            sums, kept.lists, c.cu, dk, dv, r, known, past, begin * p.G * p.n, p.lists, p.slots, p.L, p.T,
            p.documents, p.steps, p.blocks_per_sequence, softmax_scale, p.G, p.select_block, p.dk, p.dv,
            p.kv_head_tiles, p.segment, chunk, 4, p.packed, last,
        )  # fmt: skip
        c.launch(reduce.sum_dkv, (p.L - 1, p.G, -(-size // chunk)), args, last, num_warps=8)
    return dq, dk, dv


def _gluon(c: Call, stage: str, *rows: Tensor) -> Launch | None:
    """Launch settings if the stage's Gluon kernel takes this call; else None, and kv_major.py takes it. `rows`: what it
    gathers besides q."""
    p, (q, k, v) = c.plan, (c.q, c.k, c.v)
    if not c.settings.gluon or p.kv_head_tiles > 1 or p.select_block not in table.GLUON_BLOCKS.get(p.dk, ()):
        return None
    # The kernel addresses rows, and their records of four numbers, with 32 bits from the first token of the batch, and
    # copies 16 bytes at a time, which the compiler must see from the batch strides.
    if p.N * max(q.stride(1), *(x.stride(1) for x in rows), 4 * p.G * p.h) >= 1 << 31:
        return None
    if any(_strides(x)[0] % 16 for x in (q, *rows)):
        return None
    return gluon_launch(stage, q, *rows, k, v)


def _options(warps: int, stages: int, registers: int) -> dict[str, int]:
    options = {"num_warps": warps, "num_stages": stages}
    return options | {"maxnreg": registers} if registers else options


# Three times as many one-warp programs as an H200 holds at once: enough that a slow multiprocessor takes fewer of them,
# and few enough to launch where they only exit.
_MERGE_PROGRAMS = 3 * 20 * 132


def _merge_tile(p: Plan) -> tuple[int, int]:
    """(heads, slots) that one warp merges at once: 64 numbers per thread. Heads divide h, so that no thread is idle."""
    slots = min(power_of_2(p.n), 16)
    return max(1, min(p.h & -p.h, 2048 // (slots * padded(p.dv)))), slots


def _sum_tile(h: int) -> tuple[int, int]:
    """(heads, (token, KV head) pairs) per program of a reduction over slots."""
    heads = min(power_of_2(h), 64)
    return heads, max(1, 16 // heads)


def _sum_grid(total: int, pairs: int, h: int, heads: int) -> tuple[int, int, int]:
    return min(-(-total // pairs), 4096), -(-h // heads), 1


def _sum_warps(p: Plan, d: int) -> int:
    """Eight elements per thread."""
    heads, pairs = _sum_tile(p.h)
    return max(1, min(16, heads * pairs * padded(d) // 256))


def _wide(c: Call, *tensors: Tensor) -> bool:
    """Whether offsets within a range need 64 bits for any of the tensors."""
    return any(c.plan.range_tokens * x.stride(1) + c.plan.h * x.stride(2) >= 1 << 31 for x in tensors)

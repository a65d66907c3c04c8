"""Context parallelism for Native Sparse Attention: one sequence over several ranks, two chunks each.

x: [1, own tokens, dim]. Per layer, a rank fetches from the others:
  raw keys and values for compression    the l-1 tokens before each chunk
  compressed keys and values             all that its queries can see: T/d rows, so this is small
  keys of a learned selector             as the selected keys
  window keys and values                 the w-1 tokens before each chunk
  selected keys and values               its documents from their start, requested first and awaited last;
                                         or only the blocks that its queries selected (parallel.context_fetch=blocks)
Nothing is fetched outside a chunk's own documents. To the operator each chunk is a query range, on any backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.attention.block_sparse import run_block_sparse, select_by_keys
from tercet.attention.config import NSAConfig
from tercet.attention.dense import dense_attention
from tercet.attention.dispatch import Route
from tercet.attention.functional import NSAInputs, run_nsa, run_window
from tercet.attention.layout import Packing, Span
from tercet.attention.selector import choose_blocks
from tercet.model.block_sparse import BlockSparseAttention, mean_keys
from tercet.model.dense import DenseAttention
from tercet.model.layer import SelectingLayer
from tercet.model.nsa import NativeSparseAttention
from tercet.model.rope import rotate
from tercet.model.selector import BlockSelector, SampledQueries, attach_loss
from tercet.model.window import WindowAttention
from tercet.parallel.context_layout import Chunk, ContextLayout, TokenRange
from tercet.parallel.exchange import BlockFetchPlan, Exchange, RowMoves

DENSE_REASON = "context parallelism: PyTorch's dense kernels do not support query ranges of packed documents"

# Starts when created; calling it waits, the first time, and returns the fetched (k, v).
PendingFetch = Callable[[], tuple[Tensor, Tensor]]


@dataclass
class ContextShard:
    """This rank's part of one batch. Layers take it in place of `cu_seqlens`."""

    layout: ContextLayout
    group: dist.ProcessGroup
    device: torch.device
    by_blocks: bool = False  # fetch only selected blocks
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes received from other ranks so far, forward and backward, by purpose."""
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)

    @cached_property
    def packing(self) -> Packing:
        """The documents of the whole sequence. Their bounds are known on the host, so no work is masked out."""
        layout = self.layout
        bounds = torch.tensor(layout.bounds, dtype=torch.int32, device=self.device)
        packing = Packing(bounds, layout.length, layout.compressed_bounds[-1], layout.config)
        tokens, compressed = layout.bounds, layout.compressed_bounds
        packing.bounds = list(zip(tokens[:-1], tokens[1:], compressed[:-1], compressed[1:], strict=True))
        return packing

    @cached_property
    def chunks(self) -> list[Chunk]:
        chunks = []
        for index, (first, end) in enumerate(map(self.layout.tokens, self.layout.owned[self.rank])):
            ranges = {name: next(r for r in own if r.first <= first < r.end) for name, own in self.ranges.items()}
            row = index * self.layout.chunk
            chunks.append(Chunk(first, end, slice(row, row + self.layout.chunk), ranges))
        return chunks

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole sequence [1, T, ...]."""
        return torch.cat([x[:, chunk.first : chunk.end] for chunk in self.chunks], dim=1)

    @cached_property
    def position(self) -> Tensor:
        """[own tokens]: positions within documents."""
        return self.own_tokens(self.packing.position[None])[0]

    @cached_property
    def moves(self) -> dict[str, RowMoves]:
        """What is fetched, by purpose; computed once and used by every layer."""
        layout = self.layout
        plans = {name: layout.lookback_plan(tokens) for name, tokens in layout.lookback.items()}
        plans |= {"compressed": layout.compressed_plan(), "before": layout.previous_token_plan()}
        return {name: RowMoves.of_plan(plan, self.rank, self.device) for name, plan in plans.items()}

    @cached_property
    def ranges(self) -> dict[str, list[TokenRange]]:
        """Token ranges in this rank's fetched buffers, by purpose."""
        layout = self.layout
        return {name: layout.lookback_ranges(self.rank, tokens) for name, tokens in layout.lookback.items()}

    @cached_property
    def compressed_tokens(self) -> tuple[Tensor, Tensor]:
        """For this rank's compressed tokens: rows of the raw buffer [count, l], and positions [count]."""
        l, d = self.layout.config.compress_block, self.layout.config.compress_stride
        rows, positions = [], []
        for number, chunk in zip(self.layout.owned[self.rank], self.chunks, strict=True):
            raw = chunk.ranges["raw"]
            for first, count in self.layout.first_tokens(number):
                start = self.layout.document_start(first)
                stride = torch.arange(0, count * d, d, device=self.device)
                rows.append(first - raw.first + raw.at + stride)
                positions.append(first - start + stride + l - 1)
        empty = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        first_row = torch.cat(rows or empty)
        return first_row[:, None] + torch.arange(l, device=self.device), torch.cat(positions or empty)

    @cached_property
    def block_plan(self) -> BlockFetchPlan:
        return BlockFetchPlan.build(self.layout, self.moves["selected"], self.ranges["selected"], self.rank)

    def fetch(self, name: str) -> Exchange:
        """An exchange of rows for this purpose."""
        return Exchange(self.moves[name], self.group, partial(self._count_bytes, name))

    def fetch_blocks(self, block_indices: Tensor) -> Exchange:
        """An exchange of the rows in the selected blocks. block_indices: [1, own tokens, G, n]."""
        selected = self.block_plan.gather_selected(block_indices, self.group)
        self._count_bytes("requests", selected.numel() - selected[0].numel())
        moves = self.block_plan.moves(selected, self.rank)
        return Exchange(moves, self.group, partial(self._count_bytes, "selected"))

    def _count_bytes(self, name: str, size: int) -> None:
        self.traffic[name] += size


def shard_sequence(
    tokens: Tensor,
    targets: Tensor,
    bounds: list[int],
    config: NSAConfig,
    group: dist.ProcessGroup,
    *,
    by_blocks: bool = False,
) -> tuple[Tensor, Tensor, ContextShard]:
    """Split a whole batch [1, T] over the ranks of `group`. Returns this rank's tokens, targets and shard."""
    layout = ContextLayout(tuple(bounds), dist.get_world_size(group), config)
    shard = ContextShard(layout, group, tokens.device, by_blocks)
    return shard.own_tokens(tokens), shard.own_tokens(targets), shard


def apply_context_parallelism(model: nn.Module) -> None:
    """Let every attention layer accept a ContextShard as `cu_seqlens`. Other calls behave as before."""
    forwards = {
        NativeSparseAttention: _nsa_forward,
        DenseAttention: _dense_forward,
        WindowAttention: _window_forward,
        BlockSparseAttention: _block_sparse_forward,
    }
    for layer in model.modules():
        if type(layer) in forwards:
            layer.forward = partial(  # type: ignore[method-assign]
                _forward, forwards[type(layer)], layer, layer.forward
            )


def _forward(
    sharded: Any, layer: Any, original: Any, x: Tensor, cu_seqlens: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if not isinstance(cu_seqlens, ContextShard):
        return original(x, cu_seqlens, *args, **kwargs)
    result: Tensor = sharded(layer, x, cu_seqlens, kwargs.get("sampled"))
    return result


def _nsa_forward(layer: NativeSparseAttention, x: Tensor, shard: ContextShard, sampled: Tensor | None) -> Tensor:
    """Selected keys are most of what is fetched: the branches that do not read them run while they are in flight."""
    q, raw_k, keys, values = layer.project(x, shard.position)
    pending: dict[str, PendingFetch] = {}
    for branch in ("selected", "window"):
        if branch in layer.branches and not (branch == "selected" and shard.by_blocks):
            pending[branch] = _start_fetch(shard.fetch(branch), keys[branch], values[branch])
    compressed = _fetch_compressed(layer, raw_k, values["compressed"], shard) if layer.compresses else (None, None)
    nsa = _ShardedNSA(layer, shard, q, layer.gate(x), compressed, pending)
    selector_k = None
    if layer.selector is not None and "selected" in layer.branches:
        nsa.indices, selector_k = _choose_blocks(layer, layer.selector, x, shard)

    if not shard.by_blocks:
        nsa.run("compressed", "window")
    else:
        nsa.run("compressed")  # alone: it selects the blocks to fetch
        if "selected" in layer.branches:
            exchange = shard.fetch_blocks(torch.cat(nsa.indices, dim=1))
            pending["selected"] = _start_fetch(exchange, keys["selected"], values["selected"], row_per_head=True)
        nsa.run("window")
    nsa.run("selected")

    layer.routes = {branch: nsa.routes[branch] for branch in layer.branches}
    _update_stats(layer, nsa.gates, nsa.indices, shard)
    out = torch.cat(nsa.outs, dim=1)
    if selector_k is not None and sampled is not None:
        selected_k, _ = pending["selected"]()
        out = _with_selector_loss(layer, out, x, selector_k, q, selected_k, nsa.indices, sampled, shard)
    return layer.o_proj(out.flatten(2))


def _fetch_compressed(
    layer: NativeSparseAttention, raw_k: Tensor, raw_v: Tensor, shard: ContextShard
) -> tuple[Tensor, Tensor]:
    """Compress what ends in this rank's chunks, and fetch all compressed keys and values that its queries can see."""
    rows, position = shard.compressed_tokens
    k, v = _start_fetch(shard.fetch("raw"), raw_k, raw_v)()
    own_k = rotate(layer.compress_k.phi(k[:, rows]), layer.rotary.cos_sin(position))
    own_v = layer.compress_v.phi(v[:, rows])
    return _start_fetch(shard.fetch("compressed"), own_k, own_v)()


@dataclass
class _ShardedNSA:
    """The operator on this rank's chunks, a few branches at a time. Lists have one entry per chunk."""

    layer: NativeSparseAttention
    shard: ContextShard
    q: Tensor
    gates: Tensor
    compressed: tuple[Tensor, Tensor] | tuple[None, None]
    pending: dict[str, PendingFetch]  # keys and values of the other branches
    indices: list[Any] = field(default_factory=list)  # selected blocks; empty until known
    outs: list[Tensor] = field(default_factory=list)  # sum of the branches that have run
    routes: dict[str, Route] = field(default_factory=dict)

    def run(self, *branches: str) -> None:
        """Run those of these branches that the layer has. The first call also selects blocks if none are given: by the
        compressed branch, even in a layer that does not use its output."""
        wanted = tuple(b for b in self.layer.branches if b in branches)
        if not wanted and (self.indices or "selected" not in self.layer.branches):
            return
        results = [self._run_chunk(i, wanted or ("compressed",)) for i in range(len(self.shard.chunks))]
        self.indices = self.indices or [block_indices for _, block_indices, _ in results]
        if wanted:
            outs = [out for out, _, _ in results]
            self.outs = [a + b for a, b in zip(self.outs, outs, strict=True)] if self.outs else outs
            self.routes |= dict.fromkeys(wanted, Route(*results[0][2]))

    def _run_chunk(self, index: int, branches: tuple[str, ...]) -> tuple[Tensor, Tensor | None, tuple[str, str | None]]:
        chunk = self.shard.chunks[index]
        kc, vc = self.compressed
        kv: dict[str, tuple[Tensor, Tensor]] = {}
        first_key = {"selected": 0, "window": 0}
        for branch in branches:
            if branch != "compressed":
                (k, v), tokens = self.pending[branch](), chunk.ranges[branch]
                kv[branch], first_key[branch] = (k[:, tokens.rows], v[:, tokens.rows]), tokens.first
        unread = next(iter(kv.values()), None)  # any tensors for a branch that does not run
        if unread is None:
            assert kc is not None
            assert vc is not None
            unread = kc, vc
        kv = {"selected": unread, "window": unread} | kv
        q, gates = self.q[:, chunk.rows], self.gates[:, chunk.rows]
        return run_nsa(
            NSAInputs(q, kc, vc, *kv["selected"], *kv["window"], gates),
            config=self.layer.config, packing=self.shard.packing, backend=self.layer.backend, branches=branches,
            block_indices=self.indices[index] if self.indices else None, select="selected" in self.layer.branches,
            span=Span(chunk.first, first_key["selected"], first_key["window"]),
        )  # fmt: skip


def _block_sparse_forward(
    layer: BlockSparseAttention, x: Tensor, shard: ContextShard, sampled: Tensor | None
) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    pending = None if shard.by_blocks else _start_fetch(shard.fetch("selected"), k, v)
    selector_k = None
    if layer.selector is not None:
        indices, selector_k = _choose_blocks(layer, layer.selector, x, shard)
    else:
        indices = _choose_by_mean_keys(layer, q, k, shard)
    if pending is None:
        pending = _start_fetch(shard.fetch_blocks(torch.cat(indices, dim=1)), k, v, row_per_head=True)
    keys, values = pending()
    results = []
    for chunk, block_indices in zip(shard.chunks, indices, strict=True):
        tokens = chunk.ranges["selected"]
        result = run_block_sparse(
            q[:, chunk.rows], keys[:, tokens.rows], values[:, tokens.rows], **_options(layer, shard),
            dense_below=layer.dense_below, block_indices=block_indices, span=Span(chunk.first, tokens.first),
        )  # fmt: skip
        results.append(result)
    layer.routes = {"selected": Route(*results[0].route)}
    _update_stats(layer, None, indices, shard)
    out = torch.cat([result.out for result in results], dim=1)
    if selector_k is not None and sampled is not None:
        out = _with_selector_loss(layer, out, x, selector_k, q, keys, indices, sampled, shard)
    return layer.o_proj(out.flatten(2))


def _options(layer: SelectingLayer, shard: ContextShard) -> dict[str, Any]:
    return {"config": layer.config, "packing": shard.packing, "backend": layer.backend}


def _choose_by_mean_keys(layer: BlockSparseAttention, q: Tensor, k: Tensor, shard: ContextShard) -> list[Tensor]:
    """block_indices of each chunk by the means of blocks of keys."""
    with torch.no_grad():
        raw = shard.fetch("raw")(k[0])[None]
        means = mean_keys(raw[:, shard.compressed_tokens[0]])
        keys = shard.fetch("compressed")(means[0])[None]
    options = _options(layer, shard)
    return [select_by_keys(q[:, c.rows], keys, span=Span(c.first), **options) for c in shard.chunks]


def _choose_blocks(
    layer: SelectingLayer, selector: BlockSelector, x: Tensor, shard: ContextShard
) -> tuple[list[Tensor], Tensor]:
    """block_indices of each chunk by a learned selector, and its fetched keys, in the rows of the selected keys."""
    queries, own = selector(x, shard.position)
    keys = shard.fetch("selected")(own[0])[None]
    found = []
    for chunk in shard.chunks:
        tokens = chunk.ranges["selected"]
        span = Span(chunk.first, tokens.first)
        found.append(choose_blocks(queries[:, chunk.rows], keys[:, tokens.rows], span=span, **_options(layer, shard)))
    return found, keys


def _with_selector_loss(
    layer: SelectingLayer, out: Tensor, x: Tensor, selector_k: Tensor, q: Tensor, keys: Tensor,
    indices: list[Tensor], sampled: Tensor, shard: ContextShard,
) -> Tensor:  # fmt: skip
    """`SelectingLayer.with_selector_loss`, chunk by chunk, since each has its own range of the fetched keys."""
    assert layer.selector is not None
    packing, losses = shard.packing, []
    # the configuration ensures that all chunks have equally many of the sampled queries
    sampled_by_chunk = sampled.chunk(len(shard.chunks))
    for chunk, own, block_indices in zip(shard.chunks, sampled_by_chunk, indices, strict=True):
        tokens = chunk.ranges["selected"]
        row = own - chunk.rows.start
        token = chunk.first + row
        queries = SampledQueries(packing.position[token], token - tokens.first, packing.max_seqlen)
        loss, quality = layer.selector.loss(
            x[0, own], q[0, own], block_indices[0, row], selector_k[0, tokens.rows], keys[0, tokens.rows], queries,
            measure=layer.stats.enabled, backend=layer.backend,
        )  # fmt: skip
        layer.stats.update_selector(quality)
        losses.append(loss)
    return attach_loss(out, torch.stack(losses).mean() * layer.selector.weight)


def _dense_forward(layer: DenseAttention, x: Tensor, shard: ContextShard, sampled: Tensor | None) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    k, v = _start_fetch(shard.fetch("selected"), k, v)()
    outs = []
    for chunk in shard.chunks:
        tokens = chunk.ranges["selected"]
        span = Span(chunk.first, tokens.first)
        outs.append(dense_attention(q[:, chunk.rows], k[:, tokens.rows], v[:, tokens.rows], shard.packing, span))
    layer.routes = {"dense": Route("reference", DENSE_REASON)}
    return layer.o_proj(torch.cat(outs, dim=1).flatten(2))


def _window_forward(layer: WindowAttention, x: Tensor, shard: ContextShard, sampled: Tensor | None) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    k, v = _start_fetch(shard.fetch("window"), k, v)()
    results = []
    for chunk in shard.chunks:
        tokens = chunk.ranges["window"]
        result = run_window(
            q[:, chunk.rows], k[:, tokens.rows], v[:, tokens.rows], config=layer.config, packing=shard.packing,
            backend=layer.backend, span=Span(chunk.first, tokens.first),
        )  # fmt: skip
        results.append(result)
    layer.routes = {"window": Route(*results[0][1])}
    return layer.o_proj(torch.cat([out for out, _ in results], dim=1).flatten(2))


def _start_fetch(exchange: Exchange, k: Tensor, v: Tensor, *, row_per_head: bool = False) -> PendingFetch:
    """Start fetching keys and values [1, own, G, D] in one exchange."""
    kv = torch.cat((k, v), dim=-1)[0]
    rows = kv.flatten(0, 1) if row_per_head else kv
    incoming = exchange.begin(rows)

    @cache
    def wait() -> tuple[Tensor, Tensor]:
        fetched = exchange.end(rows, incoming).view(1, -1, *kv.shape[1:])
        fetched_k, fetched_v = fetched.split((k.shape[-1], v.shape[-1]), dim=-1)
        return fetched_k, fetched_v

    return wait


def _update_stats(layer: SelectingLayer, gates: Tensor | None, indices: list[Any], shard: ContextShard) -> None:
    """Update statistics chunk by chunk. Another rank may own the selection of the token before a chunk."""
    if not layer.stats.enabled:
        return
    with torch.no_grad():
        before = None
        if indices[0] is not None:
            before = shard.fetch("before")(torch.cat(indices, dim=1)[0])
        for i, (chunk, block_indices) in enumerate(zip(shard.chunks, indices, strict=True)):
            layer.stats.update(
                None if gates is None else gates[:, chunk.rows],
                block_indices,
                positions=shard.position[chunk.rows],
                before=None if before is None else before[None, i : i + 1],
            )

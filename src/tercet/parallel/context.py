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
from functools import cached_property, partial
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
from tercet.model.nsa import NativeSparseAttention
from tercet.model.rope import rotate
from tercet.model.selecting import SelectingLayer
from tercet.model.selector import BlockSelector, TaughtQueries, attach_loss
from tercet.model.window import WindowAttention
from tercet.parallel.context_layout import Layout, TokenRange
from tercet.parallel.exchange import BlockFetchPlan, Exchange, RowMoves

DENSE_REASON = "context parallelism: PyTorch's dense kernels do not support query ranges of packed documents"

# Starts when created; calling it waits and returns the fetched (k, v).
PendingFetch = Callable[[], tuple[Tensor, Tensor]]


@dataclass
class ContextShard:
    """This rank's part of one batch. Layers take it in place of `cu_seqlens`."""

    layout: Layout
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
    def chunks(self) -> list[tuple[int, int]]:
        """Token ranges of this rank's chunks."""
        return [self.layout.tokens(c) for c in self.layout.owned[self.rank]]

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole sequence [1, T, ...]."""
        return torch.cat([x[:, a:b] for a, b in self.chunks], dim=1)

    @cached_property
    def position(self) -> Tensor:
        """[own tokens]: positions within documents."""
        return self.own_tokens(self.packing.position[None])[0]

    def chunk_rows(self, index: int) -> slice:
        """Rows of the index-th chunk among this rank's tokens."""
        return slice(index * self.layout.chunk, (index + 1) * self.layout.chunk)

    @cached_property
    def moves(self) -> dict[str, RowMoves]:
        """What is fetched, by purpose; computed once and used by every layer."""
        config, layout = self.layout.config, self.layout
        plans = {
            "raw": layout.lookback_plan(config.compress_block - 1),
            "compressed": layout.compressed_plan(),
            "window": layout.lookback_plan(config.window - 1),
            "selected": layout.lookback_plan(None),
            "before": layout.previous_token_plan(),
        }
        return {name: RowMoves.of_plan(plan, self.rank, self.device) for name, plan in plans.items()}

    @cached_property
    def ranges(self) -> dict[str, list[TokenRange]]:
        """Token ranges in this rank's fetched buffers, by purpose."""
        config, layout = self.layout.config, self.layout
        lookback = {"raw": config.compress_block - 1, "window": config.window - 1, "selected": None}
        return {name: layout.lookback_ranges(self.rank, tokens) for name, tokens in lookback.items()}

    def range_of(self, name: str, index: int) -> TokenRange:
        """The fetched token range that contains the index-th chunk."""
        first, _ = self.chunks[index]
        return next(r for r in self.ranges[name] if r.first <= first < r.end)

    @cached_property
    def compressed_tokens(self) -> tuple[Tensor, Tensor]:
        """For this rank's compressed tokens: rows of the raw buffer [count, l], and positions [count]."""
        l, d = self.layout.config.compress_block, self.layout.config.compress_stride
        rows, positions = [], []
        for index, chunk in enumerate(self.layout.owned[self.rank]):
            raw = self.range_of("raw", index)
            for first, count in self.layout.first_tokens(chunk):
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
    layout = Layout(tuple(bounds), dist.get_world_size(group), config)
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
    result: Tensor = sharded(layer, x, cu_seqlens, kwargs.get("taught"))
    return result


def _nsa_forward(layer: NativeSparseAttention, x: Tensor, shard: ContextShard, taught: Tensor | None) -> Tensor:
    q, raw, keys, values = layer.project(x, shard.position)
    pending: dict[str, PendingFetch] = {}
    for branch in ("selected", "window"):
        if branch in layer.branches and not (branch == "selected" and shard.by_blocks):
            pending[branch] = _start_fetch(shard.fetch(branch), keys[branch], values[branch])
    pending_raw = _start_fetch(shard.fetch("raw"), raw, values["compressed"])

    index, position = shard.compressed_tokens
    raw_k, raw_v = pending_raw()
    k_blocks, v_blocks = raw_k[:, index], raw_v[:, index]
    k_own = rotate(layer.compress_k.phi(k_blocks), layer.rotary.cos_sin(position))
    v_own = layer.compress_v.phi(v_blocks)
    compressed = _start_fetch(shard.fetch("compressed"), k_own, v_own)()
    gates = layer.gate(x)

    def run_branches(
        branches: tuple[str, ...], fetched: dict[str, tuple[Tensor, Tensor]], block_indices: list[Any]
    ) -> list[Any]:
        """Per chunk: (out, block_indices, route) of these branches over the fetched keys and values."""
        results = []
        for i, (first, _) in enumerate(shard.chunks):
            rows, kv, key_offset = shard.chunk_rows(i), {}, {"selected": 0, "window": 0}
            for branch, (k, v) in fetched.items():
                part, key_offset[branch] = _buffer_rows(shard, branch, i)
                kv[branch] = (k[:, part], v[:, part])
            selected, window = kv.get("selected", compressed), kv.get("window", compressed)
            result = run_nsa(
                NSAInputs(q[:, rows], *compressed, *selected, *window, gates[:, rows]),
                config=layer.config, packing=shard.packing, backend=layer.backend, branches=branches,
                block_indices=block_indices[i] if block_indices else None, select="selected" in layer.branches,
                span=Span(first, key_offset["selected"], key_offset["window"]),
            )  # fmt: skip
            results.append(result)
        return results

    # Branches that need no selected keys run first, while those keys are in flight. By blocks, the fetch can only
    # start once blocks are selected.
    early = tuple(b for b in layer.branches if b != "selected")
    stages = [("compressed",), ("window",), ("selected",)] if shard.by_blocks else [early, ("selected",)]
    indices: list[Any] = []
    selector_k: Tensor | None = None
    if layer.selector is not None:
        indices, selector_k = _choose_blocks(layer, layer.selector, x, shard)
    outs: list[Tensor] = []
    routes: dict[str, Route] = {}
    loss: Tensor | None = None
    for stage in stages:
        branches = tuple(b for b in stage if b in layer.branches)
        if not branches and indices:
            continue
        fetched = {branch: pending[branch]() for branch in branches if branch in pending}
        # the compressed branch selects the blocks, even in a layer that does not use its output
        results = run_branches(branches or ("compressed",), fetched, indices)
        if not indices:
            indices = [selected for _, selected, _ in results]
            if shard.by_blocks and "selected" in layer.branches:
                exchange = shard.fetch_blocks(torch.cat(indices, dim=1))
                pending["selected"] = _start_fetch(exchange, keys["selected"], values["selected"], row_per_head=True)
        if selector_k is not None and taught is not None and "selected" in fetched:
            loss = _teach(layer, x, selector_k, q, fetched["selected"][0], indices, taught, shard)
        if branches:
            found = [out for out, _, _ in results]
            outs = [a + b for a, b in zip(outs, found, strict=True)] if outs else found
            routes |= dict.fromkeys(branches, Route(*results[0][2]))
    layer.routes = {branch: routes[branch] for branch in layer.branches}
    _update_stats(layer, gates, indices, shard)
    out = torch.cat(outs, dim=1)
    if loss is not None and layer.selector is not None:
        out = attach_loss(out, loss * layer.selector.weight)
    return layer.o_proj(out.flatten(2))


def _block_sparse_forward(layer: BlockSparseAttention, x: Tensor, shard: ContextShard, taught: Tensor | None) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    pending = None if shard.by_blocks else _start_fetch(shard.fetch("selected"), k, v)
    options: dict[str, Any] = {"config": layer.config, "packing": shard.packing, "backend": layer.backend}
    indices: list[Any] = []
    selector_k: Tensor | None = None
    if layer.selector is not None:
        indices, selector_k = _choose_blocks(layer, layer.selector, x, shard)
    else:
        with torch.no_grad():
            raw, _ = _start_fetch(shard.fetch("raw"), k, k[..., :0])()
            own = mean_keys(raw[:, shard.compressed_tokens[0]])
            block_keys, _ = _start_fetch(shard.fetch("compressed"), own, own[..., :0])()
        for i, (first, _) in enumerate(shard.chunks):
            rows = shard.chunk_rows(i)
            indices.append(select_by_keys(q[:, rows], block_keys, **options, span=Span(first)))
    if pending is None:
        pending = _start_fetch(shard.fetch_blocks(torch.cat(indices, dim=1)), k, v, row_per_head=True)
    keys, values = pending()
    results = []
    for i, (first, _) in enumerate(shard.chunks):
        part, key_offset = _buffer_rows(shard, "selected", i)
        result = run_block_sparse(
            q[:, shard.chunk_rows(i)], keys[:, part], values[:, part], **options, dense_below=layer.dense_below,
            block_indices=indices[i], span=Span(first, key_offset),
        )  # fmt: skip
        results.append(result)
    layer.routes = {"selected": Route(*results[0].route)}
    _update_stats(layer, None, indices, shard)
    out = torch.cat([result.out for result in results], dim=1)
    if layer.selector is not None and selector_k is not None and taught is not None:
        loss = _teach(layer, x, selector_k, q, keys, indices, taught, shard)
        out = attach_loss(out, loss * layer.selector.weight)
    return layer.o_proj(out.flatten(2))


def _choose_blocks(
    layer: SelectingLayer, selector: BlockSelector, x: Tensor, shard: ContextShard
) -> tuple[list[Tensor], Tensor]:
    """block_indices of each chunk by a learned selector, and its fetched keys, in the rows of the selected keys."""
    queries, own = selector(x, shard.position)
    keys, _ = _start_fetch(shard.fetch("selected"), own, own[..., :0])()
    options: dict[str, Any] = {"config": layer.config, "packing": shard.packing, "backend": layer.backend}
    found = []
    for i, (first, _) in enumerate(shard.chunks):
        part, first_key = _buffer_rows(shard, "selected", i)
        found.append(
            choose_blocks(queries[:, shard.chunk_rows(i)], keys[:, part], span=Span(first, first_key), **options)
        )
    return found, keys


def _teach(
    layer: SelectingLayer, x: Tensor, selector_k: Tensor, q: Tensor, keys: Tensor,
    indices: list[Any], taught: Tensor, shard: ContextShard,
) -> Tensor:  # fmt: skip
    """The loss of a learned selector, chunk by chunk: each has its own range of the fetched keys."""
    assert layer.selector is not None
    packing, losses = shard.packing, []
    # the configuration ensures that all chunks have equally many of the sampled queries
    for i, own in enumerate(taught.chunk(len(shard.chunks))):
        first, part, start = shard.chunks[i][0], *_buffer_rows(shard, "selected", i)
        row = own - shard.chunk_rows(i).start
        token = first + row
        queries = TaughtQueries(packing.position[token], token - start, packing.max_seqlen)
        loss, captured = layer.selector.loss(
            x[0, own], q[0, own], indices[i][0, row], selector_k[0, part], keys[0, part], queries,
            measure=layer.stats.enabled, backend=layer.backend,
        )  # fmt: skip
        layer.stats.update_selector(captured)
        losses.append(loss)
    return torch.stack(losses).mean()


def _dense_forward(layer: DenseAttention, x: Tensor, shard: ContextShard, taught: Tensor | None) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    k, v = _start_fetch(shard.fetch("selected"), k, v)()
    outs = []
    for i, (first, _) in enumerate(shard.chunks):
        part, key_offset = _buffer_rows(shard, "selected", i)
        query_range = Span(first, key_offset)
        outs.append(dense_attention(q[:, shard.chunk_rows(i)], k[:, part], v[:, part], shard.packing, query_range))
    layer.routes = {"dense": Route("reference", DENSE_REASON)}
    return layer.o_proj(torch.cat(outs, dim=1).flatten(2))


def _window_forward(layer: WindowAttention, x: Tensor, shard: ContextShard, taught: Tensor | None) -> Tensor:
    q, k, v = layer.project(x, shard.position)
    k, v = _start_fetch(shard.fetch("window"), k, v)()
    results = []
    for i, (first, _) in enumerate(shard.chunks):
        part, key_offset = _buffer_rows(shard, "window", i)
        result = run_window(
            q[:, shard.chunk_rows(i)], k[:, part], v[:, part], config=layer.config, packing=shard.packing,
            backend=layer.backend, span=Span(first, key_offset),
        )  # fmt: skip
        results.append(result)
    layer.routes = {"window": Route(*results[0][1])}
    return layer.o_proj(torch.cat([out for out, _ in results], dim=1).flatten(2))


def _start_fetch(exchange: Exchange, k: Tensor, v: Tensor, *, row_per_head: bool = False) -> PendingFetch:
    """Start fetching keys and values [1, own, G, D] in one exchange."""
    kv = torch.cat((k, v), dim=-1)[0]
    rows = kv.flatten(0, 1) if row_per_head else kv
    incoming = exchange.begin(rows)

    def wait() -> tuple[Tensor, Tensor]:
        fetched = exchange.end(rows, incoming).view(1, -1, *kv.shape[1:])
        fetched_k, fetched_v = fetched.split((k.shape[-1], v.shape[-1]), dim=-1)
        return fetched_k, fetched_v

    return wait


def _buffer_rows(shard: ContextShard, name: str, index: int) -> tuple[slice, int]:
    """Rows of the fetched buffer with the index-th chunk and the keys before it, and the token of the first row."""
    tokens = shard.range_of(name, index)
    return slice(tokens.at, tokens.at + tokens.end - tokens.first), tokens.first


def _update_stats(layer: SelectingLayer, gates: Tensor | None, indices: list[Any], shard: ContextShard) -> None:
    """Update statistics chunk by chunk. Another rank may own the selection of the token before a chunk."""
    if not layer.stats.enabled:
        return
    with torch.no_grad():
        before = None
        if indices[0] is not None:
            before = shard.fetch("before")(torch.cat(indices, dim=1)[0])
        for i, part in enumerate(indices):
            rows = shard.chunk_rows(i)
            layer.stats.update(
                None if gates is None else gates[:, rows],
                part,
                positions=shard.position[rows],
                before=None if before is None else before[None, i : i + 1],
            )

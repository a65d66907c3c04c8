"""Context parallelism for Native Sparse Attention: one sequence over several ranks, two chunks each.

x: [1, own tokens, dim]. Per layer, a rank fetches from the others:
  raw keys and values for compression    the l-1 tokens before each chunk
  compressed keys and values             all that its queries can see: T/d rows, so this is small
  keys that score blocks                 as the selected keys
  window keys and values                 the w-1 tokens before each chunk
  selected keys and values               its documents from their start, requested first and awaited last;
Nothing is fetched outside a chunk's own documents. To the operator each chunk is a query range, on any backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import Route
from tercet.attention.layout import Packing, Span
from tercet.attention.operator import Attended, AttentionInputs, attend
from tercet.attention.selector import TokenScorer, choose_blocks, own_scorer, select_by_keys
from tercet.model.attention import Attention
from tercet.model.compression import mean_keys
from tercet.model.rope import rotate
from tercet.model.selector import SampledQueries, attach_loss
from tercet.parallel.context_layout import Chunk, ContextLayout, TokenRange
from tercet.parallel.exchange import Exchange, RowMoves

# Starts when created; calling it waits, the first time, and returns the fetched (k, v).
PendingFetch = Callable[[], tuple[Tensor, Tensor]]


@dataclass
class ContextShard:
    """This rank's part of one batch. Layers take it in place of `cu_seqlens`."""

    layout: ContextLayout
    group: dist.ProcessGroup
    device: torch.device
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

    def fetch(self, name: str) -> Exchange:
        """An exchange of rows for this purpose."""
        return Exchange(self.moves[name], self.group, partial(self._count_bytes, name))

    def _count_bytes(self, name: str, size: int) -> None:
        self.traffic[name] += size


def shard_sequence(
    tokens: Tensor,
    targets: Tensor,
    bounds: list[int],
    config: NSAConfig,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor, ContextShard]:
    """Split a whole batch [1, T] over the ranks of `group`. Returns this rank's tokens, targets and shard."""
    layout = ContextLayout(tuple(bounds), dist.get_world_size(group), config)
    shard = ContextShard(layout, group, tokens.device)
    return shard.own_tokens(tokens), shard.own_tokens(targets), shard


def apply_context_parallelism(model: nn.Module) -> None:
    """Let every attention layer accept a ContextShard as `cu_seqlens`. Other calls behave as before."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.forward = partial(_forward, layer, layer.forward)  # type: ignore[method-assign]


def _forward(layer: Attention, original: Any, x: Tensor, cu_seqlens: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(cu_seqlens, ContextShard):
        result: Tensor = original(x, cu_seqlens, *args, **kwargs)
        return result
    return _attend_sharded(layer, x, cu_seqlens, kwargs.get("sampled"))


def _attend_sharded(layer: Attention, x: Tensor, shard: ContextShard, sampled: Tensor | None) -> Tensor:
    """Selected keys are most of what is fetched: the branches that do not read them run while they are in flight."""
    spec = layer.spec
    q, raw_k, keys, values = layer.project(x, shard.position)
    fetched = ("selected",) if spec.dense else [b for b in ("selected", "window") if b in spec.branches]
    pending = {branch: _start_fetch(shard.fetch(branch), keys[branch], values[branch]) for branch in fetched}
    compressed: tuple[Tensor | None, Tensor | None] = (None, None)
    if spec.compresses:
        assert raw_k is not None
        compressed = _fetch_compressed(layer, raw_k, values["compressed"], shard)
    gates = None if layer.gate is None else layer.gate(x)
    indices: list[Any] = [None for _ in shard.chunks]
    scored_k = None
    if spec.by_tokens:
        indices, scored_k = _choose_blocks(layer, q, keys["selected"], x, shard)
    elif spec.pools:
        indices = _choose_by_mean_keys(layer, q, keys["selected"], shard)
    outs: list[Tensor] = []
    routes: dict[str, Route] = {}
    for group in (("compressed", "window"), ("selected", "dense")) if spec.gated else (spec.branches,):
        branches = tuple(b for b in spec.branches if b in group)
        if not branches and not (spec.selects and indices[0] is None):
            continue
        results = [
            # compressed tokens choose the blocks even in a layer without their branch
            _attend_chunk(layer, shard, chunk, (q, gates, compressed), pending, branches or ("compressed",), chosen)
            for chunk, chosen in zip(shard.chunks, indices, strict=True)
        ]
        indices = [result.block_indices for result in results]
        if branches:
            found = [result.out for result in results]
            outs = [a + b for a, b in zip(outs, found, strict=True)] if outs else found
            routes |= dict.fromkeys(branches, Route(*results[0].route))
    layer.routes = {branch: routes[branch] for branch in spec.branches}
    _update_stats(layer, gates, indices, shard)
    out = torch.cat(outs, dim=1)
    if layer.selector is not None and scored_k is not None and sampled is not None:
        selected_k, _ = pending["selected"]()
        out = _with_selector_loss(layer, out, x, scored_k, q, selected_k, indices, sampled, shard)
    return layer.o_proj(out.flatten(2))


def _attend_chunk(
    layer: Attention, shard: ContextShard, chunk: Chunk, inputs: tuple[Any, ...], pending: dict[str, PendingFetch],
    branches: tuple[str, ...], chosen: Tensor | None,
) -> Attended:  # fmt: skip
    """Some branches of the operator on one chunk. inputs: q, gates, and all compressed keys and values."""
    (q, gates, compressed), spec = inputs, layer.spec
    kv: dict[str, tuple[Tensor, Tensor]] = {}
    first_key = {"selected": 0, "window": 0}
    for branch in branches:
        if branch != "compressed":
            name = "selected" if branch == "dense" else branch
            (k, v), tokens = pending[name](), chunk.ranges[name]
            kv[name], first_key[name] = (k[:, tokens.rows], v[:, tokens.rows]), tokens.first
    if spec.gated:  # any tensors for a branch that does not run
        unread: Any = next(iter(kv.values()), compressed)
        kv = {"selected": unread, "window": unread} | kv
    keys, values = ({name: pair[i] for name, pair in kv.items()} for i in range(2))
    own = AttentionInputs.of_branches(
        q[:, chunk.rows], compressed, keys, values, None if gates is None else gates[:, chunk.rows]
    )
    return attend(
        own, replace(spec, branches=branches), packing=shard.packing, backend=layer.backend, block_indices=chosen,
        select=spec.gated and spec.selects, span=Span(chunk.first, first_key["selected"], first_key["window"]),
    )  # fmt: skip


def _fetch_compressed(layer: Attention, raw_k: Tensor, raw_v: Tensor, shard: ContextShard) -> tuple[Tensor, Tensor]:
    """Compress what ends in this rank's chunks, and fetch all compressed keys and values that its queries can see."""
    rows, position = shard.compressed_tokens
    k, v = _start_fetch(shard.fetch("raw"), raw_k, raw_v)()
    own_k = rotate(layer.compress_k.phi(k[:, rows]), layer.rotary.cos_sin(position))
    own_v = layer.compress_v.phi(v[:, rows])
    return _start_fetch(shard.fetch("compressed"), own_k, own_v)()


def _choose_by_mean_keys(layer: Attention, q: Tensor, k: Tensor, shard: ContextShard) -> list[Tensor]:
    """block_indices of each chunk by the means of blocks of keys."""
    with torch.no_grad():
        raw = shard.fetch("raw")(k[0])[None]
        means = mean_keys(raw[:, shard.compressed_tokens[0]])
        keys = shard.fetch("compressed")(means[0])[None]
    options: Any = {"config": layer.config, "packing": shard.packing, "backend": layer.backend}
    return [select_by_keys(q[:, c.rows], keys, span=Span(c.first), **options) for c in shard.chunks]


def _choose_blocks(
    layer: Attention, q: Tensor, k: Tensor, x: Tensor, shard: ContextShard
) -> tuple[list[Tensor], Tensor]:
    """block_indices of each chunk by single tokens, and the fetched keys that scored them, in the rows of the selected
    keys."""
    if layer.selector is not None:
        scorer = TokenScorer(*layer.selector(x, shard.position))
    else:
        scorer = own_scorer(q, k, layer.score_channels, layer.spec)
    scorer = scorer.with_keys(shard.fetch("selected"))
    options: Any = {"config": layer.config, "packing": shard.packing, "backend": layer.backend}
    tokens = [(chunk, chunk.ranges["selected"]) for chunk in shard.chunks]
    found = [choose_blocks(scorer.of_rows(c.rows, t.rows), span=Span(c.first, t.first), **options) for c, t in tokens]
    return found, scorer.keys


def _with_selector_loss(
    layer: Attention, out: Tensor, x: Tensor, selector_k: Tensor, q: Tensor, keys: Tensor,
    indices: list[Tensor], sampled: Tensor, shard: ContextShard,
) -> Tensor:  # fmt: skip
    """`Attention._with_selector_loss`, chunk by chunk, since each has its own range of the fetched keys."""
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


def _start_fetch(exchange: Exchange, k: Tensor, v: Tensor) -> PendingFetch:
    """Start fetching keys and values [1, own, G, D] in one exchange."""
    rows = torch.cat((k, v), dim=-1)[0]
    incoming = exchange.begin(rows)

    @cache
    def wait() -> tuple[Tensor, Tensor]:
        fetched = exchange.end(rows, incoming)[None]
        fetched_k, fetched_v = fetched.split((k.shape[-1], v.shape[-1]), dim=-1)
        return fetched_k, fetched_v

    return wait


def _update_stats(layer: Attention, gates: Tensor | None, indices: list[Any], shard: ContextShard) -> None:
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

"""Context parallelism for Native Sparse Attention: one sequence over several ranks, each with two chunks of it.

x: [1, own tokens, dim]. What a rank needs of others, per layer:
  raw keys and values under its compressed tokens   l-1 tokens before each chunk
  compressed keys and values                        all that its queries may see: T/d rows, hence small
  window keys and values                            w-1 tokens before each chunk
  selected keys and values                          its documents from their beginning; ordered first, waited for last
                                                    or the blocks that its queries chose, and no others
Nothing is fetched beyond a chunk's own documents. Each chunk is a stretch of queries to the operator, on whatever
backend runs it.
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

from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import Route
from tercet.attention.functional import run_nsa
from tercet.attention.layout import Packing, Span
from tercet.model.attention import DenseAttention, NativeSparseAttention
from tercet.model.dense import dense_attention
from tercet.model.rope import rotate
from tercet.parallel.context_layout import Buffer, Layout, Plan
from tercet.parallel.exchange import BlockFetch, BlockPlan, Exchange, Fetch

DENSE = "context parallelism: PyTorch's dense kernels take no stretch of packed documents"


@dataclass
class ContextShare:
    """This rank's part of one batch: stands where layers expect the documents' bounds."""

    layout: Layout
    group: dist.ProcessGroup
    device: torch.device
    by_blocks: bool = False  # fetch selected blocks only
    traffic: Counter[str] = field(default_factory=Counter)
    """Bytes that came from other ranks so far, forward and backward, by what they were for."""
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)

    @cached_property
    def packing(self) -> Packing:
        """The whole sequence's documents. Their bounds are known on the host, so that nothing is masked in vain."""
        layout = self.layout
        bounds = torch.tensor(layout.bounds, dtype=torch.int32, device=self.device)
        packing = Packing(bounds, layout.length, layout.compressed_bounds[-1], layout.config)
        tokens, compressed = layout.bounds, layout.compressed_bounds
        known = list(zip(tokens[:-1], tokens[1:], compressed[:-1], compressed[1:], strict=True))
        packing.bounds = known
        return packing

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Tokens of this rank's chunks."""
        return [self.layout.tokens(c) for c in self.layout.owned[self.rank]]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of a whole sequence [1, T, ...]."""
        return torch.cat([x[:, a:b] for a, b in self.chunks], dim=1)

    @cached_property
    def position(self) -> Tensor:
        """[own tokens]: positions within documents."""
        return self.take(self.packing.position[None])[0]

    def rows(self, index: int) -> slice:
        """The index-th chunk among this rank's rows."""
        return slice(index * self.layout.chunk, (index + 1) * self.layout.chunk)

    # ------------------------------------------------------------ plans, made once and used by every layer

    @cached_property
    def plans(self) -> dict[str, Plan]:
        config, layout = self.layout.config, self.layout
        return {
            "raw": layout.reach_back(config.compress_block - 1),
            "compressed": layout.compressed_plan(),
            "window": layout.reach_back(config.window - 1),
            "selected": layout.reach_back(None),
            "before": layout.rows_before(),
        }

    @cached_property
    def buffers(self) -> dict[str, list[Buffer]]:
        config, layout = self.layout.config, self.layout
        back = {"raw": config.compress_block - 1, "window": config.window - 1, "selected": None}
        return {name: layout.buffers(self.rank, tokens) for name, tokens in back.items()}

    def buffer(self, name: str, index: int) -> Buffer:
        """The buffer in which the index-th chunk stands."""
        first, _ = self.chunks[index]
        return next(b for b in self.buffers[name] if b.first <= first < b.end)

    @cached_property
    def compressed_tokens(self) -> tuple[Tensor, Tensor]:
        """Of this rank's compressed tokens: rows of the raw buffer under each [count, l], and their positions."""
        l, d = self.layout.config.compress_block, self.layout.config.compress_stride
        rows, positions = [], []
        for index, chunk in enumerate(self.layout.owned[self.rank]):
            buffer = self.buffer("raw", index)
            for first, count in self.layout.first_tokens(chunk):
                start = self.layout.document_start(first)
                stride = torch.arange(0, count * d, d, device=self.device)
                rows.append(first - buffer.first + buffer.at + stride)
                positions.append(first - start + stride + l - 1)
        empty = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        first_row = torch.cat(rows or empty)
        return first_row[:, None] + torch.arange(l, device=self.device), torch.cat(positions or empty)

    @cached_property
    def block_plan(self) -> BlockPlan:
        return BlockPlan.of(self.layout, self.plans["selected"], self.buffers["selected"], self.rank, self.device)

    def fetch(self, name: str) -> Fetch:
        """An exchange of rows by the plan of this name."""
        return Fetch(self.plans[name], self.group, partial(self._count, name))

    def fetch_blocks(self, block_indices: Tensor) -> BlockFetch:
        """An exchange of the rows that these choices [1, own tokens, G, n] ask for."""
        wanted = self.block_plan.wanted(block_indices, self.group)
        self._count("requests", wanted.numel() - wanted[0].numel())
        return BlockFetch(self.block_plan, wanted, self.group, partial(self._count, "selected"))

    def _count(self, name: str, size: int) -> None:
        self.traffic[name] += size


def shard(
    tokens: Tensor,
    targets: Tensor,
    bounds: list[int],
    config: NSAConfig,
    group: dist.ProcessGroup,
    *,
    by_blocks: bool = False,
) -> tuple[Tensor, Tensor, ContextShare]:
    """A whole batch's tokens and targets [1, T], and what this rank has of them."""
    layout = Layout(tuple(bounds), dist.get_world_size(group), config)
    share = ContextShare(layout, group, tokens.device, by_blocks)
    return share.take(tokens), share.take(targets), share


def apply_context_parallelism(model: nn.Module) -> None:
    """Let every attention layer take a ContextShare where it takes documents' bounds; without one it is as before."""
    forwards = {NativeSparseAttention: _nsa_forward, DenseAttention: _dense_forward}
    for layer in model.modules():
        if type(layer) in forwards:
            layer.forward = partial(  # type: ignore[method-assign]
                _forward, forwards[type(layer)], layer, layer.forward
            )


def _forward(
    shared: Any, layer: Any, whole: Any, x: Tensor, cu_seqlens: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if not isinstance(cu_seqlens, ContextShare):
        return whole(x, cu_seqlens, *args, **kwargs)
    result: Tensor = shared(layer, x, cu_seqlens)
    return result


def _nsa_forward(layer: NativeSparseAttention, x: Tensor, share: ContextShare) -> Tensor:
    q, raw, keys, values = layer.project(x, share.position)
    ordered: dict[str, Any] = {}
    for branch in ("selected", "window"):
        if branch in layer.branches and not (branch == "selected" and share.by_blocks):
            ordered[branch] = _ask(share, branch, keys[branch], values[branch])
    raw_rows = _ask(share, "raw", raw, values["compressed"])

    index, position = share.compressed_tokens
    raw_k, raw_v = raw_rows()
    k_blocks, v_blocks = raw_k[:, index], raw_v[:, index]
    k_own = rotate(layer.compress_k.phi(k_blocks), layer.rotary.turn(position))
    compressed = _ask(share, "compressed", k_own, layer.compress_v.phi(v_blocks))()
    gates = layer.gate(x)

    def attend(branches: tuple[str, ...], fetched: dict[str, tuple[Tensor, Tensor]], given: list[Any]) -> list[Any]:
        """Chunk by chunk: (out, block_indices, route) of these branches, over what has been fetched for them."""
        found = []
        for i, (first, _) in enumerate(share.chunks):
            rows, parts, begins = share.rows(i), {}, {"selected": 0, "window": 0}
            for branch, (k, v) in fetched.items():
                part, begins[branch] = _stretch(share, branch, i)
                parts[branch] = (k[:, part], v[:, part])
            result = run_nsa(
                q[:, rows], *compressed, *parts.get("selected", compressed), *parts.get("window", compressed),
                gates[:, rows], config=layer.config, packing=share.packing, backend=layer.backend, branches=branches,
                block_indices=given[i] if given else None, select="selected" in layer.branches,
                span=Span(first, begins["selected"], begins["window"]),
            )  # fmt: skip
            found.append(result)
        return found

    # What needs no selected keys comes first: they travel meanwhile. Blocks can be ordered only once they are chosen.
    early = tuple(b for b in layer.branches if b != "selected")
    stages = [("compressed",), ("window",), ("selected",)] if share.by_blocks else [early, ("selected",)]
    indices: list[Any] = []
    outs: list[Tensor] = []
    routes: dict[str, Route] = {}
    for stage in stages:
        wanted = tuple(b for b in stage if b in layer.branches)
        if not wanted and indices:
            continue
        # the compressed branch chooses the blocks, even where its own output is left out
        fetched = {branch: ordered[branch]() for branch in wanted if branch in ordered}
        results = attend(wanted or ("compressed",), fetched, indices)
        if not indices:
            indices = [chosen for _, chosen, _ in results]
            if share.by_blocks and "selected" in layer.branches:
                exchange = share.fetch_blocks(torch.cat(indices, dim=1))
                ordered["selected"] = _order(exchange, keys["selected"], values["selected"], flat=True)
        if wanted:
            found = [out for out, _, _ in results]
            outs = [a + b for a, b in zip(outs, found, strict=True)] if outs else found
            routes |= dict.fromkeys(wanted, Route(*results[0][2]))
    layer.routes = {branch: routes[branch] for branch in layer.branches}
    _measure(layer, gates, indices, share)
    return layer.o_proj(torch.cat(outs, dim=1).flatten(2))


def _dense_forward(layer: DenseAttention, x: Tensor, share: ContextShare) -> Tensor:
    q, k, v = layer.project(x, share.position)
    k, v = _ask(share, "selected", k, v)()
    outs = []
    for i, (first, _) in enumerate(share.chunks):
        part, begin = _stretch(share, "selected", i)
        outs.append(dense_attention(q[:, share.rows(i)], k[:, part], v[:, part], share.packing, Span(first, begin)))
    layer.routes = {"dense": Route("reference", DENSE)}
    return layer.o_proj(torch.cat(outs, dim=1).flatten(2))


def _ask(share: ContextShare, name: str, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return _order(share.fetch(name), k, v)


def _order(exchange: Exchange, k: Tensor, v: Tensor, *, flat: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    """Order keys and values [1, own, G, D] in one go; calling the result waits for them. `flat`: a row per head."""
    together = torch.cat((k, v), dim=-1)[0]
    rows = together.flatten(0, 1) if flat else together
    coming = exchange.begin(rows)

    def wait() -> tuple[Tensor, Tensor]:
        got = exchange.end(rows, coming).view(1, -1, *together.shape[1:])
        got_k, got_v = got.split((k.shape[-1], v.shape[-1]), dim=-1)
        return got_k, got_v

    return wait


def _stretch(share: ContextShare, name: str, index: int) -> tuple[slice, int]:
    """Rows of the fetched buffer that hold the index-th chunk and what lies before it; and their first token."""
    buffer = share.buffer(name, index)
    return slice(buffer.at, buffer.at + buffer.end - buffer.first), buffer.first


def _measure(layer: NativeSparseAttention, gates: Tensor, indices: list[Any], share: ContextShare) -> None:
    """Statistics, chunk by chunk; the selection of the token before a chunk may be another rank's."""
    if not layer.stats.enabled:
        return
    with torch.no_grad():
        before = None
        if "selected" in layer.branches:
            before = share.fetch("before")(torch.cat(indices, dim=1)[0])
        for i, part in enumerate(indices):
            layer.stats.update(
                gates[:, share.rows(i)],
                part,
                positions=share.position[share.rows(i)],
                before=None if before is None else before[None, i : i + 1],
            )

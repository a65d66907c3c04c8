"""Context parallelism for Native Sparse Attention: one sequence over several ranks, each with two chunks of it.

x: [1, own tokens, dim]. What a rank needs of others, per layer:
  raw keys and values under its compressed tokens   l-1 tokens before each chunk
  compressed keys and values                        all that its queries may see: T/d rows, hence small
  window keys and values                            w-1 tokens before each chunk
  selected keys and values                          its documents from their beginning; ordered first, waited for last
Nothing is fetched beyond a chunk's own documents. Asking for selected blocks only was weighed and left: the queries of
one rank together pick nearly every block (docs/parallel.md has the numbers), and counts would have to be synchronised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.attention.dispatch import Route
from tercet.attention.functional import compressed_attention, selected_attention, window_attention
from tercet.attention.layout import Packing, Span
from tercet.attention.reference import combine
from tercet.attention.spec import NSAConfig
from tercet.model.attention import DenseAttention, NativeSparseAttention
from tercet.model.dense import dense_attention
from tercet.model.rope import rotate
from tercet.parallel.context_layout import Buffer, Layout, Plan
from tercet.parallel.exchange import Fetch

REASON = "context parallelism: the kernels take queries and keys of one whole sequence"


@dataclass
class ContextShare:
    """This rank's part of one batch: stands where layers expect the documents' bounds."""

    layout: Layout
    group: dist.ProcessGroup
    device: torch.device
    rank: int = field(init=False)
    traffic: dict[str, int] = field(default_factory=dict)
    """Bytes fetched from other ranks so far, forward only, by what they were for."""

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

    def fetch(self, name: str, x: Tensor) -> tuple[Fetch, Tensor]:
        """Order rows of x [1, own, ...] by the plan of this name."""
        fetch = Fetch(self.plans[name], self.group)
        row = x[0, :1].numel() * x.element_size() if x.shape[1] else x.shape[2:].numel() * x.element_size()
        self.traffic[name] = self.traffic.get(name, 0) + self.plans[name].fetched(self.rank) * row
        return fetch, fetch.begin(x[0])


def shard(
    tokens: Tensor, targets: Tensor, bounds: list[int], config: NSAConfig, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, ContextShare]:
    """A whole batch's tokens and targets [1, T], and what this rank has of them."""
    layout = Layout(tuple(bounds), dist.get_world_size(group), config)
    share = ContextShare(layout, group, tokens.device)
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
    config, branches = layer.config, layer.branches
    q, raw, keys, values = layer.project(x, share.position)
    selected, window = (
        _ask(share, branch, keys[branch], values[branch]) if branch in branches else None
        for branch in ("selected", "window")
    )
    raw_rows = _ask(share, "raw", raw, values["compressed"])

    index, position = share.compressed_tokens
    raw_k, raw_v = raw_rows()
    k_blocks, v_blocks = raw_k[:, index], raw_v[:, index]
    k_own = rotate(layer.compress_k.phi(k_blocks), layer.rotary.turn(position))
    k_compressed, v_compressed = _ask(share, "compressed", k_own, layer.compress_v.phi(v_blocks))()
    gates = layer.gate(x)

    outs: list[dict[str, Tensor]] = [{} for _ in share.chunks]
    indices: list[Tensor] = []
    for i, (first, _) in enumerate(share.chunks):
        out, chosen = compressed_attention(
            q[:, share.rows(i)], k_compressed, v_compressed, config=config, packing=share.packing, span=Span(first)
        )
        indices.append(chosen)
        if "compressed" in branches:
            outs[i]["compressed"] = out
    if window is not None:
        k, v = window()
        for i, (first, _) in enumerate(share.chunks):
            part, begin = _stretch(share, "window", i)
            outs[i]["window"] = window_attention(
                q[:, share.rows(i)],
                k[:, part],
                v[:, part],
                config=config,
                packing=share.packing,
                span=Span(first, begin),
            )
    if selected is not None:
        k, v = selected()
        for i, (first, _) in enumerate(share.chunks):
            part, begin = _stretch(share, "selected", i)
            outs[i]["selected"] = selected_attention(
                q[:, share.rows(i)], k[:, part], v[:, part], indices[i],
                config=config, packing=share.packing, span=Span(first, begin),
            )  # fmt: skip
    mixed = [combine(gates[:, share.rows(i)], outs[i]) for i in range(len(outs))]
    layer.routes = dict.fromkeys(branches, Route("reference", REASON))
    _count(layer, gates, indices, share)
    return layer.o_proj(torch.cat(mixed, dim=1).to(q.dtype).flatten(2))


def _dense_forward(layer: DenseAttention, x: Tensor, share: ContextShare) -> Tensor:
    q, k, v = layer.project(x, share.position)
    k, v = _ask(share, "selected", k, v)()
    outs = []
    for i, (first, _) in enumerate(share.chunks):
        part, begin = _stretch(share, "selected", i)
        outs.append(dense_attention(q[:, share.rows(i)], k[:, part], v[:, part], share.packing, Span(first, begin)))
    layer.routes = {"dense": Route("reference", REASON)}
    return layer.o_proj(torch.cat(outs, dim=1).flatten(2))


def _ask(share: ContextShare, name: str, k: Tensor, v: Tensor) -> Any:
    """Order keys and values in one go; calling the result waits for them."""
    together = torch.cat((k, v), dim=-1)
    fetch, coming = share.fetch(name, together)

    def wait() -> tuple[Tensor, Tensor]:
        got = fetch.end(together[0], coming)[None]
        got_k, got_v = got.split((k.shape[-1], v.shape[-1]), dim=-1)
        return got_k, got_v

    return wait


def _stretch(share: ContextShare, name: str, index: int) -> tuple[slice, int]:
    """Rows of the fetched buffer that hold the index-th chunk and what lies before it; and their first token."""
    buffer = share.buffer(name, index)
    return slice(buffer.at, buffer.at + buffer.end - buffer.first), buffer.first


def _count(layer: NativeSparseAttention, gates: Tensor, indices: list[Tensor], share: ContextShare) -> None:
    """Statistics, chunk by chunk; the selection of the token before a chunk may be another rank's."""
    if not layer.stats.enabled:
        return
    with torch.no_grad():
        chosen = torch.cat(indices, dim=1)
        fetch, coming = share.fetch("before", chosen)
        before = fetch.end(chosen[0], coming)
        for i, part in enumerate(indices):
            layer.stats.update(
                gates[:, share.rows(i)], part, positions=share.position[share.rows(i)], before=before[None, i : i + 1]
            )

"""Differentiable all-to-all of rows between ranks, overlapped with computation.

Forward: `begin` starts the all-to-all and `end` waits for it. Backward: gradients of fetched rows return to their
owners the same way, started in the backward of `end` and awaited in the backward of `begin`; autograd runs everything
in between meanwhile. (Not a custom op per collective: the overlap needs a handle that lives from one to the other.)

`Fetch` follows a plan that all ranks know beforehand. `BlockFetch` only moves the selected blocks: every rank announces
which blocks its queries selected and gets exactly those rows. That takes two messages instead of one, and the host has
to read the message sizes: one synchronisation per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import FetchPlan, Layout, Piece, TokenRange


class Exchange:
    """One all-to-all. x: this rank's rows [rows, ...]; out: a buffer [rows, ...] with its own and the fetched rows.

    Subclasses define which rows are sent and where they go.
    """

    in_sizes: list[int]
    """Rows received from each rank."""
    out_sizes: list[int]
    """Rows sent to each rank."""

    def __init__(self, group: dist.ProcessGroup, count_bytes: Callable[[int], None]) -> None:
        self.group, self._count_bytes = group, count_bytes
        self._work: Any = None
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._backward: tuple[Any, Tensor] | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Start the exchange. The result is only for `end`; its content is undefined until then."""
        return _Begin.apply(x, self)

    def end(self, x: Tensor, incoming: Tensor) -> Tensor:
        """Wait for the rows and return the filled buffer."""
        return _End.apply(x, incoming, self)

    def __call__(self, x: Tensor) -> Tensor:
        return self.end(x, self.begin(x))

    def send(self, rows: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> tuple[Any, Tensor]:
        """All-to-all of rows that are sorted by receiver. Returns a handle to wait on and the received rows."""
        device = rows.device
        if staged_on_host(self.group, device):
            rows = rows.cpu()
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        work: Any = dist.all_to_all_single(received, rows, receive_sizes, send_sizes, group=self.group, async_op=True)
        self._count_bytes(received.numel() * received.element_size())
        self._buffers = (rows, received)  # must stay alive until the transfer ends
        if received.device != device:
            work = _CopyToDevice(work, received, torch.empty_like(received, device=device))
            received = work.target
        return work, received

    def pack(self, x: Tensor) -> Tensor:
        """Own rows that other ranks requested, sorted by rank."""
        raise NotImplementedError

    def unpack(self, x: Tensor, incoming: Tensor) -> Tensor:
        """The buffer: own rows, received rows, zeros elsewhere."""
        raise NotImplementedError

    def pack_grad(self, grad: Tensor) -> Tensor:
        """Gradients of the received rows, sorted by owner."""
        raise NotImplementedError

    def own_grad(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """Gradients of own rows in the buffer."""
        raise NotImplementedError

    def add_grads(self, total: Tensor, received: Tensor) -> None:
        """Add other ranks' gradients of own rows, one rank after another, so that the order of the sum is fixed."""
        raise NotImplementedError


def staged_on_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries GPU tensors for this group, as for ranks that share a GPU. They are copied to the host
    first: gloo's own handling of GPU tensors in functional collectives segfaults (torch 2.11)."""
    return device.type == "cuda" and group._get_backend(device).name() == "gloo"


class _CopyToDevice:
    """Handle of a transfer on the host; waiting for it copies the result to the device."""

    def __init__(self, work: Any, source: Tensor, target: Tensor) -> None:
        self._work, self._source, self.target = work, source, target

    def wait(self) -> None:
        self._work.wait()
        self.target.copy_(self._source)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.rows = exchange, x.shape[0]
        exchange._work, received = exchange.send(exchange.pack(x), exchange.out_sizes, exchange.in_sizes)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        exchange = ctx.exchange
        work, received = exchange._backward
        work.wait()
        exchange._backward = exchange._buffers = None
        # several ranks may have read the same row: sum their gradients in fp32
        total = torch.zeros(
            ctx.rows,
            *received.shape[1:],
            dtype=torch.promote_types(received.dtype, torch.float32),
            device=received.device,
        )
        exchange.add_grads(total, received)
        return total.to(received.dtype), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, incoming: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, x.shape
        exchange._work.wait()
        exchange._work = exchange._buffers = None
        return exchange.unpack(x, incoming)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        exchange = ctx.exchange
        rows = exchange.pack_grad(grad)
        exchange._backward = exchange.send(rows, exchange.in_sizes, exchange.out_sizes)
        return exchange.own_grad(grad, ctx.shape), rows, None


class Fetch(Exchange):
    """Fetch rows by a plan. out: [plan.rows[rank], ...]."""

    def __init__(
        self, plan: FetchPlan, group: dist.ProcessGroup, count_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        super().__init__(group, count_bytes)
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self.rows = plan.rows[rank]
        pieces = plan.pieces[rank]
        self.own = [p for p in pieces if p.owner == rank]
        self.incoming = [[p for p in pieces if p.owner == r and r != rank] for r in ranks]
        self.outgoing = [[p for p in plan.pieces[r] if p.owner == rank and r != rank] for r in ranks]
        self.in_sizes = [sum(p.count for p in pieces) for pieces in self.incoming]
        self.out_sizes = [sum(p.count for p in pieces) for pieces in self.outgoing]

    def pack(self, x: Tensor) -> Tensor:
        parts = [x[p.local : p.local + p.count] for pieces in self.outgoing for p in pieces]
        return torch.cat(parts) if parts else x.new_empty(0, *x.shape[1:])

    def unpack(self, x: Tensor, incoming: Tensor) -> Tensor:
        out = x.new_zeros(self.rows, *x.shape[1:])
        for p in self.own:
            out[p.at : p.at + p.count] = x[p.local : p.local + p.count]
        at = 0
        for pieces in self.incoming:
            for p in pieces:
                out[p.at : p.at + p.count] = incoming[at : at + p.count]
                at += p.count
        return out

    def pack_grad(self, grad: Tensor) -> Tensor:
        parts = [grad[p.at : p.at + p.count] for pieces in self.incoming for p in pieces]
        return torch.cat(parts) if parts else grad.new_empty(0, *grad.shape[1:])

    def own_grad(self, grad: Tensor, shape: torch.Size) -> Tensor:
        own = grad.new_zeros(shape)
        for p in self.own:
            # += because a row may appear twice in this rank's buffer
            own[p.local : p.local + p.count] += grad[p.at : p.at + p.count]
        return own

    def add_grads(self, total: Tensor, received: Tensor) -> None:
        at = 0
        for pieces in self.outgoing:
            for p in pieces:
                total[p.local : p.local + p.count] += received[at : at + p.count]
                at += p.count


@dataclass(frozen=True)
class Candidates:
    """Rows that this rank may exchange with others."""

    rows: Tensor
    """Row among this rank's own rows (outgoing) or in its buffer (incoming)."""
    block: Tensor
    """Selection block of each row, numbered over all documents."""
    peer: Tensor
    """The rank on the other side."""


@dataclass(frozen=True)
class BlockFetchPlan:
    """What is known about a batch before blocks are selected; computed once and used by every layer.

    The plan for whole documents says which rows may be exchanged. One bit per block and KV head, gathered from all
    ranks, then says which of them are, so sender and receiver skip the same rows.
    """

    rows: int
    own: tuple[Piece, ...]
    incoming: Candidates
    outgoing: Candidates
    first_block: Tensor
    """[own tokens]: first block of each token's document."""
    blocks: int

    @classmethod
    def build(
        cls, layout: Layout, plan: FetchPlan, ranges: list[TokenRange], rank: int, device: torch.device
    ) -> BlockFetchPlan:
        l = layout.config.select_block
        counts = torch.tensor([layout.config.num_blocks(b - a) for a, b in layout.documents])
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        starts = torch.tensor(layout.bounds)
        tokens = torch.arange(layout.length)
        document = torch.bucketize(tokens, starts[1:], right=True)
        block = first[document] + (tokens - starts[document]) // l
        own_tokens = torch.cat([tokens[a:b] for a, b in (layout.tokens(c) for c in layout.owned[rank])])
        buffer_tokens = torch.cat([tokens[r.first : r.end] for r in ranges])

        def candidates(wanted: list[tuple[int, int, int]], token_of: Tensor) -> Candidates:
            """wanted: (peer, first row, count)."""
            rows = torch.cat([torch.arange(a, a + n) for _, a, n in wanted] or [tokens[:0]])
            peer = torch.cat([torch.full((n,), p) for p, _, n in wanted] or [tokens[:0]])
            return Candidates(*(x.to(device, non_blocking=True) for x in (rows, block[token_of[rows]], peer)))

        others = [r for r in range(layout.ranks) if r != rank]
        incoming = [(r, p.at, p.count) for r in others for p in plan.pieces[rank] if p.owner == r]
        outgoing = [(r, p.local, p.count) for r in others for p in plan.pieces[r] if p.owner == rank]
        return cls(
            rows=plan.rows[rank],
            own=tuple(p for p in plan.pieces[rank] if p.owner == rank),
            incoming=candidates(incoming, buffer_tokens),
            outgoing=candidates(outgoing, own_tokens),
            first_block=first[document][own_tokens].to(device, non_blocking=True),
            blocks=int(first[-1]),
        )

    def gather_selected(self, block_indices: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Exchange the selections. block_indices: this rank's [1, own tokens, G, n]. Returns bool [ranks, blocks, G]:
        whether any query of a rank selected the block."""
        groups = block_indices.shape[2]
        chosen = torch.where(block_indices[0] < 0, self.blocks, self.first_block[:, None, None] + block_indices[0])
        head = torch.arange(groups, device=chosen.device)[None, :, None].expand_as(chosen)
        selected = torch.zeros(self.blocks + 1, groups, dtype=torch.uint8, device=chosen.device)
        selected[chosen.flatten(), head.flatten()] = 1
        device = selected.device
        if staged_on_host(group, device):
            selected = selected.cpu()
        gathered = selected.new_empty(dist.get_world_size(group), self.blocks, groups)
        dist.all_gather(list(gathered.unbind(0)), selected[: self.blocks], group=group)
        return gathered.to(device).bool()


class BlockFetch(Exchange):
    """Fetch the rows of selected blocks only. x: [own tokens · G, D], out: [rows · G, D], one row per KV head."""

    def __init__(
        self, plan: BlockFetchPlan, selected: Tensor, group: dist.ProcessGroup, count_bytes: Callable[[int], None]
    ) -> None:
        super().__init__(group, count_bytes)
        ranks, _, self.groups = selected.shape
        self.plan = plan
        incoming, outgoing = plan.incoming, plan.outgoing
        received = selected[dist.get_rank(group)][incoming.block]
        sent = selected[outgoing.peer, outgoing.block]
        sizes = selected.new_zeros(2, ranks, dtype=torch.int64)
        sizes[0].index_add_(0, incoming.peer, received.sum(1))
        sizes[1].index_add_(0, outgoing.peer, sent.sum(1))
        self.in_sizes, self.out_sizes = sizes.tolist()
        self.in_rows, self.out_rows = self._flat_rows(incoming.rows, received), self._flat_rows(outgoing.rows, sent)

    def _flat_rows(self, rows: Tensor, kept: Tensor) -> Tensor:
        row, head = kept.nonzero(as_tuple=True)
        return rows[row] * self.groups + head

    def pack(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.out_rows)

    def unpack(self, x: Tensor, incoming: Tensor) -> Tensor:
        out = x.new_zeros(self.plan.rows * self.groups, *x.shape[1:])
        for at, local in self._own_slices():
            out[at] = x[local]
        return out.index_copy_(0, self.in_rows, incoming)

    def pack_grad(self, grad: Tensor) -> Tensor:
        return grad.index_select(0, self.in_rows)

    def own_grad(self, grad: Tensor, shape: torch.Size) -> Tensor:
        own = grad.new_zeros(shape)
        for at, local in self._own_slices():
            own[local] += grad[at]
        return own

    def add_grads(self, total: Tensor, received: Tensor) -> None:
        # No row appears twice in one rank's part, so the sum is deterministic.
        for rows, part in zip(self.out_rows.split(self.out_sizes), received.split(self.out_sizes), strict=True):
            total[rows] += part

    def _own_slices(self) -> list[tuple[slice, slice]]:
        n = self.groups
        return [
            (slice(p.at * n, (p.at + p.count) * n), slice(p.local * n, (p.local + p.count) * n)) for p in self.plan.own
        ]

"""Differentiable all-to-all of rows between ranks, overlapped with computation.

Forward: `begin` starts the all-to-all and `end` waits for it. Backward: gradients of fetched rows return to their
owners the same way, started in the backward of `end` and awaited in the backward of `begin`; autograd runs everything
in between meanwhile. (Not a custom op per collective: the overlap needs a handle that lives from one to the other.)

Which rows move is known to all ranks beforehand (`RowMoves.of_plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import FetchPlan


@dataclass(frozen=True)
class RowMoves:
    """Which rows one rank exchanges. Rows in transit are sorted by the other rank; none goes to one rank twice."""

    rows: int
    """Rows of the buffer that receives them; those that nothing fills are zero."""
    own: tuple[tuple[slice, slice], ...]
    """(in the buffer, among own rows): what a rank copies from itself."""
    incoming: Tensor
    """int64: rows of the buffer that other ranks fill."""
    outgoing: Tensor
    """int64: own rows that other ranks get."""
    in_sizes: list[int]
    """How many rows come from each rank."""
    out_sizes: list[int]
    """How many rows go to each rank."""

    @classmethod
    def of_plan(cls, plan: FetchPlan, rank: int, device: torch.device) -> RowMoves:
        others = [r for r in range(len(plan.rows)) if r != rank]
        incoming = [(p.at, p.count) for r in others for p in plan.pieces[rank] if p.owner == r]
        outgoing = [(p.local, p.count) for r in others for p in plan.pieces[r] if p.owner == rank]
        own = [p for p in plan.pieces[rank] if p.owner == rank]

        def rows_of(ranges: list[tuple[int, int]]) -> Tensor:
            rows = [torch.arange(first, first + count) for first, count in ranges]
            return torch.cat([torch.arange(0), *rows]).to(device, non_blocking=True)

        return cls(
            rows=plan.rows[rank],
            own=tuple((slice(p.at, p.at + p.count), slice(p.local, p.local + p.count)) for p in own),
            incoming=rows_of(incoming),
            outgoing=rows_of(outgoing),
            in_sizes=[plan.received(rank, r) if r != rank else 0 for r in range(len(plan.rows))],
            out_sizes=[plan.received(r, rank) if r != rank else 0 for r in range(len(plan.rows))],
        )


class Exchange:
    """One all-to-all. x: this rank's rows [rows, ...]; out: a buffer [moves.rows, ...] with its own and the fetched
    rows."""

    def __init__(self, moves: RowMoves, group: dist.ProcessGroup, count_bytes: Callable[[int], None]) -> None:
        self.moves, self.group, self._count_bytes = moves, group, count_bytes
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
        # Ranks that share a GPU: gloo's own handling of GPU tensors in functional collectives segfaults (torch 2.11).
        staged = device.type == "cuda" and self.group._get_backend(device).name() == "gloo"
        if staged:
            rows = rows.cpu()
        received = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        work: Any = dist.all_to_all_single(received, rows, receive_sizes, send_sizes, group=self.group, async_op=True)
        self._count_bytes(received.numel() * received.element_size())
        self._buffers = (rows, received)  # must stay alive until the transfer ends
        if staged:
            work.wait()
            received = received.to(device)
        return work, received


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.rows, moves = exchange, x.shape[0], exchange.moves
        requested = x.index_select(0, moves.outgoing)
        exchange._work, received = exchange.send(requested, moves.out_sizes, moves.in_sizes)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        exchange, moves = ctx.exchange, ctx.exchange.moves
        work, received = exchange._backward
        work.wait()
        exchange._backward = exchange._buffers = None
        # Several ranks may have read the same row: sum their gradients in fp32, one rank after another, so that the
        # order of the sum is fixed.
        dtype = torch.promote_types(received.dtype, torch.float32)
        total = torch.zeros(ctx.rows, *received.shape[1:], dtype=dtype, device=received.device)
        for rows, part in zip(moves.outgoing.split(moves.out_sizes), received.split(moves.out_sizes), strict=True):
            total[rows] += part
        return total.to(received.dtype), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, incoming: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, x.shape
        exchange._work.wait()
        exchange._work = exchange._buffers = None
        out = x.new_zeros(exchange.moves.rows, *x.shape[1:])
        for at, local in exchange.moves.own:
            out[at] = x[local]
        return out.index_copy_(0, exchange.moves.incoming, incoming)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        exchange, moves = ctx.exchange, ctx.exchange.moves
        rows = grad.index_select(0, moves.incoming)
        exchange._backward = exchange.send(rows, moves.in_sizes, moves.out_sizes)
        own = grad.new_zeros(ctx.shape)
        for at, local in moves.own:
            own[local] += grad[at]
        return own, rows, None

"""Rows fetched from other ranks, overlapped with what is computed meanwhile.

Forward: one all-to-all, begun by `begin` and waited for by `end`. Backward: gradients of fetched rows go back to their
owners the same way, begun where `end` was and waited for where `begin` was; autograd runs what lies between while they
travel. (A custom operator per collective was tried on paper and left: the overlap needs a handle that lives from one
to the other.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import Plan


class Exchange:
    """One use of an all-to-all. x: this rank's own rows [rows, ...]; out: a buffer [rows, ...] that holds the fetched
    ones and its own. Subclasses say which rows go where."""

    in_sizes: list[int]
    """Rows that come from each rank."""
    out_sizes: list[int]
    """Rows that go to each rank."""

    def __init__(self, group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
        self.group, self._count = group, count
        self._work: Any = None
        self._held: tuple[Tensor, Tensor] | None = None
        self._back: tuple[Any, Tensor] | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Order the rows; the result is for `end` alone, and may not be read before it."""
        return _Begin.apply(x, self)

    def end(self, x: Tensor, coming: Tensor) -> Tensor:
        """The buffer, once the rows have come."""
        return _End.apply(x, coming, self)

    def __call__(self, x: Tensor) -> Tensor:
        return self.end(x, self.begin(x))

    def send(self, rows: Tensor, sizes: list[int], back_sizes: list[int]) -> tuple[Any, Tensor]:
        """All-to-all of rows already in the order of their receivers; what comes is counted in bytes."""
        device = rows.device
        if through_host(self.group, device):
            rows = rows.cpu()
        got = rows.new_empty(sum(back_sizes), *rows.shape[1:])
        work: Any = dist.all_to_all_single(got, rows, back_sizes, sizes, group=self.group, async_op=True)
        self._count(got.numel() * got.element_size())
        # the sender's rows must outlive the transfer
        self._held = (rows, got)
        if got.device != device:
            work = _ToDevice(work, got, torch.empty_like(got, device=device))
            got = work.there
        return work, got

    # ------------------------------------------------------------ which rows

    def pick(self, x: Tensor) -> Tensor:
        """Own rows that others asked for, in the order of the ranks that did."""
        raise NotImplementedError

    def lay_out(self, x: Tensor, coming: Tensor) -> Tensor:
        """The buffer: own rows, those that came, zeros elsewhere."""
        raise NotImplementedError

    def pick_back(self, grad: Tensor) -> Tensor:
        """The buffer's gradients of rows that came, in the order of their owners."""
        raise NotImplementedError

    def own_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """The buffer's gradients of own rows."""
        raise NotImplementedError

    def add_back(self, total: Tensor, got: Tensor) -> None:
        """Add what others found for the rows that they had asked for, one rank after another: in a fixed order."""
        raise NotImplementedError


def through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether this group carries tensors of a GPU by gloo, as ranks that share one do. They are given to it on the
    host: of gloo's own ways with them, that of functional collectives ends in a segmentation fault (torch 2.11)."""
    return device.type == "cuda" and group._get_backend(device).name() == "gloo"


class _ToDevice:
    """A transfer on the host, whose result goes to the device when it is waited for."""

    def __init__(self, work: Any, here: Tensor, there: Tensor) -> None:
        self._work, self._here, self.there = work, here, there

    def wait(self) -> None:
        self._work.wait()
        self.there.copy_(self._here)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.rows = exchange, x.shape[0]
        exchange._work, got = exchange.send(exchange.pick(x), exchange.out_sizes, exchange.in_sizes)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        exchange = ctx.exchange
        work, got = exchange._back
        work.wait()
        exchange._back = exchange._held = None
        # several ranks may have read one row: their gradients are summed in fp32
        total = torch.zeros(
            ctx.rows, *got.shape[1:], dtype=torch.promote_types(got.dtype, torch.float32), device=got.device
        )
        exchange.add_back(total, got)
        return total.to(got.dtype), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, x.shape
        exchange._work.wait()
        exchange._work = exchange._held = None
        return exchange.lay_out(x, coming)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        exchange = ctx.exchange
        rows = exchange.pick_back(grad)
        exchange._back = exchange.send(rows, exchange.in_sizes, exchange.out_sizes)
        return exchange.own_back(grad, ctx.shape), rows, None


class Fetch(Exchange):
    """Rows by a plan that all ranks know beforehand. out: [plan.rows[rank], ...]."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup, count: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(group, count)
        rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self.rows = plan.rows[rank]
        mine = plan.pieces[rank]
        self.own = [p for p in mine if p.owner == rank]
        self.incoming = [[p for p in mine if p.owner == r and r != rank] for r in ranks]
        self.outgoing = [[p for p in plan.pieces[r] if p.owner == rank and r != rank] for r in ranks]
        self.in_sizes = [sum(p.count for p in pieces) for pieces in self.incoming]
        self.out_sizes = [sum(p.count for p in pieces) for pieces in self.outgoing]

    def pick(self, x: Tensor) -> Tensor:
        parts = [x[p.local : p.local + p.count] for pieces in self.outgoing for p in pieces]
        return torch.cat(parts) if parts else x.new_empty(0, *x.shape[1:])

    def lay_out(self, x: Tensor, coming: Tensor) -> Tensor:
        out = x.new_zeros(self.rows, *x.shape[1:])
        for p in self.own:
            out[p.at : p.at + p.count] = x[p.local : p.local + p.count]
        at = 0
        for pieces in self.incoming:
            for p in pieces:
                out[p.at : p.at + p.count] = coming[at : at + p.count]
                at += p.count
        return out

    def pick_back(self, grad: Tensor) -> Tensor:
        parts = [grad[p.at : p.at + p.count] for pieces in self.incoming for p in pieces]
        return torch.cat(parts) if parts else grad.new_empty(0, *grad.shape[1:])

    def own_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        own = grad.new_zeros(shape)
        for p in self.own:
            # one row may stand in two buffers of this rank
            own[p.local : p.local + p.count] += grad[p.at : p.at + p.count]
        return own

    def add_back(self, total: Tensor, got: Tensor) -> None:
        at = 0
        for pieces in self.outgoing:
            for p in pieces:
                total[p.local : p.local + p.count] += got[at : at + p.count]
                at += p.count

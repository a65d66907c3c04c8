"""Rows fetched from other ranks by a plan that all ranks know, overlapped with what is computed meanwhile.

Forward: one all-to-all, begun by `begin` and waited for by `end`. Backward: gradients of fetched rows go back to their
owners the same way, begun where `end` was and waited for where `begin` was; autograd runs what lies between while they
travel. (A custom operator per collective was tried on paper and left: the overlap needs a handle that lives from one
to the other.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import Plan


class Fetch:
    """One use of a plan. x: this rank's own rows [rows, ...]; out: the buffer [plan.rows[rank], ...]."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup) -> None:
        self.group, self.rank, ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.rows = plan.rows[self.rank]
        mine = plan.pieces[self.rank]
        self.own = [p for p in mine if p.owner == self.rank]
        others = range(ranks)
        self.incoming = [[p for p in mine if p.owner == r and r != self.rank] for r in others]
        self.outgoing = [[p for p in plan.pieces[r] if p.owner == self.rank and r != self.rank] for r in others]
        self.in_sizes = [sum(p.count for p in pieces) for pieces in self.incoming]
        self.out_sizes = [sum(p.count for p in pieces) for pieces in self.outgoing]
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
        """All-to-all of rows already in the order of their receivers."""
        got = rows.new_empty(sum(back_sizes), *rows.shape[1:])
        work = dist.all_to_all_single(got, rows, back_sizes, sizes, group=self.group, async_op=True)
        # the sender's rows must outlive the transfer
        self._held = (rows, got)
        return work, got


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch, ctx.rows = fetch, x.shape[0]
        parts = [x[p.local : p.local + p.count] for pieces in fetch.outgoing for p in pieces]
        rows = torch.cat(parts) if parts else x.new_empty(0, *x.shape[1:])
        fetch._work, got = fetch.send(rows, fetch.out_sizes, fetch.in_sizes)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        fetch = ctx.fetch
        work, got = fetch._back
        work.wait()
        fetch._back = fetch._held = None
        # several ranks may have read one row: their gradients are summed in fp32
        total = torch.zeros(
            ctx.rows, *got.shape[1:], dtype=torch.promote_types(got.dtype, torch.float32), device=got.device
        )
        at = 0
        for pieces in fetch.outgoing:
            for p in pieces:
                total[p.local : p.local + p.count] += got[at : at + p.count]
                at += p.count
        return total.to(got.dtype), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coming: Tensor, fetch: Fetch) -> Tensor:
        ctx.fetch, ctx.shape = fetch, x.shape
        fetch._work.wait()
        fetch._work = fetch._held = None
        out = x.new_zeros(fetch.rows, *x.shape[1:])
        for p in fetch.own:
            out[p.at : p.at + p.count] = x[p.local : p.local + p.count]
        at = 0
        for pieces in fetch.incoming:
            for p in pieces:
                out[p.at : p.at + p.count] = coming[at : at + p.count]
                at += p.count
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        fetch = ctx.fetch
        parts = [grad[p.at : p.at + p.count] for pieces in fetch.incoming for p in pieces]
        rows = torch.cat(parts) if parts else grad.new_empty(0, *grad.shape[1:])
        fetch._back = fetch.send(rows, fetch.in_sizes, fetch.out_sizes)
        own = grad.new_zeros(ctx.shape)
        for p in fetch.own:
            # one row may stand in two buffers of this rank
            own[p.local : p.local + p.count] += grad[p.at : p.at + p.count]
        return own, rows, None

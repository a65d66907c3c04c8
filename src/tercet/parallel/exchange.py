"""Rows fetched from other ranks, overlapped with what is computed meanwhile.

Forward: one all-to-all, begun by `begin` and waited for by `end`. Backward: gradients of fetched rows go back to their
owners the same way, begun where `end` was and waited for where `begin` was; autograd runs what lies between while they
travel. (A custom operator per collective was tried on paper and left: the overlap needs a handle that lives from one
to the other.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import Buffer, Layout, Piece, Plan


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


# ------------------------------------------------------------------------------------------------
# Only the selected blocks: every rank tells which blocks its queries chose, and gets those rows and no others.
#
# Two messages instead of one, and the host must read how many rows each will have: one synchronisation per layer. Which
# rows *may* travel follows from the plan of whole documents; which of them do, from a bit per block and KV head that all
# ranks exchange, so that sender and receiver leave out the same ones.
# x: [own tokens · G, D] and out: [rows · G, D], a row for each token and KV head.


@dataclass(frozen=True)
class Candidates:
    """Rows that may travel between this rank and others, by peer."""

    rows: Tensor
    """Among this rank's own rows (outgoing), or in its buffer (incoming)."""
    block: Tensor
    """The selection block that each row belongs to, counted over all documents."""
    peer: Tensor
    """The rank at the other end."""


@dataclass(frozen=True)
class BlockPlan:
    """What is known of a batch before anything is selected; made once, used by every layer."""

    rows: int
    own: tuple[Piece, ...]
    incoming: Candidates
    outgoing: Candidates
    first_block: Tensor
    """[own tokens]: the first block of each token's document."""
    blocks: int

    @classmethod
    def of(cls, layout: Layout, plan: Plan, buffers: list[Buffer], rank: int, device: torch.device) -> BlockPlan:
        l = layout.config.select_block
        counts = torch.tensor([layout.config.num_blocks(b - a) for a, b in layout.documents])
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        starts = torch.tensor(layout.bounds)
        tokens = torch.arange(layout.length)
        document = torch.bucketize(tokens, starts[1:], right=True)
        block = first[document] + (tokens - starts[document]) // l
        own_tokens = torch.cat([tokens[a:b] for a, b in (layout.tokens(c) for c in layout.owned[rank])])
        held = torch.cat([tokens[b.first : b.end] for b in buffers])

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
            incoming=candidates(incoming, held),
            outgoing=candidates(outgoing, own_tokens),
            first_block=first[document][own_tokens].to(device, non_blocking=True),
            blocks=int(first[-1]),
        )

    def wanted(self, block_indices: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[ranks, blocks, G]: whether any query of a rank has chosen the block, from this rank's choices
        [1, own tokens, G, n]."""
        groups = block_indices.shape[2]
        chosen = torch.where(block_indices[0] < 0, self.blocks, self.first_block[:, None, None] + block_indices[0])
        head = torch.arange(groups, device=chosen.device)[None, :, None].expand_as(chosen)
        mine = torch.zeros(self.blocks + 1, groups, dtype=torch.uint8, device=chosen.device)
        mine[chosen.flatten(), head.flatten()] = 1
        ranks = dist.get_world_size(group)
        device = mine.device
        if through_host(group, device):
            mine = mine.cpu()
        told = mine.new_empty(ranks, self.blocks, groups)
        dist.all_gather(list(told.unbind(0)), mine[: self.blocks], group=group)
        return told.to(device).bool()


class BlockFetch(Exchange):
    """Rows of the blocks that were chosen."""

    def __init__(self, plan: BlockPlan, wanted: Tensor, group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
        super().__init__(group, count)
        ranks, _, self.groups = wanted.shape
        self.plan = plan
        come, go = plan.incoming, plan.outgoing
        coming, going = wanted[dist.get_rank(group)][come.block], wanted[go.peer, go.block]
        sizes = wanted.new_zeros(2, ranks, dtype=torch.int64)
        sizes[0].index_add_(0, come.peer, coming.sum(1))
        sizes[1].index_add_(0, go.peer, going.sum(1))
        self.in_sizes, self.out_sizes = sizes.tolist()
        self.into, self.out_of = self._flat(come.rows, coming), self._flat(go.rows, going)

    def _flat(self, rows: Tensor, kept: Tensor) -> Tensor:
        row, head = kept.nonzero(as_tuple=True)
        return rows[row] * self.groups + head

    def pick(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.out_of)

    def lay_out(self, x: Tensor, coming: Tensor) -> Tensor:
        out = x.new_zeros(self.plan.rows * self.groups, *x.shape[1:])
        for at, local in self._own():
            out[at] = x[local]
        return out.index_copy_(0, self.into, coming)

    def pick_back(self, grad: Tensor) -> Tensor:
        return grad.index_select(0, self.into)

    def own_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        own = grad.new_zeros(shape)
        for at, local in self._own():
            own[local] += grad[at]
        return own

    def add_back(self, total: Tensor, got: Tensor) -> None:
        # within one rank's part no row stands twice, so that this is not a sum in an order left to chance
        for rows, part in zip(self.out_of.split(self.out_sizes), got.split(self.out_sizes), strict=True):
            total[rows] += part

    def _own(self) -> list[tuple[slice, slice]]:
        n = self.groups
        return [
            (slice(p.at * n, (p.at + p.count) * n), slice(p.local * n, (p.local + p.count) * n)) for p in self.plan.own
        ]

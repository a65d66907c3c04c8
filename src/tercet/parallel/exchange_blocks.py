"""Only the selected blocks: every rank tells which blocks its queries chose, and gets those rows and no others.

Two messages instead of one, and the host must read how many rows each will have: one synchronisation per layer. Which
rows *may* travel follows from the plan of whole documents; which of them do, from a bit per block and KV head that all
ranks exchange, so that sender and receiver leave out the same ones.
x: [own tokens · G, D] and out: [rows · G, D], a row for each token and KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tercet.parallel.context_layout import Buffer, Layout, Piece, Plan
from tercet.parallel.exchange import Exchange, through_host


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

"""Statistics of gates and selection, accumulated on the device and read on demand.

Only a read synchronises. Every statistic is a mean over the tokens since the last reset.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.layout import Packing
from tercet.model.selector import ChoiceQuality, measure_choice

# A (token, head) whose largest share of the gates is above this counts as collapsed.
COLLAPSE_SHARE = 0.95
# Distances in blocks: 0, 1, 2-3, 4-7, … up to 2^19 blocks and more.
DISTANCE_BUCKETS = 21

_GATES = (*(f"gate_share_{b}" for b in BRANCHES), "gate_entropy", "gate_max_share", "gate_collapse")
_SELECTION = ("selected_blocks", "selected_distance", "selected_forced", "selected_overlap")
_SELECTOR = ("selector_kl", "selector_mass", "selector_best", "selector_random")
# The vector of sums: [(token, head) pairs, _GATES], [sum, count] of each of _SELECTION, [_SELECTOR, sampled queries]
_PARTS = (1 + len(_GATES), 2 * len(_SELECTION), len(_SELECTOR) + 1)
_SUMS = sum(_PARTS)


class AttentionStats:
    """Statistics of one layer. Not a module, so that checkpoints, gradients and wrappers ignore its sums.

    branches           branches of the layer: the gates of others, which have no effect, are not counted
    gate_share_*       mean of g_c / Σ g over (token, head), for each branch of the layer
    gate_entropy       mean of -Σ share · ln share, in nats
    gate_max_share     mean of the largest share
    gate_collapse      fraction of (token, head) whose largest share is above COLLAPSE_SHARE; 0 with one branch
    selected_blocks    mean number of blocks that a (token, group) selects
    selected_distance  mean of c - j over selected blocks: how many blocks back
    selected_forced    fraction of selected blocks that were forced
    selected_overlap   mean fraction of a token's freely selected blocks that the previous token selected too. Excludes
                       forced blocks, which move with the token, and tokens whose every block fits: a selection that
                       never changes then has overlap 1
    selector_kl        of a learned selector: KL divergence from its teacher, over the sampled queries
    selector_mass      share of the teacher's attention to free blocks that the chosen ones receive, on sampled queries,
                       whatever chose them; selector_best is that of the best choice, selector_random that of a random
                       one
    """

    def __init__(self, config: NSAConfig, branches: tuple[str, ...] = BRANCHES) -> None:
        self.config, self.branches = config, branches
        self.enabled = False
        self._sums: Tensor | None = None
        self._histogram: Tensor | None = None

    def reset(self) -> None:
        self._sums = self._histogram = None

    @torch.no_grad()
    def update(
        self,
        gates: Tensor | None,
        block_indices: Tensor | None,
        packing: Packing | None = None,
        *,
        positions: Tensor | None = None,
        before: Tensor | None = None,
    ) -> None:
        """gates: [B, T, H, 3], None in a layer without them; block_indices: [B, T, G, n].

        For part of a sequence, `positions` [T] are its tokens' positions in their documents, and `before` [B, 1, G, n]
        is the selection of the token before it.
        """
        if not self._counts or (gates is None and block_indices is None):
            return
        with _hidden_from_checkpointing():
            gate_sums = None if gates is None else _gate_sums(gates, self.branches)
            selection = histogram = None
            if block_indices is not None:
                positions = positions if packing is None else packing.position
                selection, histogram = self._selection_sums(block_indices, positions, before)
            self._add(gate_sums, selection, None, histogram=histogram)

    @torch.no_grad()
    def update_selector(self, quality: ChoiceQuality | None) -> None:
        """Count the loss of a learned selector, and the attention that its choice captures."""
        if quality is not None and self._counts:
            with _hidden_from_checkpointing():
                self._add_quality(quality)

    @torch.no_grad()
    def update_choice(self, q: Tensor, k: Tensor, rows: Tensor, block_indices: Tensor, packing: Packing | None) -> None:
        """Count the attention captured by a choice that was not learned. See `selector.measure_choice`."""
        if self._counts:
            with _hidden_from_checkpointing():
                self._add_quality(measure_choice(q, k, rows, block_indices, packing, self.config))

    @property
    def _counts(self) -> bool:
        """Recomputation by activation checkpointing is already counted."""
        recomputing = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return self.enabled and not recomputing

    def _add_quality(self, quality: ChoiceQuality) -> None:
        *means, queries = quality
        count = queries.double()
        self._add(None, None, torch.cat((torch.stack([mean.double() for mean in means]) * count, count[None])))

    def _add(self, *parts: Tensor | None, histogram: Tensor | None = None) -> None:
        """Add parts of the vector of sums, None for zeros."""
        given = next(part for part in parts if part is not None)
        sums = torch.cat([given.new_zeros(n) if part is None else part for n, part in zip(_PARTS, parts, strict=True)])
        self._sums = sums if self._sums is None else self._sums + sums
        if histogram is not None:
            self._histogram = histogram if self._histogram is None else self._histogram + histogram

    def read(self) -> dict[str, float]:
        """Means so far; empty before the first update. Synchronises."""
        return {} if self._sums is None else self.means(self._sums.tolist())

    def sums(self, device: torch.device | None = None) -> Tensor:
        """All sums as one fp64 vector of fixed size, which ranks can add up; zeros before the first update. `means` and
        `distances` decode it. Does not synchronise."""
        if self._sums is None:
            return torch.zeros(_SUMS + DISTANCE_BUCKETS, dtype=torch.float64, device=device)
        histogram = self._sums.new_zeros(DISTANCE_BUCKETS) if self._histogram is None else self._histogram
        return torch.cat((self._sums, histogram.double()))

    def add(self, sums: Tensor) -> None:
        """Add a vector of `sums`, e.g. from a replayed CUDA graph."""
        self._add(*sums[:_SUMS].split(_PARTS), histogram=sums[_SUMS:].to(torch.int64))

    @staticmethod
    def distances(sums: list[float]) -> list[int]:
        """Decode the histogram of a vector of `sums`: selected blocks that are 0, 1, 2-3, 4-7, … blocks back."""
        return [round(number) for number in sums[_SUMS:]]

    def means(self, sums: list[float]) -> dict[str, float]:
        """Decode the means of a vector of `sums`; empty if nothing was counted."""
        numbers = sums[:_SUMS]
        count, gates, rest = numbers[0], numbers[1 : 1 + len(_GATES)], numbers[1 + len(_GATES) :]
        means = {name: value / count for name, value in zip(_GATES, gates, strict=True)} if count else {}
        for branch in set(BRANCHES).difference(self.branches):
            means.pop(f"gate_share_{branch}", None)
        selection, selector = rest[: 2 * len(_SELECTION)], rest[2 * len(_SELECTION) :]
        for name, value, weight in zip(_SELECTION, selection[::2], selection[1::2], strict=True):
            if weight:
                means[name] = value / weight
        if queries := selector[-1]:
            # the KL divergence is NaN where nothing is learned
            means |= {n: value / queries for n, value in zip(_SELECTOR, selector, strict=False) if value == value}
        return means

    def _selection_sums(
        self, block_indices: Tensor, positions: Tensor | None, preceding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum and count of each of _SELECTION, and the histogram of distances. preceding: as `before` in `update`."""
        length = block_indices.shape[1]
        t = torch.arange(length, device=block_indices.device) if positions is None else positions
        current = (t // self.config.select_block).to(block_indices.dtype)[:, None, None]
        real = block_indices >= 0
        count = real.sum()
        distance = torch.where(real, current - block_indices, 0)
        forced = real & ((block_indices < self.config.select_initial) | (distance < self.config.select_local))
        queries = real.shape[0] * real.shape[1] * real.shape[2]
        pairs = (
            (count, torch.full_like(count, queries)),
            (distance.sum(), count),
            (forced.sum(), count),
            self._overlap(block_indices, t, real & ~forced, preceding),
        )
        sums = torch.stack([number.double() for pair in pairs for number in pair])
        return sums, _distance_histogram(torch.where(real, distance, -1))

    def _overlap(
        self, block_indices: Tensor, t: Tensor, free: Tensor, preceding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum and count of selected_overlap. free: which of the blocks were selected freely, [B, T, G, n]."""
        before, after = block_indices[:, :-1], block_indices
        if preceding is not None:
            before = torch.cat((preceding, before), dim=1)
        else:  # the first token has no previous one
            after, free, t = after[:, 1:], free[:, 1:], t[1:]
        chosen = free.sum(-1)
        chooses = (t // self.config.select_block >= self.config.select_count)[:, None] & (chosen > 0)
        kept = ((after[..., :, None] == before[..., None, :]).any(-1) & free).sum(-1)
        return torch.where(chooses, kept.double() / chosen.clamp(min=1), 0).sum(), chooses.sum()


def _distance_histogram(distance: Tensor) -> Tensor:
    """How many blocks are in each bucket; a distance of -1 is in none."""
    # Count blocks at least as far back as each bucket's start. Integer comparisons: compiled into one loop, a
    # logarithm would be recomputed for every bucket.
    k = torch.arange(DISTANCE_BUCKETS, device=distance.device, dtype=distance.dtype)
    bucket_start = (torch.ones_like(k) << k) >> 1  # 0, 1, 2, 4, …
    reached = (distance.flatten()[:, None] >= bucket_start).sum(0)
    return reached - torch.nn.functional.pad(reached[1:], (0, 1))


def _hidden_from_checkpointing() -> AbstractContextManager[object]:
    """Selective checkpointing matches operators between both passes; these run in the first only."""
    return nullcontext() if torch.compiler.is_compiling() else _disable_current_modes()


def _gate_sums(gates: Tensor, branches: tuple[str, ...]) -> Tensor:
    # shares in fp32, sums in fp64: sums have millions of terms
    gates = gates.to(torch.promote_types(gates.dtype, torch.float32))
    if len(branches) < len(BRANCHES):
        parts = zip(BRANCHES, gates.unbind(-1), strict=True)
        gates = torch.stack([gate if branch in branches else torch.zeros_like(gate) for branch, gate in parts], -1)
    share = gates / gates.sum(-1, keepdim=True)
    highest = share.amax(-1)
    count = torch.full((1,), highest.numel(), dtype=torch.float64, device=gates.device)
    entropy = -torch.special.xlogy(share, share).sum(dtype=torch.float64)
    collapsed = (highest > (COLLAPSE_SHARE if len(branches) > 1 else 1)).sum().double()
    rest = torch.stack((entropy, highest.sum(dtype=torch.float64), collapsed))
    return torch.cat((count, share.flatten(0, -2).sum(0, dtype=torch.float64), rest))

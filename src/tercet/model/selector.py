"""Learned selectors of blocks with their loss, which are not in the paper.

BlockSelector (docs/nsa.md, "Learned selection"): small projections of the layer's input score the blocks instead of the
compressed branch. The loss is KL(teacher || student) on a sample of the queries: the teacher is the attention that the
selected branch would give to every block of the past, the student is the selector's own attention to them. The input is
detached and the teacher has no gradient, so the loss trains the selector only.

Axes: a selector's queries and keys [B, T, G, size]; S sampled queries, h query heads per group, NB blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tercet.attention.config import NSAConfig
from tercet.attention.first_order import first_order
from tercet.attention.layout import Packing
from tercet.attention.selector import block_lse
from tercet.attention.spec import AttentionSpec
from tercet.model.cache import Cache, NewTokens
from tercet.model.config import check_selector
from tercet.model.rope import CosSin, Rotary, rotate_first


class SampledQueries(NamedTuple):
    """Where the sampled queries are: int64 [S] each."""

    position: Tensor
    """In their documents."""
    row: Tensor
    """Among the rows of the selected branch's keys, and of the selector's."""
    longest: int
    """Upper bound on the documents' length."""


class ChoiceQuality(NamedTuple):
    """How good the selection is: means over the sampled queries that have a choice. Scalars on the device."""

    kl: Tensor
    """Divergence of a learned selector from its teacher; NaN if the selector is not learned."""
    mass: Tensor
    """Share of the teacher's attention to free blocks that the chosen blocks receive."""
    best: Tensor
    """What the best choice of as many blocks would receive."""
    random: Tensor
    """What a random choice would receive on average."""
    queries: Tensor
    """Number of (query, KV group) pairs that were counted."""


class BlockSelector(nn.Module):
    """A query and a key per token and KV group, from the layer's input, that choose the blocks; see docs/nsa.md.

    size      channels
    rotary    RoPE of the first `rotary.size` channels, so that nearness can count; the others compare content alone
    teacher   "all": every block of the past; "selected": only the blocks that were read
    weight    factor of the loss; it only scales the gradient of these parameters. 0: computed only to be measured
    backend   "reference" rotates in PyTorch
    """

    def __init__(
        self, dim: int, kv_heads: int, size: int, config: NSAConfig, rotary: Rotary | None = None, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.kv_heads, self.size, self.config, self.rotary, self.backend = kv_heads, size, config, rotary, backend
        self.q_proj = nn.Linear(dim, kv_heads * size, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * size, bias=False)
        self.teacher, self.weight = "all", 1.0

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        for proj in (self.q_proj, self.k_proj):
            nn.init.normal_(proj.weight, std=std)

    def cache_key(self) -> dict[str, int]:
        """Its part of a layer's `cache_key`."""
        return {"selector_dim": self.size, "selector_rotary": 0 if self.rotary is None else self.rotary.size}

    def forward(self, x: Tensor, positions: Tensor | None, cos_sin: CosSin | None = None) -> tuple[Tensor, Tensor]:
        """Queries and keys of x [B, T, dim], which is detached; cos_sin: of the positions, if the caller has it."""
        with torch.no_grad():  # `loss` projects its few queries again: one gradient over all of them would cost more
            q = self.q_proj(x.detach())
        k = self.k_proj(x.detach())
        if self.rotary is not None and cos_sin is None:
            cos_sin = self.rotary.of_tokens(x, positions)
        return self._rotate(q, cos_sin), self._rotate(k, cos_sin)

    def append(
        self, projected: Sequence[Tensor], new: NewTokens, cache: Cache, cos_sin: CosSin | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the keys of the new tokens. Returns their queries, and all keys that they can see.

        projected: outputs of q_proj and k_proj for these tokens.
        """
        if self.rotary is not None and cos_sin is None:
            cos_sin = self.rotary.cos_sin(new.positions)
        queries, keys = (self._rotate(y, cos_sin) for y in projected)
        cache.append_selector(new, keys)
        return queries, keys if new.fresh else cache.selector_keys(new).to(queries.dtype)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries [S, G, size] of some tokens x [S, dim], with a gradient for the projection."""
        return self._rotate(self.q_proj(x.detach()), None if self.rotary is None else self.rotary.cos_sin(positions))

    def _rotate(self, y: Tensor, cos_sin: CosSin | None) -> Tensor:
        """[..., G · size] -> [..., G, size]"""
        y = y.unflatten(-1, (self.kv_heads, self.size))
        return y if self.rotary is None or cos_sin is None else rotate_first(y, cos_sin, self.backend)

    def loss_of_rows(
        self,
        x: Tensor,
        selector_k: Tensor,
        q: Tensor,
        k: Tensor,
        rows: Tensor,
        block_indices: Tensor,
        packing: Packing | None,
        *,
        measure: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, ChoiceQuality | None]:
        """`loss` on some queries of whole sequences. x: the layer's input; selector_k: keys from `forward`; q [B, T, H,
        Dk], k: those of the selected branch; rows: int64 [S], flat indices of queries."""
        queries = _locate(rows, q.shape[1], packing)
        x, q, block_indices = (each.flatten(0, 1)[rows] for each in (x.detach(), q, block_indices))
        keys = selector_k.flatten(0, 1), k.flatten(0, 1)
        return self.loss(x, q, block_indices, *keys, queries, measure=measure, backend=backend)

    def loss(
        self,
        x: Tensor,
        q: Tensor,
        block_indices: Tensor,
        selector_k: Tensor,
        k: Tensor,
        queries: SampledQueries,
        *,
        measure: bool = False,
        backend: str = "auto",
    ) -> tuple[Tensor, ChoiceQuality | None]:
        """The loss on the sampled queries and, if `measure`, how good their choice was.

        x, q, block_indices: of these queries, [S, dim], [S, H, Dk], [S, G, n]; selector_k, k: rows of keys that hold at
        least what they see, [rows, G, size], of the same tokens.
        """
        if not (self.weight or measure):  # DDP and the optimizer expect gradients: zeros
            return self.queries(x[:1], queries.position[:1]).sum() + selector_k[:1].sum(), None
        chosen = None
        if measure or self.teacher == "selected":
            chosen = _chosen(block_indices, self.config.num_blocks(queries.longest))
        among = chosen if self.teacher == "selected" else None
        teacher = _find_teacher(q, k, queries, self.config, among=among, backend=backend)
        selector_q = self.queries(x, queries.position)
        blocks, block = teacher.free.shape[-1], self.config.select_block
        scores = block_lse(selector_q, selector_k, queries.row, queries.position, blocks, block, backend)[:, :, 0]
        compared = teacher.free[:, None] if among is None else teacher.free[:, None] & among
        # a finite mask: a query without such blocks has no teacher either
        student = scores.masked_fill(~compared, -1e30).log_softmax(-1)
        kl = (torch.special.xlogy(teacher.mass, teacher.mass) - teacher.mass * student).sum()
        # a mean over all sampled queries, even those without a choice, so that ranks and micro-batches weigh the same
        loss = kl / teacher.counted.numel()
        if not measure or chosen is None:
            return loss, None
        return loss, _choice_quality(teacher, chosen, kl.detach(), self.config)


def mix_bits(x: Tensor) -> Tensor:
    """A hash of 32-bit numbers, in int64."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rotated_channels(size: int, rotary: int | None) -> int:
    """Channels of a selector that RoPE rotates: half of them unless the setting says how many."""
    return size // 4 * 2 if rotary is None else rotary


def build_selector(
    spec: AttentionSpec, dim: int, kv_heads: int, size: int, config: NSAConfig, rope: Rotary, rotated: int | None,
    backend: str,
) -> BlockSelector | None:  # fmt: skip
    """The learned selector of a layer; None if it has none. rope: the layer's; rotated: channels, None for half."""
    if spec.scorer != "learned":
        return None
    check_selector(size, rotated)
    rotated = rotated_channels(size, rotated)
    rotary = rope.of_size(rotated) if rotated else None
    return BlockSelector(dim, kv_heads, size, config, rotary, backend)


def attach_loss(out: Tensor, loss: Tensor) -> Tensor:
    """`out`, unchanged; its backward pass also runs the backward pass of `loss`, with gradient 1."""
    result: Tensor = _AttachLoss.apply(out, loss)
    return result


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return out.view_as(out)

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream[0], upstream[0].new_ones((), dtype=ctx.dtype)


EVERY = 128  # a selector's loss is computed on one query in this many (default of train.selector.every)


def sample_queries(tokens: Tensor, every: int) -> Tensor:
    """Flat indices of one query in every `every`, at a place that depends on the tokens around it.

    A function of the batch alone: the same on every backend and in a recomputation, and nothing to save for a resume.
    """
    flat = tokens.flatten()
    count = max(1, flat.shape[0] // every)
    every = flat.shape[0] // count  # longer if the tokens are not a multiple, so that the last ones can be sampled too
    weights = torch.arange(1, every + 1, device=tokens.device) * 40503
    place = (flat[: count * every].view(count, every).long() * weights).sum(1) % every
    return torch.arange(count, device=tokens.device) * every + place


@torch.no_grad()
def measure_choice(
    q: Tensor, k: Tensor, rows: Tensor, block_indices: Tensor, packing: Packing | None, config: NSAConfig
) -> ChoiceQuality:
    """How good the selection of some queries was, by any method. The teacher is the same as for a learned selector.

    q [B, T, H, Dk], k: those of the selected branch; block_indices [B, T, G, n]; rows: int64 [S], flat indices.
    """
    queries = _locate(rows, q.shape[1], packing)
    q, block_indices = q.flatten(0, 1)[rows], block_indices.flatten(0, 1)[rows]
    teacher = _find_teacher(q, k.flatten(0, 1), queries, config)
    chosen = _chosen(block_indices, teacher.free.shape[-1])
    return _choice_quality(teacher, chosen, q.new_full((), torch.nan), config)


def _locate(rows: Tensor, length: int, packing: Packing | None) -> SampledQueries:
    """Queries at these flat indices of sequences of `length` tokens."""
    if packing is None:
        return SampledQueries(rows % length, rows, length)
    return SampledQueries(packing.position[rows], rows, packing.max_seqlen)


class _Teacher(NamedTuple):
    """Attention of the sampled queries to free blocks."""

    mass: Tensor  # fp32 [S, G, NB]: over free blocks, sums to 1; 0 for queries that have none
    counted: Tensor  # bool [S, G]: queries with free blocks
    free: Tensor  # bool [S, NB]: blocks of the past that are not forced


@torch.no_grad()
def _find_teacher(
    q: Tensor, k: Tensor, queries: SampledQueries, config: NSAConfig, *, among: Tensor | None = None,
    backend: str = "auto",
) -> _Teacher:  # fmt: skip
    """q: of the sampled queries [S, H, Dk]; k: rows of keys [rows, G, Dk]; among: only these blocks count."""
    j = torch.arange(config.num_blocks(queries.longest), device=q.device)
    current = (queries.position // config.select_block)[:, None]
    free = (j >= config.select_initial) & (j <= current - config.select_local)
    q, k = q.detach(), k.detach()
    lse = block_lse(q, k, queries.row, queries.position, j.shape[0], config.select_block, backend)
    if among is not None:
        lse = lse.masked_fill(~among[:, :, None], -torch.inf)
    mass = lse.softmax(-1).mean(2) * free[:, None]
    total = mass.sum(-1, keepdim=True)
    return _Teacher(mass / torch.where(total > 0, total, 1), total[..., 0] > 0, free)


@torch.no_grad()
def _choice_quality(teacher: _Teacher, chosen: Tensor, kl: Tensor, config: NSAConfig) -> ChoiceQuality:
    """chosen: bool [S, G, NB]; kl: summed over the queries."""
    mass, counted, free = teacher.mass.double(), teacher.counted, teacher.free
    count = counted.sum()
    each = 1 / count.clamp(min=1).double()  # weight of a query in the means
    slots = min(config.select_count - config.select_initial - config.select_local, free.shape[-1])
    best = mass.topk(slots, -1).values.sum() * each
    possible = (slots / free.sum(-1).clamp(min=1)).clamp(max=1)[:, None]
    random = (possible * counted).sum(dtype=torch.float64) * each
    return ChoiceQuality(kl * each, (mass * chosen).sum() * each, best, random, count)


def _chosen(block_indices: Tensor, blocks: int) -> Tensor:
    """[S, G, n] -> bool [S, G, NB]"""
    chosen = torch.zeros(*block_indices.shape[:-1], blocks + 1, dtype=torch.bool, device=block_indices.device)
    return chosen.scatter(-1, torch.where(block_indices < 0, blocks, block_indices).long(), True)[..., :blocks]

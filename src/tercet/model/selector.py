"""Other choices of blocks than the paper's: learned projections with the loss that teaches them, and random blocks.

BlockSelector (docs/nsa.md, "Learned selection"): small projections of the layer's input score the blocks in place of
the compressed branch. They learn from the selected branch itself: the teacher is the attention that its queries and
keys would put on every block of the past, and the student's scores follow it by a KL divergence, on a sample of the
queries. The input is detached and the teacher has no gradient, so the rest of the model never feels this loss.

Axes: queries [B, T, G·heads, size], keys [B, Tc, G, size]; S sampled queries, h query heads per group, NB blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tercet.attention.config import NSAConfig
from tercet.attention.first_order import first_order
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing, move_rows
from tercet.attention.reference import block_importance, compute_dtype
from tercet.model.cache import NewTokens, NSACache
from tercet.model.rope import CosSin, RopeCache, Rotary, compressed_positions, rotate_first

SELECTORS = ("compressed", "learned", "random")
TEACHERS = ("all", "selected")
# Numbers of keys that the PyTorch teacher gathers at once.
_GATHERED = 1 << 24


class TaughtQueries(NamedTuple):
    """Sampled queries: where they are. int64 [S] each."""

    position: Tensor
    """In their documents."""
    key_row: Tensor
    """Among the rows of the selected branch's keys."""
    first_key: Tensor
    """Row of their document's first key of the selector."""
    longest: int
    """Upper bound on the documents' length."""


class Captured(NamedTuple):
    """How good a choice is; means over the sampled queries that have one. Scalars on the device."""

    kl: Tensor
    """Divergence of a learned selector from its teacher; NaN if the selector is not learned."""
    mass: Tensor
    """Share of the teacher's attention to free blocks that the chosen blocks receive."""
    best: Tensor
    """What the best choice of as many blocks would receive."""
    random: Tensor
    """What a random choice would receive on average."""
    queries: Tensor
    """How many were counted, times groups."""


class BlockSelector(nn.Module):
    """Scores of blocks for each KV group from the layer's input; see docs/nsa.md.

    heads, size  query heads per group, and their size
    rotary       RoPE of the first `rotary.size` channels, so that nearness can count; the others compare content alone
    teacher      "all": every block of the past; "selected": only the blocks that were read
    weight       factor of the loss; it only scales the gradient of these parameters
    """

    def __init__(
        self, dim: int, kv_heads: int, heads: int, size: int, config: NSAConfig, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.kv_heads, self.heads, self.size, self.config, self.rotary = kv_heads, heads, size, config, rotary
        self.q_proj = nn.Linear(dim, kv_heads * heads * size, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * size, bias=False)
        self.teacher, self.weight = "all", 1.0

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        for proj in (self.q_proj, self.k_proj):
            nn.init.normal_(proj.weight, std=std)

    def cache_key(self) -> dict[str, int]:
        """Its part of a layer's `cache_key`."""
        return {"selector_dim": self.size, "selector_rotary": 0 if self.rotary is None else self.rotary.size}

    def forward(
        self, x: Tensor, packing: Packing | None = None, rope: RopeCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and pooled keys of x [B, T, dim], which is detached."""
        q, k = self.project(x)
        k = self.pool(k, packing)
        if self.rotary is None:
            return q, k
        known = None if rope is None else rope.selector
        tokens, compressed = known or selector_rope(self.rotary, x, packing, self.config)
        return rotate_first(q, tokens), rotate_first(k, compressed)

    def append(self, x: Tensor, new: NewTokens, cache: NSACache) -> tuple[Tensor, Tensor]:
        """Store the keys of the new tokens. Returns their queries, and all keys that they can see."""
        queries, keys = self.project(x)
        queries = self.at(queries, new.positions)
        blocks = cache.append_selector(new, keys)
        if new.fresh:
            pooled = self.pool(keys)
            index = torch.arange(pooled.shape[1], device=x.device)
            pooled = self.at(pooled, compressed_positions(index, self.config))
            cache.append_compressed(new, selector=pooled[:, : new.emitted])
            return queries, pooled
        if blocks is not None:
            position = compressed_positions(cache.completed(new), self.config)
            cache.append_compressed(new, selector=self.at(self.pool_blocks(blocks), position))
        return queries, cache.selector_keys(new).to(queries.dtype)

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, T, heads, size], rotated at the positions."""
        return x if self.rotary is None else rotate_first(x, self.rotary.cos_sin(positions))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of every token: [B, T, G·heads, size], [B, T, G, size]."""
        with torch.no_grad():  # `loss` projects its few queries again: one gradient over all of them would cost more
            queries = self.queries(x)
        return queries, self.k_proj(x.detach()).unflatten(-1, (self.kv_heads, self.size))

    def queries(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., G·heads, size]"""
        return self.q_proj(x.detach()).unflatten(-1, (self.kv_heads * self.heads, self.size))

    def pool(self, k: Tensor, packing: Packing | None = None) -> Tensor:
        """One key per compressed token: the largest value of each channel over its l tokens. -> [B, Tc, G, size]

        A maximum keeps the feature of one token among l, which a mean would dilute.
        """
        l, d = self.config.compress_block, self.config.compress_stride
        if k.shape[1] < l:
            return k.new_zeros(k.shape[0], 0 if packing is None else packing.compressed_length, *k.shape[2:])
        if packing is None:
            chunks = k[:, : k.shape[1] // d * d].unflatten(1, (-1, d)).amax(2)
        else:
            chunks = move_rows(k[0], packing.tokens_to_chunks).unflatten(0, (-1, d)).amax(1)[None]
        places, count = l // d, chunks.shape[1] - l // d + 1
        pooled = chunks[:, :count]
        for place in range(1, places):
            pooled = torch.maximum(pooled, chunks[:, place : place + count])
        return pooled if packing is None else move_rows(pooled[0], packing.chunks_to_compressed)[None]

    def pool_blocks(self, blocks: Tensor) -> Tensor:
        """`pool` of given blocks: [B, E, l, G, size] -> [B, E, G, size]."""
        return blocks.amax(2)

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
    ) -> tuple[Tensor, Captured | None]:
        """`loss` on some queries of whole sequences. x: the layer's input; selector_k: keys from `forward`; q [B, T, H,
        Dk], k: those of the selected branch; rows: int64 [S], flat indices of queries."""
        queries = _locate(rows, q.shape[1], selector_k.shape[1], packing)
        x, q, block_indices = (each.flatten(0, 1)[rows] for each in (x.detach(), q, block_indices))
        return self.loss(x, q, block_indices, selector_k.flatten(0, 1), k.flatten(0, 1), queries, measure=measure)

    def loss(
        self,
        x: Tensor,
        q: Tensor,
        block_indices: Tensor,
        selector_k: Tensor,
        k: Tensor,
        queries: TaughtQueries,
        *,
        measure: bool = False,
    ) -> tuple[Tensor, Captured | None]:
        """The loss on the sampled queries and, if `measure`, how good their choice was.

        x, q, block_indices: of these queries, [S, dim], [S, H, Dk], [S, G, n]; selector_k, k: rows of keys that hold at
        least what they see, [rows, G, size].
        """
        chosen = None
        if measure or self.teacher == "selected":
            chosen = _chosen(block_indices, self.config.num_blocks(queries.longest))
        teacher = _teach(q, k, queries, self.config, among=chosen if self.teacher == "selected" else None)
        blocks = torch.arange(teacher.free.shape[-1], device=q.device)
        selector_q = self.at(self.queries(x)[None], queries.position)[0]
        with torch.autocast(q.device.type, enabled=False):
            student = self._block_probabilities(selector_q, selector_k, queries.position, queries.first_key, blocks)
            student = student * teacher.free[:, None] + 1e-12
            student = student.log() - student.sum(-1, keepdim=True).log()
        kl = (torch.special.xlogy(teacher.mass, teacher.mass) - teacher.mass * student).sum()
        # over all sampled queries, also those without a choice: ranks and micro-batches then weigh the same
        loss = kl / teacher.counted.numel()
        if not measure or chosen is None:
            return loss, None
        return loss, _capture(teacher, chosen, kl.detach(), self.config)

    def _block_probabilities(self, q: Tensor, k: Tensor, position: Tensor, first_key: Tensor, j: Tensor) -> Tensor:
        """The student: mean over heads of the softmax over visible keys, pooled over blocks (Eq. 9). [S, G, NB]"""
        config = self.config
        q = q.unflatten(1, (self.kv_heads, self.heads))
        logits = torch.einsum("sghd,cgd->gshc", q, k).to(compute_dtype(q)) * self.size**-0.5
        seen = (position + 1 - config.compress_block).div(config.compress_stride, rounding_mode="floor") + 1
        i = torch.arange(k.shape[0], device=k.device) - first_key[:, None]
        visible = ((i >= 0) & (i < seen[:, None]))[:, None]
        # a finite mask: a query that sees no key has no free block either
        p = logits.masked_fill(~visible, -1e30).softmax(-1)
        p = torch.where(visible, p, 0).mean(2)
        return block_importance(p, first_key[:, None], j.shape[0], config).transpose(0, 1)


class RandomBlocks:
    """Random blocks in place of the best ones, as a control: the forced blocks, and free ones by a hash of the query's
    position, group and layer. Every set of free blocks is equally likely; no parameters, nothing to save for a resume.
    """

    def __init__(self, kv_heads: int, config: NSAConfig) -> None:
        self.kv_heads, self.config = kv_heads, config
        self.layer = 0
        """Number of the layer: layers choose independently."""

    def __call__(self, position: Tensor, longest: int, layer: Tensor | None = None) -> Tensor:
        """block_indices [..., G, n] of queries at these positions [...] of documents of at most `longest` tokens.

        layer: `self.layer` as a tensor. Compiled blocks share their code only if the number is not part of it.
        """
        config = self.config
        n, initial, local = config.select_count, config.select_initial, config.select_local
        position = position.long()[..., None, None]
        current, place = position // config.select_block, torch.arange(n, device=position.device)
        every = torch.where(place <= current, place, -1).expand(*position.shape[:-2], self.kv_heads, -1)
        blocks, slots = config.num_blocks(longest), n - initial - local
        if blocks <= n:
            return every.int()
        group = torch.arange(self.kv_heads, device=position.device)[:, None]
        j = torch.arange(blocks, device=position.device)
        key = _mix(_mix(position) + (self.layer if layer is None else layer)) + (group << 20) + j
        key = (_mix(key) << 20) + j  # hashes may be equal, these are not
        free = (j >= initial) & (j <= current - local)
        chosen = torch.where(free, key, -1).topk(slots, sorted=False).indices.sort(-1).values
        first, last = place[:initial], current - local + 1 + place[:local]
        parts = (first.expand(*every.shape[:-1], -1), chosen, last.expand(*every.shape[:-1], -1))
        return torch.where(current < n, every, torch.cat(parts, -1)).int()


def _mix(x: Tensor) -> Tensor:
    """A hash of 32-bit numbers, in int64."""
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def rotated_channels(size: int, rotary: int | None) -> int:
    """Channels of a selector's head that RoPE rotates: half of them unless the setting says how many."""
    return size // 4 * 2 if rotary is None else rotary


def build_selector(
    kind: str, dim: int, kv_heads: int, heads: int, size: int, config: NSAConfig, rope: Rotary, rotated: int | None
) -> BlockSelector | None:
    """The learned selector of a layer; None if it has none. rope: the layer's; rotated: channels, None for half."""
    if kind not in SELECTORS:
        raise ValueError(f"selector={kind!r} is unknown: pick one of {', '.join(SELECTORS)}")
    if kind != "learned":
        return None
    rotated = rotated_channels(size, rotated)
    rotary = rope.of_size(rotated) if rotated else None
    return BlockSelector(dim, kv_heads, heads, size, config, rotary)


def selector_rope(rotary: Rotary, x: Tensor, packing: Packing | None, config: NSAConfig) -> tuple[CosSin, CosSin]:
    """cos/sin of a selector's rotated channels, at the tokens x [B, T, ...] and at their compressed tokens."""
    tokens = rotary.of_tokens(x, None if packing is None else packing.position)
    return tokens, rotary.of_compressed(x, packing, config)


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


def sample_queries(tokens: Tensor, every: int) -> Tensor:
    """Flat indices of one query in every `every`, at a place that depends on the tokens around it.

    A function of the batch alone: the same on every backend and in a recomputation, and nothing to save for a resume.
    """
    flat = tokens.flatten()
    every = min(every, flat.shape[0])
    count = flat.shape[0] // every
    weights = torch.arange(1, every + 1, device=tokens.device) * 40503
    place = (flat[: count * every].view(count, every).long() * weights).sum(1) % every
    return torch.arange(count, device=tokens.device) * every + place


@torch.no_grad()
def measure_choice(
    q: Tensor, k: Tensor, rows: Tensor, block_indices: Tensor, packing: Packing | None, config: NSAConfig
) -> Captured:
    """How good the choice of some queries was, whatever chose: the teacher is that of a learned selector.

    q [B, T, H, Dk], k: those of the selected branch; block_indices [B, T, G, n]; rows: int64 [S], flat indices.
    """
    queries = _locate(rows, q.shape[1], 0, packing)
    q, block_indices = q.flatten(0, 1)[rows], block_indices.flatten(0, 1)[rows]
    teacher = _teach(q, k.flatten(0, 1), queries, config)
    return _capture(teacher, _chosen(block_indices, teacher.free.shape[-1]), q.new_full((), torch.nan), config)


def _locate(rows: Tensor, length: int, compressed: int, packing: Packing | None) -> TaughtQueries:
    """Queries at these flat indices of sequences of `length` tokens and `compressed` compressed tokens."""
    if packing is None:
        return TaughtQueries(rows % length, rows, rows // length * compressed, length)
    first_key = packing.compressed_cu_seqlens[packing.document[rows]].long()
    return TaughtQueries(packing.position[rows], rows, first_key, packing.max_seqlen)


class _Teacher(NamedTuple):
    """What sampled queries attend to."""

    mass: Tensor  # fp32 [S, G, NB]: over free blocks, sums to 1; 0 for queries that have none
    counted: Tensor  # bool [S, G]: queries with free blocks
    free: Tensor  # bool [S, NB]: blocks of the past that are not forced


@torch.no_grad()
def _teach(q: Tensor, k: Tensor, queries: TaughtQueries, config: NSAConfig, *, among: Tensor | None = None) -> _Teacher:
    """q: of the sampled queries [S, H, Dk]; k: rows of keys [rows, G, Dk]; among: only these blocks count."""
    j = torch.arange(config.num_blocks(queries.longest), device=q.device)
    current = (queries.position // config.select_block)[:, None]
    free = (j >= config.select_initial) & (j <= current - config.select_local)
    lse = block_lse(q.detach(), k.detach(), queries.key_row, queries.position, j.shape[0], config)
    if among is not None:
        lse = lse.masked_fill(~among[:, :, None], -torch.inf)
    mass = lse.softmax(-1).mean(2) * free[:, None]
    total = mass.sum(-1, keepdim=True)
    return _Teacher(mass / torch.where(total > 0, total, 1), total[..., 0] > 0, free)


@torch.no_grad()
def _capture(teacher: _Teacher, chosen: Tensor, kl: Tensor, config: NSAConfig) -> Captured:
    mass, counted, free = teacher.mass.double(), teacher.counted, teacher.free
    count = counted.sum()
    each = 1 / count.clamp(min=1).double()
    slots = min(config.select_count - config.select_initial - config.select_local, free.shape[-1])
    best = mass.topk(slots, -1).values.sum() * each
    possible = (slots / free.sum(-1).clamp(min=1)).clamp(max=1)[:, None]
    random = (possible * counted).sum(dtype=torch.float64) * each
    return Captured(kl * each, (mass * chosen).sum() * each, best, random, count)


def _chosen(block_indices: Tensor, blocks: int) -> Tensor:
    """[S, G, n] -> bool [S, G, NB]"""
    chosen = torch.zeros(*block_indices.shape[:-1], blocks + 1, dtype=torch.bool, device=block_indices.device)
    return chosen.scatter(-1, torch.where(block_indices < 0, blocks, block_indices).long(), True)[..., :blocks]


def block_lse(q: Tensor, k: Tensor, rows: Tensor, position: Tensor, blocks: int, config: NSAConfig) -> Tensor:
    """The teacher: log-sum-exp of the logits of each query in every block of its document. fp32 [S, G, h, NB]

    q: [S, H, Dk]; k: [tokens, G, Dk]; rows: int64 [S], where the queries are among the tokens; position: where they are
    in their documents. -inf in blocks after the query.
    """
    with torch.autocast(q.device.type, enabled=False):
        if kernels_run_on(q):
            from tercet.attention.kernels.teacher import nsa_block_lse

            op = torch.ops.tercet.nsa_block_lse if torch.compiler.is_compiling() else nsa_block_lse
            lse: Tensor = op(q, k.to(q.dtype), rows, position, config.select_block, blocks)
            return lse
        dtype = compute_dtype(q)
        q = q.unflatten(1, (k.shape[1], -1)).to(dtype) * q.shape[-1] ** -0.5
        s = torch.arange(blocks * config.select_block, device=q.device)
        found = []
        step = max(1, _GATHERED // (s.shape[0] * k.shape[1] * k.shape[2]))
        for part in torch.arange(rows.shape[0], device=q.device).split(step):
            token = ((rows - position)[part, None] + s).clamp(max=k.shape[0] - 1)
            logits = torch.einsum("sghd,stgd->sght", q[part], k[token].to(dtype))
            logits = logits.masked_fill((s > position[part, None])[:, None, None], -torch.inf)
            found.append(logits.unflatten(-1, (blocks, -1)).logsumexp(-1))
        return torch.cat(found)

"""BlockSparseAttention: a dense layer that reads long contexts block by block. x: [B, T, dim] -> [B, T, dim]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.attention.block_sparse import check_dense_below, pool_keys, reads_all_below, run_block_sparse
from tercet.attention.checks import check_config
from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import check_backend
from tercet.attention.layout import Packing, Span
from tercet.attention.reference import block_importance, select, select_at
from tercet.attention.tiling import compute_dtype
from tercet.model import decode
from tercet.model.cache import NewTokens
from tercet.model.config import AttentionKind
from tercet.model.dense import DenseAttention
from tercet.model.layer import Scorer, SelectingLayer
from tercet.model.nsa_cache import BlockSparseCache
from tercet.model.rope import RopeCache
from tercet.model.selector import build_selector
from tercet.model.stats import AttentionStats


class BlockSparseAttention(SelectingLayer, DenseAttention):
    """Dense attention's parameters; each query reads a few blocks of the past in full (docs/nsa.md, "Block-sparse
    mode"). Other arguments are DenseAttention's.

    config       block sizes; `window` has no effect
    dense_below  queries at positions below this read everything
    selector     what scores the blocks: "compressed" (means of their keys) or "learned" (a query and a key of
                 `selector_dim` channels per token and KV head)
    backend      "auto", "reference" or "triton"
    """

    kind: AttentionKind = "nsa"
    cache_class = BlockSparseCache

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        dense_below: int = 0,
        selector: str = "compressed",
        selector_dim: int = 32,
        selector_rotary: int | None = None,
        backend: str = "auto",
        **dense: Any,
    ) -> None:
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, **dense)
        check_backend(backend)
        check_dense_below(dense_below)
        self.config = NSAConfig() if config is None else config
        check_config(self.config)
        self.dense_below, self.backend = dense_below, backend
        self.selector = build_selector(
            selector, dim, kv_heads, selector_dim, self.config, self.rotary, selector_rotary, backend
        )
        self.stats = AttentionStats(self.config)
        self._branch = "selected"

    @property
    def branch_names(self) -> tuple[str, ...]:
        return (self._branch,)

    @property
    def reads_all_below(self) -> int:
        """Queries at positions below this read every token up to their own."""
        return reads_all_below(self.config, self.dense_below)

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        super().init_weights(std, output_std)
        if self.selector is not None:
            self.selector.init_weights(std)

    def cache_key(self) -> dict[str, Any]:
        return super().cache_key() | {"shared_kv": True, "branches": ("selected",), "compresses": False}

    # ------------------------------------------------------------ whole sequences

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        positions = None if packing is None else packing.position
        q, k, v = self.project(x, positions, None if rope is None else rope.tokens)
        longest = x.shape[1] if packing is None else packing.max_seqlen
        # without a choice, blocks are selected only to count them or for the selector's loss
        wanted = self.stats.enabled or (self.selector is not None and sampled is not None)
        chooses = wanted or longest > self.reads_all_below
        scored = None
        if self.selector is not None and chooses:
            scored = self.selector(x, positions, None if rope is None else rope.selector)
        out, block_indices, self._branch, self._route = run_block_sparse(
            q, k, v, config=self.config, dense_below=self.dense_below, packing=packing, backend=self.backend,
            selector=scored, select=wanted,
        )  # fmt: skip
        self.stats.update(None, block_indices, packing)
        if sampled is not None and block_indices is not None:
            out = self.with_selector_loss(out, x, scored, q, k, sampled, block_indices, packing, self.backend)
        return self.o_proj(out.flatten(2))

    # ------------------------------------------------------------ new tokens after a cache

    @torch.no_grad()  # inference only
    def _forward_cached(self, x: Tensor, cache: Any, lengths: Tensor | None, rope: RopeCache | None) -> Tensor:
        reason = decode.why_not_kernels(self, x, cache, lengths)
        if reason is None and x.shape[1] == 1:
            self._branch = "selected"
            return decode.run_token(self, x, cache, lengths)
        new = cache.begin(self.cache_key(), x, lengths)
        x = new.zero_padding(x)
        q, k, v, *scorer = self.project_new(x, new, cache, rope, *self.selector_layers())
        completed = cache.append_tokens(new, k, v)
        scored = None
        if self.selector is not None:
            scored = self.selector.append(scorer, new, cache, None if rope is None else rope.selector)
        cache.reads = None
        if new.fresh:
            return self._prefill(new, cache, q, k, v, scored)
        if completed is not None:
            cache.append_compressed(new, k_compressed=mean_keys(completed))
        if new.longest <= self.reads_all_below:
            name, why = decode.cached_dense_route(q, cache, new)
            self._branch, self._route = "dense", (name, why)
            return self.o_proj(decode.cached_dense_attention(q, cache, new).flatten(2))
        self._branch, self._route = "selected", ("triton", None) if reason is None else ("reference", reason)
        attend = self._attend_chunk if reason is None else self._attend_tokens
        out = attend(q, cache, new, scored)
        if self.dense_below > self.config.selected_tokens and (new.first is None or new.first < self.dense_below):
            reads, early = cache.reads, (new.positions < self.dense_below)[..., None]
            out = torch.where(early[..., None], decode.cached_dense_attention(q, cache, new), out)
            cache.reads = None if reads is None else torch.where(early, cache.reads, reads)
        return self.o_proj(out.flatten(2))

    def decode_token(self, x: Tensor, cache: Any, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        from tercet.attention.kernels import decode as kernels

        q, kv, *scored = decode.project(x, cache, self.q_proj, self.kv_proj, *self.selector_layers())
        norms = decode.kernel_norms(self.q_norm, None if self.k_norm is None else [self.k_norm], q.dtype)
        out, read, cache.block_indices = kernels.nsa_step(
            q, kv, None, decode.kernel_cache(cache), counts, self.config, decode.kernel_heads(self),
            branches=("selected",), shared=True, softmax_gate=False, norms=norms, phi=None,
            selector=None if self.selector is None else (scored[0], scored[1]),
            dense_below=self.dense_below if self.dense_below > self.config.selected_tokens else 0,
        )  # fmt: skip
        return out, read

    def _prefill(
        self, new: NewTokens, cache: BlockSparseCache, q: Tensor, k: Tensor, v: Tensor, scored: Scorer | None
    ) -> Tensor:
        """The first tokens of an empty cache; causal masks hide the right padding from every real token."""
        block_keys = None
        if scored is None:
            block_keys = pool_keys(k, self.config)
            cache.append_compressed(new, k_compressed=block_keys[:, : new.emitted])
        out, _, self._branch, self._route = run_block_sparse(
            q, k, v, config=self.config, dense_below=self.dense_below, backend=self.backend, selector=scored,
            block_keys=block_keys,
        )  # fmt: skip
        return self.o_proj(out.flatten(2))

    def _attend_chunk(self, q: Tensor, cache: BlockSparseCache, new: NewTokens, scored: Scorer | None) -> Tensor:
        """A chunk at the same position in every row, on the kernels: a query range of the cached sequences."""
        k, v = cache.all(new)
        keys = None if scored is not None else cache.block_keys(new)
        found = run_block_sparse(
            q, k, v, config=self.config, backend="triton", selector=scored, block_keys=keys,
            span=Span(new.longest - q.shape[1]),
        )  # fmt: skip
        return found.out

    def _attend_tokens(self, q: Tensor, cache: BlockSparseCache, new: NewTokens, scored: Scorer | None) -> Tensor:
        """New tokens at any positions, in PyTorch."""
        k, v = (x[:, : new.longest] for x in cache.selected())
        means = cache.block_keys(new) if scored is None else None
        out, cache.reads = attend_tokens(q, k, v, means, new.positions, self.config, scored)
        return out


def attend_tokens(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor | None, t: Tensor, config: NSAConfig, scored: Scorer | None = None
) -> tuple[Tensor, Tensor]:
    """Queries at positions t [B, C] of their rows of keys, which may differ, in PyTorch. means: the block keys that
    score the blocks, unless a selector does.

    Returns their output [B, C, H, Dv], and the keys and block keys that they read [B, C, G].
    """
    heads, size, groups = *q.shape[2:], k.shape[2]
    gathered = groups * config.selected_tokens * (size + v.shape[3])
    scores = heads * means.shape[1] if means is not None else groups * k.shape[1]

    def attend(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        at = t[:, part]
        if scored is not None:
            block_indices, read_keys = select_at(scored[0][:, part], scored[1], at, config), torch.zeros_like(at)
        else:
            assert means is not None
            block_indices, read_keys = _select(rows, means, at, config.num_blocks(k.shape[1]), config)
        out, read = decode.attend_selected(rows, at, block_indices, k, v, config)
        return out.flatten(2, 3), read + read_keys[..., None]

    return decode.in_chunks(attend, q, groups, max(gathered, scores))


def _select(rows: Tensor, k: Tensor, t: Tensor, blocks: int, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Selected blocks [B, C, G, n] of scaled queries [B, C, G, h, D] at positions t [B, C], and how many block keys
    each query read [B, C]."""
    p, visible = decode.compressed_weights(rows, k, t, config)
    importance = block_importance(p.sum(3), 0, blocks, config)
    return select(importance, t[:, None], config).transpose(1, 2), visible.sum(-1)


def mean_keys(blocks: Tensor) -> Tensor:
    """`pool_keys` of given blocks: [B, E, l, G, D] -> [B, E, G, D]"""
    return blocks.to(compute_dtype(blocks)).mean(2).to(blocks.dtype)

"""Base classes of attention layers: AttentionLayer, and SelectingLayer for those that select blocks. x: [B, T, dim]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tercet.attention.checks import check_max_seqlen, check_packing, make_packing
from tercet.attention.config import NSAConfig, check_group_size, check_sizes
from tercet.attention.dispatch import Route
from tercet.attention.layout import Packing
from tercet.model.cache import Cache
from tercet.model.config import AttentionKind
from tercet.model.rope import RopeCache, Rotary
from tercet.model.selector import EVERY, BlockSelector, attach_loss, mix_bits, sample_queries
from tercet.model.stats import AttentionStats

Scorer = tuple[Tensor, Tensor]
"""Queries and keys of a learned selector: [B, T, G, size] each."""


class AttentionLayer(nn.Module):
    """Sizes, projections, RoPE, input checks and routes. Subclasses implement `_forward_sequence` (training and
    evaluation) and `_forward_cached` (new tokens after a cache).

    key_sets, value_sets: how many sets of keys and values kv_proj computes.
    """

    kind: AttentionKind
    """As model.attention names it."""
    cache_class: type[Cache]
    q_norm: nn.RMSNorm | None
    config: NSAConfig | None = None
    backend: str = "auto"

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        *,
        key_sets: int,
        value_sets: int,
        rotary: Rotary,
        bias: bool,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        check_group_size(heads, kv_heads)
        check_sizes(dim=dim, head_dim=head_dim, value_dim=value_dim)
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.key_sets, self.rotary = key_sets, rotary
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=bias)
        self.kv_proj = nn.Linear(dim, kv_heads * (key_sets * head_dim + value_sets * value_dim), bias=bias)
        self.o_proj = nn.Linear(heads * value_dim, dim, bias=bias)
        self._route: dict[str, Route] | tuple[str, str | None] = {}

    @property
    def kv_rows(self) -> tuple[int, ...]:
        """Rows of each set of keys or values in kv_proj, in their order there."""
        return self.kv_heads * self.head_dim, self.kv_heads * self.value_dim

    @property
    def branch_names(self) -> tuple[str, ...]:
        """Keys of `routes`."""
        raise NotImplementedError

    @property
    def routes(self) -> dict[str, Route]:
        """The backend that each branch of the last call ran on, and why no faster one ran."""
        # Set as a plain tuple while torch.compile traces the layer, which cannot trace a Route.
        return self._route if isinstance(self._route, dict) else dict.fromkeys(self.branch_names, Route(*self._route))

    @routes.setter
    def routes(self, routes: dict[str, Route]) -> None:
        self._route = routes

    @torch.no_grad()
    def init_weights(self, std: float, output_std: float) -> None:
        """Reinitialise every parameter, also after `to_empty` from the meta device."""
        for linear, width in ((self.q_proj, std), (self.kv_proj, std), (self.o_proj, output_std)):
            nn.init.normal_(linear.weight, std=width)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def make_cache(self, batch: int, max_len: int | None = None, *, dtype: torch.dtype | None = None) -> Cache:
        """An empty cache for `batch` sequences: preallocated for max_len tokens, or growing if max_len is None."""
        weight = self.q_proj.weight
        return self.cache_class(
            self.cache_key(), batch, max_len, weight.device, weight.dtype if dtype is None else dtype
        )

    def cache_key(self) -> dict[str, Any]:
        """The settings that a cache must have been created for."""
        return {
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.value_dim,
            "theta": self.rotary.theta, "scaling": self.rotary.scaling,
            "max_wavelength": self.rotary.max_wavelength, "rope": self.rotary.rope,
        }  # fmt: skip

    def phi_is_plain(self) -> bool:
        """Whether φ, if the layer has one, is fully described by its weights, which is all the decode kernels read."""
        return True

    def decode_token(self, x: Tensor, cache: Any, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out [B, 1, H·Dv], keys read) of one token per row on the decode kernels, which advance the cache. counts:
        int32 [B], 0 for rows without a token. Called by `decode.run_token`."""
        raise NotImplementedError

    def chooses_randomly(self) -> bool:
        """Whether blocks are chosen at random, as a control."""
        return False

    def selector_size(self) -> int:
        """Channels of a learned selector; 0 without one."""
        return 0

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: Any = None,
        lengths: Tensor | None = None,
        rope: RopeCache | None = None,
        max_seqlen: int | None = None,
        sampled: Tensor | None = None,
    ) -> Tensor:
        """x: [B, T, dim] -> [B, T, dim].

        cu_seqlens  bounds of packed documents, B = 1, or their Packing
        cache       x continues the tokens in this cache; inference only
        lengths     [B], with a cache: how many of each row's T tokens are real. The rest is right padding, and its
                    outputs are meaningless
        rope        cos/sin of this pass, if the caller computed them for all layers (`rope.rope_cache`); with a cache:
                    only if it is empty
        max_seqlen  with cu_seqlens: upper bound on document length, T by default. A tight bound saves the kernels work
        sampled     int64 [S]: flat indices of the queries on which the loss of a learned selector is computed in this
                    pass, or on which the statistics measure how well blocks are chosen. By default a learned selector
                    learns on one query in 128
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}: expected 3 axes, [batch, tokens, {self.dim}]")
        if 0 in x.shape:
            raise ValueError(f"x has shape {list(x.shape)}: expected at least one token")
        check_max_seqlen(max_seqlen, cu_seqlens)
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("cu_seqlens and cache were both given: a cache holds one document per row")
            return self._forward_cached(x, cache, lengths, rope)
        check_lengths_have_cache(lengths)
        if isinstance(cu_seqlens, Packing):
            check_packing(cu_seqlens, x, None, self.config or cu_seqlens.config)
        elif cu_seqlens is not None:
            # a layer without a config has no compressed tokens
            count = 0 if self.config is None else None
            cu_seqlens = make_packing(cu_seqlens, x, self.config or NSAConfig(), count, max_seqlen)
        return self._forward_sequence(x, cu_seqlens, rope, self.sample(x) if sampled is None else sampled)

    def sample(self, x: Tensor) -> Tensor | None:
        """Queries on which a learned selector learns if the caller names none."""
        return None

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def _forward_cached(self, x: Tensor, cache: Any, lengths: Tensor | None, rope: RopeCache | None) -> Tensor:
        raise NotImplementedError


class SelectingLayer(AttentionLayer):
    """Base of NSA and block-sparse layers. They set `config`, `selector` (None if it is not learned) and `stats`."""

    config: NSAConfig
    selector: BlockSelector | None
    stats: AttentionStats

    def cache_key(self) -> dict[str, Any]:
        key = super().cache_key() | {"config": self.config}
        return key if self.selector is None else key | self.selector.cache_key()

    def selector_size(self) -> int:
        return 0 if self.selector is None else self.selector.size

    def selector_layers(self) -> tuple[nn.Linear, ...]:
        """The projections of a learned selector."""
        return () if self.selector is None else (self.selector.q_proj, self.selector.k_proj)

    def sample(self, x: Tensor) -> Tensor | None:
        if self.selector is None or not (self.training and torch.is_grad_enabled() and x.numel()):
            return None
        # hashed: as fp32, half-precision numbers end in zeros, and every sample would be the first of its 128 queries
        bits = x.detach()[..., 0].float().view(torch.int32).long() & 0xFFFFFFFF
        return sample_queries(mix_bits(bits), EVERY)

    def with_selector_loss(
        self, out: Tensor, x: Tensor, scored: Scorer | None, q: Tensor, k: Tensor, rows: Tensor, block_indices: Tensor,
        packing: Packing | None, backend: str,
    ) -> Tensor:  # fmt: skip
        """Return `out` with the loss of the learned selector attached: the backward pass of `out` also runs that of the
        loss. Without a learned selector, only measure how well blocks were chosen, if statistics are on.

        scored: the selector's queries and keys; the other arguments: see `BlockSelector.loss_of_rows`.
        """
        if self.selector is None or scored is None:
            self.stats.update_choice(q, k, rows, block_indices, packing)
            return out
        loss, quality = self.selector.loss_of_rows(
            x, scored[1], q, k, rows, block_indices, packing, measure=self.stats.enabled, backend=backend
        )
        self.stats.update_selector(quality)
        return attach_loss(out, loss * self.selector.weight)


def are_plain(*layers: nn.Module) -> bool:
    """Whether these are bare linear layers, whose weights may be multiplied without calling them.

    Adapters, subclasses, parametrizations (which create a subclass) and hooks, also global ones, only act through the
    layer's call. FSDP2 wraps blocks, not the linear layers inside.
    """
    if _has_any_global_hook():
        return False
    for layer in layers:
        if type(layer) is not nn.Linear:
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    return True


def check_lengths_have_cache(lengths: Tensor | None) -> None:
    if lengths is not None:
        raise ValueError("lengths was given without a cache: use cu_seqlens for packed documents")

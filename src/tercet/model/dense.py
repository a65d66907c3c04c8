"""DenseAttention: full causal attention, with the interface of NativeSparseAttention. x: [B, T, dim] -> [B, T, dim]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tercet.attention.config import NSAConfig, check_above_zero
from tercet.attention.dense import dense_attention, dense_route
from tercet.attention.layout import Packing
from tercet.model import decode
from tercet.model.cache import Cache, DenseCache, NewTokens
from tercet.model.config import NSA_ONLY, AttentionKind, RopeConfig
from tercet.model.layer import AttentionLayer
from tercet.model.rope import CosSin, RopeCache, Rotary, rotate


class DenseAttention(AttentionLayer):
    """The dense baseline: takes NativeSparseAttention's arguments and ignores those that only apply to it."""

    kind: AttentionKind = "dense"
    cache_class: type[Cache] = DenseCache

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        rope_theta: float = 10000.0,
        rope_scaling: float = 1.0,
        rope_max_wavelength: float = 0.0,
        rope: RopeConfig | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        norm_eps: float | None = None,
        **nsa_only: Any,
    ) -> None:
        ignored = {*NSA_ONLY, "backend"} - {"nsa"}  # "nsa" is `config` here
        if unknown := set(nsa_only) - ignored:
            raise TypeError(f"DenseAttention got unknown arguments: {', '.join(sorted(unknown))}")
        super().__init__(
            dim, heads, kv_heads, head_dim, value_dim, key_sets=1, value_sets=1, bias=bias,
            rotary=Rotary(head_dim, rope_theta, rope_scaling, rope_max_wavelength, rope),
        )  # fmt: skip
        check_above_zero(norm_eps=norm_eps)
        self.q_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else None
        self._route = ("sdpa", None)

    @property
    def branch_names(self) -> tuple[str, ...]:
        return ("dense",)

    def project(
        self,
        x: Tensor,
        positions: Tensor | None,
        cos_sin: CosSin | None = None,
        projected: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; q and k rotated at their tokens' positions. projected: outputs of q_proj and kv_proj, if the
        caller has them."""
        batch, length, _ = x.shape
        cos_sin = self.rotary.of_tokens(x, positions) if cos_sin is None else cos_sin
        q, kv = (self.q_proj(x), self.kv_proj(x)) if projected is None else projected
        q = q.view(batch, length, self.heads, self.head_dim)
        k, v = kv.split(self.kv_rows, dim=-1)
        k = k.view(batch, length, self.kv_heads, self.head_dim)
        v = v.view(batch, length, self.kv_heads, self.value_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos_sin, self.backend), rotate(k, cos_sin, self.backend), v

    def project_new(
        self, x: Tensor, new: NewTokens, cache: Cache, rope: RopeCache | None, *more: nn.Linear
    ) -> tuple[Tensor, ...]:
        """q, k and v of tokens after a cache, and the outputs of `more` layers that read x."""
        q, kv, *others = decode.project(x, cache, self.q_proj, self.kv_proj, *more)
        cos_sin = self.rotary.cos_sin(new.positions) if rope is None else rope.tokens
        return *self.project(x, None, cos_sin, (q, kv)), *others

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        positions = None if packing is None else packing.position
        q, k, v = self.project(x, positions, None if rope is None else rope.tokens)
        self._route = dense_route(q, v, packing)
        return self.o_proj(dense_attention(q, k, v, packing).flatten(2))

    @torch.no_grad()  # inference only
    def _forward_cached(self, x: Tensor, cache: DenseCache, lengths: Tensor | None, rope: RopeCache | None) -> Tensor:
        reason = decode.why_not_token_kernels(self, cache) if x.shape[1] == 1 else None
        if x.shape[1] == 1 and reason is None:
            return decode.run_token(self, x, cache, lengths)
        new = cache.begin(self.cache_key(), x, lengths)
        x = new.zero_padding(x)
        q, k, v = self.project_new(x, new, cache, rope)
        cache.append(new, k, v)
        if new.fresh:  # prefill; causal masks hide the right padding from every real token
            cache.reads = None
            self._route = dense_route(q, v)
            return self.o_proj(dense_attention(q, k, v).flatten(2))
        name, why = decode.cached_dense_route(q, cache, new)
        self._route = name, reason or why
        return self.o_proj(decode.cached_dense_attention(q, cache, new).flatten(2))

    def decode_token(self, x: Tensor, cache: Any, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        from tercet.attention.kernels import decode as kernels

        held = kernels.Held(cache.lengths, cache.rope_frequencies(), cache.capacity, selected=cache.stores())
        q, kv = decode.project(x, cache, self.q_proj, self.kv_proj)
        norms = decode.kernel_norms(self.q_norm, None if self.k_norm is None else [self.k_norm], q.dtype)
        return kernels.dense_step(q, kv, held, counts, decode.kernel_heads(self), norms=norms)

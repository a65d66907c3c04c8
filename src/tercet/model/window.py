"""WindowAttention: sliding-window attention as a layer of its own. x: [B, T, dim] -> [B, T, dim]"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tercet.attention.checks import check_config
from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import check_backend
from tercet.attention.functional import run_window
from tercet.attention.layout import Packing
from tercet.model import decode
from tercet.model.config import AttentionKind
from tercet.model.dense import DenseAttention
from tercet.model.nsa_cache import NSACache
from tercet.model.rope import RopeCache

_BRANCHES = ("window",)


class WindowAttention(DenseAttention):
    """The window branch of NativeSparseAttention without the others: each query sees the last config.window tokens,
    itself included. One set of keys and values, no gate, no compression, no selection; its cache has constant size.

    The weights are those of a DenseAttention of the same sizes.
    """

    config: NSAConfig
    kind: AttentionKind = "window"
    cache_class = NSACache

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        config: NSAConfig | None = None,
        *,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(dim, heads, kv_heads, head_dim, value_dim, **options)
        check_backend(backend)
        self.config = NSAConfig() if config is None else config
        check_config(self.config)
        self.backend = backend
        self._route = {}

    @property
    def branch_names(self) -> tuple[str, ...]:
        return _BRANCHES

    def cache_key(self) -> dict[str, Any]:
        return super().cache_key() | {
            "config": self.config,
            "shared_kv": False,
            "branches": _BRANCHES,
            "compresses": False,
        }

    def _forward_sequence(
        self, x: Tensor, packing: Packing | None, rope: RopeCache | None, sampled: Tensor | None
    ) -> Tensor:
        positions = None if packing is None else packing.position
        q, k, v = self.project(x, positions, None if rope is None else rope.tokens)
        out, self._route = run_window(q, k, v, config=self.config, packing=packing, backend=self.backend)
        return self.o_proj(out.flatten(2))

    @torch.no_grad()  # inference only
    def _forward_cached(  # type: ignore[override]
        self, x: Tensor, cache: NSACache, lengths: Tensor | None, rope: RopeCache | None
    ) -> Tensor:
        reason = decode.why_not_kernels(self, x, cache, lengths)
        if reason is None and x.shape[1] == 1:
            return decode.run_token(self, x, cache, lengths)
        new = cache.begin(self.cache_key(), x, lengths)
        x = new.zero_padding(x)
        q, k, v = self.project_new(x, new, cache, rope)
        cache.append(new, k, {"window": k}, {"window": v})
        if new.fresh:  # prefill; causal masks hide the right padding from every real token
            cache.reads = None
            out, self._route = run_window(q, k, v, config=self.config, backend=self.backend)
        elif reason is None:
            out, self._route = decode.window_chunk(q, cache, new, self.config)
        else:
            self._route = ("reference", reason)
            out = decode.cached_window_attention(q, cache, new, self.config)
        return self.o_proj(out.flatten(2))

    def decode_token(self, x: Tensor, cache: Any, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        from tercet.attention.kernels import decode as kernels

        held = kernels.Held(cache.lengths, cache.rope_frequencies(), cache.capacity, window=cache.stores()["window"])
        q, kv = decode.project(x, cache, self.q_proj, self.kv_proj)
        norms = decode.kernel_norms(self.q_norm, None if self.k_norm is None else [self.k_norm], q.dtype)
        out, read, _ = kernels.nsa_step(
            q, kv, None, held, counts, self.config, decode.kernel_heads(self), branches=_BRANCHES, shared=True,
            softmax_gate=False, norms=norms, phi=None,
        )  # fmt: skip
        return out, read

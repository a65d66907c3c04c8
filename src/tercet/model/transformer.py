"""The decoder: blocks of attention and SwiGLU between an embedding and a head (Llama's arrangement).

tokens: int64 [B, T]; hidden states: [B, T, dim]; logits: [B, T, vocab].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.attention.checks import check_cu_seqlens, check_max_seqlen
from tercet.attention.layout import Packing
from tercet.model.attention import DenseAttention, NativeSparseAttention, turns_of
from tercet.model.config import AttentionKind, ModelConfig
from tercet.model.ffn import SwiGLU
from tercet.model.loss import Loss, cross_entropy
from tercet.model.rope import Rotary, Turns

__all__ = ["Block", "ModelConfig", "Transformer"]


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). Called as a module, so that it can be wrapped by itself."""

    def __init__(self, config: ModelConfig, kind: AttentionKind) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = _attention(config, kind)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim, config.backend)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: Any = None,
        lengths: Tensor | None = None,
        turns: Turns | None = None,
    ) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, cu_seqlens=cu_seqlens, cache=cache, lengths=lengths, turns=turns)
        return x + self.ffn(self.ffn_norm(x))

    def init_weights(self, std: float, into_residual: float) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            nn.init.ones_(norm.weight)
        self.attention.init_weights(std=std, output_std=into_residual)
        nn.init.normal_(self.ffn.gate_up.weight, std=std)
        nn.init.normal_(self.ffn.down.weight, std=into_residual)


class Transformer(nn.Module):
    """A language model. With targets it gives their loss, without them the logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.attention_kinds)
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        # Tied means that there is no head, not that one parameter has two names: checkpoints, shards and decay
        # groups then need not know of it.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.compiled = False  # whether blocks are: the loss is then, too
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights, narrower where a block writes into the residual stream: 2·layers of them add up there.

        Draws from torch's global generator. What attention starts in a known state (gates, φ) it keeps.
        """
        std = self.config.init_std
        into_residual = std / (2 * self.config.layers) ** 0.5
        nn.init.normal_(self.embedding.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        nn.init.ones_(self.norm.weight)
        for block in self.blocks:
            cast(Block, block).init_weights(std, into_residual)

    def attention_layers(self) -> list[NativeSparseAttention | DenseAttention]:
        """Attention of every block, in order: for statistics and caches."""
        return [cast(Block, block).attention for block in self.blocks]

    def hidden(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: Sequence[Any] | None = None,
        lengths: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Normalised hidden states; `logits` are made of those that are wanted. With a cache, `lengths` [B] says how
        many of each row's tokens are real: the rest is padding on the right. With cu_seqlens, no document is longer
        than `max_seqlen`, all T tokens unless given: one number for a whole run, since compiled blocks are made for it.
        """
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache has {len(cache)} layers, the model {len(self.blocks)}")
        if lengths is not None and cache is None:
            raise ValueError("lengths was given without a cache: packed documents are told by cu_seqlens")
        check_max_seqlen(max_seqlen, cu_seqlens)
        packing = None if cu_seqlens is None else self._packing(tokens, cu_seqlens, max_seqlen)
        x = self.embedding(tokens)
        turns = self._turns(tokens, packing) if cache is None else None
        for i, block in enumerate(self.blocks):
            x = block(x, packing, turns=turns) if cache is None else block(x, packing, cache[i], lengths)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head_weight)

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _packing(self, tokens: Tensor, cu_seqlens: Any, max_seqlen: int | None) -> Any:
        """Where documents stand, worked out once for all layers. What is no tensor is the layers' own business."""
        if not isinstance(cu_seqlens, Tensor):
            return cu_seqlens
        batch, length = tokens.shape
        on_cpu = cu_seqlens.device.type == "cpu"
        check_cu_seqlens(cu_seqlens, batch, length, tokens.device, values=on_cpu, max_seqlen=max_seqlen)
        nsa = self.config.nsa
        packing = Packing(cu_seqlens, length, length // nsa.compress_stride, nsa, max_seqlen)
        if self.compiled:
            # the number of documents is another in every batch: the compiler is told, before it compiles for one
            for bounds in (packing.cu_seqlens, packing.compressed_cu_seqlens):
                torch._dynamo.maybe_mark_dynamic(bounds, 0)
        return packing

    def _turns(self, tokens: Tensor, packing: Any) -> Turns | None:
        """Rotary turns, worked out once for all layers; a rank's share of a sequence has positions of its own."""
        if packing is not None and not isinstance(packing, Packing):
            return None
        sparse = "nsa" in self.config.attention_kinds
        return turns_of(self.rotary, tokens, packing, self.config.nsa if sparse else None)

    @overload
    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = ...,
        targets: None = ...,
        cache: Any = ...,
        max_seqlen: int | None = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None,
        targets: Tensor,
        cache: Any = ...,
        max_seqlen: int | None = ...,
    ) -> Loss: ...

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        cache: Any = None,
        max_seqlen: int | None = None,
    ) -> Tensor | Loss:
        """Logits [B, T, vocab], or the Loss of `targets` [B, T]: the token after each one, -100 where none counts."""
        hidden = self.hidden(tokens, cu_seqlens, cache, max_seqlen=max_seqlen)
        if targets is None:
            return self.logits(hidden)
        return cross_entropy(hidden, self._head_weight, targets, compiled=self.compiled)


def _attention(config: ModelConfig, kind: AttentionKind) -> NativeSparseAttention | DenseAttention:
    build = {"nsa": NativeSparseAttention, "dense": DenseAttention}[kind]
    return build(
        config.dim,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.value_dim,
        config.nsa,
        compression=config.compression,
        gate=config.gate,
        shared_kv=config.shared_kv,
        compress_selected_keys=config.compress_selected_keys,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        qk_norm=config.qk_norm,
        branches=config.branches,
        backend=config.backend,
        bias=config.attention_bias,
        norm_eps=config.norm_eps,
    )

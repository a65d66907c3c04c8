"""The decoder: embedding, blocks of attention and SwiGLU, head (Llama's architecture).

tokens: int64 [B, T]; hidden states: [B, T, dim]; logits: [B, T, vocab].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.attention.checks import check_max_seqlen, make_packing
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing
from tercet.model.attention import Attention, check_lengths_have_cache
from tercet.model.config import ModelConfig
from tercet.model.layers import build_layer
from tercet.model.loss import cross_entropy
from tercet.model.rope import RopeCache, Rotary, rope_cache
from tercet.model.selector import EVERY, sample_queries

__all__ = ["Block", "ModelConfig", "Transformer"]


# Statistics measure how well blocks are chosen on at least this many queries per sequence.
MEASURED_QUERIES = 8


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)) (arXiv 2002.05202); gate and up are one matrix, for one larger matmul.

    backend: "reference" uses PyTorch only, as in attention; otherwise the gradient kernel runs wherever it can.
    """

    def __init__(self, dim: int, ffn_dim: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate_up(x)
        if self.backend != "reference" and torch.is_grad_enabled() and kernels_run_on(y):
            from tercet.model.swiglu import SiluMul

            return self.down(SiluMul.apply(y))
        gate, up = y.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)). The unit of compilation, sharding and activation checkpointing."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = _build_attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim, config.backend)
        # Nothing but a selector learns: gradients pass through the residual stream only, to reach the blocks below.
        self.frozen = False

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | Packing | None = None,
        cache: Any = None,
        lengths: Tensor | None = None,
        rope: RopeCache | None = None,
        sampled: Tensor | None = None,
    ) -> Tensor:
        normed = self.attention_norm(x.detach() if self.frozen else x)
        x = x + self.attention(normed, cu_seqlens=cu_seqlens, cache=cache, lengths=lengths, rope=rope, sampled=sampled)
        return x + self.ffn(self.ffn_norm(x.detach() if self.frozen else x))

    def init_weights(self, std: float, residual_std: float) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            nn.init.ones_(norm.weight)
        self.attention.init_weights(std=std, output_std=residual_std)
        nn.init.normal_(self.ffn.gate_up.weight, std=std)
        nn.init.normal_(self.ffn.down.weight, std=residual_std)


class Transformer(nn.Module):
    """A language model. Returns the loss if called with targets, the logits otherwise."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.rotary = _rotary(config)
        # Tied: no head at all rather than one parameter with two names, so that checkpoints, shards and weight-decay
        # groups need no special case.
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.compiled = False  # whether the blocks are compiled, and with them the loss
        self.selector_every = EVERY
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights; smaller by √(2·layers) in projections whose outputs add up in the residual stream.

        Draws from torch's global generator. Gates and the last layer of φ start at zero.
        """
        if self.embedding.weight.is_meta:  # nothing to initialize
            return
        std = self.config.init_std
        residual_std = std / (2 * self.config.layers) ** 0.5
        nn.init.normal_(self.embedding.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        nn.init.ones_(self.norm.weight)
        for block in self.blocks:
            cast(Block, block).init_weights(std, residual_std)

    def attention_layers(self) -> list[Attention]:
        """The attention layer of every block, in order."""
        return [cast(Block, block).attention for block in self.blocks]

    def hidden(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: Sequence[Any] | None = None,
        lengths: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Normalised hidden states; pass those you need to `logits`.

        lengths     [B], with a cache: how many of each row's tokens are real; the rest is right padding
        max_seqlen  with cu_seqlens: upper bound on document length, T by default. Use one value per run: compiled
                    blocks are specialised to it
        """
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache has {len(cache)} layers, the model {len(self.blocks)}")
        if cache is None:
            check_lengths_have_cache(lengths)
        check_max_seqlen(max_seqlen, cu_seqlens)
        packing = self._packing(tokens, cu_seqlens, max_seqlen)
        x = self.embedding(tokens)
        # Positions are those of a whole sequence. A single token is a decode step, whose kernels compute the angles.
        first = cache is None or (tokens.shape[1] > 1 and all(layer.is_empty for layer in cache))
        rope = self._rope_cache(tokens, packing) if first else None
        sampled = self._sample_queries(tokens, packing) if self.training and cache is None else None
        for i, block in enumerate(self.blocks):
            if cache is None:
                x = block(x, packing, rope=rope, sampled=sampled)
            else:
                x = block(x, packing, cache[i], lengths, rope)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head_weight)

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _packing(self, tokens: Tensor, cu_seqlens: Any, max_seqlen: int | None) -> Any:
        """The Packing of cu_seqlens, shared by all layers. Anything but a tensor is passed through to them."""
        if not isinstance(cu_seqlens, Tensor):
            return cu_seqlens
        nsa = self.config.nsa
        packing = make_packing(cu_seqlens, tokens, nsa, max_seqlen=max_seqlen)
        assert packing is not None
        packings = [packing]
        if self.config.exact_groups:
            packings.append(packing.with_sizes(self.config.spec("nsa").means))
        if nsa.selected_tokens < self.config.dense_below < packing.max_seqlen:
            packings.append(packing.first_tokens(self.config.dense_below)[1])  # once for all layers
        if self.compiled:
            # The document count varies per batch; mark it dynamic before the first compile.
            for documents in packings:
                for bounds in (documents.cu_seqlens, documents.compressed_cu_seqlens):
                    torch._dynamo.maybe_mark_dynamic(bounds, 0)
        return packing

    def _sample_queries(self, tokens: Tensor, packing: Any) -> Tensor | None:
        """Queries sampled in this pass for the loss of learned selectors, or to measure how well blocks are chosen."""
        if self.config.selector == "learned":
            return sample_queries(tokens, self.selector_every)
        # a context-parallel rank does not see all of the sequence
        layers = self.attention_layers() if packing is None or isinstance(packing, Packing) else []
        if not any(layer.stats.enabled for layer in layers):
            return None
        # by length, not by tokens: the sample is then the same however sequences are spread over ranks
        length = tokens.shape[1] if packing is None else packing.max_seqlen
        return sample_queries(tokens, max(1, min(self.selector_every, length // MEASURED_QUERIES)))

    def _rope_cache(self, tokens: Tensor, packing: Any) -> RopeCache | None:
        """cos/sin shared by all layers; None for a context-parallel shard, which has its own positions."""
        if packing is not None and not isinstance(packing, Packing):
            return None
        layers = self.attention_layers()
        gated = any(layer.gate is not None for layer in layers)
        cache = rope_cache(self.rotary, tokens, packing, self.config.nsa if gated else None)
        selectors = (layer.selector for layer in layers)
        rotary = next((selector.rotary for selector in selectors if selector is not None), None)
        if rotary is None:
            return cache
        positions = None if packing is None else packing.position
        return cache._replace(selector=rotary.of_tokens(tokens, positions))

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        cache: Any = None,
        max_seqlen: int | None = None,
    ) -> Any:
        """Logits [B, T, vocab], or the Loss of `targets` [B, T]: the next token at each position, -100 to ignore."""
        hidden = self.hidden(tokens, cu_seqlens, cache, max_seqlen=max_seqlen)
        if targets is None:
            return self.logits(hidden)
        return cross_entropy(hidden, self._head_weight, targets, compiled=self.compiled)


def _build_attention(config: ModelConfig, layer: int) -> Attention:
    spec = config.spec(config.attention_kinds[layer], layer)
    return build_layer(
        spec, config.dim, config.heads, config.kv_heads, config.head_dim, config.value_dim,
        rotary=_rotary(config), qk_norm=config.qk_norm, bias=config.attention_bias, norm_eps=config.norm_eps,
        backend="auto" if spec.dense else config.backend,
        selector_dim=config.selector_dim, selector_rotary=config.selector_rotary,
    )  # fmt: skip


def _rotary(config: ModelConfig) -> Rotary:
    return Rotary(config.head_dim, config.rope_theta, config.rope_scaling, config.rope_max_wavelength, config.rope)

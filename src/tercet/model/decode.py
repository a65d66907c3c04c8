"""One new token for each row through a layer, on the GPU's decode kernels. x: [B, 1, dim] -> [B, 1, dim]"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tercet.attention.dispatch import TRITON_INSTALLED
from tercet.model.cache import DenseCache, NSACache
from tercet.model.compression import Compression

if TYPE_CHECKING:
    from tercet.attention.kernels.decode import CompressionWeights, Heads, Norms
    from tercet.model.attention import DenseAttention, NativeSparseAttention


def why_not(layer: NativeSparseAttention | DenseAttention, x: Tensor, cache: NSACache | DenseCache) -> str | None:
    """Why the decode kernels cannot run x; None if they can."""
    if x.shape[1] != 1:
        return f"the kernels take one new token per row with a cache, and x has {x.shape[1]}"
    if not TRITON_INSTALLED:
        return "Triton is not installed (pip install 'tercet[kernels]')"
    from tercet.attention.kernels import decode

    config = getattr(layer, "config", None)
    reason = decode.unsupported(cache.device, cache.dtype, _heads(layer), config)
    if reason is None and config is not None:
        reason = decode.too_long(max(cache.room, max(cache.host.tokens) + 1), config)
    return reason


def nsa_token(layer: NativeSparseAttention, x: Tensor, cache: NSACache, lengths: Tensor | None) -> Tensor:
    from tercet.attention.kernels import decode

    counts = cache.begin_token(layer.cache_key(), x, lengths)
    held = decode.Held(cache.lengths, cache.turns(), cache.room, **cache.stores())
    q, kv, gates = layer.q_proj(x), layer.kv_proj(x), layer.gate.proj(x)
    out, read, cache.block_indices = decode.nsa_step(
        q, kv, gates, held, counts, layer.config, _heads(layer), branches=layer.branches, shared=layer.shared_kv,
        softmax_gate=layer.gate.kind == "softmax",
        norms=_norms(layer.q_norm, layer.k_norms, q.dtype),
        phi=(phi_weights(layer.compress_k), phi_weights(layer.compress_v)),
    )  # fmt: skip
    cache.read_in_parts(read)
    return layer.o_proj(out)


def dense_token(layer: DenseAttention, x: Tensor, cache: DenseCache, lengths: Tensor | None) -> Tensor:
    from tercet.attention.kernels import decode

    counts = cache.begin_token(layer.cache_key(), x, lengths)
    held = decode.Held(cache.lengths, cache.turns(), cache.room, selected=cache.stores())
    q, kv = layer.q_proj(x), layer.kv_proj(x)
    norms = _norms(layer.q_norm, None if layer.k_norm is None else [layer.k_norm], q.dtype)
    out, read = decode.dense_step(q, kv, held, counts, _heads(layer), norms=norms)
    cache.read_in_parts(read)
    return layer.o_proj(out)


def _heads(layer: NativeSparseAttention | DenseAttention) -> Heads:
    from tercet.attention.kernels.decode import Heads

    return Heads(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim)


def _norms(q: nn.RMSNorm | None, keys: nn.ModuleList | list[nn.RMSNorm] | None, dtype: torch.dtype) -> Norms | None:
    if q is None or keys is None:
        return None
    from tercet.attention.kernels.decode import Norms

    eps = torch.finfo(dtype).eps if q.eps is None else q.eps
    return Norms(q.weight, tuple(norm.weight for norm in keys), eps)  # type: ignore[misc]


def phi_weights(compression: Compression) -> CompressionWeights:
    from tercet.attention.kernels.decode import CompressionWeights

    if compression.kind == "mean":
        return CompressionWeights()
    up, down = compression.up, compression.down
    return CompressionWeights(compression.position, up.weight, up.bias, down.weight, down.bias)

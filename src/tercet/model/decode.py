"""New tokens after a cache, on the GPU: one for each row on the decode kernels, a chunk on those of whole sequences.

x: [B, C, dim]; one token: [B, 1, dim] -> [B, 1, dim]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tercet.attention.functional import NSAInputs, run_nsa
from tercet.attention.hardware import TRITON_INSTALLED, interpreting
from tercet.attention.layout import Span
from tercet.model.cache import DenseCache, NSACache
from tercet.model.cache_rows import HostLengths, Step
from tercet.model.compression import Compression

if TYPE_CHECKING:
    from tercet.attention.kernels.decode import CompressionWeights, Heads, Norms
    from tercet.model.attention import DenseAttention, NativeSparseAttention


def why_not(layer: NativeSparseAttention | DenseAttention, x: Tensor, cache: NSACache | DenseCache) -> str | None:
    """Why the decode kernels cannot run one token of each row; None if they can."""
    if not TRITON_INSTALLED:
        return "Triton is not installed (pip install 'tercet[kernels]')"
    if cache.device.type != "cuda" and not interpreting():
        return f"the cache is on {cache.device} and the kernels need a CUDA device"
    if not all(
        phi.is_plain() for phi in (getattr(layer, "compress_k", None), getattr(layer, "compress_v", None)) if phi
    ):
        return "φ's linear layers do more than their weights say, and the kernels read only these"
    from tercet.attention.kernels import decode

    config = getattr(layer, "config", None)
    reason = decode.unsupported(cache.device, cache.dtype, _heads(layer), config)
    if reason is None and config is not None:
        # the kernels' scratch is for all the room, so it is the room that this step would make which counts
        reason = decode.too_long(cache.room_for(max(cache.host.tokens) + 1), config)
    return reason


def why_not_chunk(layer: NativeSparseAttention, x: Tensor, cache: NSACache, lengths: Tensor | None) -> str | None:
    """Why the kernels of whole sequences cannot run several tokens of each row after those of a cache."""
    cache.check(layer.cache_key(), x)
    if not TRITON_INSTALLED:
        return "Triton is not installed (pip install 'tercet[kernels]')"
    if not cache.compresses:
        return "the window alone is kept, and the kernels want the compressed tokens too"
    if x.device.type != "cuda" and not interpreting():
        return f"x is on {x.device} and the kernels need a CUDA device"
    from tercet.attention import kernels

    batch, width = x.shape[:2]
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else layer.q_proj.weight.dtype

    def like(tokens: int, heads: int, size: int, dtype: torch.dtype = cache.dtype) -> Tensor:
        return torch.empty((), dtype=dtype, device=x.device).expand(batch, tokens, heads, size)

    keys, values = (like(1, layer.kv_heads, size) for size in (layer.head_dim, layer.value_dim))
    q = like(width, layer.heads, layer.head_dim, dtype)
    reason = kernels.unsupported(q, keys, values, keys, values, keys, values, layer.config)
    if reason is not None:
        return reason
    if len(set(cache.known_lengths())) > 1:
        return "the rows hold unequal numbers of tokens, and the kernels want the queries of all rows in one place"
    if lengths is not None and any(n != width for n in lengths.tolist()):
        return "some rows have fewer new tokens than others, and the kernels want the queries of all rows in one place"
    return None


def nsa_chunk(
    layer: NativeSparseAttention, q: Tensor, gates: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor],
    cache: NSACache, step: Step,
) -> tuple[Tensor, tuple[str, str | None]]:  # fmt: skip
    """A chunk whose rows all begin at the same place: a stretch of the sequences that the cache now holds."""
    start, w = step.longest - q.shape[1], layer.config.window
    first = max(0, start - w + 1)
    pairs = {name: (keys[name], values[name]) for name in ("selected", "window")}
    if cache.keeps_all:
        k, v = cache.selected()
        pairs["selected"] = k[:, : step.longest], v[:, : step.longest]
    if step.window_k is not None and step.window_v is not None:
        # of the w-1 places before the chunk those that hold a token
        empty = w - 1 - (start - first)
        pairs["window"] = step.window_k[:, empty:], step.window_v[:, empty:]
    compressed = cache.compressed(step)
    if compressed is None:
        compressed = keys["selected"][:, :0], values["selected"][:, :0]
    out, _, ran = run_nsa(
        NSAInputs(q, *compressed, *pairs["selected"], *pairs["window"], gates), config=layer.config, backend="triton",
        branches=layer.branches, span=Span(start, 0 if cache.keeps_all else start, first),
    )  # fmt: skip
    cache.reads = None
    return out, ran


def nsa_token(layer: NativeSparseAttention, x: Tensor, cache: NSACache, lengths: Tensor | None) -> Tensor:
    from tercet.attention.kernels import decode

    counts = cache.begin_token(layer.cache_key(), x, lengths)
    with _counted(cache):
        arrived = cache.arrived(decode.arrivals(cache.batch, layer.kv_heads))
        held = decode.Held(cache.lengths, cache.turns(), cache.room, **cache.stores(), arrived=arrived)
        q, kv, gates = layer.q_proj(x), layer.whole_sets(layer.kv_proj(x)), layer.gate.proj(x)
        key_norms = None if layer.k_norms is None else layer.per_branch(tuple(layer.k_norms))
        out, read, cache.block_indices = decode.nsa_step(
            q, kv, gates, held, counts, layer.config, _heads(layer), branches=layer.branches, shared=layer.shared_kv,
            softmax_gate=layer.gate.kind == "softmax",
            norms=_norms(layer.q_norm, key_norms, q.dtype),
            phi=(phi_weights(layer.compress_k), phi_weights(layer.compress_v)),
        )  # fmt: skip
    cache.read_in_parts(read)
    return layer.o_proj(out)


def dense_token(layer: DenseAttention, x: Tensor, cache: DenseCache, lengths: Tensor | None) -> Tensor:
    from tercet.attention.kernels import decode

    counts = cache.begin_token(layer.cache_key(), x, lengths)
    with _counted(cache):
        held = decode.Held(cache.lengths, cache.turns(), cache.room, selected=cache.stores())
        q, kv = layer.q_proj(x), layer.kv_proj(x)
        norms = _norms(layer.q_norm, None if layer.k_norm is None else [layer.k_norm], q.dtype)
        out, read = decode.dense_step(q, kv, held, counts, _heads(layer), norms=norms)
    cache.read_in_parts(read)
    return layer.o_proj(out)


@contextmanager
def _counted(cache: NSACache | DenseCache) -> Iterator[None]:
    """The host has counted this token, the device does so in the last launch: where that may not have come about, the
    host knows a bound only."""
    try:
        yield
    except BaseException:
        cache.host = HostLengths(cache.host.tokens, exact=False)
        raise


def _heads(layer: NativeSparseAttention | DenseAttention) -> Heads:
    from tercet.attention.kernels.decode import Heads

    return Heads(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim)


def _norms(q: nn.RMSNorm | None, keys: Iterable[nn.RMSNorm] | None, dtype: torch.dtype) -> Norms | None:
    if q is None or keys is None:
        return None
    from tercet.attention.kernels.decode import Norms

    # nn.RMSNorm without an eps adds that of the type it computes in: float32's for half precision
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if q.eps is None else q.eps
    return Norms(q.weight, tuple(norm.weight for norm in keys), eps)  # type: ignore[misc]


def phi_weights(compression: Compression) -> CompressionWeights:
    from tercet.attention.kernels.decode import CompressionWeights

    if compression.kind == "mean":
        return CompressionWeights()
    up, down = compression.up, compression.down
    return CompressionWeights(compression.position, up.weight, up.bias, down.weight, down.bias)

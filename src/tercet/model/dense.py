"""Full causal attention through PyTorch's own kernels. q: [B, T, H, Dk]; k, v: [B, T, G, D*] -> [B, T, H, Dv]"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention.layout import WHOLE, Packing, Span
from tercet.attention.tiled import Tile, attend, segments


def dense_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
    """With a span, q is a stretch of the sequence, and k and v another that has every token that its queries see."""
    if span is not WHOLE:
        return _masked(q, k, v, packing, span)
    if packing is None:
        return _sdpa(q, k, v)
    if packing.bounds is not None:
        documents = [(first, end) for first, end, _, _ in packing.bounds if end > first]
        return torch.cat([_sdpa(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in documents], dim=1)
    causal = _varlen_causal()
    if causal is not None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] == v.shape[-1]:
        from torch.nn.attention.varlen import varlen_attn

        h = q.shape[2] // k.shape[2]
        keys, values = (x[0].repeat_interleave(h, dim=1) for x in (k, v))
        bounds = packing.cu_seqlens.int()
        # the longest document is not known without a synchronisation; all tokens is a bound, and costs empty blocks
        longest = packing.length
        out = cast(Tensor, varlen_attn(q[0], keys, values, bounds, bounds, longest, longest, **causal))
        return out[None]
    return _masked(q, k, v, packing)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.device.type == "cpu":
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@lru_cache(maxsize=1)
def _varlen_causal() -> dict[str, Any] | None:
    """How this torch's kernel for packed documents is told to be causal: the name of it changed. None without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if "is_causal" in known:
        return {"is_causal": True}
    return {"window_size": (-1, 0)} if "window_size" in known else None


def _masked(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, span: Span = WHOLE) -> Tensor:
    """Documents kept apart by masks, in tiles of queries: any device, any dtype, no synchronisation."""

    def tiles():  # type: ignore[no-untyped-def]
        count = q.shape[1]
        for segment in segments(span.first_query + count, 0, packing, span, count):
            start = max(segment.first, span.first_key)
            for first, end in segment.query_tiles(q.shape[0] * q.shape[2]):
                t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
                mask = segment.keep_apart(s <= t[:, None], (first, end), (start, end))
                yield Tile(segment.queries(first, end), segment.keys(start, end), t, mask)

    with torch.autocast(q.device.type, enabled=False):
        return attend(q, k, v, tiles)

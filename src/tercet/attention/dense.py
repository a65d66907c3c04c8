"""Full causal attention through PyTorch's kernels. q: [B, T, H, Dk]; k, v: [B, T, G, D*] -> [B, T, H, Dv]"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention.dispatch import without_autocast
from tercet.attention.hardware import capability
from tercet.attention.layout import WHOLE, Packing, Span
from tercet.attention.tiling import Tile, segments, tiled_attention

# torch.compile traces `_varlen_options` without its cache, which is fine.
warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")

_HALF = (torch.bfloat16, torch.float16)


def dense_route(q: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> tuple[str, str | None]:
    """What `dense_attention` runs: (name, why not something faster). Plain strings, so that torch.compile can trace it.

    cudnn      cuDNN attention, requested explicitly: the fastest on GPUs that have it
    sdpa       whatever scaled_dot_product_attention picks; the only choice on a CPU
    varlen     PyTorch's FlashAttention-2 for packed documents
    reference  masked tiles in PyTorch: slow on a GPU, used only where no kernel supports the call
    """
    half, equal = q.dtype in _HALF, q.shape[-1] == v.shape[-1]
    if span is not WHOLE:
        if packing is not None:
            return "reference", "PyTorch has no kernel for a query range of packed documents"
        if not q.is_cuda:
            return "reference", f"SDPA for a query range needs a CUDA device: q is on {q.device.type}"
        if not half or not equal:
            found = f"{_name(q.dtype)}, Dk={q.shape[-1]} and Dv={v.shape[-1]}"
            return "reference", f"SDPA needs bf16 or fp16 with Dk = Dv for a query range: here {found}"
        return "sdpa", None
    if packing is not None:
        if packing.bounds is not None:
            return "sdpa", None
        if _varlen_options() is None:
            return "reference", f"torch {torch.__version__} has no varlen_attn for packed documents"
        if not half or not equal:
            found = f"{_name(q.dtype)}, Dk={q.shape[-1]} and Dv={v.shape[-1]}"
            return "reference", f"varlen_attn needs packed documents in bf16 or fp16 with Dk = Dv: here {found}"
        return "varlen", None
    if not q.is_cuda:
        return "sdpa", None
    if torch.are_deterministic_algorithms_enabled():
        return "sdpa", "cuDNN attention is not reproducible, and run.deterministic is on"
    if not half:
        return "sdpa", f"cuDNN attention needs bf16 or fp16: here {_name(q.dtype)}"
    if not equal or q.shape[-1] > 128 or q.shape[-1] % 8:
        found = f"Dk={q.shape[-1]}, Dv={v.shape[-1]}"
        return "sdpa", f"cuDNN attention needs Dk = Dv, a multiple of 8 and at most 128: here {found}"
    if q.shape[1] == 1:
        return "sdpa", None  # cuDNN has no kernel for a single token
    if capability(q.device) < (9, 0):
        return "sdpa", None  # FlashAttention-2 is as fast there
    return "cudnn", None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
    """Full causal attention. With a span, q holds a query range, and k and v at least the tokens it sees."""
    name, _ = dense_route(q, v, packing, span)
    if name == "reference":
        return masked_attention(q, k, v, packing, span)
    if span is not WHOLE:
        # here, since it imports torch._dynamo, a second at every start
        from torch.nn.attention.bias import causal_lower_right

        k, v = (x[:, : span.first_query - span.first_key + q.shape[1]] for x in (k, v))
        with without_autocast(q.device.type):
            return _sdpa(q, k, v, causal_lower_right(q.shape[1], k.shape[1]))
    if name == "varlen":
        assert packing is not None
        return _varlen(q, k, v, packing)
    if packing is not None:
        assert packing.bounds is not None
        documents = [(first, end) for first, end, _, _ in packing.bounds if end > first]
        return torch.cat([_sdpa(q[:, a:b], k[:, a:b], v[:, a:b]) for a, b in documents], dim=1)
    if name == "cudnn":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _sdpa(q, k, v)
    return _sdpa(q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.device.type == "cpu":
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = dict(_varlen_options() or {})
    keys, values = k[0], v[0]
    if k.shape[2] != q.shape[2] and "enable_gqa" not in options:
        # this torch version needs one key head per query head
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=1) for x in (keys, values))
    # the exact longest length would need a synchronisation; a loose bound only costs empty thread blocks
    bounds, longest = packing.cu_seqlens, packing.max_seqlen
    return cast(Tensor, varlen_attn(q[0], keys, values, bounds, bounds, longest, longest, **options))[None]


@lru_cache(maxsize=1)
def _varlen_options() -> dict[str, Any] | None:
    """Options for causal, grouped attention in this torch version's varlen_attn; None if it has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    grouped = {"enable_gqa": True} if "enable_gqa" in known else {}
    if "is_causal" in known:
        return {"is_causal": True, **grouped}
    return {"window_size": (-1, 0), **grouped} if "window_size" in known else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def masked_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
    """Masked tiles: any device, any dtype, no synchronisation."""

    def tiles() -> Iterator[Tile]:
        for segment in segments(q.shape[1], packing, span):
            start = max(segment.first, span.first_key)
            for first, end in segment.query_tiles(q.shape[0] * q.shape[2]):
                t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
                mask = segment.mask_documents(s <= t[:, None], (first, end), (start, end))
                yield Tile(segment.queries(first, end), segment.keys(start, end), t, mask)

    with without_autocast(q.device.type):
        return tiled_attention(q, k, v, tiles)

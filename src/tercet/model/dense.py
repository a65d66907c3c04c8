"""Full causal attention through PyTorch's own kernels. q: [B, T, H, Dk]; k, v: [B, T, G, D*] -> [B, T, H, Dv]"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.attention.layout import WHOLE, Packing, Span
from tercet.attention.reference import Tile, segments, tiled_attention

_HALF = (torch.bfloat16, torch.float16)
_STRETCH = "a stretch of a sequence has no kernel of PyTorch's"


def dense_route(q: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> tuple[str, str | None]:
    """What `dense_attention` runs for these: (name, why not something faster). Plain strings: torch.compile traces it.

    cudnn      cuDNN's attention by name, the fastest there is on the GPUs that have it
    sdpa       scaled_dot_product_attention's own choice; on a CPU there is nothing else
    varlen     PyTorch's FlashAttention-2 for packed documents
    reference  masked tiles, in PyTorch: slow on a GPU, and there only where no kernel takes the call
    """
    if span is not WHOLE:
        return "reference", _STRETCH
    on_gpu, half, equal = q.is_cuda, q.dtype in _HALF, q.shape[-1] == v.shape[-1]
    if packing is not None:
        if packing.bounds is not None:
            return "sdpa", None
        if _varlen_options() is None:
            return "reference", f"torch {torch.__version__} has no varlen_attn for packed documents"
        if not half or not equal:
            found = f"{_name(q.dtype)}, Dk={q.shape[-1]} and Dv={v.shape[-1]}"
            return "reference", f"varlen_attn takes packed documents in bf16 or fp16 with Dk = Dv: here {found}"
        return "varlen", None
    if not on_gpu:
        return "sdpa", None
    if torch.are_deterministic_algorithms_enabled():
        return "sdpa", "cuDNN's attention is not reproducible, and run.deterministic asks for it"
    if not half:
        return "sdpa", f"cuDNN's attention takes bf16 and fp16: here {_name(q.dtype)}"
    if not equal or q.shape[-1] > 128 or q.shape[-1] % 8:
        return "sdpa", f"Dk={q.shape[-1]}, Dv={v.shape[-1]}: cuDNN by name where they are one multiple of 8 up to 128"
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return "sdpa", None  # there FlashAttention-2 is as good
    return "cudnn", None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
    """With a span, q is a stretch of the sequence, and k and v another that has every token that its queries see."""
    name, _ = dense_route(q, v, packing, span)
    if name == "reference":
        return _masked(q, k, v, packing, span)
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.device.type == "cpu":
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options = dict(_varlen_options() or {})
    keys, values = k[0], v[0]
    if k.shape[2] != q.shape[2] and "enable_gqa" not in options:
        # this torch takes as many key heads as query heads: they are written out
        keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=1) for x in (keys, values))
    # how long the longest document is would take a synchronisation: a bound costs empty thread blocks
    bounds, longest = packing.cu_seqlens, packing.max_seqlen
    return cast(Tensor, varlen_attn(q[0], keys, values, bounds, bounds, longest, longest, **options))[None]


@lru_cache(maxsize=1)
def _varlen_options() -> dict[str, Any] | None:
    """How this torch's kernel for packed documents is told to be causal (the name of it changed) and that heads share
    keys, where it can be. None without the kernel."""
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


def _masked(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, span: Span = WHOLE) -> Tensor:
    """Documents kept apart by masks, in tiles of queries: any device, any dtype, no synchronisation."""

    def tiles():  # type: ignore[no-untyped-def]
        count = q.shape[1]
        for segment in segments(span.first_query + count, 0, packing, span, count):
            start = max(segment.first, span.first_key)
            for first, end in segment.query_tiles(q.shape[0] * q.shape[2]):
                t, s = segment.position(first, end, q.device), segment.position(start, end, q.device)
                mask = segment.mask_documents(s <= t[:, None], (first, end), (start, end))
                yield Tile(segment.queries(first, end), segment.keys(start, end), t, mask)

    with torch.autocast(q.device.type, enabled=False):
        return tiled_attention(q, k, v, tiles)

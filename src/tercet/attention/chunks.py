"""Packed documents cut into chunks of d tokens, which compressed tokens are made of: where each row goes, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tercet.attention.spec import NSAConfig


class Rearrangement(NamedTuple):
    """Rows that move, each to one place at most: new = old[there] where is_there, else 0; and the way back."""

    there: Tensor
    is_there: Tensor
    back: Tensor
    is_back: Tensor


def place_chunks(
    cu_seqlens: Tensor,
    compressed_cu_seqlens: Tensor,
    token: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor],
    config: NSAConfig,
) -> tuple[Rearrangement, Rearrangement]:
    """(T tokens -> the tokens of S = T // d chunks, S - l/d + 1 runs of l/d chunks -> Tc compressed tokens).

    `token` and `compressed` are (document, index within it) of each. Chunks begin anew at each document; the tokens
    that a document has over are in none, nor is a run that crosses a boundary a compressed token. On the device.
    """
    stride, device = config.compress_stride, cu_seqlens.device
    (token_document, position), (compressed_document, compressed_index) = token, compressed
    length, last = position.shape[0], cu_seqlens.shape[0] - 2
    # bounds that end before the tokens do are refused by whoever uses them, not here
    token_document = token_document.clamp(max=last)
    bounds = torch.zeros_like(cu_seqlens)
    bounds[1:] = ((cu_seqlens[1:] - cu_seqlens[:-1]) // stride).cumsum(0)
    slot = torch.arange(length // stride, device=device)
    document = torch.searchsorted(bounds, slot.to(bounds.dtype), right=True) - 1
    real = document <= last
    document = document.clamp(max=last)
    index = slot - bounds[document]

    first = (cu_seqlens[document] + index * stride).clamp(max=max(length - stride, 0))
    whole = position // stride < (bounds[1:] - bounds[:-1])[token_document]
    in_chunks = (bounds[token_document] + position // stride) * stride + position % stride
    into_chunks = Rearrangement(
        (first[:, None] + torch.arange(stride, device=device)).flatten(),
        real[:, None].expand(-1, stride).flatten(),
        torch.where(whole, in_chunks, 0),
        whole,
    )

    runs = max(slot.shape[0] - config.compress_block // stride + 1, 0)
    emitted = (compressed_cu_seqlens[1:] - compressed_cu_seqlens[:-1])[document]
    begins = (real & (index < emitted))[:runs]
    first_chunk = bounds[compressed_document.clamp(max=last)] + compressed_index
    into_compressed = Rearrangement(
        first_chunk.clamp(0, max(runs - 1, 0)),
        compressed_document <= last,
        torch.where(begins, (compressed_cu_seqlens[document] + index)[:runs], 0),
        begins,
    )
    return into_chunks, into_compressed

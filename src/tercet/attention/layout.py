"""Where tokens stand when documents are packed into one sequence: everything on the device, nothing synchronised.

T tokens of all documents stand one after another, and so do their Tc compressed tokens (padding may follow).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tercet.attention.buckets import Buckets, fill_buckets
from tercet.attention.chunks import Rearrangement, place_chunks
from tercet.attention.spec import NSAConfig


@dataclass(frozen=True)
class Span:
    """Which part of the whole sequence stands in q, and where the keys at hand begin: token indices of the sequence.

    A rank that holds a part of a long sequence asks for its own queries only, against the keys that it has fetched; new
    tokens after a cache are the last of their sequence. The keys of the selected and of the window branch may begin
    apart: `window_key` is where the window's do, `first_key` unless given.
    """

    first_query: int = 0
    first_key: int = 0
    window_key: int | None = None

    @property
    def first_window_key(self) -> int:
        return self.first_key if self.window_key is None else self.window_key

    @property
    def of_window(self) -> Span:
        """As the window branch alone sees it."""
        return Span(self.first_query, self.first_window_key)


WHOLE = Span()


class Packing:
    """Positions within documents, made once from `cu_seqlens` and shared by all layers of a forward pass.

    All is worked out at once: torch.compile traces the layers that read it, and stumbles over what is made on demand.
    """

    cu_seqlens: Tensor
    """int32 [docs + 1]: the documents' bounds."""
    length: int
    """T"""
    compressed_length: int
    """Tc, padding included."""
    max_seqlen: int
    """No document is longer: what the host knows of their lengths. T unless given."""
    document: Tensor
    """[T] int64: the document each token belongs to."""
    position: Tensor
    """[T] int64: 0 at each document's first token."""
    compressed_cu_seqlens: Tensor
    """[docs + 1]: bounds of the documents' compressed tokens."""
    compressed_document: Tensor
    """[Tc] int64: the document each compressed token belongs to; the number of documents for padding."""
    compressed_index: Tensor
    """[Tc] int64: i, counted within the document."""
    compressed_first_token: Tensor
    """[Tc] int64: the packed index of the first token under each compressed token (padding: clamped)."""
    into_chunks: Rearrangement
    """T tokens -> the tokens of S = T // d chunks of d, which begin anew at each document; what a document has over is
    in none."""
    chunks_into_compressed: Rearrangement
    """S - l/d + 1 runs of l/d chunks, by their first chunk -> Tc compressed tokens."""
    bounds: list[tuple[int, int, int, int]] | None
    """Each document's (first token, end, first compressed token, end), where reading them costs no synchronisation;
    None on a device."""
    over_keys: dict[tuple[tuple[int, int], ...], Tensor]
    """Bounds over stretches of keys, kept for the layers that follow: see stretch.bounds."""

    def __init__(
        self,
        cu_seqlens: Tensor,
        length: int,
        compressed_length: int,
        config: NSAConfig,
        max_seqlen: int | None = None,
    ) -> None:
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()  # as kernels read it
        self.cu_seqlens, self.length, self.compressed_length, self.config = (
            cu_seqlens, length, compressed_length, config,
        )  # fmt: skip
        self.max_seqlen = length if max_seqlen is None else min(max_seqlen, length)
        device, last = cu_seqlens.device, cu_seqlens.shape[0] - 2
        self.compressed_cu_seqlens = config.compressed_cu_seqlens(cu_seqlens)
        self.document = _document(cu_seqlens, length)
        self.position = torch.arange(length, device=device) - cu_seqlens[self.document]
        self.compressed_document = _document(self.compressed_cu_seqlens, compressed_length)
        document = self.compressed_document.clamp(max=last)
        index = torch.arange(compressed_length, device=device)
        self.compressed_index = index - self.compressed_cu_seqlens[document]
        first = cu_seqlens[document] + self.compressed_index * config.compress_stride
        self.compressed_first_token = first.clamp(max=max(length - config.compress_block, 0))
        self.into_chunks, self.chunks_into_compressed = place_chunks(
            cu_seqlens, self.compressed_cu_seqlens, (self.document, self.position),
            (self.compressed_document, self.compressed_index), config,
        )  # fmt: skip
        self.bounds = _read_bounds(cu_seqlens, self.compressed_cu_seqlens)
        self.over_keys = {}

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @cached_property
    def buckets(self) -> Buckets | None:
        """Documents of similar length as rows of batches, where there is more than one and their bounds are known."""
        if self.bounds is None or self.num_documents < 2:
            return None
        return fill_buckets(self.bounds, self.config)


def _read_bounds(cu_seqlens: Tensor, compressed_cu_seqlens: Tensor) -> list[tuple[int, int, int, int]] | None:
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    tokens, compressed = cu_seqlens.tolist(), compressed_cu_seqlens.tolist()
    return list(zip(tokens[:-1], tokens[1:], compressed[:-1], compressed[1:], strict=True))


def _document(cu_seqlens: Tensor, length: int) -> Tensor:
    index = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # right=True skips empty documents: a token belongs to the last document that starts at or before it.
    # All bounds, not the ends alone: inductor (torch 2.11, CUDA) does not compile a search in a slice.
    return torch.searchsorted(cu_seqlens, index, right=True) - 1

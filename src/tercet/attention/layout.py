"""Where tokens stand when documents are packed into one sequence: everything on the device, nothing synchronised.

T tokens of all documents stand one after another, and so do their Tc compressed tokens (padding may follow).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tercet.attention.spec import NSAConfig


@dataclass(frozen=True)
class Span:
    """Which part of the whole sequence stands in q, and where the keys at hand begin: token indices of the sequence.

    A rank that holds a part of a long sequence asks for its own queries only, against the keys that it has fetched.
    """

    first_query: int = 0
    first_key: int = 0


WHOLE = Span()


@dataclass(frozen=True)
class Packing:
    """Positions within documents, made once from `cu_seqlens` and shared by all layers of a forward pass."""

    cu_seqlens: Tensor  # int32 [docs + 1]
    length: int  # T
    compressed_length: int  # Tc, padding included
    config: NSAConfig

    @cached_property
    def compressed_cu_seqlens(self) -> Tensor:
        return self.config.compressed_cu_seqlens(self.cu_seqlens)

    @cached_property
    def document(self) -> Tensor:
        """[T] int64: the document each token belongs to."""
        return _document(self.cu_seqlens, self.length)

    @cached_property
    def position(self) -> Tensor:
        """[T] int64: 0 at each document's first token."""
        return torch.arange(self.length, device=self.cu_seqlens.device) - self.cu_seqlens[self.document]

    @cached_property
    def compressed_document(self) -> Tensor:
        """[Tc] int64: the document each compressed token belongs to; the number of documents for padding."""
        return _document(self.compressed_cu_seqlens, self.compressed_length)

    @cached_property
    def compressed_index(self) -> Tensor:
        """[Tc] int64: i, counted within the document."""
        first = self.compressed_cu_seqlens[self.compressed_document.clamp(max=self.num_documents - 1)]
        return torch.arange(self.compressed_length, device=first.device) - first

    @cached_property
    def compressed_first_token(self) -> Tensor:
        """[Tc] int64: the packed index of the first token under each compressed token (padding: clamped)."""
        document = self.compressed_document.clamp(max=self.num_documents - 1)
        token = self.cu_seqlens[document] + self.compressed_index * self.config.compress_stride
        return token.clamp(max=max(self.length - self.config.compress_block, 0))

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @cached_property
    def bounds(self) -> list[tuple[int, int, int, int]] | None:
        """Each document's (first token, end, first compressed token, end), where reading them costs no
        synchronisation; None on a device."""
        if self.cu_seqlens.device.type != "cpu":
            return None
        tokens, compressed = self.cu_seqlens.tolist(), self.compressed_cu_seqlens.tolist()
        return list(zip(tokens[:-1], tokens[1:], compressed[:-1], compressed[1:], strict=True))


def _document(cu_seqlens: Tensor, length: int) -> Tensor:
    index = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # right=True skips empty documents: a token belongs to the last document that starts at or before it
    return torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True)

"""Packed documents of similar length as the rows of a batch: the way the reference takes on a CPU.

One document after another would be many small matrix products; all documents at once behind masks would be mostly
masked. Rows are padded on the right, where causality already keeps it from every real token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.attention.spec import NSAConfig


@dataclass(frozen=True)
class Bucket:
    """D documents, padded to the longest of them, L tokens."""

    tokens: Tensor  # int64 [D, L]: packed index of each row's tokens
    compressed: Tensor  # int64 [D, num_compressed(L)]
    complete: Tensor  # bool [D, num_compressed(L)]: which compressed tokens the documents really have
    real: Tensor  # int64: which of the D·L tokens are not padding

    def rows(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [D, L, ...]"""
        return x[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)

    def compressed_rows(self, x: Tensor) -> Tensor:
        """[1, Tc, ...] -> [D, num_compressed(L), ...]"""
        if self.compressed.numel() == 0:
            return x.new_zeros(*self.compressed.shape, *x.shape[2:])
        rows = x[0].index_select(0, self.compressed.flatten()).unflatten(0, self.compressed.shape)
        # zeros for what a shorter document lacks: nothing of another document may stand there, masked or not
        return torch.where(self.complete[..., None, None], rows, 0)


@dataclass(frozen=True)
class Buckets:
    buckets: list[Bucket]
    order: Tensor  # int64 [T]: where each token stands once the buckets' real tokens follow one another

    def unpack(self, outs: list[Tensor]) -> Tensor:
        """One [D, L, ...] for each bucket -> [1, T, ...]"""
        real = [out.flatten(0, 1).index_select(0, bucket.real) for out, bucket in zip(outs, self.buckets, strict=True)]
        return torch.cat(real).index_select(0, self.order)[None]


def fill_buckets(bounds: list[tuple[int, int, int, int]], config: NSAConfig) -> Buckets:
    """Documents whose lengths have the same power of two above them share a bucket: at most half of it is padding.

    bounds: each document's (first token, end, first compressed token, end).
    """
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    for document in bounds:
        if document[1] > document[0]:
            by_size.setdefault((document[1] - document[0] - 1).bit_length(), []).append(document)
    buckets = []
    for documents in by_size.values():
        first, end, compressed_first, compressed_end = torch.tensor(documents).T[:, :, None]
        longest = int((end - first).max())
        place = torch.arange(longest)
        compressed_place = torch.arange(config.num_compressed(longest))
        complete = compressed_place < compressed_end - compressed_first
        buckets.append(
            Bucket(
                # padding repeats the document's last token, so that it is as finite as the document is
                tokens=torch.minimum(first + place, end - 1),
                compressed=torch.where(complete, compressed_first + compressed_place, 0),
                complete=complete,
                real=(place < end - first).flatten().nonzero()[:, 0],
            )
        )
    token = torch.cat([bucket.tokens.flatten()[bucket.real] for bucket in buckets])
    order = torch.empty_like(token)
    order[token] = torch.arange(token.numel())
    return Buckets(buckets, order)

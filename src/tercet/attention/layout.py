"""Where tokens stand when documents are packed into one sequence: everything on the device, nothing synchronised.

T tokens of all documents stand one after another, and so do their Tc compressed tokens (padding may follow).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig


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


# ------------------------------------------------------------------------------------------------
# Packed documents of similar length as the rows of a batch: the way the reference takes on a CPU.
#
# One document after another would be many small matrix products; all documents at once behind masks would be mostly
# masked. Rows are padded on the right, where causality already keeps it from every real token.


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


# ------------------------------------------------------------------------------------------------
# Packed documents cut into chunks of d tokens, which compressed tokens are made of: where each row goes, and back.


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


# ------------------------------------------------------------------------------------------------
# A query range: q holds some of a sequence's queries, and the keys may start later than the sequence does.
#
# A kernel counts tokens from its first key. Documents that start earlier are cut there: a window never reaches past its
# keys, while selection blocks are counted from the document's first token, so that token must be present.


def why_no_query_range(span: Span, packing: Packing | None, branches: tuple[str, ...]) -> str | None:
    """Why the kernels cannot take this stretch; None if they can."""
    if "selected" not in branches or span.first_key == 0:
        return None
    if packing is None:
        return f"k_selected begins at token {span.first_key} of the sequence, and blocks are counted from the first"
    if packing.bounds is None:
        return f"whether k_selected begins with a document, at token {span.first_key}, is known on the device only"
    if all(first != span.first_key for first, *_ in packing.bounds):
        return f"k_selected begins at token {span.first_key}, within a document, and blocks are counted from its first"
    return None


def query_offsets(q: Tensor, span: Span, packing: Packing | None) -> list[int]:
    """Tokens of the whole, and the first query's place for the compressed branch, the selected and the window."""
    whole = span.first_query + q.shape[1] if packing is None else packing.length
    return [whole, span.first_query, span.first_query - span.first_key, span.first_query - span.first_window_key]


def key_bounds(k_selected: Tensor, k_window: Tensor, span: Span, packing: Packing | None) -> Tensor | None:
    """int32 [3, documents + 1]: of the whole sequence, over the selected keys and over the window's keys."""
    if packing is None:
        return None
    at_hand = ((0, packing.length), (span.first_key, k_selected.shape[1]), (span.first_window_key, k_window.shape[1]))
    if (kept := packing.over_keys.get(at_hand)) is None:
        cu = packing.cu_seqlens
        kept = torch.stack([(cu - first).clamp(0, count) for first, count in at_hand])
        packing.over_keys[at_hand] = kept
    return kept


# ------------------------------------------------------------------------------------------------
# Where a selection is handed from the stage that makes it to the stages that read it.
#
# Activation checkpointing recomputes the forward pass, and a recomputed selection may differ from the first by a
# near-tie: gradients would then belong to blocks that the forward pass never read. A checkpointing policy marks this
# one operator "must save", in every mode and on every backend, and the recomputation gets the first selection back.


@torch.library.custom_op("tercet::keep_selection", mutates_args=())
def keep_selection(block_indices: torch.Tensor) -> torch.Tensor:
    return block_indices.clone()


@keep_selection.register_fake
def _(block_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(block_indices)

"""Token layout: packed documents, their chunks and buckets, and query ranges within a sequence.

A packed sequence holds T tokens, one document after another, and their Tc compressed tokens likewise (padding may
follow). Everything here is computed on the device without synchronising.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.first_order import first_order


class Packing:
    """Token positions within packed documents, computed once from `cu_seqlens` and shared by all layers of a pass.

    Computed eagerly: torch.compile traces the layers that read it, and does not handle lazy attributes well.
    """

    cu_seqlens: Tensor
    """int32 [docs + 1]: document bounds."""
    length: int
    """T."""
    compressed_length: int
    """Tc, including padding."""
    max_seqlen: int
    """Upper bound on document length known to the host; T by default."""
    document: Tensor
    """int64 [T]: document of each token."""
    position: Tensor
    """int64 [T]: position of each token in its document."""
    compressed_cu_seqlens: Tensor
    """[docs + 1]: bounds of the documents' compressed tokens."""
    compressed_document: Tensor
    """int64 [Tc]: document of each compressed token; the number of documents for padding."""
    compressed_index: Tensor
    """int64 [Tc]: i, counted within the document."""
    compressed_first_token: Tensor
    """int64 [Tc]: packed index of the first token of each compressed token (clamped for padding)."""
    tokens_to_chunks: RowMap
    """T tokens -> tokens of S = T // d chunks of d. Chunks restart at each document; leftover tokens are in none."""
    chunks_to_compressed: RowMap
    """S - l/d + 1 runs of l/d consecutive chunks, by first chunk -> Tc compressed tokens."""
    bounds: list[tuple[int, int, int, int]] | None
    """(first token, end, first compressed token, end) of each document on the host; None if reading would
    synchronise."""
    derived: dict[Any, Any]
    """What layers computed from these documents, shared by all of them."""

    def __init__(
        self,
        cu_seqlens: Tensor,
        length: int,
        compressed_length: int,
        config: NSAConfig,
        max_seqlen: int | None = None,
    ) -> None:
        cu_seqlens = cu_seqlens.to(torch.int32).contiguous()  # as the kernels read it
        self.cu_seqlens, self.length, self.compressed_length = cu_seqlens, length, compressed_length
        self.config = config
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
        self.tokens_to_chunks, self.chunks_to_compressed = _chunk_maps(
            cu_seqlens, self.compressed_cu_seqlens, (self.document, self.position),
            (self.compressed_document, self.compressed_index), config,
        )  # fmt: skip
        self.bounds = _read_bounds(cu_seqlens, self.compressed_cu_seqlens)
        self.derived = {}

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def first_tokens(self, limit: int) -> tuple[RowMap, Packing]:
        """The documents cut to their first `limit` tokens: where these are among the tokens, and their packing.

        On a device, whose lengths the host does not know, T rows are kept; those after the last document are unused.
        """
        if limit not in self.derived:
            self.derived[limit] = self._first_tokens(limit)
        found: tuple[RowMap, Packing] = self.derived[limit]
        return found

    def _first_tokens(self, limit: int) -> tuple[RowMap, Packing]:
        device, last = self.cu_seqlens.device, self.num_documents - 1
        bounds = torch.nn.functional.pad(self.cu_seqlens.diff().clamp(max=limit).cumsum(0), (1, 0))
        bounds = bounds.to(self.cu_seqlens.dtype)
        length = self.length if self.bounds is None else sum(min(end - first, limit) for first, end, *_ in self.bounds)
        row = torch.arange(length, device=device)
        document = _document(bounds, length)
        valid = document <= last
        source = self.cu_seqlens[document.clamp(max=last)] + row - bounds[document]
        inside = self.position < limit
        place = bounds[self.document] + self.position
        rows = RowMap(torch.where(valid, source, 0), valid, torch.where(inside, place, 0), inside)
        return rows, Packing(bounds, length, 0, self.config, min(limit, self.max_seqlen))

    def with_sizes(self, config: NSAConfig) -> Packing:
        """The same documents with compressed tokens of other sizes."""
        if config == self.config:
            return self
        found: Packing | None = self.derived.get(config)
        if found is not None:
            return found
        found = Packing(self.cu_seqlens, self.length, self.length // config.compress_stride, config, self.max_seqlen)
        if self.bounds is not None:  # the host may know them although they are on a device
            counts = [config.num_compressed(end - first) for first, end, *_ in self.bounds]
            ends = [*accumulate(counts, initial=0)]
            found.bounds = [(a, b, *c) for (a, b, *_), c in zip(self.bounds, pairwise(ends), strict=True)]
        self.derived[config] = found
        return found

    @cached_property
    def buckets(self) -> Buckets | None:
        """Documents of similar length as batches; None for a single document or unknown bounds."""
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
    # Search all bounds, not a slice of them: inductor (torch 2.11, CUDA) cannot compile a search in a slice.
    return torch.searchsorted(cu_seqlens, index, right=True) - 1


class RowMap(NamedTuple):
    """Rows that move to at most one place each: new = old[source] where valid, else 0; and the inverse map."""

    source: Tensor
    valid: Tensor
    inverse: Tensor
    inverse_valid: Tensor


def move_rows(x: Tensor, rows: RowMap) -> Tensor:
    """x[rows.source] where valid, else 0; differentiable."""
    result: Tensor = _MoveRows.apply(x, *rows)
    return result


class _MoveRows(torch.autograd.Function):
    """x[source] where valid, else 0. The gradient is a gather too; autograd's own would sort and scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, valid: Tensor, inverse: Tensor, inverse_valid: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, inverse_valid)
        return _gather(x, source, valid)

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(upstream[0], *ctx.saved_tensors), None, None, None, None


def _gather(x: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid.view(-1, *(1,) * (x.dim() - 1)), x[source], 0)


def _chunk_maps(
    cu_seqlens: Tensor,
    compressed_cu_seqlens: Tensor,
    token: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor],
    config: NSAConfig,
) -> tuple[RowMap, RowMap]:
    """`Packing.tokens_to_chunks` and `Packing.chunks_to_compressed`.

    `token` and `compressed` are (document, index within it) of each token and compressed token. A run of chunks that
    crosses a document boundary is not a compressed token.
    """
    stride, device = config.compress_stride, cu_seqlens.device
    (token_document, position), (compressed_document, compressed_index) = token, compressed
    length, last = position.shape[0], cu_seqlens.shape[0] - 2
    # bounds that end before the tokens do are rejected by the caller's checks, not here
    token_document = token_document.clamp(max=last)
    chunk_bounds = torch.zeros_like(cu_seqlens)
    chunk_bounds[1:] = ((cu_seqlens[1:] - cu_seqlens[:-1]) // stride).cumsum(0)
    chunk = torch.arange(length // stride, device=device)
    document = torch.searchsorted(chunk_bounds, chunk.to(chunk_bounds.dtype), right=True) - 1
    real = document <= last
    document = document.clamp(max=last)
    index = chunk - chunk_bounds[document]

    first = (cu_seqlens[document] + index * stride).clamp(max=max(length - stride, 0))
    in_chunk = position // stride < (chunk_bounds[1:] - chunk_bounds[:-1])[token_document]
    row = (chunk_bounds[token_document] + position // stride) * stride + position % stride
    tokens_to_chunks = RowMap(
        (first[:, None] + torch.arange(stride, device=device)).flatten(),
        real[:, None].expand(-1, stride).flatten(),
        torch.where(in_chunk, row, 0),
        in_chunk,
    )

    runs = max(chunk.shape[0] - config.compress_block // stride + 1, 0)
    count = (compressed_cu_seqlens[1:] - compressed_cu_seqlens[:-1])[document]
    is_compressed = (real & (index < count))[:runs]
    first_chunk = chunk_bounds[compressed_document.clamp(max=last)] + compressed_index
    chunks_to_compressed = RowMap(
        first_chunk.clamp(0, max(runs - 1, 0)),
        compressed_document <= last,
        torch.where(is_compressed, (compressed_cu_seqlens[document] + index)[:runs], 0),
        is_compressed,
    )
    return tokens_to_chunks, chunks_to_compressed


# ------------------------------------------------------------ documents as batches, for the reference on a CPU
#
# One document at a time would be many small matrix products; all at once behind masks would be mostly masked. Rows are
# padded on the right, where causal masks already hide the padding from every real token.


@dataclass(frozen=True)
class Bucket:
    """D documents, padded to the longest of them, L tokens."""

    tokens: Tensor  # int64 [D, L]: packed index of each row's tokens
    compressed: Tensor  # int64 [D, num_compressed(L)]
    complete: Tensor  # bool [D, num_compressed(L)]: compressed tokens that exist in the document
    real: Tensor  # int64: which of the D·L tokens are not padding

    def rows(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [D, L, ...]"""
        return x[0].index_select(0, self.tokens.flatten()).unflatten(0, self.tokens.shape)

    def compressed_rows(self, x: Tensor) -> Tensor:
        """[1, Tc, ...] -> [D, num_compressed(L), ...]"""
        if self.compressed.numel() == 0:
            return x.new_zeros(*self.compressed.shape, *x.shape[2:])
        rows = x[0].index_select(0, self.compressed.flatten()).unflatten(0, self.compressed.shape)
        # zeros where a shorter document has none: no value of another document may appear, masked or not
        return torch.where(self.complete[..., None, None], rows, 0)


@dataclass(frozen=True)
class Buckets:
    buckets: list[Bucket]
    order: Tensor  # int64 [T]: row of each token in the concatenation of all buckets' real tokens

    def unpack(self, outs: list[Tensor]) -> Tensor:
        """One [D, L, ...] per bucket -> [1, T, ...]"""
        real = [out.flatten(0, 1).index_select(0, bucket.real) for out, bucket in zip(outs, self.buckets, strict=True)]
        return torch.cat(real).index_select(0, self.order)[None]

    def run(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """A function of tensors [1, T, ...] that takes a batch of documents, bucket by bucket."""
        return self.unpack([function(*map(bucket.rows, tensors)) for bucket in self.buckets])


def document_buckets(packing: Packing | None, span: Span) -> Buckets | None:
    """The documents of a whole packed sequence as batches, on which the reference is fastest; None if it has to run on
    the sequence as it is. torch.compile traces no buckets."""
    return packing.buckets if packing is not None and span is WHOLE and not torch.compiler.is_compiling() else None


def fill_buckets(bounds: list[tuple[int, int, int, int]], config: NSAConfig) -> Buckets:
    """Group documents by length rounded up to a power of two, so at most half of a bucket is padding.

    bounds: (first token, end, first compressed token, end) of each document.
    """
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    for document in bounds:
        if document[1] > document[0]:
            by_size.setdefault((document[1] - document[0] - 1).bit_length(), []).append(document)
    buckets = []
    for documents in by_size.values():
        first, end, compressed_first, compressed_end = torch.tensor(documents).T[:, :, None]
        longest = int((end - first).max())
        position = torch.arange(longest)
        compressed_index = torch.arange(config.num_compressed(longest))
        complete = compressed_index < compressed_end - compressed_first
        buckets.append(
            Bucket(
                # padding repeats the document's last token, so that it is finite wherever the document is
                tokens=torch.minimum(first + position, end - 1),
                compressed=torch.where(complete, compressed_first + compressed_index, 0),
                complete=complete,
                real=(position < end - first).flatten().nonzero()[:, 0],
            )
        )
    token = torch.cat([bucket.tokens.flatten()[bucket.real] for bucket in buckets])
    order = torch.empty_like(token)
    order[token] = torch.arange(token.numel())
    return Buckets(buckets, order)


# ------------------------------------------------------------ query ranges
#
# q may hold only some of a sequence's queries, and the given keys may start later than the sequence does. The kernels
# count tokens from the first key they are given. Documents that start earlier are cut there: a window never reaches
# past its keys, but selection blocks are counted from the document's first token, so that token must be present.


@dataclass(frozen=True)
class Span:
    """A query range: a call that holds only part of a sequence. Indices, in the whole sequence, of q's first token and
    of the first given key.

    Used by context-parallel ranks, which hold part of a long sequence, and by new tokens after a cache. The window
    branch's keys may start elsewhere than the selected branch's, at `window_key` (`first_key` by default).
    """

    first_query: int = 0
    first_key: int = 0
    window_key: int | None = None

    @property
    def first_window_key(self) -> int:
        return self.first_key if self.window_key is None else self.window_key

    @property
    def of_window(self) -> Span:
        """The span for the window branch alone."""
        return Span(self.first_query, self.first_window_key)


WHOLE = Span()


def why_no_query_range(span: Span, packing: Packing | None, branches: tuple[str, ...]) -> str | None:
    """Why the kernels cannot run this query range; None if they can."""
    if "selected" not in branches or span.first_key == 0:
        return None
    if packing is None:
        return f"k_selected begins at token {span.first_key} of the sequence, but blocks are counted from token 0"
    if packing.bounds is None:
        return f"only the device knows whether k_selected, from token {span.first_key}, begins with a document"
    if all(first != span.first_key for first, *_ in packing.bounds):
        return (
            f"k_selected begins at token {span.first_key}, within a document, but blocks are counted from its first "
            "token"
        )
    return None


class KernelLayout(NamedTuple):
    """Where the queries and keys of a call are, as the kernels read it (kernels/ops.py)."""

    cu_seqlens: Tensor | None = None  # [documents + 1], or [3, documents + 1] with a row per branch
    span: Sequence[int] = ()
    compressed_cu_seqlens: Tensor | None = None  # bounds of the compressed tokens, if known
    max_seqlen: int | None = None


def kernel_layout(
    q: Tensor, packing: Packing | None, span: Span, k_selected: Tensor | None = None, k_window: Tensor | None = None
) -> KernelLayout:
    """The KernelLayout of a call that reads these keys; k_window: k_selected by default."""
    offsets: Sequence[int] = ()
    if span is not WHOLE:
        # length of the whole sequence, and the first query's index among compressed, selected and window keys
        whole = span.first_query + q.shape[1] if packing is None else packing.length
        offsets = [whole, span.first_query, span.first_query - span.first_key, span.first_query - span.first_window_key]
    if packing is None:
        return KernelLayout(span=offsets)
    bounds = packing.cu_seqlens
    if span is not WHOLE and k_selected is not None:
        bounds = _key_bounds(k_selected, k_selected if k_window is None else k_window, span, packing)
    return KernelLayout(bounds, offsets, packing.compressed_cu_seqlens, packing.max_seqlen)


def _key_bounds(k_selected: Tensor, k_window: Tensor, span: Span, packing: Packing) -> Tensor:
    """int32 [3, documents + 1]: bounds within the whole sequence, the selected keys and the window keys."""
    ranges = ((0, packing.length), (span.first_key, k_selected.shape[1]), (span.first_window_key, k_window.shape[1]))
    if ranges not in packing.derived:
        packing.derived[ranges] = torch.stack([(packing.cu_seqlens - a).clamp(0, n) for a, n in ranges])
    bounds: Tensor = packing.derived[ranges]
    return bounds


# ------------------------------------------------------------ selection under activation checkpointing
#
# Activation checkpointing recomputes the forward pass, and near-ties could then select other blocks than the first
# pass did: gradients would belong to blocks that the output never read. Checkpointing policies therefore mark this
# operator "must save", in every mode and on every backend.


@torch.library.custom_op("tercet::keep_selection", mutates_args=())
def keep_selection(block_indices: torch.Tensor) -> torch.Tensor:
    """Identity on the selected blocks."""
    return block_indices.clone()


@keep_selection.register_fake
def _(block_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(block_indices)

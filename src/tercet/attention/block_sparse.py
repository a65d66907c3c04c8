"""Block-sparse attention: the selected branch alone, without gates (docs/nsa.md, "Block-sparse mode").

Axes: q [B, T, H, Dk]; k [B, T, G, Dk]; v [B, T, G, Dv]; block keys [B, Tc, G, Dk]. q and k are already rotated.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention import checks, reference
from tercet.attention.config import NSAConfig
from tercet.attention.dense import dense_attention, dense_route, masked_attention
from tercet.attention.dispatch import Route, choose_backend, without_autocast
from tercet.attention.functional import AttentionAux
from tercet.attention.layout import (
    WHOLE,
    Packing,
    RowMap,
    Span,
    document_buckets,
    keep_selection,
    kernel_layout,
    move_rows,
    why_no_query_range,
)
from tercet.attention.selector import check_selector, choose_blocks
from tercet.attention.tiling import compute_dtype


class BlockSparse(NamedTuple):
    """Result of a call. torch.compile traces it, so the route is a plain pair."""

    out: Tensor
    block_indices: Tensor | None  # None if nothing was selected
    branch: str  # what ran: "selected", or "dense" if no query had to choose
    route: tuple[str, str | None]


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: NSAConfig,
    dense_below: int = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
    return_aux: bool = False,
    block_indices: Tensor | None = None,
    validate: bool = False,
    selector: tuple[Tensor, Tensor] | None = None,
) -> Tensor | Any:
    """Causal attention [B, T, H, Dv] in which a query reads select_count blocks of keys, chosen by their means.

    config        block sizes; `window` has no effect, the most recent keys are read as select_local forced blocks
    dense_below   queries at positions below this read every key up to their own. Those below
                  select_count · select_block always do, since all of their blocks are selected
    cu_seqlens    int32 [documents + 1]: bounds of packed documents, B = 1
    max_seqlen    with cu_seqlens: upper bound on document length, T by default; not checked on a GPU
    backend       "auto", "reference" or "triton"; one that cannot run raises an error that says why
    return_aux    return (out, AttentionAux): also the selected blocks and the backend
    block_indices int32 [B, T, G, n]: read these blocks instead of selecting, ascending, padded with -1
    validate      check the values of cu_seqlens, max_seqlen and block_indices on a device too, which synchronises
    selector      (queries, keys), each [B, T, G, size], that score the blocks in place of q and the means
    """
    checks.check_config(config)
    check_dense_below(dense_below)
    checks.check_tensors({"q": q, "k": k, "v": v})
    checks.check_max_seqlen(max_seqlen, cu_seqlens)
    packing = None
    if cu_seqlens is not None:
        packing = checks.make_packing(cu_seqlens, q, config, max_seqlen=max_seqlen, validate=validate)
    if validate and block_indices is not None:
        checks.check_block_order(block_indices)
    found = run_block_sparse(
        q, k, v, config=config, dense_below=dense_below, packing=packing, backend=backend, selector=selector,
        block_indices=block_indices, select=return_aux,
    )  # fmt: skip
    if not return_aux:
        return found.out
    return found.out, AttentionAux(found.block_indices, {found.branch: Route(*found.route)})


def check_dense_below(dense_below: object) -> None:
    if not isinstance(dense_below, int) or isinstance(dense_below, bool) or dense_below < 0:
        raise ValueError(f"dense_below={dense_below!r} must be an integer of at least 0")


def reads_all_below(config: NSAConfig, dense_below: int) -> int:
    """Queries at positions below this read every key up to their own."""
    return max(dense_below, config.selected_tokens)


def run_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: NSAConfig,
    dense_below: int = 0,
    packing: Packing | None = None,
    backend: str = "auto",
    selector: tuple[Tensor, Tensor] | None = None,
    block_keys: Tensor | None = None,
    block_indices: Tensor | None = None,
    span: Span = WHOLE,
    select: bool = False,
) -> BlockSparse:
    """block_sparse_attention in a form that torch.compile traces.

    block_keys  what `pool_keys` returns for the whole sequence, if the caller has it
    span        q and given block_indices hold a query range; k and v hold at least the tokens it reads, block_keys and
                the packing are those of the whole sequence
    select      select blocks even if no query has to choose
    """
    _check(q, k, v, config, packing, block_indices, span)
    beyond = dense_below > config.selected_tokens
    if beyond and span is not WHOLE:
        raise ValueError(
            f"dense_below={dense_below} is more than select_count · select_block = "
            f"{config.selected_tokens}, which a query range does not support: lower it, or pass whole sequences"
        )
    route = _route(q, k, v, config, backend, why_no_query_range(span, packing, ("selected",)))
    longest = packing.max_seqlen if packing is not None else span.first_query + q.shape[1]
    every = longest <= reads_all_below(config, dense_below) and span is WHOLE and block_indices is None
    with without_autocast(q.device.type):
        if block_indices is None and (select or not every):
            if selector is None:
                block_keys = pool_keys(k, config, packing) if block_keys is None else block_keys
                block_indices = _select(q, block_keys, config, packing, span, route[0])
            else:
                check_selector(*selector, q, k)
                own = backend if route[0] == "triton" else "reference"  # "auto": kernels may not take the selector
                block_indices = choose_blocks(*selector, config=config, packing=packing, span=span, backend=own)
        if every:
            if backend != "reference":
                route = dense_route(q, v, packing)
            return BlockSparse(_dense(q, k, v, packing, backend), block_indices, "dense", route)
        assert block_indices is not None
        if not beyond:
            out = _attend(q, k, v, block_indices, config, packing, span, route[0])
        else:
            position = torch.arange(q.shape[1], device=q.device) if packing is None else packing.position
            early = (position < dense_below)[:, None, None]
            # without blocks the output of a query is 0, and it costs nothing
            sparse = _attend(q, k, v, torch.where(early, -1, block_indices), config, packing, span, route[0])
            out = torch.where(early, _dense_rows(q, k, v, packing, dense_below, backend), sparse)
        return BlockSparse(out, block_indices, "selected", route)


def select_by_keys(
    q: Tensor, keys: Tensor, *, config: NSAConfig, packing: Packing | None, backend: str, span: Span
) -> Tensor:
    """block_indices of queries q by the scores of `keys`, one per compressed token of the whole sequence."""
    route = _route(q, keys, keys, config, backend)
    with without_autocast(q.device.type):
        return _select(q, keys, config, packing, span, route[0])


def pool_keys(k: Tensor, config: NSAConfig, packing: Packing | None = None) -> Tensor:
    """Means of the l keys of every compressed token, without a gradient. [B, T, G, D] -> [B, Tc, G, D]"""
    l, d = config.compress_block, config.compress_stride
    k = k.detach()
    if k.shape[1] < l:
        return k.new_zeros(k.shape[0], 0 if packing is None else packing.compressed_length, *k.shape[2:])
    if packing is None:
        chunks = k[:, : k.shape[1] // d * d].unflatten(1, (-1, d))
    else:
        chunks = move_rows(k[0], packing.tokens_to_chunks).unflatten(0, (-1, d))[None]
    sums = chunks.sum(2, dtype=compute_dtype(k))
    places, count = l // d, chunks.shape[1] - l // d + 1
    total = sums[:, :count]
    for place in range(1, places):
        total = total + sums[:, place : place + count]
    means = (total / l).to(k.dtype)
    return means if packing is None else move_rows(means[0], packing.chunks_to_compressed)[None]


def _route(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, backend: str, obstacle: str | None = None
) -> tuple[str, str | None]:
    return choose_backend(backend, {"q": q, "k_selected": k, "v_selected": v}, config, obstacle)


def _check(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, packing: Packing | None, block_indices: Tensor | None,
    span: Span,
) -> None:  # fmt: skip
    checks.check_tensors({"q": q, "k": k, "v": v})
    checks.check_keys(q, k, v, "", q.shape[1] if span is WHOLE else None)
    if span is not WHOLE:
        checks.check_span(q, k, "selected", span, config, packing)
    if block_indices is not None:
        checks.check_block_indices(block_indices, q, k.shape[2], config)


# ------------------------------------------------------------ selection and attention


def _select(q: Tensor, keys: Tensor, config: NSAConfig, packing: Packing | None, span: Span, backend: str) -> Tensor:
    """block_indices by the scores of `keys`: steps 2 to 5 of docs/nsa.md."""
    q, keys = q.detach(), keys.detach()
    if backend == "triton":
        from tercet.attention import kernels

        return kernels.select_by_keys(q, keys, config, kernel_layout(q, packing, span))

    def select(q: Tensor, keys: Tensor, packing: Packing | None = None, span: Span = WHOLE) -> Tensor:
        _, indices, _ = reference.compressed_attention(q, keys, keys[..., :0], config, packing, span=span)
        assert indices is not None
        return indices

    if (buckets := document_buckets(packing, span)) is not None:
        found = [select(bucket.rows(q), bucket.compressed_rows(keys)) for bucket in buckets.buckets]
        return keep_selection(buckets.unpack(found))
    return keep_selection(select(q, keys, packing, span))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, packing: Packing | None, span: Span,
    backend: str,
) -> Tensor:  # fmt: skip
    """The selected branch."""
    if backend == "triton":
        from tercet.attention import kernels

        return kernels.attend_selected(q, k, v, block_indices, config, kernel_layout(q, packing, span, k))
    if (buckets := document_buckets(packing, span)) is not None:
        return buckets.run(partial(reference.selected_attention, config=config), q, k, v, block_indices)
    return reference.selected_attention(q, k, v, block_indices, config, packing, span)


# ------------------------------------------------------------ queries that read every key


def _dense(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, backend: str) -> Tensor:
    return (masked_attention if backend == "reference" else dense_attention)(q, k, v, packing)


def _dense_rows(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, dense_below: int, backend: str) -> Tensor:
    """Dense attention of the queries at positions below dense_below; 0 for the others. [B, T, H, Dv]"""
    if packing is None:
        dense_below = min(dense_below, q.shape[1])
        first = _dense(q[:, :dense_below], k[:, :dense_below], v[:, :dense_below], None, backend)
        return F.pad(first, (0, 0, 0, 0, 0, q.shape[1] - dense_below))
    rows, first_tokens = packing.first_tokens(dense_below)
    own_q, own_k, own_v = (move_rows(x[0], rows)[None] for x in (q, k, v))
    first = _dense(own_q, own_k, own_v, first_tokens, backend)
    back = RowMap(rows.inverse, rows.inverse_valid, rows.source, rows.valid)
    return move_rows(first[0], back)[None]

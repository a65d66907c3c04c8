"""Native Sparse Attention as functions of tensors: the whole operator, and its stages one by one.

Axes: q [B, T, H, Dk]; k_* [B, T, G, Dk]; v_* [B, T, G, Dv]; compressed ones [B, Tc, G, D*]; gates [B, T, H, 3].
q and k come in already rotated: the operator knows no RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention import checks, reference
from tercet.attention.config import BRANCHES, NSAConfig, check_branches
from tercet.attention.dispatch import Route, choose
from tercet.attention.layout import (
    WHOLE,
    Buckets,
    Packing,
    Span,
    keep_selection,
    key_bounds,
    query_offsets,
    why_no_query_range,
)


@dataclass(frozen=True)
class AttentionAux:
    """What a call did besides its output."""

    block_indices: Tensor | None
    """int32 [B, T, G, n]: selected blocks, ascending, padded with -1, counted within each document. None where no
    branch needed a selection; given ones as they were given."""
    routes: dict[str, Route]
    """The backend that each branch really ran on; `routes[branch].reason` says why not a faster one."""


@overload
def nsa_attention(
    q: Tensor, k_compressed: Tensor, v_compressed: Tensor, k_selected: Tensor, v_selected: Tensor,
    k_window: Tensor, v_window: Tensor, gates: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: str = "auto", return_aux: Literal[False] = False,
    branches: tuple[str, ...] = BRANCHES, block_indices: Tensor | None = None, validate: bool = False,
    packing: Packing | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def nsa_attention(
    q: Tensor, k_compressed: Tensor, v_compressed: Tensor, k_selected: Tensor, v_selected: Tensor,
    k_window: Tensor, v_window: Tensor, gates: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: str = "auto", return_aux: Literal[True],
    branches: tuple[str, ...] = BRANCHES, block_indices: Tensor | None = None, validate: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, AttentionAux]: ...  # fmt: skip
def nsa_attention(
    q: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    k_selected: Tensor,
    v_selected: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str = "auto",
    return_aux: bool = False,
    branches: tuple[str, ...] = BRANCHES,
    block_indices: Tensor | None = None,
    validate: bool = False,
    packing: Packing | None = None,
) -> Tensor | tuple[Tensor, AttentionAux]:
    """Native Sparse Attention: out [B, T, H, Dv] = Σ over branches of gate · attention over what the branch sees.

    config        sizes of the three branches
    cu_seqlens    int32 [documents + 1]: packed documents, B = 1; k_compressed and v_compressed hold the documents'
                  compressed tokens one after another (`config.compressed_cu_seqlens`), padding may follow
    max_seqlen    with cu_seqlens: no document is longer. All tokens unless given; a bound near the truth spares the
                  kernels what longer documents would need. On a device the caller's word, as cu_seqlens' numbers are
    backend       "auto", "reference" or "triton"; one that cannot run is an error that says why
    return_aux    also return the selected blocks and what each branch ran on
    branches      leave branches out, for ablations; selection is still made from the compressed probabilities
    block_indices int32 [B, T, G, n]: read these blocks instead of selecting. Each query's ascending, each once, padded
                  with -1 at the end; of blocks after the query's own nothing is read
    validate      check the numbers in cu_seqlens and max_seqlen also on a device, where reading them synchronises, and
                  the order of given block_indices, which the kernels rely on
    packing       the positions that cu_seqlens stands for, when the caller has them already
    """
    checks.check_config(config)
    branches = check_branches(branches)
    if packing is not None and cu_seqlens is not None:
        raise ValueError("packing and cu_seqlens were both given: packing is made of cu_seqlens, give one")
    checks.check_max_seqlen(max_seqlen, cu_seqlens if packing is None else packing)
    if cu_seqlens is not None:
        packing = _pack(cu_seqlens, q, k_compressed, config, validate, max_seqlen)
    if validate and block_indices is not None:
        checks.check_block_order(block_indices)
    out, block_indices, route = run_nsa(
        q, k_compressed, v_compressed, k_selected, v_selected, k_window, v_window, gates,
        config=config, packing=packing, backend=backend, branches=branches, block_indices=block_indices,
    )  # fmt: skip
    if not return_aux:
        return out
    return out, AttentionAux(block_indices, dict.fromkeys(branches, Route(*route)))


def run_nsa(
    q: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    k_selected: Tensor,
    v_selected: Tensor,
    k_window: Tensor,
    v_window: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    packing: Packing | None = None,
    backend: str = "auto",
    branches: tuple[str, ...] = BRANCHES,
    block_indices: Tensor | None = None,
    span: Span = WHOLE,
    select: bool = False,
    output: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None, tuple[str, str | None]]:
    """What nsa_attention does, for callers that torch.compile traces: (out, block_indices, (backend, reason)).

    `select`: choose blocks also where the selected branch is left to a later call, whose keys are still on their way.
    `output`: (weight, bias) of the output projection: out is then the product [B, T, dim] with it, in q's type.
    Compiled, the kernels make what is multiplied again in the backward pass rather than keep it.

    With a span, q, gates and given block_indices are a stretch of the sequence (and so are the results), k_selected and
    k_window others that have every token their branch reads, k_compressed and the packing those of the whole sequence.
    """
    if packing is not None and span is WHOLE:
        checks.check_packing(packing, q, k_compressed, config)
    keys = {"compressed": k_compressed, "selected": k_selected, "window": k_window}
    values = {"compressed": v_compressed, "selected": v_selected, "window": v_window}
    tensors = {"q": q}
    for branch in BRANCHES:
        tensors |= {f"k_{branch}": keys[branch], f"v_{branch}": values[branch]}
    checks.check_tensors(tensors | {"gates": gates})
    length = q.shape[1]
    for branch in BRANCHES:
        tokens: int | None = length
        if branch == "compressed":
            tokens = None if packing is not None else config.num_compressed(length)
        if span is not WHOLE:
            tokens = None
            if branch in branches or branch == "compressed":
                here = span.of_window if branch == "window" else span
                checks.check_span(q, keys[branch], branch, here, config, packing)
        checks.check_keys(q, keys[branch], values[branch], branch, tokens)
    checks.check_same_groups(keys, values)
    checks.check_gates(gates, q)
    if block_indices is not None:
        checks.check_block_indices(block_indices, q, k_selected.shape[2], config)
    route = choose(backend, tensors, config, why_no_query_range(span, packing, branches))
    with torch.autocast(q.device.type, enabled=False):
        if route[0] == "triton":
            from tercet.attention import kernels

            cu_seqlens, offsets = None if packing is None else packing.cu_seqlens, []
            compressed_cu_seqlens = None if packing is None else packing.compressed_cu_seqlens
            if span is not WHOLE:
                cu_seqlens = key_bounds(k_selected, k_window, span, packing)
                offsets = query_offsets(q, span, packing)
            out, block_indices = kernels.nsa(
                q,
                k_compressed,
                v_compressed,
                k_selected,
                v_selected,
                k_window,
                v_window,
                gates,
                config,
                cu_seqlens=cu_seqlens,
                branches=branches,
                block_indices=block_indices,
                span=offsets,
                select=select,
                output=output,
                compressed_cu_seqlens=compressed_cu_seqlens,
                max_seqlen=None if packing is None else packing.max_seqlen,
            )
        else:
            out, block_indices = _reference(tensors, gates, config, packing, branches, block_indices, span, select)
            if output is not None:
                weight, bias = output
                out = F.linear(out.flatten(2), weight.to(out.dtype), None if bias is None else bias.to(out.dtype))
    return out, block_indices, route


def _reference(
    tensors: dict[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    packing: Packing | None,
    branches: tuple[str, ...],
    block_indices: Tensor | None,
    span: Span = WHOLE,
    select: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if packing is not None and span is WHOLE and packing.buckets is not None:
        return _reference_by_buckets(tensors, gates, config, packing.buckets, branches, block_indices, select)
    q = tensors["q"]
    outs: dict[str, Tensor] = {}
    wants_selection = block_indices is None and (select or "selected" in branches)
    if "compressed" in branches or wants_selection:
        out, indices, _ = reference.compressed_attention(
            q,
            tensors["k_compressed"],
            tensors["v_compressed"],
            config,
            packing,
            want_indices=wants_selection,
            span=span,
        )
        if "compressed" in branches:
            outs["compressed"] = out
        if indices is not None:
            block_indices = keep_selection(indices)
    if "selected" in branches:
        assert block_indices is not None
        outs["selected"] = reference.selected_attention(
            q, tensors["k_selected"], tensors["v_selected"], block_indices, config, packing, span
        )
    if "window" in branches:
        outs["window"] = reference.window_attention(
            q, tensors["k_window"], tensors["v_window"], config, packing, span.of_window
        )
    return reference.combine(gates, outs).to(q.dtype), block_indices


def _reference_by_buckets(
    tensors: dict[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    buckets: Buckets,
    branches: tuple[str, ...],
    block_indices: Tensor | None,
    select: bool,
) -> tuple[Tensor, Tensor | None]:
    outs, selections = [], []
    for bucket in buckets.buckets:
        rows = {
            name: bucket.compressed_rows(x) if name.endswith("_compressed") else bucket.rows(x)
            for name, x in tensors.items()
        }
        given = None if block_indices is None else bucket.rows(block_indices)
        out, indices = _reference(rows, bucket.rows(gates), config, None, branches, given, select=select)
        outs.append(out)
        if indices is not None:
            selections.append(indices)
    if block_indices is None and selections:
        block_indices = buckets.unpack(selections)
    return buckets.unpack(outs), block_indices


# ------------------------------------------------------------ stages: on every device these run the reference


def compress_mean(x: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """φ = mean: each block of l tokens, every d tokens, becomes its mean. [B, T, G, D] -> [B, Tc, G, D]

    With cu_seqlens, Tc is T // d: room for the compressed tokens of any documents, zeros where there are fewer.
    """
    checks.check_config(config)
    checks.check_tensors({"x": x})
    packing = None
    if cu_seqlens is not None:
        packing = _pack(cu_seqlens, x, None, config, validate=False)
    return compression_blocks(x, config, packing).mean(2)


def compression_blocks(x: Tensor, config: NSAConfig, packing: Packing | None = None) -> Tensor:
    """The l tokens under each compressed token. [B, T, G, D] -> [B, Tc, l, G, D], zeros in a packing's padding."""
    l, d = config.compress_block, config.compress_stride
    if packing is None:
        if x.shape[1] < l:
            return x.new_zeros(x.shape[0], 0, l, *x.shape[2:])
        return x.unfold(1, l, d).movedim(-1, 2)
    if x.shape[1] < l:
        return x.new_zeros(1, packing.compressed_length, l, *x.shape[2:])
    index = packing.compressed_first_token[:, None] + torch.arange(l, device=x.device)
    real = packing.compressed_document < packing.num_documents
    return torch.where(real[:, None, None, None], x[0, index], 0)[None]


def compressed_attention(
    q: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    return_scores: bool = False,
    packing: Packing | None = None,
    span: Span = WHOLE,
) -> tuple[Tensor, Tensor]:
    """The compressed branch and what it says of the blocks: (out [B, T, H, Dv], block_indices [B, T, G, n]), or with
    return_scores (out, scores [B, T, G, blocks]), the importance of Eq. 10, which takes memory of T²/l'.

    With a span, q is a stretch of the sequence, while k_compressed and v_compressed are those of all of it.
    """
    packing = _stage(q, k_compressed, v_compressed, "compressed", config, cu_seqlens, packing, span)
    with torch.autocast(q.device.type, enabled=False):
        out, indices, scores = reference.compressed_attention(
            q, k_compressed, v_compressed, config, packing,
            want_indices=not return_scores, want_scores=return_scores, span=span,
        )  # fmt: skip
    if return_scores:
        assert scores is not None
        return out, scores
    assert indices is not None
    return out, keep_selection(indices)


def select_blocks(scores: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """Blocks to read in full (Eq. 11) from scores [B, T, G, blocks]: int32 [B, T, G, n], ascending, padded with -1."""
    checks.check_config(config)
    checks.check_tensors({"scores": scores})
    length = scores.shape[1]
    if scores.shape[-1] < config.num_blocks(length) and cu_seqlens is None:
        raise ValueError(
            f"scores has {scores.shape[-1]} blocks: {length} tokens have {config.num_blocks(length)} selection blocks"
        )
    if cu_seqlens is None:
        t = torch.arange(length, device=scores.device)
    else:
        t = _pack(cu_seqlens, scores, None, config, validate=False).position
    return reference.select(scores.transpose(1, 2), t, config).transpose(1, 2)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    packing: Packing | None = None,
    span: Span = WHOLE,
) -> Tensor:
    """The selected branch (Eq. 12) over given blocks [B, T, G, n]; of those after a query's own nothing is read.

    With a span, q is a stretch of the sequence, and k and v another that has every selected token.
    """
    packing = _stage(q, k, v, "selected", config, cu_seqlens, packing, span)
    checks.check_block_indices(block_indices, q, k.shape[2], config)
    with torch.autocast(q.device.type, enabled=False):
        return reference.selected_attention(q, k, v, block_indices, config, packing, span)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    packing: Packing | None = None,
    span: Span = WHOLE,
) -> Tensor:
    """The window branch: the last w tokens, the current one included.

    With a span, q is a stretch of the sequence, and k and v another that has every token of its windows.
    """
    packing = _stage(q, k, v, "window", config, cu_seqlens, packing, span)
    with torch.autocast(q.device.type, enabled=False):
        return reference.window_attention(q, k, v, config, packing, span)


def combine(gates: Tensor, compressed: Tensor, selected: Tensor, window: Tensor) -> Tensor:
    """out = Σ_c g_c · branch_c (Eq. 5). gates [B, T, H, 3]; branches [B, T, H, Dv]."""
    checks.check_tensors({"compressed": compressed, "selected": selected, "window": window, "gates": gates})
    checks.check_gates(gates, compressed)
    for name, branch in (("selected", selected), ("window", window)):
        if branch.shape != compressed.shape:
            raise ValueError(
                f"{name} has shape {checks.shape_of(branch)} and compressed {checks.shape_of(compressed)}: "
                "all branches must have one shape"
            )
    out = reference.combine(gates, {"compressed": compressed, "selected": selected, "window": window})
    return out.to(compressed.dtype)


def _stage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: str,
    config: NSAConfig,
    cu_seqlens: Tensor | None,
    packing: Packing | None,
    span: Span,
) -> Packing | None:
    checks.check_config(config)
    checks.check_tensors({"q": q, f"k_{branch}": k, f"v_{branch}": v})
    packed = cu_seqlens is not None or packing is not None
    tokens: int | None = q.shape[1]
    if branch == "compressed":
        tokens = None if packed else config.num_compressed(q.shape[1])
    if span is not WHOLE:
        tokens = None
        checks.check_span(q, k, branch, span, config, packing)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens was given with a span: give the Packing of the whole sequence instead")
    checks.check_keys(q, k, v, branch, tokens)
    if packing is not None or cu_seqlens is None:
        return packing
    return _pack(cu_seqlens, q, k if branch == "compressed" else None, config, validate=False)


def _pack(
    cu_seqlens: Tensor,
    q: Tensor,
    k_compressed: Tensor | None,
    config: NSAConfig,
    validate: bool,
    max_seqlen: int | None = None,
) -> Packing:
    if not isinstance(q, Tensor) or q.dim() != 4:
        checks.check_tensors({"q": q})
    # on the CPU reading the numbers costs nothing, so they are always checked there
    readable = validate or cu_seqlens.device.type == "cpu"
    checks.check_cu_seqlens(cu_seqlens, q.shape[0], q.shape[1], q.device, values=readable, max_seqlen=max_seqlen)
    if k_compressed is None:
        return Packing(cu_seqlens, q.shape[1], q.shape[1] // config.compress_stride, config)
    if readable:
        checks.check_packed_compressed(k_compressed, cu_seqlens, config)
    return Packing(cu_seqlens, q.shape[1], k_compressed.shape[1], config, max_seqlen)

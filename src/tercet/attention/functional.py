"""Native Sparse Attention as a function of tensors. Its stages one by one: stages.py.

Axes: q [B, T, H, Dk]; k_* [B, T, G, Dk]; v_* [B, T, G, Dv]; compressed ones [B, Tc, G, D*]; gates [B, T, H, 3].
q and k are already rotated: the operator does not apply RoPE.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from tercet.attention import checks, reference
from tercet.attention.config import BRANCHES, NSAConfig, check_branches
from tercet.attention.dispatch import Route, call_key, choose_backend, without_autocast
from tercet.attention.layout import (
    WHOLE,
    Buckets,
    Packing,
    Span,
    document_buckets,
    keep_selection,
    kernel_layout,
    why_no_query_range,
)
from tercet.attention.selector import check_selector, choose_blocks


@dataclass(frozen=True)
class AttentionAux:
    """Details of a call: the selected blocks and the backends."""

    block_indices: Tensor | None
    """int32 [B, T, G, n]: selected blocks, ascending, padded with -1, counted within each document; the given ones if
    given. None if no branch needed a selection."""
    routes: dict[str, Route]
    """The backend that each branch ran on; `routes[branch].reason` says why no faster one ran."""


class NSAInputs(NamedTuple):
    """Tensors of one call, in the order of nsa_attention's arguments. Compressed ones are None in a call that does not
    read them: without the compressed branch, and with blocks given or chosen by a selector."""

    q: Tensor
    k_compressed: Tensor | None
    v_compressed: Tensor | None
    k_selected: Tensor
    v_selected: Tensor
    k_window: Tensor
    v_window: Tensor
    gates: Tensor


def nsa_attention(
    q: Tensor,
    k_compressed: Tensor | None,
    v_compressed: Tensor | None,
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
    selector: tuple[Tensor, Tensor] | None = None,
) -> Tensor | Any:
    """Native Sparse Attention: out [B, T, H, Dv] = Σ over branches of gate · attention over the keys the branch sees.

    config        sizes of the three branches
    cu_seqlens    int32 [documents + 1]: bounds of packed documents, B = 1; k_compressed and v_compressed hold the
                  documents' compressed tokens one after another (`config.compressed_cu_seqlens`), padding may follow
    max_seqlen    with cu_seqlens: upper bound on document length, T by default. A tight bound saves the kernels work;
                  on a GPU it is not checked, nor are the values of cu_seqlens
    backend       "auto", "reference" or "triton"; one that cannot run raises an error that says why
    return_aux    return (out, AttentionAux): also the selected blocks and the backend of each branch
    branches      omit branches for ablations; blocks are still selected from the compressed probabilities. If a
                  selector or block_indices choose instead, k_compressed and v_compressed may be None
    block_indices int32 [B, T, G, n]: read these blocks instead of selecting; per query ascending, each once, padded
                  with -1 at the end; blocks after the query's own are not read
    validate      check the values of cu_seqlens and max_seqlen on a device too (synchronises), and the order of given
                  block_indices, which the kernels rely on
    packing       the Packing of cu_seqlens, if the caller already has it
    selector      (queries, keys), each [B, T, G, size] of any size: they score the blocks in place of q and
                  k_compressed, by the sum of their weights; no gradient flows through them
    """
    checks.check_config(config)
    branches = check_branches(branches)
    if packing is not None and cu_seqlens is not None:
        raise ValueError("packing and cu_seqlens were both given: packing is built from cu_seqlens, pass one")
    checks.check_max_seqlen(max_seqlen, cu_seqlens if packing is None else packing)
    if cu_seqlens is not None:
        packing = checks.pack_documents(cu_seqlens, q, k_compressed, config, max_seqlen, validate=validate)
    if validate and block_indices is not None:
        checks.check_block_order(block_indices)
    inputs = NSAInputs(q, k_compressed, v_compressed, k_selected, v_selected, k_window, v_window, gates)
    out, block_indices, route = run_nsa(
        inputs, config=config, packing=packing, backend=backend, branches=branches, block_indices=block_indices,
        selector=selector,
    )  # fmt: skip
    if not return_aux:
        return out
    return out, AttentionAux(block_indices, dict.fromkeys(branches, Route(*route)))


def run_nsa(
    inputs: NSAInputs,
    *,
    config: NSAConfig,
    packing: Packing | None = None,
    backend: str = "auto",
    branches: tuple[str, ...] = BRANCHES,
    block_indices: Tensor | None = None,
    span: Span = WHOLE,
    select: bool = False,
    output: tuple[Tensor, Tensor | None] | None = None,
    selector: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, tuple[str, str | None]]:
    """nsa_attention in a form that torch.compile traces; returns (out, block_indices, (backend, reason)).

    span    q, gates and given block_indices hold a query range; k_selected and k_window hold at least the tokens their
            branch reads; k_compressed and the packing are those of the whole sequence
    select  select blocks even if `branches` omits the selected branch, for a later call that runs it
    output  (weight, bias) of the output projection: out is then the projected [B, T, dim], in q's dtype. Compiled, the
            kernels recompute the gated sum in the backward pass instead of saving it
    """
    plain = packing is None and span is WHOLE
    given = (*inputs, block_indices, *(selector or ()))
    key = call_key(given, config, branches, backend, select) if plain else None
    route = None if key is None else _checked.get(key)
    chooses = block_indices is None and (select or "selected" in branches)
    if route is None:
        by_compressed = chooses and selector is None
        _check_inputs(inputs, config, packing, branches, span, compressed="compressed" in branches or by_compressed)
        if block_indices is not None:
            checks.check_block_indices(block_indices, inputs.q, inputs.k_selected.shape[2], config)
        if selector is not None:
            check_selector(*selector, inputs.q, inputs.k_selected)
        route = choose_backend(backend, _without_gates(inputs), config, why_no_query_range(span, packing, branches))
        if key is not None:
            if len(_checked) >= _MOST_CHECKED:
                _checked.clear()
            _checked[key] = route
    if selector is not None and chooses:
        own = backend if route[0] == "triton" else "reference"  # "auto": kernels may not take the selector
        block_indices = choose_blocks(*selector, config=config, packing=packing, span=span, backend=own)
    with without_autocast(inputs.q.device.type):
        if route[0] == "triton":
            from tercet.attention import kernels

            layout = kernel_layout(inputs.q, packing, span, inputs.k_selected, inputs.k_window)
            out, block_indices = kernels.nsa(*inputs, config, layout, branches, block_indices, select, output)
        else:
            out, block_indices = _run_reference(inputs, config, packing, branches, block_indices, span, select)
            if output is not None:
                weight, bias = output
                out = F.linear(out.flatten(2), weight.to(out.dtype), None if bias is None else bias.to(out.dtype))
    return out, block_indices, route


def run_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    config: NSAConfig,
    packing: Packing | None = None,
    backend: str = "auto",
    span: Span = WHOLE,
) -> tuple[Tensor, tuple[str, str | None]]:
    """The window branch alone, without a gate, as a whole layer needs it: (out, (backend, reason)). See run_nsa."""
    checks.check_tensors({"q": q, "k_window": k, "v_window": v})
    if span is not WHOLE:
        checks.check_span(q, k, "window", span, config, packing)
    checks.check_keys(q, k, v, "window", q.shape[1] if span is WHOLE else None)
    route = choose_backend(backend, {"q": q, "k_selected": k, "v_selected": v}, config)
    with without_autocast(q.device.type):
        if route[0] == "triton":
            from tercet.attention import kernels

            return kernels.attend_window(q, k, v, config, kernel_layout(q, packing, span, k)), route
        if (buckets := document_buckets(packing, span)) is not None:
            return buckets.run(partial(reference.window_attention, config=config), q, k, v), route
        return reference.window_attention(q, k, v, config, packing, span), route


# Plain calls on a GPU that passed the checks, and their (backend, reason). The checks take a quarter of the
# host time of a short call.
_checked: dict[Hashable, tuple[str, str | None]] = {}
_MOST_CHECKED = 256


def _without_gates(inputs: NSAInputs) -> dict[str, Tensor | None]:
    return dict(zip(NSAInputs._fields[:-1], inputs[:-1], strict=True))


def _check_inputs(
    inputs: NSAInputs,
    config: NSAConfig,
    packing: Packing | None,
    branches: tuple[str, ...],
    span: Span,
    *,
    compressed: bool,
) -> None:
    """compressed: the call reads compressed tokens, so that they must be given."""
    q = inputs.q
    if packing is not None and span is WHOLE:
        checks.check_packing(packing, q, inputs.k_compressed, config)
    optional = () if compressed else ("k_compressed", "v_compressed")
    tensors: dict[str, Any] = {n: x for n, x in _without_gates(inputs).items() if x is not None or n not in optional}
    checks.check_tensors(tensors | {"gates": inputs.gates})
    given = [branch for branch in BRANCHES if f"k_{branch}" in tensors]
    keys = {branch: tensors[f"k_{branch}"] for branch in given}
    values = {branch: tensors[f"v_{branch}"] for branch in given}
    for branch in given:
        tokens: int | None = q.shape[1]
        if branch == "compressed":
            tokens = None if packing is not None else config.num_compressed(q.shape[1])
        if span is not WHOLE:
            tokens = None
            if branch in branches or branch == "compressed":
                here = span.of_window if branch == "window" else span
                checks.check_span(q, keys[branch], branch, here, config, packing)
        checks.check_keys(q, keys[branch], values[branch], branch, tokens)
    checks.check_same_groups(keys, values)
    checks.check_gates(inputs.gates, q)


def _run_reference(
    inputs: NSAInputs,
    config: NSAConfig,
    packing: Packing | None,
    branches: tuple[str, ...],
    block_indices: Tensor | None,
    span: Span,
    select: bool,
) -> tuple[Tensor, Tensor | None]:
    if (buckets := document_buckets(packing, span)) is not None:
        return _run_reference_by_buckets(inputs, config, buckets, branches, block_indices, select)
    q = inputs.q
    outs: dict[str, Tensor] = {}
    want_indices = block_indices is None and (select or "selected" in branches)
    if "compressed" in branches or want_indices:
        assert inputs.k_compressed is not None
        assert inputs.v_compressed is not None
        out, indices, _ = reference.compressed_attention(
            q, inputs.k_compressed, inputs.v_compressed, config, packing, want_indices=want_indices, span=span
        )
        if "compressed" in branches:
            outs["compressed"] = out
        if indices is not None:
            block_indices = keep_selection(indices)
    if "selected" in branches:
        assert block_indices is not None
        outs["selected"] = reference.selected_attention(
            q, inputs.k_selected, inputs.v_selected, block_indices, config, packing, span
        )
    if "window" in branches:
        outs["window"] = reference.window_attention(
            q, inputs.k_window, inputs.v_window, config, packing, span.of_window
        )
    return reference.combine(inputs.gates, outs).to(q.dtype), block_indices


def _run_reference_by_buckets(
    inputs: NSAInputs,
    config: NSAConfig,
    buckets: Buckets,
    branches: tuple[str, ...],
    block_indices: Tensor | None,
    select: bool,
) -> tuple[Tensor, Tensor | None]:
    outs, selections = [], []
    for bucket in buckets.buckets:
        kc, vc = inputs.k_compressed, inputs.v_compressed
        rows = NSAInputs(
            bucket.rows(inputs.q),
            None if kc is None else bucket.compressed_rows(kc),
            None if vc is None else bucket.compressed_rows(vc),
            *(bucket.rows(x) for x in inputs[3:]),
        )
        given = None if block_indices is None else bucket.rows(block_indices)
        out, indices = _run_reference(rows, config, None, branches, given, WHOLE, select)
        outs.append(out)
        if indices is not None:
            selections.append(indices)
    if block_indices is None and selections:
        block_indices = buckets.unpack(selections)
    return buckets.unpack(outs), block_indices

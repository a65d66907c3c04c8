"""Attention of every form as a function of tensors. Its stages one by one: stages.py.

Axes: q [B, T, H, Dk]; k_* [B, T, G, Dk]; v_* [B, T, G, Dv]; compressed ones [B, Tc, G, D*]; gates [B, T, H, 3].
q and k are already rotated: the operator does not apply RoPE.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention import checks, reference
from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.dense import dense_attention, dense_route, masked_attention
from tercet.attention.dispatch import Route, choose_backend, without_autocast
from tercet.attention.layout import (
    WHOLE,
    Buckets,
    Packing,
    RowMap,
    Span,
    document_buckets,
    keep_selection,
    kernel_layout,
    move_rows,
    why_no_query_range,
)
from tercet.attention.selector import (
    Ranges,
    TokenScorer,
    check_channels,
    check_selector,
    choose_blocks,
    own_scorer,
    pool_keys,
    select_by_keys,
)
from tercet.attention.spec import SCORERS, AttentionSpec, block_sparse, check_exact_groups


@dataclass(frozen=True)
class AttentionAux:
    """Details of a call: the selected blocks and the backends."""

    block_indices: Tensor | None
    """int32 [B, T, G, n]: selected blocks, ascending, padded with -1, counted within each document; the given ones if
    given. None if no branch needed a selection."""
    routes: dict[str, Route]
    """The backend that each branch ran on; `routes[branch].reason` says why no faster one ran."""


class AttentionInputs(NamedTuple):
    """Tensors of one call. Those that it does not read may be None."""

    q: Tensor
    k_compressed: Tensor | None = None  # where blocks are chosen by means of keys: the means, if the caller has them
    v_compressed: Tensor | None = None
    k_selected: Tensor | None = None  # dense attention: all keys
    v_selected: Tensor | None = None
    k_window: Tensor | None = None
    v_window: Tensor | None = None
    gates: Tensor | None = None

    @classmethod
    def of_branches(
        cls,
        q: Tensor,
        compressed: tuple[Tensor | None, Tensor | None],
        keys: Mapping[str, Tensor | None],
        values: Mapping[str, Tensor | None],
        gates: Tensor | None,
    ) -> Self:
        selected, window = ((keys.get(branch), values.get(branch)) for branch in ("selected", "window"))
        return cls(q, *compressed, *selected, *window, gates)

    def pair(self, branch: str) -> tuple[Tensor, Tensor]:
        """Keys and values of a branch that the call reads."""
        k, v = (getattr(self, f"{kind}_{branch}") for kind in "kv")
        assert k is not None
        assert v is not None
        return k, v

    def map(self, change: Any) -> Self:
        return self._replace(**{name: change(x) for name, x in self._asdict().items() if x is not None})


class Attended(NamedTuple):
    """Result of a call. torch.compile traces it, so the route is a plain pair."""

    out: Tensor
    block_indices: Tensor | None  # None if nothing was selected
    branches: tuple[str, ...]  # what ran: the spec's branches, or dense if no query had to choose
    route: tuple[str, str | None]  # (backend, why no faster one)


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
    selector      (queries, keys), each [B, T, G, size] of any size: they score the blocks in place of q and
                  k_compressed, by the sum of their weights; no gradient flows through them
    """
    checks.check_config(config)
    spec = AttentionSpec(config, branches, scorer="compressed" if selector is None else "learned")
    packing = checks.make_packing(cu_seqlens, q, config, max_seqlen, compressed=k_compressed, validate=validate)
    if validate and block_indices is not None:
        checks.check_block_order(block_indices)
    inputs = AttentionInputs(q, k_compressed, v_compressed, k_selected, v_selected, k_window, v_window, gates)
    scorer = None if selector is None else TokenScorer(*selector)
    found = attend(inputs, spec, packing=packing, backend=backend, block_indices=block_indices, scorer=scorer)
    return _with_aux(found) if return_aux else found.out


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
    scorer: str = "compressed",
    score_channels: Tensor | Ranges | None = None,
    exact_groups: tuple[int, ...] | None = None,
) -> Tensor | Any:
    """Causal attention [B, T, H, Dv] in which a query reads select_count blocks of keys.

    config        block sizes; `window` has no effect, the most recent keys are read as select_local forced blocks
    dense_below   queries at positions below this read every key up to their own. Those below
                  select_count · select_block always do, since all of their blocks are selected
    cu_seqlens    int32 [documents + 1]: bounds of packed documents, B = 1
    max_seqlen    with cu_seqlens: upper bound on document length, T by default; not checked on a GPU
    backend       "auto", "reference" or "triton"; one that cannot run raises an error that says why
    return_aux    return (out, AttentionAux): also the selected blocks and the backend
    block_indices int32 [B, T, G, n]: read these blocks instead of selecting, ascending, padded with -1
    validate      check the values of cu_seqlens, max_seqlen and block_indices on a device too, which synchronises
    scorer        what scores the blocks: "compressed", by the means of their keys, or "own", by the largest product of
                  a query head of the group with a key of the block
    score_channels  int64 [c] or [G, c]: the channels of q and k that "own" reads, or ranges ((first, end), …) of them;
                    None for all
    exact_groups  the KV heads that "own" chooses for; the others choose by the means of their blocks. None: all
    selector      (queries, keys), each [B, T, G, size], that score the blocks in place of q and the means
    """
    checks.check_config(config)
    kind = _scorer_kind(scorer, score_channels, selector)
    spec = block_sparse(config, kind, dense_below, exact_groups)
    checks.check_tensors({"q": q, "k": k, "v": v})
    if spec.by_branch:
        if score_channels is not None:
            check_channels(score_channels, k.shape[2], k.shape[3])
        check_exact_groups(exact_groups, kind, k.shape[2])
    checks.check_keys(q, k, v, "", q.shape[1])
    packing = checks.make_packing(cu_seqlens, q, config, max_seqlen, validate=validate)
    if validate and block_indices is not None:
        checks.check_block_order(block_indices)
    chooser = own_scorer(q, k, score_channels, spec) if spec.by_branch else None
    chooser = TokenScorer(*selector) if selector is not None else chooser
    found = attend(
        AttentionInputs(q, k_selected=k, v_selected=v), spec, packing=packing, backend=backend, scorer=chooser,
        block_indices=block_indices, select=return_aux,
    )  # fmt: skip
    return _with_aux(found) if return_aux else found.out


def _with_aux(found: Attended) -> tuple[Tensor, AttentionAux]:
    return found.out, AttentionAux(found.block_indices, dict.fromkeys(found.branches, Route(*found.route)))


def _scorer_kind(scorer: str, channels: Tensor | Ranges | None, selector: tuple[Tensor, Tensor] | None) -> str:
    known = [name for name, each in SCORERS.items() if each.reads != "projections"]
    if scorer not in known:
        raise ValueError(f"scorer={scorer!r} is unknown: pick one of {', '.join(known)}, or give a selector")
    by_branch = SCORERS[scorer].reads == "branch"
    if by_branch and selector is not None:
        raise ValueError(f'scorer="{scorer}" and selector were both given: pass one')
    if not by_branch and channels is not None:
        raise ValueError(f'score_channels was given, but scorer={scorer!r} does not read them: use scorer="own"')
    return scorer if selector is None else "learned"


# ------------------------------------------------------------ one operator


def attend(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    *,
    packing: Packing | None = None,
    backend: str = "auto",
    scorer: TokenScorer | None = None,
    block_indices: Tensor | None = None,
    span: Span = WHOLE,
    select: bool = False,
    output: tuple[Tensor, Tensor | None] | None = None,
) -> Attended:
    """Attention of any form, as torch.compile traces it.

    scorer  what scores the blocks, if single tokens do
    span    q, gates and given block_indices hold a query range; k_selected and k_window hold at least the tokens their
            branch reads; k_compressed and the packing are those of the whole sequence
    select  select blocks even if no branch reads them here, or no query has to choose
    output  (weight, bias) of the output projection: out is then the projected [B, T, dim], in q's dtype. Compiled, the
            kernels recompute the gated sum in the backward pass instead of saving it
    """
    q, config = inputs.q, spec.blocks
    if spec.dense:
        k, v = inputs.pair("selected")
        return Attended(dense_attention(q, k, v, packing, span), None, spec.branches, dense_route(q, v, packing, span))
    beyond = spec.dense_below > config.selected_tokens and (packing is not None or span.first_query < spec.dense_below)
    if beyond and packing is not None and span is not WHOLE:
        raise ValueError(
            f"dense_below={spec.dense_below} is more than select_count · select_block = {config.selected_tokens}, "
            "which a query range of packed documents does not support: lower it, or pass whole sequences"
        )
    every = _every_query_reads_all(inputs, spec, packing, span) and block_indices is None
    chooses = block_indices is None and (select or (spec.selects and not every))
    given, route = _check(inputs, spec, packing, span, backend, chooses and scorer is None and spec.gated)
    if block_indices is not None:
        checks.check_block_indices(block_indices, q, given["k_selected"].shape[2], config)
    with without_autocast(q.device.type):
        options: Any = {"config": config, "packing": packing, "span": span}
        options["backend"] = backend if route[0] == "triton" else "reference"  # "auto": kernels may not take the scorer
        if chooses and scorer is not None:
            check_selector(scorer, q, given["k_selected"])
            block_indices = choose_blocks(scorer, **options)
        elif chooses and not spec.gated:
            keys = inputs.k_compressed
            keys = pool_keys(given["k_selected"], config, packing) if keys is None else keys
            block_indices = select_by_keys(q, keys, **options)
        if every:
            k, v = given["k_selected"], given["v_selected"]
            route = route if backend == "reference" else dense_route(q, v, packing, span)
            return Attended(_dense(q, k, v, packing, span, backend), block_indices, ("dense",), route)
        if not beyond:
            out, block_indices = _run(inputs, spec, packing, span, block_indices, select, output, route[0])
            return Attended(out, block_indices, spec.branches, route)
        assert block_indices is not None
        first, end = span.first_query, span.first_query + q.shape[1]
        position = torch.arange(first, end, device=q.device) if packing is None else packing.position
        early = (position < spec.dense_below)[:, None, None]
        # without blocks the output of a query is 0, and it costs nothing
        later = torch.where(early, -1, block_indices)
        sparse, _ = _run(inputs, spec, packing, span, later, False, None, route[0])
        k, v = given["k_selected"], given["v_selected"]
        out = torch.where(early, _dense_rows(q, k, v, packing, span, spec.dense_below, backend), sparse)
        return Attended(out, block_indices, spec.branches, route)


def _every_query_reads_all(inputs: AttentionInputs, spec: AttentionSpec, packing: Packing | None, span: Span) -> bool:
    """Whether block-sparse attention is dense here: no query has more blocks than it selects."""
    if spec.gated or not spec.selects or (packing is not None and span is not WHOLE):
        return False
    longest = span.first_query + inputs.q.shape[1] if packing is None else packing.max_seqlen
    return longest <= spec.reads_all_below


# Layouts of plain calls on a GPU that passed the checks: the names of their tensors, and the route. Checking each call
# again took a sixth of the host time of short ones.
_passed: dict[Hashable, tuple[list[str], tuple[str, str | None]]] = {}
_MOST_PASSED = 256


def _check(
    inputs: AttentionInputs, spec: AttentionSpec, packing: Packing | None, span: Span, backend: str, compressed: bool
) -> tuple[dict[str, Tensor], tuple[str, str | None]]:
    """Check shapes, and return q, keys and values by name, and (backend, why no faster one). compressed: blocks are
    chosen by compressed tokens, which must be given, as for their branch."""
    layout: Hashable = None
    q = inputs.q
    if packing is None and span is WHOLE and not torch.compiler.is_compiling() and isinstance(q, Tensor) and q.is_cuda:
        parts = ((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x) for x in inputs)
        layout = (backend, compressed, spec.blocks, spec.branches, spec.gated, *parts)
        if (known := _passed.get(layout)) is not None:
            return {name: getattr(inputs, name) for name in known[0]}, known[1]
    tensors = _check_shapes(inputs, spec, packing, span, compressed=compressed)
    route = choose_backend(backend, tensors, spec.blocks, why_no_query_range(span, packing, spec.branches))
    if layout is not None:
        if len(_passed) >= _MOST_PASSED:
            _passed.clear()
        _passed[layout] = list(tensors), route
    return tensors, route


def _check_shapes(
    inputs: AttentionInputs, spec: AttentionSpec, packing: Packing | None, span: Span, *, compressed: bool
) -> dict[str, Tensor]:
    q, config = inputs.q, spec.blocks
    # a gated call has all of them, also those of branches that it omits
    named = BRANCHES if spec.gated else spec.branches
    needed = {b for b in named if b != "compressed" or compressed or b in spec.branches}
    tensors: dict[str, Any] = {"q": q}
    for branch in named:
        k, v = (getattr(inputs, f"{kind}_{branch}") for kind in "kv")
        if branch in needed or k is not None:
            tensors |= {f"k_{branch}": k, f"v_{branch}": v}
    checks.check_tensors(tensors | {"gates": inputs.gates} if spec.gated else tensors)
    given = [branch for branch in named if f"k_{branch}" in tensors]
    keys = {branch: tensors[f"k_{branch}"] for branch in given}
    values = {branch: tensors[f"v_{branch}"] for branch in given}
    for branch in given:
        tokens: int | None = q.shape[1]
        if branch == "compressed":
            tokens = None if packing is not None else config.num_compressed(q.shape[1])
        if span is not WHOLE:
            tokens = None
        checks.check_keys(q, keys[branch], values[branch], branch, tokens)
    checks.check_same_groups(keys, values)
    if spec.gated:
        assert inputs.gates is not None
        checks.check_gates(inputs.gates, q)
    return tensors


def _run(
    inputs: AttentionInputs, spec: AttentionSpec, packing: Packing | None, span: Span, block_indices: Tensor | None,
    select: bool, output: tuple[Tensor, Tensor | None] | None, backend: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, block_indices) of the branches; blocks are selected by compressed tokens if none are given."""
    if backend == "triton":
        from tercet.attention import kernels

        if not spec.gated:  # compressed keys were only there to choose
            inputs = inputs._replace(k_compressed=None, v_compressed=None)
        layout = kernel_layout(inputs.q, packing, span, inputs.k_selected, inputs.k_window)
        return kernels.attend(*inputs, spec.blocks, layout, spec.branches, block_indices, select, output)
    if (buckets := document_buckets(packing, span)) is not None:
        out, block_indices = _reference_by_buckets(inputs, spec, buckets, block_indices, select)
    else:
        out, block_indices = _reference(inputs, spec, packing, block_indices, span, select)
    if output is not None:
        weight, bias = output
        out = F.linear(out.flatten(2), weight.to(out.dtype), None if bias is None else bias.to(out.dtype))
    return out, block_indices


# ------------------------------------------------------------ the reference backend


def _reference(
    inputs: AttentionInputs, spec: AttentionSpec, packing: Packing | None, block_indices: Tensor | None, span: Span,
    select: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    q, config = inputs.q, spec.blocks
    outs: dict[str, Tensor] = {}
    want_indices = block_indices is None and (select or spec.selects)
    if "compressed" in spec.branches or want_indices:
        k, v = inputs.pair("compressed")
        out, indices, _ = reference.compressed_attention(q, k, v, config, packing, want_indices=want_indices, span=span)
        if "compressed" in spec.branches:
            outs["compressed"] = out
        if indices is not None:
            block_indices = keep_selection(indices)
    if spec.selects:
        assert block_indices is not None
        k, v = inputs.pair("selected")
        outs["selected"] = reference.selected_attention(q, k, v, block_indices, config, packing, span)
    if "window" in spec.branches:
        k, v = inputs.pair("window")
        outs["window"] = reference.window_attention(q, k, v, config, packing, span.of_window)
    if inputs.gates is None:
        return outs[spec.branches[0]], block_indices
    return reference.combine(inputs.gates, outs).to(q.dtype), block_indices


def _reference_by_buckets(
    inputs: AttentionInputs, spec: AttentionSpec, buckets: Buckets, block_indices: Tensor | None, select: bool
) -> tuple[Tensor, Tensor | None]:
    outs, selections = [], []
    for bucket in buckets.buckets:
        rows = inputs._replace(k_compressed=None, v_compressed=None).map(bucket.rows)
        if spec.gated and inputs.k_compressed is not None and inputs.v_compressed is not None:
            kc, vc = map(bucket.compressed_rows, (inputs.k_compressed, inputs.v_compressed))
            rows = rows._replace(k_compressed=kc, v_compressed=vc)
        given = None if block_indices is None else bucket.rows(block_indices)
        out, indices = _reference(rows, spec, None, given, WHOLE, select)
        outs.append(out)
        if indices is not None:
            selections.append(indices)
    if block_indices is None and selections:
        block_indices = buckets.unpack(selections)
    return buckets.unpack(outs), block_indices


# ------------------------------------------------------------ queries that read every key


def _dense(q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, span: Span, backend: str) -> Tensor:
    return (masked_attention if backend == "reference" else dense_attention)(q, k, v, packing, span)


def _dense_rows(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, span: Span, dense_below: int, backend: str
) -> Tensor:
    """Dense attention of the queries at positions below dense_below; 0 for the others. [B, T, H, Dv]"""
    if packing is None:
        end = min(dense_below, span.first_query + q.shape[1])
        count = end - span.first_query
        first = _dense(q[:, :count], k[:, :end], v[:, :end], None, span, backend)
        return F.pad(first, (0, 0, 0, 0, 0, q.shape[1] - count))
    rows, first_tokens = packing.first_tokens(dense_below)
    own_q, own_k, own_v = (move_rows(x[0], rows)[None] for x in (q, k, v))
    first = _dense(own_q, own_k, own_v, first_tokens, WHOLE, backend)
    back = RowMap(rows.inverse, rows.inverse_valid, rows.source, rows.valid)
    return move_rows(first[0], back)[None]

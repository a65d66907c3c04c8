"""The operator as differentiable functions: what `tercet.attention` calls.

`nsa_attend` takes everything that the result depends on and owns the whole gradient: compressed attention and selection
before it run under no_grad. So the backward folds the gates in, adds up dq once, and never materialises the gradient of
a branch's output.

The ops are called through the dispatcher only under torch.compile or a dispatch mode, such as a checkpointing policy.
Otherwise their bodies are called directly, since the dispatcher costs more than the kernels on short sequences; under
no_grad without an autograd.Function, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.first_order import first_order
from tercet.attention.kernels.custom_op import must_dispatch
from tercet.attention.kernels.ops import (
    GRADIENTS,
    KEPT,
    TENSORS,
    Kept,
    Numbers,
    Tensors,
    compressed_lse,
    gradients,
    nsa_attend,
    run_stages,
    select_blocks,
    select_by_scores,
    sizes_of,
)
from tercet.attention.kernels.selected.launch import Saved
from tercet.attention.kernels.varlen import compressed_bounds
from tercet.attention.layout import KernelLayout

_INPUTS = TENSORS + len(Numbers._fields)  # of nsa_attend
_NO_GRADIENT = (None,) * (_INPUTS - GRADIENTS)  # for the inputs after the first eight


def _keep(ctx, x: Tensors, numbers: Sequence[Any], found: Sequence[Tensor | None], saved: Sequence[Tensor | None]):
    """Save what the backward reads. found: the first five fields of an Attended."""
    out, o_s, lse_s, o_w, lse_w = found
    # one branch without gates: its output is the result
    if x.ks is None:
        o_s = None
    elif o_s is None or o_s.numel() == 0:
        o_s = out
    if x.kw is None:
        o_w = None
    elif o_w is None or o_w.numel() == 0:
        o_w = out
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)
    kept = Kept(*x[:GRADIENTS], x.o_c, x.lse_c, o_s, lse_s, o_w, lse_w, x.block_indices, x.cu, x.ccu)
    ctx.save_for_backward(*kept, *saved)


# ------------------------------------------------------------ through the dispatcher


def _keep_op(ctx, inputs, output) -> None:
    _keep(
        ctx, Tensors(*inputs[:TENSORS]), inputs[TENSORS:], output[: -len(Saved._fields)], output[-len(Saved._fields) :]
    )


@first_order
def _op_backward(ctx, dout, *_unused):
    if dout is None:
        return (None,) * _INPUTS
    kept = ctx.saved_tensors
    grads = torch.ops.tercet.nsa_backward(dout, *kept[:KEPT], list(kept[KEPT:]), *ctx.numbers)
    return *(None if x is None else g for x, g in zip(kept[:GRADIENTS], grads, strict=True)), *_NO_GRADIENT


nsa_attend.register_autograd(_op_backward, setup_context=_keep_op)


def project(out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output projection: [B, T, H, Dv] -> [B, T, rows of the weight], in the dtype of out."""
    return F.linear(out.flatten(2), weight.to(out.dtype), None if bias is None else bias.to(out.dtype))


class _AttendAndProject(torch.autograd.Function):
    """project(nsa_attend(...)) without saving the projection's input, for torch.compile.

    The branches' outputs are saved for the gradients of gates and scores. Their gated sum, the projection's input,
    would be one more tensor of q's size per layer (1.1 GiB in the M7C model at 65,536 tokens). The backward reads the
    branches' outputs anyway, for delta, and recomputes the gated sum in the same pass. That requires one function to
    own both gradients. Deltas come first and the projection's gradient right after them, so that the branches' outputs
    and the gated sum are freed before the kernels allocate their workspace.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, *inputs: Any) -> Tensor:
        out, o_s, lse_s, o_w, lse_w, *saved = torch.ops.tercet.nsa_attend(*inputs)
        tensors, ctx.numbers = inputs[:TENSORS], inputs[TENSORS:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.given = [x is not None for x in tensors]
        ctx.save_for_backward(weight, *(x for x in tensors if x is not None), o_s, lse_s, o_w, lse_w, *saved)
        return project(out, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = upstream
        weight, *kept = ctx.saved_tensors
        # tensors that were None were not saved
        places = [sum(ctx.given[:i]) for i in range(TENSORS + 1)]
        x = Tensors(*(kept[places[i]] if given else None for i, given in enumerate(ctx.given)))
        o_s, lse_s, o_w, lse_w, *saved = kept[places[-1] :]
        rows = dy.flatten(0, 1)
        dout = rows @ weight.to(dy.dtype)
        dout = dout.view(*x.q.shape[:3], -1)
        delta, planes, dgates, mixed = torch.ops.tercet.nsa_delta(
            dout, x.gates, x.o_c, None if x.ks is None else o_s, None if x.kw is None else o_w
        )
        d_weight = (rows.t() @ mixed.flatten(2).flatten(0, 1)).to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        # without the branches' outputs: their deltas are enough
        kept_ = Kept(
            *x[:GRADIENTS], lse_c=x.lse_c, lse_s=None if x.ks is None else lse_s, lse_w=None if x.kw is None else lse_w,
            block_indices=x.block_indices, cu=x.cu, ccu=x.ccu,
        )  # fmt: skip
        grads = torch.ops.tercet.nsa_backward(dout, *kept_, saved, *ctx.numbers, delta, planes)
        of_tensors = (*grads[: GRADIENTS - 1], dgates)
        found = (None if y is None else grad for y, grad in zip(x[:GRADIENTS], of_tensors, strict=True))
        return d_weight, d_bias, *found, *_NO_GRADIENT


# ------------------------------------------------------------ without the dispatcher


class _Attend(torch.autograd.Function):
    """ops.run_stages with its gradient: (output, the selection if `choose`)."""

    @staticmethod
    def forward(ctx, *inputs):
        *inputs, compressed, choose = inputs
        numbers = Numbers(*inputs[TENSORS:])
        x, (*found, saved) = run_stages(Tensors(*inputs[:TENSORS]), numbers, compressed, choose)
        _keep(ctx, x, numbers, found, saved)
        return found[0], x.block_indices if choose else None

    @staticmethod
    @first_order
    def backward(ctx, dout, _selection):
        kept = ctx.saved_tensors
        if dout is None:
            return (None,) * (_INPUTS + 2)
        return *gradients(dout, Kept(*kept[:KEPT]), kept[KEPT:], ctx.numbers), *_NO_GRADIENT, None, None


class _Direct:
    """The ops' bodies under the ops' names."""

    nsa_compressed_bounds = staticmethod(compressed_bounds)

    @staticmethod
    def nsa_compressed_lse(q, kc, cu, ccu, *numbers):
        return compressed_lse(q, kc, cu, ccu, Numbers(*numbers))

    @staticmethod
    def nsa_select(q, kc, lse, cu, ccu, *numbers):
        return select_blocks(q, kc, lse, cu, ccu, Numbers(*numbers))

    @staticmethod
    def nsa_select_by_tokens(q, k, cu, own, *numbers):
        return select_by_scores(q, k, cu, own, Numbers(*numbers))

    @staticmethod
    def keep_selection(block_indices):
        return block_indices


# ------------------------------------------------------------ entry points


def attend(
    q: Tensor,
    kc: Tensor | None,
    vc: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    kw: Tensor | None,
    vw: Tensor | None,
    gates: Tensor | None,
    config: NSAConfig,
    layout: KernelLayout = KernelLayout(),  # noqa: B008  a named tuple
    branches: tuple[str, ...] = BRANCHES,
    block_indices: Tensor | None = None,
    select: bool = False,
    output: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(output, block_indices) of the branches; without gates, of a single one.

    `output`: (weight, bias) of the output projection, applied to the result; compiled, its input is not saved.
    """
    choose = block_indices is None and (select or "selected" in branches)
    compressed = "compressed" in branches
    ops, numbers = _call(config, layout)
    cu_seqlens = layout.cu_seqlens
    ccu = _compressed_bounds(layout, config, ops) if compressed or choose else None
    if "selected" not in branches:
        ks = vs = None
    if "window" not in branches:
        kw = vw = None
    if ops is _Direct:
        x = Tensors(q, kc, vc, ks, vs, kw, vw, gates, None, None, block_indices, cu_seqlens, ccu)
        out, selection = _attend(x, numbers, compressed, choose)
        return out if output is None else project(out, *output), selection if choose else block_indices
    o_c = lse_c = None
    traced = output is not None and torch.compiler.is_compiling()
    # nsa_attend owns the gradient of these
    with torch.no_grad():
        if compressed or choose:
            o_c, lse_c = ops.nsa_compressed(q, kc, vc, cu_seqlens, ccu, *numbers)
        if choose:
            block_indices = ops.nsa_select(q, kc, lse_c, cu_seqlens, ccu, *numbers)
            # checkpointing saves the selection by this op's name; _AttendAndProject is never recomputed
            if not traced:
                block_indices = ops.keep_selection(block_indices)
    if not compressed:
        kc = vc = o_c = lse_c = None
    inputs = (q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu_seqlens, ccu, *numbers)
    if traced:
        return _AttendAndProject.apply(*output, *inputs), block_indices
    out = ops.nsa_attend(*inputs)[0]
    return out if output is None else project(out, *output), block_indices


def select_by_keys(q: Tensor, keys: Tensor, config: NSAConfig, layout: KernelLayout) -> Tensor:
    """block_indices by the scores of compressed keys, without the output of compressed attention."""
    ops, numbers = _call(config, layout)
    cu, ccu = layout.cu_seqlens, _compressed_bounds(layout, config, ops)
    with torch.no_grad():
        lse = ops.nsa_compressed_lse(q, keys, cu, ccu, *numbers)
        return ops.keep_selection(ops.nsa_select(q, keys, lse, cu, ccu, *numbers))


def select_by_tokens(q: Tensor, keys: Tensor, config: NSAConfig, layout: KernelLayout, own: bool) -> Tensor:
    """block_indices by the queries and keys of single tokens: a selector's, or the model's own."""
    ops, numbers = _call(config, layout)
    with torch.no_grad():
        return ops.keep_selection(ops.nsa_select_by_tokens(q, keys, layout.cu_seqlens, own, *numbers))


def _attend(x: Tensors, numbers: tuple, compressed: bool, choose: bool) -> tuple[Tensor, Tensor | None]:
    """(output, the selection) without the dispatcher."""
    if torch.is_grad_enabled():
        return _Attend.apply(*x, *numbers, compressed, choose)
    x, found = run_stages(x, Numbers(*numbers), compressed, choose, False)
    return found.out, x.block_indices


def _call(config: NSAConfig, layout: KernelLayout) -> tuple[Any, tuple[Any, list[int], int | None]]:
    """The ops to call, and their Numbers."""
    dispatch = must_dispatch()
    ops = torch.ops.tercet if dispatch else _Direct
    return ops, (sizes_of(config) if dispatch else config, list(layout.span), layout.max_seqlen)


def _compressed_bounds(layout: KernelLayout, config: NSAConfig, ops: Any) -> Tensor | None:
    """Bounds of the compressed tokens, which are those of whole sequences."""
    if layout.cu_seqlens is None or layout.compressed_cu_seqlens is not None:
        return layout.compressed_cu_seqlens
    whole = layout.cu_seqlens if layout.cu_seqlens.dim() == 1 else layout.cu_seqlens[0]
    return ops.nsa_compressed_bounds(whole, config.compress_block, config.compress_stride)

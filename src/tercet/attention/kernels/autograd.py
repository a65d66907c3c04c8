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
from tercet.attention.kernels import ops as bodies
from tercet.attention.kernels.launch import must_dispatch
from tercet.attention.kernels.ops import GRADIENTS, TENSORS, Attended, Numbers, Tensors, gradients, run_stages, sizes_of
from tercet.attention.kernels.selected.launch import Saved
from tercet.attention.layout import KernelLayout, keep_selection

_INPUTS = TENSORS + len(Numbers._fields)  # of nsa_attend
_NO_GRADIENT = (None,) * (_INPUTS - GRADIENTS)  # for the inputs after the first eight


def _keep(ctx, x: Tensors, numbers: Sequence[Any], found: Attended) -> None:
    """Save what the backward reads."""
    # one branch without gates: its output is the result
    o_s, o_w = (
        None if keys is None else found.out if o is None or o.numel() == 0 else o
        for keys, o in ((x.ks, found.o_s), (x.kw, found.o_w))
    )  # fmt: skip
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)
    x = x._replace(o_s=o_s, lse_s=found.lse_s, o_w=o_w, lse_w=found.lse_w)
    ctx.save_for_backward(*x, *found.saved)


# ------------------------------------------------------------ through the dispatcher


def _keep_op(ctx, inputs, output) -> None:
    outputs = len(Attended._fields) - 1
    found = Attended(*output[:outputs], Saved(*output[outputs:]))
    _keep(ctx, Tensors(*inputs[:TENSORS]), inputs[TENSORS:], found)


@first_order
def _op_backward(ctx, dout, *_unused):
    if dout is None:
        return (None,) * _INPUTS
    kept = ctx.saved_tensors
    grads = torch.ops.tercet.nsa_backward(dout, *kept[:TENSORS], list(kept[TENSORS:]), *ctx.numbers)
    return *(None if x is None else g for x, g in zip(kept[:GRADIENTS], grads, strict=True)), *_NO_GRADIENT


bodies.nsa_attend.register_autograd(_op_backward, setup_context=_keep_op)


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
        x = x._replace(o_c=None, lse_s=None if x.ks is None else lse_s, lse_w=None if x.kw is None else lse_w)
        grads = torch.ops.tercet.nsa_backward(dout, *x, saved, *ctx.numbers, delta, planes)
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
        x, found = run_stages(Tensors(*inputs[:TENSORS]), numbers, compressed, choose)
        _keep(ctx, x, numbers, found)
        return found.out, x.block_indices if choose else None

    @staticmethod
    @first_order
    def backward(ctx, dout, _selection):
        kept = ctx.saved_tensors
        if dout is None:
            return (None,) * (_INPUTS + 2)
        return *gradients(dout, Tensors(*kept[:TENSORS]), list(kept[TENSORS:]), ctx.numbers), *_NO_GRADIENT, None, None


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
    numbers = _numbers(config, layout)
    if "selected" not in branches:
        ks = vs = None
    if "window" not in branches:
        kw = vw = None
    ccu = layout.compressed_cu_seqlens if compressed or choose else None
    x = Tensors(q, kc, vc, ks, vs, kw, vw, gates, None, None, block_indices, layout.cu_seqlens, ccu)
    if not must_dispatch():
        if torch.is_grad_enabled():
            out, selection = _Attend.apply(*x, *numbers, compressed, choose)
        else:
            x, found = run_stages(x, numbers, compressed, choose, False)
            out, selection = found.out, x.block_indices
        return out if output is None else project(out, *output), selection if choose else block_indices
    ops = torch.ops.tercet
    traced = output is not None and torch.compiler.is_compiling()
    # nsa_attend owns the gradient of these
    with torch.no_grad():
        if compressed or choose:
            o_c, lse_c = ops.nsa_compressed(q, kc, vc, x.cu, ccu, *numbers)
            x = x._replace(o_c=o_c, lse_c=lse_c)
        if choose:
            block_indices = ops.nsa_select(q, kc, x.lse_c, x.cu, ccu, *numbers)
            # checkpointing saves the selection by this op's name; _AttendAndProject is never recomputed
            if not traced:
                block_indices = keep_selection(block_indices)
    x = x._replace(block_indices=block_indices)
    if not compressed:
        x = x._replace(kc=None, vc=None, o_c=None, lse_c=None)
    if traced:
        return _AttendAndProject.apply(*output, *x, *numbers), block_indices
    out = ops.nsa_attend(*x, *numbers)[0]
    return out if output is None else project(out, *output), block_indices


def select_by_keys(q: Tensor, keys: Tensor, config: NSAConfig, layout: KernelLayout) -> Tensor:
    """block_indices by the scores of compressed keys, without the output of compressed attention."""
    ops, numbers = _ops(), _numbers(config, layout)
    cu, ccu = layout.cu_seqlens, layout.compressed_cu_seqlens
    with torch.no_grad():
        lse = ops.nsa_compressed_lse(q, keys, cu, ccu, *numbers)
        return _kept(ops.nsa_select(q, keys, lse, cu, ccu, *numbers))


def select_by_tokens(q: Tensor, keys: Tensor, config: NSAConfig, layout: KernelLayout, own: bool) -> Tensor:
    """block_indices by the queries and keys of single tokens: a selector's, or the model's own."""
    with torch.no_grad():
        return _kept(_ops().nsa_select_by_tokens(q, keys, layout.cu_seqlens, own, *_numbers(config, layout)))


def _numbers(config: NSAConfig, layout: KernelLayout) -> Numbers:
    return Numbers(sizes_of(config), tuple(layout.span), layout.max_seqlen)


def _ops() -> Any:
    """Where to call ops by their names."""
    return torch.ops.tercet if must_dispatch() else bodies


def _kept(block_indices: Tensor) -> Tensor:
    return keep_selection(block_indices) if must_dispatch() else block_indices

"""The operator and the output projection after it, so that what is multiplied need not be kept.

The branches' outputs are kept for the gradients of gates and scores; their gated sum is the projection's input, whose
weights' gradient asks for it too. Kept, it is one more tensor of q's size per layer: 1.1 GiB of the M7C model's 65,536
tokens. The backward pass reads the branches' outputs anyway, for the sums of their rows: it writes the gated sum again
in the same pass. For that, one function has to own both gradients. Row sums come first, and the projection's gradient
right after them: the branches' outputs and the sum are gone before the kernels ask for their workspace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_INPUTS, _TENSORS = 16, 13  # of nsa_attend: tensors come first, and eight of them have gradients


def multiply(out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B, T, H, Dv] -> [B, T, rows of the weight], in out's type."""
    return F.linear(out.flatten(2), weight.to(out.dtype), None if bias is None else bias.to(out.dtype))


class Multiplied(torch.autograd.Function):
    """multiply(nsa_attend(...)), for the compiler to trace. `inputs` are nsa_attend's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, *inputs: Any) -> Tensor:
        out, o_s, lse_s, o_w, lse_w, *saved = torch.ops.tercet.nsa_attend(*inputs)
        tensors, ctx.numbers = inputs[:_TENSORS], inputs[_TENSORS:]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.there = [x is not None for x in tensors]
        ctx.save_for_backward(weight, *(x for x in tensors if x is not None), o_s, lse_s, o_w, lse_w, *saved)
        return multiply(out, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = upstream
        weight, *kept = ctx.saved_tensors
        # by place: what is not there was not kept
        places = [sum(ctx.there[:i]) for i in range(len(ctx.there) + 1)]
        tensors = [kept[places[i]] if present else None for i, present in enumerate(ctx.there)]
        o_s, lse_s, o_w, lse_w, *saved = kept[places[-1] :]
        q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu, ccu = tensors
        assert q is not None
        rows = dy.flatten(0, 1)
        dout = rows @ weight.to(dy.dtype)
        dout = dout.view(*q.shape[:3], -1)
        sums, planes, dgates, mixed = torch.ops.tercet.nsa_row_sums(
            dout, gates, o_c, None if ks is None else o_s, None if kw is None else o_w
        )
        d_weight = (rows.t() @ mixed.flatten(2).flatten(0, 1)).to(weight.dtype)
        d_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        none = None  # the branches' outputs: their row sums are all that is needed of them
        grads = torch.ops.tercet.nsa_backward(
            dout, q, kc, vc, ks, vs, kw, vw, gates, none, lse_c, none, None if ks is None else lse_s,
            none, None if kw is None else lse_w, block_indices, cu, ccu, saved, *ctx.numbers, sums, planes,
        )  # fmt: skip
        of_tensors = (*grads[:7], dgates)
        inputs = (None if x is None else grad for x, grad in zip(tensors[:8], of_tensors, strict=True))
        return d_weight, d_bias, *inputs, *(None,) * (_INPUTS - 8)

"""Last launch of a decode step: merge parts into branches and branches into the output; increment the row lengths.

out: [B, H·Dv]   gates: logits [B, 3·H], three per head, rows of any stride   lengths: int64 [B]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import BRANCHES
from tercet.attention.kernels.decode.common import Parts, row_is_active, wait_for_previous_launch
from tercet.attention.kernels.launch import call, power_of_2
from tercet.attention.kernels.table import overlap_launches


@triton.jit
def _share(lse, own, gate):
    """Weight of each part of a branch in the output; 0 for the parts of other branches."""
    lse = tl.where(own, lse, float("-inf"))
    top = tl.max(lse, 0)
    p = tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(p, 0)
    return p * (gate / tl.where(total > 0, total, 1.0))


@triton.jit(do_not_specialize=["a", "b", "c", "gate_row"])
def decode_merge_kernel(
    O, LSE, GATES, OUT, LENGTHS, COUNTS, a, b, c, gate_row, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    PP: tl.constexpr, GATED: tl.constexpr,
    SOFTMAX: tl.constexpr, MASKED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Parts 0 … a-1 belong to the compressed branch, a … b-1 to the selected branch, b … c-1 to the window.

    SOFTMAX: the branches of a softmax over the gates, 1 + 2 + 4 for all three; 0 for sigmoids."""
    h = tl.program_id(0)
    batch = tl.program_id(1)
    row = batch.to(tl.int64) * H + h
    d = tl.arange(0, DVP)
    acc = tl.zeros([DVP], tl.float32)
    gate_c = 1.0
    gate_s = 1.0
    gate_w = 1.0
    if GATED:
        GATES += batch.to(tl.int64) * gate_row + h * 3
        gate_c = tl.load(GATES).to(tl.float32)
        gate_s = tl.load(GATES + 1).to(tl.float32)
        gate_w = tl.load(GATES + 2).to(tl.float32)
    real = row_is_active(COUNTS, batch, MASKED)
    wait_for_previous_launch(OVERLAP)
    if real:
        LSE += row * c
        O += row * c * DV
        if GATED:
            if SOFTMAX > 0:
                if SOFTMAX & 1 == 0:
                    gate_c = float("-inf")
                if SOFTMAX & 2 == 0:
                    gate_s = float("-inf")
                if SOFTMAX & 4 == 0:
                    gate_w = float("-inf")
                highest = tl.maximum(tl.maximum(gate_c, gate_s), gate_w)
                gate_c = tl.exp(gate_c - highest)
                gate_s = tl.exp(gate_s - highest)
                gate_w = tl.exp(gate_w - highest)
                total = gate_c + gate_s + gate_w
                gate_c /= total
                gate_s /= total
                gate_w /= total
            else:
                gate_c = 1.0 / (1.0 + tl.exp(-gate_c))
                gate_s = 1.0 / (1.0 + tl.exp(-gate_s))
                gate_w = 1.0 / (1.0 + tl.exp(-gate_w))
        p = tl.arange(0, PP)
        lse = tl.load(LSE + p, mask=p < c, other=float("-inf"))
        # load parts that read nothing too, whatever they hold: a mask by lse would wait for lse
        o = tl.load(O + p[:, None] * DV + d[None, :], mask=(p < c)[:, None] & (d < DV)[None, :], other=0.0)
        share_c = _share(lse, p < a, gate_c)
        share_s = _share(lse, (p >= a) & (p < b), gate_s)
        share_w = _share(lse, p >= b, gate_w)
        weight = share_c + share_s + share_w
        acc += tl.sum(tl.where((lse > float("-inf"))[:, None], weight[:, None] * o, 0.0), 0)
        if h == 0:
            tl.store(LENGTHS + batch, tl.load(LENGTHS + batch) + 1)
    tl.store(OUT + row * DV + d, acc.to(OUT.dtype.element_ty), mask=d < DV)


def merge_parts(
    parts: Parts, gates: Tensor | None, lengths: Tensor, counts: Tensor | None, ends: tuple[int, int, int],
    dtype: torch.dtype, *, softmax: tuple[str, ...] = (),
) -> Tensor:  # fmt: skip
    """ends: where the parts of the three branches end. softmax: the branches of a softmax over the gates; without any,
    gates are sigmoids. Rows without a new token get 0."""
    batch, heads, count, size = parts.o.shape
    assert ends[2] == count
    out = torch.empty(batch, heads * size, dtype=dtype, device=parts.o.device)
    early = overlap_launches(parts.o, batch * parts.read.shape[1])
    call(
        decode_merge_kernel, (heads, batch), (parts.o, parts.lse, gates, out, lengths, counts),
        (*ends, 0 if gates is None else gates.stride(0)),
        (heads, size, power_of_2(size), max(16, power_of_2(count)), gates is not None,
         sum(1 << BRANCHES.index(branch) for branch in softmax), counts is not None, early),
        num_warps=8 if count > 64 else 4, launch_pdl=early,
    )  # fmt: skip
    return out

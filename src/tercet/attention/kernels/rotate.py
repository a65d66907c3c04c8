"""RoPE in one launch, without a gradient. Reading a prompt, a small model waits for launches; PyTorch needs eight.

x: [B, T, heads, D]   cos, sin: fp32 [..., T, 1, pairs]; the first 2 · pairs channels are rotated (model/rope.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.launch import call, power_of_2

_ROWS = 64


@triton.jit(do_not_specialize=["rows", "angles"])
def rotate_kernel(
    X, COS, SIN, OUT, rows, angles, x_t, x_h,
    HEADS: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, RP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Program (R rows): a row is a head of a token. `angles`: tokens that have cos and sin, again for each sequence."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    token = row // HEADS
    at = (X + token.to(tl.int64) * x_t + row % HEADS * x_h)[:, None]
    to = (OUT + row.to(tl.int64) * D)[:, None]
    pair = tl.arange(0, PP)[None, :]
    mask = (row < rows)[:, None] & (pair < PAIRS)
    angle = (token % angles * PAIRS)[:, None] + pair
    cos = tl.load(COS + angle, mask=mask, other=0.0)
    sin = tl.load(SIN + angle, mask=mask, other=0.0)
    a = tl.load(at + pair, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + PAIRS + pair, mask=mask, other=0.0).to(tl.float32)
    tl.store(to + pair, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=mask)
    tl.store(to + PAIRS + pair, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=mask)
    if D > 2 * PAIRS:
        d = 2 * PAIRS + tl.arange(0, RP)[None, :]
        mask = (row < rows)[:, None] & (d < D)
        tl.store(to + d, tl.load(at + d, mask=mask, other=0.0), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its first channels rotated, contiguous."""
    angles = cos.numel() // cos.shape[-1]
    if angles not in (x.shape[1], x.shape[0] * x.shape[1]):
        raise ValueError(f"cos has shape {list(cos.shape)}: x of {list(x.shape)} needs {x.shape[1]} per sequence")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, size, pairs = *x.shape[2:], cos.shape[-1]
    # one stride must lead from token to token, across sequences
    flat = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    x = x if flat else x.contiguous()
    rows = x.shape[0] * x.shape[1] * heads
    call(
        rotate_kernel, (-(-rows // _ROWS),), (x, cos.contiguous(), sin.contiguous(), out),
        (rows, angles),
        (x.stride(1), x.stride(2), heads, size, pairs, power_of_2(pairs), power_of_2(max(1, size - 2 * pairs)), _ROWS),
        num_warps=4,
        enable_fp_fusion=False,  # rounds as PyTorch does, which rotates where gradients are needed
    )  # fmt: skip
    return out

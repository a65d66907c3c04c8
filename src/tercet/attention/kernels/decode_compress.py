"""φ of the blocks that a decode step completes, in the launch that keeps the step's tokens.

A program takes 16 (row, KV head) pairs, the rows of its matrix products, and leaves at once if none of them has
completed a block: at the default sizes that is 15 steps of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@dataclass(frozen=True)
class CompressionWeights:
    """Of the "mlp" φ: its position encoding and both layers; all None for "mean"."""

    position: Tensor | None = None  # [l, D]
    up: Tensor | None = None  # [D, l·D]
    up_bias: Tensor | None = None
    down: Tensor | None = None  # [D, D]
    down_bias: Tensor | None = None

    def all(self) -> tuple[Tensor | None, ...]:
        return self.position, self.up, self.up_bias, self.down, self.down_bias


@triton.jit
def _raw(RAW, NEW, NORM_WEIGHT, scale, i, d, mask, first, at, new_at, L: tl.constexpr, G: tl.constexpr,
         D: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Number d of token i of each row's block: the last from the projection, the others from the ring. fp32"""
    last = i == L - 1
    slot = (first + i) % L
    held = tl.load(RAW + at + slot * (G * D) + d, mask=mask & (i < L - 1), other=0.0)
    new = tl.load(NEW + new_at + d, mask=mask & last, other=0.0).to(tl.float32)
    if NORM:
        new = new * scale * tl.load(NORM_WEIGHT + d, mask=mask & last, other=0.0).to(tl.float32)
    # as it is kept, so that a token weighs the same whether it is the newest or not
    return held.to(tl.float32) + new.to(RAW.dtype.element_ty).to(tl.float32)


@triton.jit
def _outputs(hidden, RAW, NEW, NORM_WEIGHT, DOWN, DOWN_BIAS, scale, o, done, first, at, new_at, L: tl.constexpr,
             G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, MLP: tl.constexpr):  # fmt: skip
    """Numbers o of φ's output: the mean over the block, and the correction."""
    inside = done[:, None] & (o < D)[None, :]
    total = tl.zeros([done.shape[0], o.shape[0]], tl.float32)
    for i in range(L):
        total += _raw(RAW, NEW, NORM_WEIGHT, scale, i, o[None, :], inside, first[:, None], at[:, None],
                      new_at[:, None], L, G, D, NORM)  # fmt: skip
    result = total / L
    if MLP:
        d = tl.arange(0, DP)
        weight = tl.load(DOWN + o[None, :] * D + d[:, None], mask=(o < D)[None, :] & (d < D)[:, None], other=0.0)
        result += tl.dot(hidden.to(weight.dtype), weight, input_precision="ieee")
        result += tl.load(DOWN_BIAS + o, mask=o < D, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def compress(
    KV, NORM_WEIGHT, RAW, OUT, POSITION, UP, UP_BIAS, DOWN, DOWN_BIAS, TURNS, LENGTHS, COUNTS, which, batch, slots,
    offset, kv_row, eps, L: tl.constexpr, S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, MLP: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    r = which * 16 + tl.arange(0, 16)
    b = r // G
    g = r % G
    inside = b < batch
    after = tl.load(LENGTHS + b, mask=inside, other=0) + 1
    done = inside & (after >= L) & ((after - L) % S == 0)
    if MASKED:
        done = done & (tl.load(COUNTS + b, mask=inside, other=0) > 0)
    if tl.max(done.to(tl.int32), 0) > 0:
        first = after - L
        at = (b.to(tl.int64) * (L + 1) * G + g) * D
        new_at = b.to(tl.int64) * kv_row + offset + g * D
        scale = tl.zeros([16, 1], tl.float32)
        if NORM:
            d = tl.arange(0, DP)
            new = tl.load(KV + new_at[:, None] + d[None, :], mask=done[:, None] & (d < D)[None, :], other=0.0)
            new = new.to(tl.float32)
            scale = tl.rsqrt(tl.sum(new * new, 1) / D + eps)[:, None]
        hidden = tl.zeros([16, DP], tl.float32)
        if MLP:
            n = tl.arange(0, DP)
            for f0 in range(0, L * D, CHUNK):
                f = f0 + tl.arange(0, CHUNK)
                i = f // D
                mask = done[:, None] & (f < L * D)[None, :]
                x = _raw(RAW, KV, NORM_WEIGHT, scale, i[None, :], (f % D)[None, :], mask, first[:, None], at[:, None],
                         new_at[:, None], L, G, D, NORM)  # fmt: skip
                x += tl.load(POSITION + f, mask=f < L * D, other=0.0).to(tl.float32)[None, :]
                weight = tl.load(UP + n[:, None] * (L * D) + f[None, :],
                                 mask=(n < D)[:, None] & (f < L * D)[None, :], other=0.0)  # fmt: skip
                hidden = tl.dot(x.to(weight.dtype), tl.trans(weight), hidden, input_precision="ieee")
            hidden += tl.load(UP_BIAS + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
            hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        out = OUT + ((b.to(tl.int64) * slots + first // S) * G + g) * D
        if TURN:
            HALF: tl.constexpr = D // 2
            PART: tl.constexpr = 16 if DP < 64 else 32 if DP == 64 else 64
            for o0 in range(0, HALF, PART):
                o = o0 + tl.arange(0, PART)
                # a half that is no multiple of PART must not run into the other one
                o = tl.where(o < HALF, o, D)
                one = _outputs(hidden, RAW, KV, NORM_WEIGHT, DOWN, DOWN_BIAS, scale, o, done, first, at, new_at,
                               L, G, D, DP, NORM, MLP)  # fmt: skip
                two = _outputs(hidden, RAW, KV, NORM_WEIGHT, DOWN, DOWN_BIAS, scale, o + HALF, done, first, at, new_at,
                               L, G, D, DP, NORM, MLP)  # fmt: skip
                # at the position of the block's last token
                turns = tl.load(TURNS + o, mask=o < HALF, other=0.0)[None, :] * (after - 1).to(tl.float64)[:, None]
                angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
                cos = tl.cos(angle)
                sin = tl.sin(angle)
                mask = done[:, None] & (o < HALF)[None, :]
                kept = OUT.dtype.element_ty
                tl.store(out[:, None] + o[None, :], (one * cos - two * sin).to(kept), mask=mask)
                tl.store(out[:, None] + HALF + o[None, :], (two * cos + one * sin).to(kept), mask=mask)
        else:
            WHOLE_PART: tl.constexpr = DP if DP < 64 else 64
            for o0 in range(0, D, WHOLE_PART):
                o = o0 + tl.arange(0, WHOLE_PART)
                one = _outputs(hidden, RAW, KV, NORM_WEIGHT, DOWN, DOWN_BIAS, scale, o, done, first, at, new_at,
                               L, G, D, DP, NORM, MLP)  # fmt: skip
                tl.store(out[:, None] + o[None, :], one.to(OUT.dtype.element_ty),
                         mask=done[:, None] & (o < D)[None, :])  # fmt: skip

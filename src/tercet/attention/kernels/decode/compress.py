"""φ of the compression blocks that a decode step completes, as part of the append launch.

A program takes 16 (row, KV head) pairs, the rows of its matrix products, and a slice of a block's tokens. It exits at
once if none of the pairs has completed a block, which at the default sizes is 15 steps of 16.

sums, hidden: fp32 [slices, 16, D] per 16 pairs   arrived: int32, 0 between steps
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


def slices(block: int) -> int:
    """Programs that share the tokens of a block."""
    return min(8, block)


@dataclass(frozen=True)
class CompressionWeights:
    """Position encoding and both layers of the "mlp" φ; all None for "mean"."""

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
    """Element d of token i of each row's block, in fp32: the last token from the projection, the others from the
    ring."""
    last = i == L - 1
    slot = (first + i) % L
    held = tl.load(RAW + at + slot * (G * D) + d, mask=mask & (i < L - 1), other=0.0)
    new = tl.load(NEW + new_at + d, mask=mask & last, other=0.0).to(tl.float32)
    if NORM:
        new = new * scale * tl.load(NORM_WEIGHT + d, mask=mask & last, other=0.0).to(tl.float32)
    # rounded as in the cache, so that a token counts the same whether it is the newest or not
    return held.to(tl.float32) + new.to(RAW.dtype.element_ty).to(tl.float32)


@triton.jit
def _outputs(hidden, SUMS, DOWN, DOWN_BIAS, o, done, L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
             SLICES: tl.constexpr, MLP: tl.constexpr):  # fmt: skip
    """Elements o of φ's output: the mean over the block plus the MLP's correction."""
    inside = done[:, None] & (o < D)[None, :]
    row = tl.arange(0, 16)
    total = tl.zeros([16, o.shape[0]], tl.float32)
    for n in tl.static_range(SLICES):
        total += tl.load(SUMS + (n * 16 + row)[:, None] * DP + o[None, :], mask=inside, other=0.0)
    result = total / L
    if MLP:
        d = tl.arange(0, DP)
        weight = tl.load(DOWN + o[None, :] * D + d[:, None], mask=(o < D)[None, :] & (d < D)[:, None], other=0.0)
        result += tl.dot(hidden.to(weight.dtype), weight, input_precision="ieee")
        result += tl.load(DOWN_BIAS + o, mask=o < D, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit
def _sum_slice(
    KV, NORM_WEIGHT, RAW, POSITION, UP, SUMS, HIDDEN, done, first, at, new_at, slice, eps,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, MLP: tl.constexpr,
):  # fmt: skip
    """A slice of the block's tokens: their sum, and their contribution to the hidden layer."""
    TOKENS: tl.constexpr = L // SLICES
    row = tl.arange(0, 16)
    n = tl.arange(0, DP)
    inside = done[:, None] & (n < D)[None, :]
    scale = tl.zeros([16, 1], tl.float32)
    if NORM:
        new = tl.load(KV + new_at[:, None] + n[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(new * new, 1) / D + eps)[:, None]
    total = tl.zeros([16, DP], tl.float32)
    for token in tl.static_range(TOKENS):
        total += _raw(RAW, KV, NORM_WEIGHT, scale, slice * TOKENS + token, n[None, :], inside, first[:, None],
                      at[:, None], new_at[:, None], L, G, D, NORM)  # fmt: skip
    tl.store(SUMS + (slice * 16 + row)[:, None] * DP + n[None, :], total)
    if MLP:
        hidden = tl.zeros([16, DP], tl.float32)
        end = (slice + 1) * (TOKENS * D)
        for f0 in tl.range(slice * (TOKENS * D), end, CHUNK):
            f = f0 + tl.arange(0, CHUNK)
            mask = done[:, None] & (f < end)[None, :]
            x = _raw(RAW, KV, NORM_WEIGHT, scale, (f // D)[None, :], (f % D)[None, :], mask, first[:, None],
                     at[:, None], new_at[:, None], L, G, D, NORM)  # fmt: skip
            x += tl.load(POSITION + f, mask=f < end, other=0.0).to(tl.float32)[None, :]
            weight = tl.load(UP + n[:, None] * (L * D) + f[None, :], mask=(n < D)[:, None] & (f < end)[None, :],
                             other=0.0)  # fmt: skip
            hidden = tl.dot(x.to(weight.dtype), tl.trans(weight), hidden, input_precision="ieee")
        tl.store(HIDDEN + (slice * 16 + row)[:, None] * DP + n[None, :], hidden)


@triton.jit
def compress(
    KV, NORM_WEIGHT, RAW, OUT, POSITION, UP, UP_BIAS, DOWN, DOWN_BIAS, FREQS, LENGTHS, COUNTS, SUMS, HIDDEN, ARRIVED,
    rows, slice, batch, slots, offset, kv_row, eps,
    L: tl.constexpr, S: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    SLICES: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, MLP: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Each program sums its slice; the last one to finish adds up the slices, in a fixed order."""
    r = rows * 16 + tl.arange(0, 16)
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
        _sum_slice(KV, NORM_WEIGHT, RAW, POSITION, UP, SUMS, HIDDEN, done, first, at, new_at, slice, eps,
                   L, G, D, DP, CHUNK, SLICES, NORM, MLP)  # fmt: skip
        tl.debug_barrier()  # all threads have written before the counter is incremented
        if tl.atomic_add(ARRIVED, 1, sem="acq_rel") == SLICES - 1:
            tl.store(ARRIVED, 0)
            hidden = tl.zeros([16, DP], tl.float32)
            if MLP:
                row = tl.arange(0, 16)
                n = tl.arange(0, DP)
                for part in tl.range(SLICES):
                    hidden += tl.load(HIDDEN + (part * 16 + row)[:, None] * DP + n[None, :])
                hidden += tl.load(UP_BIAS + n, mask=n < D, other=0.0).to(tl.float32)[None, :]
                hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
            out = OUT + ((b.to(tl.int64) * slots + first // S) * G + g) * D
            if ROTATE:
                HALF: tl.constexpr = D // 2
                PART: tl.constexpr = 16 if DP < 64 else 32 if DP == 64 else 64
                factor = tl.load(FREQS + HALF).to(tl.float32)
                for o0 in range(0, HALF, PART):
                    o = o0 + tl.arange(0, PART)
                    # a half that is not a multiple of PART must not run into the other half
                    o = tl.where(o < HALF, o, D)
                    one = _outputs(hidden, SUMS, DOWN, DOWN_BIAS, o, done, L, D, DP, SLICES, MLP)
                    two = _outputs(hidden, SUMS, DOWN, DOWN_BIAS, o + HALF, done, L, D, DP, SLICES, MLP)
                    # at the position of the block's last token
                    rotations = (
                        tl.load(FREQS + o, mask=o < HALF, other=0.0)[None, :] * (after - 1).to(tl.float64)[:, None]
                    )
                    angle = ((rotations - tl.floor(rotations + 0.5)) * 6.283185307179586).to(tl.float32)
                    cos = tl.cos(angle) * factor
                    sin = tl.sin(angle) * factor
                    mask = done[:, None] & (o < HALF)[None, :]
                    kept = OUT.dtype.element_ty
                    tl.store(out[:, None] + o[None, :], (one * cos - two * sin).to(kept), mask=mask)
                    tl.store(out[:, None] + HALF + o[None, :], (two * cos + one * sin).to(kept), mask=mask)
            else:
                WHOLE_PART: tl.constexpr = DP if DP < 64 else 64
                for o0 in range(0, D, WHOLE_PART):
                    o = o0 + tl.arange(0, WHOLE_PART)
                    one = _outputs(hidden, SUMS, DOWN, DOWN_BIAS, o, done, L, D, DP, SLICES, MLP)
                    tl.store(out[:, None] + o[None, :], one.to(OUT.dtype.element_ty),
                             mask=done[:, None] & (o < D)[None, :])  # fmt: skip

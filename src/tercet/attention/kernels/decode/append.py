"""First launch of a decode step: normalise and rotate the projections, and write keys and values to the cache.

One program per row and KV head rotates the queries of its group and writes keys and values. Further programs run φ
(compress.py); they do nothing unless a row has just completed a compression block. The ring of raw tokens has one slot
for each of a block's l tokens: the slot overwritten now has left the block, so that φ may read the ring in the same
launch. φ takes the newest token from the projection.

q: [B, H·Dk]   kv: [B, sets·G·(Dk + Dv)], in each set all keys, then all values   cache tensors: [B, slots, G, D]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.decode.common import row_is_active, wait_for_previous_launch
from tercet.attention.kernels.decode.compress import ROWS, CompressionWeights, compress, slices
from tercet.attention.kernels.launch import call, padded, power_of_2
from tercet.attention.kernels.table import overlap_launches


@triton.jit
def _cos_sin(FREQS, t, HALF: tl.constexpr, HP: tl.constexpr):
    """cos and sin of a position's angles. Whole turns are removed in fp64: at position 1,000,000 an fp32 angle is off
    by 0.06 rad."""
    d = tl.arange(0, HP)
    turns = tl.load(FREQS + d, mask=d < HALF, other=0.0) * t.to(tl.float64)
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _halves(X, W, inside, eps, HALF: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr):
    """Both halves, [rows, HP] each, of the vectors that X points at; RMS-normalised if NORM."""
    d = tl.arange(0, HP)
    mask = inside[:, None] & (d < HALF)[None, :]
    first = tl.load(X[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(X[:, None] + HALF + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        first *= r * tl.load(W + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        second *= r * tl.load(W + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _store_halves(OUT, inside, first, second, HALF: tl.constexpr, HP: tl.constexpr):
    d = tl.arange(0, HP)
    mask = inside[:, None] & (d < HALF)[None, :]
    tl.store(OUT[:, None] + d[None, :], first.to(OUT.dtype.element_ty), mask=mask)
    tl.store(OUT[:, None] + HALF + d[None, :], second.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _store_rotated(OUT, inside, first, second, cos, sin, HALF: tl.constexpr, HP: tl.constexpr):
    cos, sin = cos[None, :], sin[None, :]
    _store_halves(OUT, inside, first * cos - second * sin, second * cos + first * sin, HALF, HP)


@triton.jit
def _load(X, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    return tl.load(X + d, mask=d < D)


@triton.jit
def _store(OUT, x, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(OUT + d, x.to(OUT.dtype.element_ty), mask=d < D)


@triton.jit
def _slot(X, b, slots, slot, g, G: tl.constexpr, D: tl.constexpr):
    """Pointer to a token's vector in a cache tensor."""
    return X + ((b.to(tl.int64) * slots + slot) * G + g) * D


@triton.jit(do_not_specialize=["batch", "selected_slots", "compressed_slots", "phi"])
def decode_append_kernel(
    Q, KV, QOUT, FREQS, LENGTHS, COUNTS, QN, KNC, KNS, KNW, KS, VS, KW, VW, KR, VR, KC, VC,
    PK, UPK, UBK, DNK, DBK, PV, UPV, UBV, DNV, DBV, SCRATCH, ARRIVED,
    batch, selected_slots, compressed_slots, phi,
    eps, L: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, SETS: tl.constexpr, G: tl.constexpr,
    HEADS: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HALFP: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, MLP: tl.constexpr,
    SELECTED: tl.constexpr, RING: tl.constexpr, COMPRESSED: tl.constexpr, CHUNK: tl.constexpr,
    SLICES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous_launch(OVERLAP)
    PER_SET: tl.constexpr = G * (DK + DV)
    HALF: tl.constexpr = DK // 2
    program = tl.program_id(0)
    if COMPRESSED:
        if program < phi:
            # φ first: it takes longest
            rows = program // (2 * SLICES)
            slice = program // 2 % SLICES
            PER: tl.constexpr = SLICES * 16 * (DKP if DKP > DVP else DVP)
            sums = SCRATCH + (program % 2 + 2 * rows) * (2 * PER)
            arrived = ARRIVED + program % 2 + 2 * rows
            if program % 2 == 0:
                compress(KV, KNC, KR, KC, PK, UPK, UBK, DNK, DBK, FREQS, LENGTHS, COUNTS, sums, sums + PER, arrived,
                         rows, slice, batch, compressed_slots, 0, SETS * PER_SET, eps, L, S, G, DK, DKP, CHUNK,
                         SLICES, NORM, MASKED, MLP, True)  # fmt: skip
            else:
                compress(KV, KNC, VR, VC, PV, UPV, UBV, DNV, DBV, FREQS, LENGTHS, COUNTS, sums, sums + PER, arrived,
                         rows, slice, batch, compressed_slots, G * DK, SETS * PER_SET, eps, L, S, G, DV, DVP, CHUNK,
                         SLICES, False, MASKED, MLP, False)  # fmt: skip
    if program >= phi:
        b = (program - phi) // G
        g = (program - phi) % G
        if row_is_active(COUNTS, b, MASKED):
            # all loads before any store: with stores in between, each load would wait for the previous one
            r = tl.arange(0, RP)
            q = (b * (G * HEADS) + g * HEADS + r).to(tl.int64) * DK
            q1, q2 = _halves(Q + q, QN, r < HEADS, eps, HALF, HALFP, NORM)
            one = tl.arange(0, 1)
            alone = one == 0
            at = KV + b.to(tl.int64) * (SETS * PER_SET)
            k = at + g * DK
            v = at + G * DK + g * DV
            SECOND: tl.constexpr = PER_SET if SETS == 3 else 0
            if COMPRESSED:
                c1, c2 = _halves(k + one, KNC, alone, eps, HALF, HALFP, NORM)
                cv = _load(v, DV, DVP)
            if SELECTED:
                s1, s2 = _halves(k + SECOND + one, KNS, alone, eps, HALF, HALFP, NORM)
                sv = _load(v + SECOND, DV, DVP)
            if RING:
                w1, w2 = _halves(k + 2 * SECOND + one, KNW, alone, eps, HALF, HALFP, NORM)
                wv = _load(v + 2 * SECOND, DV, DVP)
            t = tl.load(LENGTHS + b)
            cos, sin = _cos_sin(FREQS, t, HALF, HALFP)
            _store_rotated(QOUT + q, r < HEADS, q1, q2, cos, sin, HALF, HALFP)
            if COMPRESSED:
                slot = t % L
                _store_halves(_slot(KR, b, L + 1, slot, g, G, DK) + one, alone, c1, c2, HALF, HALFP)
                _store(_slot(VR, b, L + 1, slot, g, G, DV), cv, DV, DVP)
            if SELECTED:
                _store_rotated(_slot(KS, b, selected_slots, t, g, G, DK) + one, alone, s1, s2, cos, sin, HALF, HALFP)
                _store(_slot(VS, b, selected_slots, t, g, G, DV), sv, DV, DVP)
            if RING:
                slot_w = t % WINDOW
                _store_rotated(_slot(KW, b, WINDOW + 1, slot_w, g, G, DK) + one, alone, w1, w2, cos, sin, HALF, HALFP)
                _store(_slot(VW, b, WINDOW + 1, slot_w, g, G, DV), wv, DV, DVP)


@dataclass(frozen=True)
class Held:
    """The tensors of a cache, (keys, values) of [B, slots, G, D]; None where the step does not read them."""

    lengths: Tensor  # int64 [B]: tokens before this one; the step's last launch increments it
    frequencies: Tensor  # fp64 [Dk/2]: RoPE frequencies, in turns per position
    tokens: int  # capacity
    selected: tuple[Tensor, Tensor] | None = None
    window: tuple[Tensor, Tensor] | None = None  # a ring
    compressed: tuple[Tensor, Tensor] | None = None
    raw: tuple[Tensor, Tensor] | None = None  # a ring of the last l tokens
    arrived: Tensor | None = None  # int32 [arrivals(…)]: counters of finished programs, 0 between steps


def arrivals(batch: int, groups: int) -> int:
    """Counters that a step needs: two for every 16 (row, KV head) pairs of φ, and one per pair for the scores."""
    return 2 * -(-batch * groups // ROWS) + batch * groups


@dataclass(frozen=True)
class Norms:
    """Weights of the RMS norms of q and of each set of keys."""

    q: Tensor
    keys: tuple[Tensor, ...]
    eps: float


def append(
    q: Tensor, kv: Tensor, held: Held, counts: Tensor | None, config: NSAConfig, *, heads: int, groups: int,
    key_size: int, value_size: int, shared: bool, norms: Norms | None,
    phi: tuple[CompressionWeights, CompressionWeights] | None,
) -> Tensor:  # fmt: skip
    """Write the tokens to the cache; returns the rotated queries. counts: int32 [B], 0 for rows without a new token."""
    batch = q.shape[0]
    sets = 1 if shared else 3
    dtype = next(x for x in (held.selected, held.window, held.compressed) if x is not None)[0].dtype
    out = torch.empty(batch, heads, key_size, dtype=dtype, device=q.device)
    counters = 0 if held.raw is None else 2 * -(-batch * groups // ROWS)
    count = slices(config.compress_block)
    largest = max(padded(key_size), padded(value_size))
    scratch = torch.empty(counters, 2, count, ROWS, largest, dtype=torch.float32, device=q.device)
    programs = counters * count
    keys = (None,) * 3 if norms is None else norms.keys * (3 // len(norms.keys))
    parts = [pair or (None, None) for pair in (held.selected, held.window, held.raw, held.compressed)]
    weights = (CompressionWeights(),) * 2 if phi is None else phi
    mlp = weights[0].up is not None
    # cache tensors have one spare slot; dense attention has no compressed tokens
    slots = 0 if held.selected is None else held.selected[0].shape[1]
    compressed_slots = 0 if held.compressed is None else held.compressed[0].shape[1]
    early = overlap_launches(q, batch * groups)
    call(
        decode_append_kernel, (programs + batch * groups,),
        (q, kv, out, held.frequencies, held.lengths, counts, None if norms is None else norms.q, *keys,
         *parts[0], *parts[1], *parts[2], *parts[3], *weights[0].all(), *weights[1].all(),
         scratch, held.arrived),
        (batch, slots, compressed_slots, programs),
        (0.0 if norms is None else norms.eps, config.compress_block, config.compress_stride, config.window, sets,
         groups, heads // groups, power_of_2(heads // groups), key_size, value_size, power_of_2(key_size // 2),
         padded(key_size), padded(value_size), norms is not None, counts is not None, mlp,
         held.selected is not None, held.window is not None, held.raw is not None,
         64 if dtype != torch.float32 else 32 if max(key_size, value_size) <= 128 else 16, count,
         early),
        num_warps=8 if programs else 4, num_stages=2, launch_pdl=early,
    )  # fmt: skip
    return out

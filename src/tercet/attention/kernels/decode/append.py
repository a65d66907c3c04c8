"""First launch of a decode step: normalise and rotate the projections, and write keys and values to the cache.

One program per row and KV head rotates the queries of its group and writes keys and values. Further programs run φ
(compress.py); they do nothing unless a row has just completed a compression block. The ring of raw tokens has one slot
for each of a block's l tokens: the slot overwritten now has left the block, so that φ may read the ring in the same
launch. φ takes the newest token from the projection.

The same program stores the key that scores blocks: the slowest channels of the selected branch's (`own`), or a learned
selector's, where RoPE may rotate the first channels of this key and of the selector's query.

q: [B, H·Dk]   kv: [B, sets·G·(Dk + Dv)], in each set all keys, then all values; the first set's keys, or the
whole set, may be absent. Rows of any stride   cache tensors: [B, slots, G, D]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.decode.common import Heads, row_is_active, wait_for_previous_launch
from tercet.attention.kernels.decode.compress import ROWS, CompressionWeights, compress, slices
from tercet.attention.kernels.launch import call, padded, power_of_2
from tercet.attention.kernels.table import overlap_launches


@triton.jit
def _cos_sin(FREQS, t, pair, inside):
    """cos and sin of pairs of channels at a position; 1 and 0 outside. Whole rotations are removed in fp64: at position
    1,000,000 an fp32 angle is off by 0.06 rad."""
    rotations = tl.load(FREQS + pair, mask=inside, other=0.0) * t.to(tl.float64)
    angle = ((rotations - tl.floor(rotations + 0.5)) * 6.283185307179586).to(tl.float32)
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
def _store_slowest(OUT, inside, first, second, cos, sin, HALF: tl.constexpr, HP: tl.constexpr, PLANES: tl.constexpr):
    """Of rotated vectors, the last PLANES channels of each half."""
    d = tl.arange(0, HP)
    mask = inside[:, None] & ((d >= HALF - PLANES) & (d < HALF))[None, :]
    to = OUT[:, None] + (d - (HALF - PLANES))[None, :]
    cos, sin = cos[None, :], sin[None, :]
    tl.store(to, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=mask)
    tl.store(to + PLANES, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=mask)


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


@triton.jit
def _load_partners(X, ROTATED: tl.constexpr, DP: tl.constexpr):
    """For each of the first ROTATED channels of a selector's vector, the channel with which RoPE mixes it; else 0."""
    d = tl.arange(0, DP)
    partner = tl.where(d < ROTATED // 2, d + ROTATED // 2, d - ROTATED // 2)
    return tl.load(X + partner, mask=d < ROTATED, other=0.0)


@triton.jit
def _selector_cos_sin(FREQS, t, ROTATED: tl.constexpr, DP: tl.constexpr):
    """(cos, sin) of each channel, such that x · cos + x[partner] · sin is rotated."""
    d = tl.arange(0, DP)
    cos, sin = _cos_sin(FREQS, t, d % (ROTATED // 2), d < ROTATED)
    return cos, tl.where(d < ROTATED // 2, -sin, sin)


@triton.jit
def _pool_keys(first_half, second_half, KS, KC, b, g, t, slots, pooled_slots, L: tl.constexpr, S: tl.constexpr,
               G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HP: tl.constexpr):  # fmt: skip
    """The mean of the l stored keys that end with token t, whose halves are given. Nothing if no compressed token ends
    here."""
    first = t + 1 - L
    if (first >= 0) & (first % S == 0):
        i = tl.arange(0, L)
        d = tl.arange(0, HP)
        token = _slot(KS, b, slots, first + i, g, G, D)[:, None] + d[None, :]
        mask = (i < L - 1)[:, None] & (d < HALF)[None, :]
        kind = KS.dtype.element_ty
        low = tl.sum(tl.load(token, mask=mask, other=0.0).to(tl.float32), 0)
        high = tl.sum(tl.load(token + HALF, mask=mask, other=0.0).to(tl.float32), 0)
        low = (low[None, :] + first_half.to(kind).to(tl.float32)) / L
        high = (high[None, :] + second_half.to(kind).to(tl.float32)) / L
        one = tl.arange(0, 1)
        _store_halves(_slot(KC, b, pooled_slots, first // S, g, G, D) + one, one == 0, low, high, HALF, HP)


@triton.jit(
    do_not_specialize=["batch", "selected_slots", "compressed_slots", "selector_q_row", "selector_k_row", "phi"]
)
def decode_append_kernel(
    Q, KV, SELECTOR_Q, SELECTOR_K, QOUT, SELECTOR_QOUT, FREQS, SELECTOR_FREQS, LENGTHS, COUNTS,
    QN, KNC, KNS, KNW, KS, VS, KW, VW, KR, VR, KC, VC, SELECTOR_KEYS,
    PK, UPK, UBK, DNK, DBK, PV, UPV, UBV, DNV, DBV, SCRATCH, ARRIVED,
    batch, selected_slots, compressed_slots, selector_q_row, selector_k_row, phi,
    eps, Q_ROW: tl.constexpr, KV_ROW: tl.constexpr, L: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr,
    SETS: tl.constexpr, ABSENT: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, RP: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, HALFP: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, SD: tl.constexpr, SDP: tl.constexpr,
    ROTATED: tl.constexpr, PLANES: tl.constexpr, NORM: tl.constexpr,
    MASKED: tl.constexpr, MLP: tl.constexpr, SELECTED: tl.constexpr, RING: tl.constexpr, COMPRESSED: tl.constexpr,
    POOL: tl.constexpr, SELECTOR: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous_launch(OVERLAP)
    PER_SET: tl.constexpr = G * (DK + DV)
    # ABSENT: numbers missing at the beginning of a row of KV
    COMPRESSED_KEYS: tl.constexpr = PER_SET if ABSENT > 0 else 0
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
                         rows, slice, batch, compressed_slots, COMPRESSED_KEYS - ABSENT, KV_ROW, eps, L, S, G, DK, DKP,
                         CHUNK, SLICES, NORM, MASKED, MLP, True)  # fmt: skip
            else:
                compress(KV, KNC, VR, VC, PV, UPV, UBV, DNV, DBV, FREQS, LENGTHS, COUNTS, sums, sums + PER, arrived,
                         rows, slice, batch, compressed_slots, G * DK - ABSENT, KV_ROW, eps, L, S, G, DV, DVP, CHUNK,
                         SLICES, False, MASKED, MLP, False)  # fmt: skip
    if program >= phi:
        b = (program - phi) // G
        g = (program - phi) % G
        if row_is_active(COUNTS, b, MASKED):
            # all loads before any store: with stores in between, each load would wait for the previous one
            r = tl.arange(0, RP)
            head = g * HEADS + r
            q1, q2 = _halves(Q + b.to(tl.int64) * Q_ROW + head * DK, QN, r < HEADS, eps, HALF, HALFP, NORM)
            one = tl.arange(0, 1)
            alone = one == 0
            at = KV + b.to(tl.int64) * KV_ROW - ABSENT
            k = at + g * DK
            v = at + G * DK + g * DV
            SECOND: tl.constexpr = PER_SET if SETS == 3 else 0
            if COMPRESSED:
                c1, c2 = _halves(k + COMPRESSED_KEYS + one, KNC, alone, eps, HALF, HALFP, NORM)
                cv = _load(v, DV, DVP)
            if SELECTED:
                s1, s2 = _halves(k + SECOND + one, KNS, alone, eps, HALF, HALFP, NORM)
                sv = _load(v + SECOND, DV, DVP)
            if RING:
                w1, w2 = _halves(k + 2 * SECOND + one, KNW, alone, eps, HALF, HALFP, NORM)
                wv = _load(v + 2 * SECOND, DV, DVP)
            if SELECTOR:
                at_k = SELECTOR_K + b.to(tl.int64) * selector_k_row + g * SD
                selector_k = _load(at_k, SD, SDP)
            if ROTATED > 0:
                at_q = SELECTOR_Q + b.to(tl.int64) * selector_q_row + g * SD
                selector_q = _load(at_q, SD, SDP)
                partner_q = _load_partners(at_q, ROTATED, SDP)
                partner_k = _load_partners(at_k, ROTATED, SDP)
            t = tl.load(LENGTHS + b)
            half = tl.arange(0, HALFP)
            cos, sin = _cos_sin(FREQS, t, half, half < HALF)
            factor = tl.load(FREQS + HALF).to(tl.float32)
            cos, sin = cos * factor, sin * factor
            if ROTATED > 0:
                selector_cos, selector_sin = _selector_cos_sin(SELECTOR_FREQS, t, ROTATED, SDP)
            _store_rotated(QOUT + (b.to(tl.int64) * (G * HEADS) + head) * DK, r < HEADS, q1, q2, cos, sin, HALF, HALFP)
            if COMPRESSED:
                slot = t % L
                _store_halves(_slot(KR, b, L + 1, slot, g, G, DK) + one, alone, c1, c2, HALF, HALFP)
                _store(_slot(VR, b, L + 1, slot, g, G, DV), cv, DV, DVP)
            if POOL:
                rotated1 = s1 * cos[None, :] - s2 * sin[None, :]
                rotated2 = s2 * cos[None, :] + s1 * sin[None, :]
                _pool_keys(
                    rotated1, rotated2, KS, KC, b, g, t, selected_slots, compressed_slots, L, S, G, DK, HALF, HALFP
                )
            if SELECTED:
                _store_rotated(_slot(KS, b, selected_slots, t, g, G, DK) + one, alone, s1, s2, cos, sin, HALF, HALFP)
                _store(_slot(VS, b, selected_slots, t, g, G, DV), sv, DV, DVP)
            if PLANES > 0:
                to = _slot(SELECTOR_KEYS, b, selected_slots, t, g, G, SD) + one
                _store_slowest(to, alone, s1, s2, cos, sin, HALF, HALFP, PLANES)
            if RING:
                slot_w = t % WINDOW
                _store_rotated(_slot(KW, b, WINDOW + 1, slot_w, g, G, DK) + one, alone, w1, w2, cos, sin, HALF, HALFP)
                _store(_slot(VW, b, WINDOW + 1, slot_w, g, G, DV), wv, DV, DVP)
            if ROTATED > 0:
                selector_q = selector_q * selector_cos + partner_q * selector_sin
                selector_k = selector_k * selector_cos + partner_k * selector_sin
                _store(SELECTOR_QOUT + (b.to(tl.int64) * G + g) * SD, selector_q, SD, SDP)
            if SELECTOR:
                _store(_slot(SELECTOR_KEYS, b, selected_slots, t, g, G, SD), selector_k, SD, SDP)


@dataclass(frozen=True)
class Held:
    """The tensors of a cache, (keys, values) of [B, slots, G, D]; None where the step does not read them."""

    lengths: Tensor  # int64 [B]: tokens before this one; the step's last launch increments it
    frequencies: Tensor  # fp64 [Dk/2 + 1]: rotations per position, and the factor of rotated vectors
    tokens: int  # capacity
    selected: tuple[Tensor, Tensor] | None = None
    window: tuple[Tensor, Tensor] | None = None  # a ring
    compressed: tuple[Tensor, Tensor] | None = None
    raw: tuple[Tensor, Tensor] | None = None  # a ring of the last l tokens; None: compressed keys are means of selected
    arrived: Tensor | None = None  # int32 [arrivals(…)]: counters of finished programs, 0 between steps
    selector: Tensor | None = None  # the keys that score blocks, in the slots of `selected`; None: `selected` itself
    selector_frequencies: Tensor | None = None  # of the selector's first channels, two for each; None: it rotates none


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
    q: Tensor, kv: Tensor, held: Held, counts: Tensor | None, config: NSAConfig, heads: Heads, *, shared: bool,
    absent: int, norms: Norms | None, phi: tuple[CompressionWeights, CompressionWeights] | None,
    selector: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Write the tokens to the cache; returns the rotated queries, and those of the selector. counts: int32 [B], 0 for
    rows without a new token. selector: queries and keys of a learned one, [B, G·size]."""
    batch, groups, per_group = q.shape[0], heads.groups, heads.heads // heads.groups
    key_size, value_size = heads.key_size, heads.value_size
    selector_size = max(1, heads.selector_size)
    sets = 1 if shared else 3
    dtype = next(x for x in (held.selected, held.window, held.compressed) if x is not None)[0].dtype
    out = torch.empty(batch, heads.heads, key_size, dtype=dtype, device=q.device)
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
    selector_q, selector_k = selector or (None, None)
    selector_rows = (0, 0) if selector is None else tuple(x.stride(0) for x in selector)
    rotated, rotated_q = 0, None
    planes = selector_size // 2 if heads.own and held.selector is not None else 0
    if selector_q is not None and held.selector_frequencies is not None:
        rotated = 2 * held.selector_frequencies.shape[0]
        rotated_q = torch.empty(selector_q.shape, dtype=dtype, device=q.device)
    early = overlap_launches(q, batch * groups)
    call(
        decode_append_kernel, (programs + batch * groups,),
        (q, kv, selector_q, selector_k, out, rotated_q, held.frequencies, held.selector_frequencies, held.lengths,
         counts, None if norms is None else norms.q, *keys, *(x for pair in parts for x in pair), held.selector,
         *weights[0].all(), *weights[1].all(), scratch, held.arrived),
        (batch, slots, compressed_slots, *selector_rows, programs),
        (0.0 if norms is None else norms.eps, q.stride(0), kv.stride(0), config.compress_block, config.compress_stride,
         config.window, sets, absent, groups, per_group, power_of_2(per_group), key_size, value_size,
         power_of_2(key_size // 2), padded(key_size), padded(value_size), selector_size, padded(selector_size), rotated,
         planes, norms is not None, counts is not None, mlp, held.selected is not None, held.window is not None,
         held.raw is not None, held.raw is None and held.compressed is not None, selector_k is not None,
         64 if dtype != torch.float32 else 32 if max(key_size, value_size) <= 128 else 16, count,
         early),
        num_warps=8 if programs else 4, num_stages=2, launch_pdl=early,
    )  # fmt: skip
    return out, selector_q if rotated_q is None else rotated_q

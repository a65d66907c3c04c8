"""One product of x with all of a layer's weights, taken apart as the kernels read it, and its gradient put together.

A row of the product is [q heads][compressed k, v][selected k, v][window k, v][gate logits][nothing]. One pass turns q
and the selected and window keys by their rotary angles, lays the compressed branch's keys and values chunk by chunk, as
φ multiplies them, and copies the rest; one pass backwards is its transpose. Left to the compiler, the gradient alone
was four kernels, of which the one that knew all layouts ran at a quarter of the memory's rate.

y: [B, T, C]   q: [B, T, H, D]   keys and values: [B, T, G, D]   chunks: [2 (k, v), B, S, G, d, D], zeros where there is
none   logits: [B, T, 3H]   cos, sin: fp32 [T, 1, D/2]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.kernels.launching import call
from tercet.attention.kernels.settings import power_of_2

# Rows of whole cache lines in bf16, and whole tiles of a product
_ALIGNMENT = 64


def columns(heads: int, kv_heads: int, size: int) -> int:
    """C: of a row, what it ends with for alignment's sake included."""
    used = (heads + 6 * kv_heads) * size + 3 * heads
    return -(-used // _ALIGNMENT) * _ALIGNMENT


@triton.jit
def _turn(FROM, TO, source, target, cos, sin, d, mask, HALF: tl.constexpr):
    """A head of every row: from FROM + source to TO + target, turned by the angle."""
    a = tl.load(FROM + source[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(FROM + source[:, None] + HALF + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(TO + target[:, None] + d[None, :], (a * cos - b * sin).to(TO.dtype.element_ty), mask=mask)
    tl.store(TO + target[:, None] + HALF + d[None, :], (b * cos + a * sin).to(TO.dtype.element_ty), mask=mask)


@triton.jit
def _copy(FROM, TO, source, target, d, real, mask):
    """A head of every row as it is, zeros where a row is not real; mask: of what is written."""
    x = tl.load(FROM + source[:, None] + d[None, :], mask=mask & real[:, None], other=0.0)
    tl.store(TO + target[:, None] + d[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["tokens", "length", "in_chunks"])
def _apart(
    Y, COS, SIN, Q, KS, VS, KW, VW, CHUNKS, LOGITS, THERE, IS_THERE, tokens, length, in_chunks,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, MAPPED: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr, Q_PARTS: tl.constexpr, QB: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    # one part of R tokens, the parts of the same tokens side by side
    part = tl.program_id(0) % (Q_PARTS + 4)
    row = (tl.program_id(0) // (Q_PARTS + 4)).to(tl.int64) * R + tl.arange(0, R)
    inside = row < tokens
    d, half = tl.arange(0, DP), tl.arange(0, HP)
    whole = inside[:, None] & (d < D)[None, :]
    if part < Q_PARTS + 2:
        halves = inside[:, None] & (half < D // 2)[None, :]
        angle = (row % length)[:, None] * (D // 2) + half[None, :]
        cos, sin = tl.load(COS + angle, mask=halves, other=0.0), tl.load(SIN + angle, mask=halves, other=0.0)
        if part < Q_PARTS:
            for i in tl.static_range(QB):
                head = part * QB + i
                _turn(Y, Q, row * C + head * D, (row * H + head) * D, cos, sin, half, halves & (head < H), D // 2)
        elif part == Q_PARTS:
            for g in tl.static_range(G):
                _turn(Y, KS, row * C + (H + 2 * G + g) * D, (row * G + g) * D, cos, sin, half, halves, D // 2)
                _copy(Y, VS, row * C + (H + 3 * G + g) * D, (row * G + g) * D, d, inside, whole)
        else:
            for g in tl.static_range(G):
                _turn(Y, KW, row * C + (H + 4 * G + g) * D, (row * G + g) * D, cos, sin, half, halves, D // 2)
                _copy(Y, VW, row * C + (H + 5 * G + g) * D, (row * G + g) * D, d, inside, whole)
    elif part == Q_PARTS + 2:
        placed = row < in_chunks
        if MAPPED:
            token = tl.load(THERE + row, mask=placed, other=0)
            real = tl.load(IS_THERE + row, mask=placed, other=0) != 0
        else:
            per_row = length // STRIDE * STRIDE
            token, real = row // per_row * length + row % per_row, placed
        target = (row // STRIDE * G * STRIDE + row % STRIDE) * D
        mask = placed[:, None] & (d < D)[None, :]
        for g in tl.static_range(G):
            to = target + g * STRIDE * D
            _copy(Y, CHUNKS, token * C + (H + g) * D, to, d, real, mask)
            _copy(Y, CHUNKS, token * C + (H + G + g) * D, to + in_chunks.to(tl.int64) * G * D, d, real, mask)
    else:
        c = tl.arange(0, LP)
        _copy(Y, LOGITS, row * C + (H + 6 * G) * D, row * 3 * H, c, inside, inside[:, None] & (c < 3 * H)[None, :])


@triton.jit(do_not_specialize=["tokens", "length", "in_chunks"])
def _together(
    DY, COS, SIN, DQ, DKS, DVS, DKW, DVW, DCHUNKS, DLOGITS, BACK, IS_BACK, tokens, length, in_chunks,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, MAPPED: tl.constexpr,
    DP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr, Q_PARTS: tl.constexpr, QB: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % (Q_PARTS + 4)
    row = (tl.program_id(0) // (Q_PARTS + 4)).to(tl.int64) * R + tl.arange(0, R)
    inside = row < tokens
    d, half = tl.arange(0, DP), tl.arange(0, HP)
    whole = inside[:, None] & (d < D)[None, :]
    if part < Q_PARTS + 2:
        halves = inside[:, None] & (half < D // 2)[None, :]
        angle = (row % length)[:, None] * (D // 2) + half[None, :]
        # turned back: the angle's sine has the other sign
        cos, sin = tl.load(COS + angle, mask=halves, other=0.0), -tl.load(SIN + angle, mask=halves, other=0.0)
        if part < Q_PARTS:
            for i in tl.static_range(QB):
                head = part * QB + i
                _turn(DQ, DY, (row * H + head) * D, row * C + head * D, cos, sin, half, halves & (head < H), D // 2)
        elif part == Q_PARTS:
            for g in tl.static_range(G):
                _turn(DKS, DY, (row * G + g) * D, row * C + (H + 2 * G + g) * D, cos, sin, half, halves, D // 2)
                _copy(DVS, DY, (row * G + g) * D, row * C + (H + 3 * G + g) * D, d, inside, whole)
        else:
            for g in tl.static_range(G):
                _turn(DKW, DY, (row * G + g) * D, row * C + (H + 4 * G + g) * D, cos, sin, half, halves, D // 2)
                _copy(DVW, DY, (row * G + g) * D, row * C + (H + 5 * G + g) * D, d, inside, whole)
    elif part == Q_PARTS + 2:
        if MAPPED:
            place = tl.load(BACK + row, mask=inside, other=0)
            real = tl.load(IS_BACK + row, mask=inside, other=0) != 0
        else:
            per_row = length // STRIDE * STRIDE
            place, real = row // length * per_row + row % length, inside & (row % length < per_row)
        source = (place // STRIDE * G * STRIDE + place % STRIDE) * D
        for g in tl.static_range(G):
            at = source + g * STRIDE * D
            _copy(DCHUNKS, DY, at, row * C + (H + g) * D, d, real, whole)
            _copy(DCHUNKS, DY, at + in_chunks.to(tl.int64) * G * D, row * C + (H + G + g) * D, d, real, whole)
    else:
        c = tl.arange(0, LP)
        logits = tl.load(
            DLOGITS + row[:, None] * (3 * H) + c[None, :], mask=inside[:, None] & (c < 3 * H)[None, :], other=0.0
        )
        rest = (H + 6 * G) * D
        tl.store(DY + row[:, None] * C + rest + c[None, :], logits, mask=inside[:, None] & (c < C - rest)[None, :])


_ROWS = 32
_Q_BLOCK = 4


def _launch(kernel, main: Tensor, parts: Sequence[Tensor], cos, sin, map_, is_map, sizes) -> None:
    """main: y or its gradient; parts: q, ks, vs, kw, vw, chunks, logits or theirs."""
    heads, kv_heads, size, stride = sizes
    batch, length, width = main.shape
    tokens = batch * length
    if cos.numel() != length * size // 2:
        raise ValueError(f"cos has shape {list(cos.shape)}: {length} tokens and heads of {size} need [T, 1, D/2]")
    q_parts = -(-heads // _Q_BLOCK)
    call(
        kernel, (-(-tokens // _ROWS) * (q_parts + 4),),
        (main, cos, sin, *parts, map_, None if is_map is None else is_map.view(torch.uint8)),
        (tokens, length, batch * (length // stride) * stride),
        (width, heads, kv_heads, size, stride, map_ is not None, power_of_2(size), power_of_2(size // 2),
         power_of_2(max(3 * heads, width - (heads + 6 * kv_heads) * size)), q_parts, _Q_BLOCK, _ROWS),
        num_warps=4,
    )  # fmt: skip


def _parts_like(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads, size, stride = sizes
    batch, length, _ = y.shape
    q = y.new_empty(batch, length, heads, size)
    ks, vs, kw, vw = (y.new_empty(batch, length, kv_heads, size) for _ in range(4))
    chunks = y.new_empty(2, batch, length // stride, kv_heads, stride, size)
    return q, ks, vs, kw, vw, chunks, y.new_empty(batch, length, 3 * heads)


@torch.library.custom_op("tercet::heads_apart", mutates_args=())
def heads_apart(
    y: Tensor, cos: Tensor, sin: Tensor, there: Tensor | None, is_there: Tensor | None, back: Tensor | None,
    is_back: Tensor | None, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(q, ks, vs, kw, vw, chunks, logits) of a product y. `sizes` are H, G, D and d; the maps say where packed
    documents' tokens stand in chunks (chunks.Rearrangement), None where chunks are simply every d tokens."""
    parts = _parts_like(y, sizes)
    _launch(_apart, y.contiguous(), parts, cos.contiguous(), sin.contiguous(), there, is_there, sizes)
    return parts


@heads_apart.register_fake
def _(y, cos, sin, there, is_there, back, is_back, sizes):
    return _parts_like(y, sizes)


@torch.library.custom_op("tercet::heads_together", mutates_args=())
def heads_together(
    dq: Tensor, dks: Tensor, dvs: Tensor, dkw: Tensor, dvw: Tensor, dchunks: Tensor, dlogits: Tensor, cos: Tensor,
    sin: Tensor, back: Tensor | None, is_back: Tensor | None, sizes: list[int],
) -> Tensor:  # fmt: skip
    """The gradient of y from those of its parts."""
    dy = dq.new_empty(*dq.shape[:2], columns(*sizes[:3]))
    parts = [x.contiguous() for x in (dq, dks, dvs, dkw, dvw, dchunks, dlogits)]
    _launch(_together, dy, parts, cos.contiguous(), sin.contiguous(), back, is_back, sizes)
    return dy


@heads_together.register_fake
def _(dq, dks, dvs, dkw, dvw, dchunks, dlogits, cos, sin, back, is_back, sizes):
    return dq.new_empty(*dq.shape[:2], columns(*sizes[:3]))


def _keep(ctx, inputs, output) -> None:
    _, cos, sin, _, _, back, is_back, ctx.sizes = inputs
    ctx.save_for_backward(cos, sin, back, is_back)


def _gradient(ctx, *grads):
    return torch.ops.tercet.heads_together(*grads, *ctx.saved_tensors, ctx.sizes), *(None,) * 7


heads_apart.register_autograd(_gradient, setup_context=_keep)

"""Fused QKV and gate projection, split into the layouts that the kernels read; and its backward.

A row of the projection y is, with three sets of keys and values,

    [q heads][compressed k, v][selected k, v][window k, v][gate logits][padding]

With two sets of keys the compressed branch shares the selected branch's and has only [compressed v]; with one set for
all branches it is [q heads][k, v][gate logits][padding]; without a compressed branch (UNCOMPRESSED), nothing is between
q and the selected keys, and there are no chunks. One kernel applies RoPE to q and to the selected and window keys,
lays out the compressed branch's keys and values in chunks, as φ multiplies them, and copies the rest. The backward is
its transpose. torch.compile made four kernels of the backward, the main one at a quarter of the memory bandwidth.

y: [B, T, C]   q: [B, T, H, D]   keys, values: [B, T, G, D]   chunks: [2 (k, v), B, S, G, d, D], zeros where empty
logits: [B, T, 3H]   cos, sin: fp32 [T, 1, D/2]

`rotate` is RoPE alone, for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.first_order import first_order
from tercet.attention.kernels.launch import call, must_dispatch, operator, power_of_2

# In place of a number of key sets: selected and window keys and values, and nothing for the compressed branch
UNCOMPRESSED = 0
# Rows are whole cache lines in bf16, and whole tiles of a matrix product
_ALIGNMENT = 64


def columns(heads: int, kv_heads: int, size: int, key_sets: int) -> int:
    """C: columns of y, padding included. key_sets: 3, 2, 1 or UNCOMPRESSED."""
    used = _before_logits(heads, kv_heads, size, key_sets) + 3 * heads
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def _before_logits(heads: int, kv_heads: int, size: int, key_sets: int) -> int:
    return (heads + {3: 6, 2: 5, 1: 2, UNCOMPRESSED: 4}[key_sets] * kv_heads) * size


# ------------------------------------------------------------ one head of each row; BACK: from a part into y


@triton.jit
def _load(X, at, d, mask):
    return tl.load(X + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(X, at, d, mask, x):
    tl.store(X + at[:, None] + d[None, :], x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _copy(Y, PART, in_y, in_part, d, read, written, BACK: tl.constexpr):
    """Copy; zeros where it is written but not read."""
    if BACK:
        _store(Y, in_y, d, written, _load(PART, in_part, d, read))
    else:
        _store(PART, in_part, d, written, _load(Y, in_y, d, read))


@triton.jit
def _rotated(X, at, cos, sin, half, mask, HALF: tl.constexpr):
    a, b = _load(X, at, half, mask).to(tl.float32), _load(X, at + HALF, half, mask).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _rotate(Y, PART, in_y, in_part, cos, sin, half, mask, HALF: tl.constexpr, BACK: tl.constexpr):
    if BACK:
        a, b = _rotated(PART, in_part, cos, sin, half, mask, HALF)
        _store(Y, in_y, half, mask, a)
        _store(Y, in_y + HALF, half, mask, b)
    else:
        a, b = _rotated(Y, in_y, cos, sin, half, mask, HALF)
        _store(PART, in_part, half, mask, a)
        _store(PART, in_part + HALF, half, mask, b)


# ------------------------------------------------------------ positions


@triton.jit
def _cos_sin(COS, SIN, row, length, half, mask, HALF: tl.constexpr, BACK: tl.constexpr):
    at = row.to(tl.int32) % length * HALF  # 64-bit division is a subroutine
    cos, sin = _load(COS, at, half, mask), _load(SIN, at, half, mask)
    return cos, (-sin if BACK else sin)


@triton.jit
def _mapped(MAP, IS_MAP, row, given, length, STRIDE: tl.constexpr, MAPPED: tl.constexpr, BACK: tl.constexpr):
    """(the tokens of places in chunks, whether there is one); BACK: the places in chunks of tokens."""
    if MAPPED:
        other = tl.load(MAP + row, mask=given, other=0)
        real = tl.load(IS_MAP + row, mask=given, other=0) != 0
    else:
        per_row, row = length // STRIDE * STRIDE, row.to(tl.int32)
        if BACK:
            other = (row // length * per_row + row % length).to(tl.int64)
            real = given & (row % length < per_row)
        else:
            other = (row // per_row * length + row % per_row).to(tl.int64)
            real = given
    return other, real


@triton.jit
def _in_chunks(place, head, G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr):
    return (place // STRIDE * G * STRIDE + head * STRIDE + place % STRIDE) * D


# ------------------------------------------------------------ KB heads of each row, starting at `first`


@triton.jit
def _keys_and_values(
    Y, K, V, row, first, column, cos, sin, d, half, whole, halves, C: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    KB: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate keys, copy values. column: heads before this set in a row of y."""
    for i in tl.static_range(KB):
        head = first + i
        k_in_y, at = row * C + (column + head) * D, (row * G + head) * D
        _rotate(Y, K, k_in_y, at, cos, sin, half, halves & (head < G), D // 2, BACK)
        _copy(Y, V, k_in_y + G * D, at, d, whole & (head < G), whole & (head < G), BACK)


@triton.jit
def _chunks(
    Y, CHUNKS, MAP, IS_MAP, row, given, length, in_chunks, first, k_column, v_column, d, C: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, KB: tl.constexpr, MAPPED: tl.constexpr, BACK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS: with their keys; False where _shared_gradients adds their gradient to the selected branch's."""
    other, real = _mapped(MAP, IS_MAP, row, given, length, STRIDE, MAPPED, BACK)
    token = row if BACK else other
    place = other if BACK else row
    for i in tl.static_range(KB):
        head = first + i
        written = given[:, None] & (d < D)[None, :] & (head < G)
        read = written & real[:, None]
        in_y, at = token * C + head * D, _in_chunks(place, head, G, D, STRIDE)
        if KEYS:
            _copy(Y, CHUNKS, in_y + k_column * D, at, d, read, written, BACK)
        _copy(Y, CHUNKS, in_y + v_column * D, at + in_chunks.to(tl.int64) * G * D, d, read, written, BACK)


@triton.jit
def _shared_gradients(
    DY, DKS, DVS, DKW, DVW, DCHUNKS, MAP, IS_MAP, row, inside, length, in_chunks, first, column, cos, sin, d, half,
    whole, halves, C: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, KB: tl.constexpr,
    MAPPED: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Summed gradients of keys and values that several branches share. ALL: one set for all three branches; otherwise
    the selected branch's set, whose keys the compressed branch reads too."""
    place, real = _mapped(MAP, IS_MAP, row, inside, length, STRIDE, MAPPED, True)
    for i in tl.static_range(KB):
        head = first + i
        k_in_y, at = row * C + (column + head) * D, (row * G + head) * D
        in_chunk = _in_chunks(place, head, G, D, STRIDE)
        mask = halves & (head < G)
        a, b = _rotated(DKS, at, cos, sin, half, mask, D // 2)
        a_more = _load(DCHUNKS, in_chunk, half, mask & real[:, None]).to(tl.float32)
        b_more = _load(DCHUNKS, in_chunk + D // 2, half, mask & real[:, None]).to(tl.float32)
        if ALL:
            a_window, b_window = _rotated(DKW, at, cos, sin, half, mask, D // 2)
            a_more += a_window
            b_more += b_window
        _store(DY, k_in_y, half, mask, a + a_more)
        _store(DY, k_in_y + D // 2, half, mask, b + b_more)
        mask = whole & (head < G)
        if ALL:
            in_chunk += in_chunks.to(tl.int64) * G * D
            v = _load(DVS, at, d, mask).to(tl.float32) + _load(DVW, at, d, mask).to(tl.float32)
            v += _load(DCHUNKS, in_chunk, d, mask & real[:, None]).to(tl.float32)
            _store(DY, k_in_y + G * D, d, mask, v)
        else:
            _copy(DY, DVS, k_in_y + G * D, at, d, mask, mask, True)


@triton.jit(
    do_not_specialize=["tokens", "length", "in_chunks"],
    repr=lambda variant: "qkv_split_backward_kernel" if variant.constants["BACK"] else "qkv_split_kernel",
)
def qkv_split_kernel(
    Y, COS, SIN, Q, KS, VS, KW, VW, CHUNKS, LOGITS, MAP, IS_MAP, tokens, length, in_chunks,
    C: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, KEY_SETS: tl.constexpr,
    MAPPED: tl.constexpr, BACK: tl.constexpr, DP: tl.constexpr, HP: tl.constexpr, LP: tl.constexpr,
    QB: tl.constexpr, KB: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Split y into its parts; BACK: gather their gradients into y's. A program handles QB heads of q, KB heads of keys
    and values, or the logits, of R tokens. (All heads unrolled in one program: 16 KV heads took 78 s to compile.)"""
    Q_PARTS: tl.constexpr = (H + QB - 1) // QB
    KV_PARTS: tl.constexpr = (G + KB - 1) // KB
    KV_HEADS: tl.constexpr = 2 if KEY_SETS == 1 else 4 if KEY_SETS == 0 else 3 + KEY_SETS
    REST: tl.constexpr = (H + KV_HEADS * G) * D
    # heads before the selected (or shared) keys, and before the compressed branch's keys and values
    SELECTED: tl.constexpr = H if KEY_SETS == 0 else H + (KEY_SETS - 1) * G
    COMPRESSED_K: tl.constexpr = H if KEY_SETS == 3 else SELECTED
    COMPRESSED_V: tl.constexpr = H if KEY_SETS == 2 else H + G
    # programs of the same tokens are neighbours: q, keys and values (selected, window; or shared), chunks, logits
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64) * R + tl.arange(0, R)
    inside = row < tokens
    d, half = tl.arange(0, DP), tl.arange(0, HP)
    first = (part - Q_PARTS) % KV_PARTS * KB
    if part < Q_PARTS + (1 if KEY_SETS == 1 else 2) * KV_PARTS:
        whole, halves = inside[:, None] & (d < D)[None, :], inside[:, None] & (half < D // 2)[None, :]
        cos, sin = _cos_sin(COS, SIN, row, length, half, halves, D // 2, BACK)
        if part < Q_PARTS:
            for i in tl.static_range(QB):
                head = part * QB + i
                in_y, at = row * C + head * D, (row * H + head) * D
                _rotate(Y, Q, in_y, at, cos, sin, half, halves & (head < H), D // 2, BACK)
        elif part < Q_PARTS + KV_PARTS:
            if (KEY_SETS == 1 or KEY_SETS == 2) and BACK:
                _shared_gradients(
                    Y, KS, VS, KW, VW, CHUNKS, MAP, IS_MAP, row, inside, length, in_chunks, first, SELECTED, cos, sin,
                    d, half, whole, halves, C, G, D, STRIDE, KB, MAPPED, KEY_SETS == 1,
                )  # fmt: skip
            else:
                _keys_and_values(Y, KS, VS, row, first, SELECTED, cos, sin, d, half, whole, halves, C, G, D, KB, BACK)
        elif KEY_SETS != 1:
            _keys_and_values(
                Y, KW, VW, row, first, SELECTED + 2 * G, cos, sin, d, half, whole, halves, C, G, D, KB, BACK
            )
    elif part < PARTS - 1:
        if KEY_SETS > 0:
            given = inside if BACK else row < in_chunks
            _chunks(
                Y, CHUNKS, MAP, IS_MAP, row, given, length, in_chunks, first, COMPRESSED_K, COMPRESSED_V, d, C, G, D,
                STRIDE, KB, MAPPED, BACK, KEY_SETS == 3 or not BACK,
            )  # fmt: skip
    else:
        c = tl.arange(0, LP)
        read = inside[:, None] & (c < 3 * H)[None, :]
        written = inside[:, None] & (c < (C - REST if BACK else 3 * H))[None, :]
        _copy(Y, LOGITS, row * C + REST, row * 3 * H, c, read, written, BACK)


_ROWS = 32
_Q_BLOCK = 4
_KV_BLOCK = 2  # a key and a value each: as many bytes per program as for q


def _launch(
    main: Tensor, parts: Sequence[Tensor | None], cos: Tensor, sin: Tensor, map_: Tensor | None,
    is_map: Tensor | None, sizes: Sequence[int], *, back: bool,
) -> None:  # fmt: skip
    """main: y or its gradient; parts: q, ks, vs, kw, vw, chunks, logits, or their gradients."""
    heads, kv_heads, size, stride, key_sets = sizes
    batch, length, width = main.shape
    tokens, shared = batch * length, key_sets == 1
    if cos.numel() != length * size // 2:
        raise ValueError(f"cos has shape {list(cos.shape)}: {length} tokens and heads of {size} need [T, 1, D/2]")
    # shared keys have three gradients: half as many heads per program
    kv_block = min(kv_heads, max(1, _KV_BLOCK // 2) if shared and back else _KV_BLOCK)
    kinds = 1 if shared and back else 2 if shared or key_sets == UNCOMPRESSED else 3
    # their gradient is padded with zeros
    logits = width - _before_logits(heads, kv_heads, size, key_sets) if back else 3 * heads
    programs = -(-heads // _Q_BLOCK) + kinds * -(-kv_heads // kv_block) + 1
    call(
        qkv_split_kernel, (-(-tokens // _ROWS) * programs,),
        (main, cos.contiguous(), sin.contiguous(), *parts, map_, None if is_map is None else is_map.view(torch.uint8)),
        (tokens, length, batch * (length // stride) * stride),
        (width, heads, kv_heads, size, stride, key_sets, map_ is not None, back, power_of_2(size),
         power_of_2(size // 2), power_of_2(logits), _Q_BLOCK, kv_block, programs, _ROWS),
        num_warps=4,
    )  # fmt: skip


# ------------------------------------------------------------ ops; `split_qkv` has their gradient


def _parts_like(y: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    heads, kv_heads, size, stride, key_sets = sizes
    batch, length, _ = y.shape
    q = y.new_empty(batch, length, heads, size)
    # the compressed branch's are in the chunks; the others have two sets, or share one
    keys_and_values = [y.new_empty(batch, length, kv_heads, size) for _ in range(2 if key_sets == 1 else 4)]
    places = 0 if key_sets == UNCOMPRESSED else length // stride
    chunks = y.new_empty(2, batch, places, kv_heads, stride, size)
    return [q, *keys_and_values, chunks, y.new_empty(batch, length, 3 * heads)]


def _together_like(grads: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    heads, kv_heads, size, _, key_sets = sizes
    return grads[0].new_empty(*grads[0].shape[:2], columns(heads, kv_heads, size, key_sets))


@operator(lambda y, cos, sin, there, is_there, sizes: _parts_like(y, sizes))
def heads_apart(
    y: Tensor, cos: Tensor, sin: Tensor, there: Tensor | None, is_there: Tensor | None, sizes: list[int]
) -> list[Tensor]:
    """[q, ks, vs, kw, vw, chunks, logits] of a projection y; [q, k, v, chunks, logits] with one set of keys and values.
    More columns may follow in y.

    `sizes`: H, G, D, d and the number of key sets. `there`, `is_there`: which tokens of packed documents go where in
    the chunks (layout.RowMap); None where chunks are simply every d tokens."""
    parts = _parts_like(y, sizes)
    seven = parts if len(parts) == 7 else [*parts[:3], None, None, *parts[3:]]
    _launch(y.contiguous(), seven, cos, sin, there, is_there, sizes, back=False)
    return parts


@operator(lambda grads, cos, sin, back, is_back, sizes: _together_like(grads, sizes))
def heads_together(
    grads: list[Tensor], cos: Tensor, sin: Tensor, back: Tensor | None, is_back: Tensor | None, sizes: list[int]
) -> Tensor:
    """The gradient of y from those of q, ks, vs, kw, vw, chunks and logits, whatever the number of sets."""
    dy = _together_like(grads, sizes)
    _launch(dy, [x.contiguous() for x in grads], cos, sin, back, is_back, sizes, back=True)
    return dy


class _Split(torch.autograd.Function):
    """heads_apart with its gradient, and seven outputs whatever the number of sets.

    A shared set of keys and values is returned twice, as views of the same memory, so that its two gradients arrive
    separately and are added in registers in fp32. Autograd would add them in a separate launch (2 × 3 × 16.8 MB per
    layer at 65,536 tokens) and round once more. Outputs of an op may not share memory, hence this function around it.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, cos, sin, there, is_there, back, is_back, sizes: list[int]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        ctx.save_for_backward(cos, sin, back, is_back)
        return _seven(torch.ops.tercet.heads_apart(y, cos, sin, there, is_there, sizes))

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.tercet.heads_together(list(grads), *ctx.saved_tensors, ctx.sizes), *(None,) * 7


def _seven(parts: list[Tensor]) -> tuple[Tensor, ...]:
    if len(parts) == 7:
        return tuple(parts)
    q, k, v, chunks, logits = parts
    return q, k, v, k.view_as(k), v.view_as(v), chunks, logits


def split_qkv(
    y: Tensor, rope: tuple[Tensor, Tensor], maps: Sequence[Tensor | None], sizes: list[int]
) -> tuple[Tensor, ...]:
    """(q, ks, vs, kw, vw, chunks, logits) of a projection y. rope: cos, sin; maps: there, is_there, back, is_back."""
    if torch.is_grad_enabled() or must_dispatch():
        found: tuple[Tensor, ...] = _Split.apply(y, *rope, *maps, sizes)
        return found
    return _seven(heads_apart(y, *rope, *maps[:2], sizes))


# RoPE alone, without a gradient. Reading a prompt, a small model waits for launches; PyTorch needs eight.
# x: [B, T, heads, D]   cos, sin: fp32 [..., T, 1, pairs]; the first 2 · pairs channels are rotated (model/rope.py).

_ROTATED = 64


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
        rotate_kernel, (-(-rows // _ROTATED),), (x, cos.contiguous(), sin.contiguous(), out),
        (rows, angles),
        (x.stride(1), x.stride(2), heads, size, pairs, power_of_2(pairs), power_of_2(max(1, size - 2 * pairs)),
         _ROTATED),
        num_warps=4,
        enable_fp_fusion=False,  # rounds as PyTorch does, which rotates where gradients are needed
    )  # fmt: skip
    return out

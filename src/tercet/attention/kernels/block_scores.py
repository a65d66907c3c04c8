"""Block scores from queries and keys of single tokens. No gradients.

Two scorers. `learned`: each KV head has one selector query and one selector key per token (model/selector.py), and a
block's score is the sum of `weight` over its tokens. `own`: the model's own queries and keys, every query head of the
group by itself, and a block's score is the largest product of any head with any of its tokens.

A program holds M queries (of each head) and reads the keys of their document once, several blocks at a time. Maxima are
first taken across heads, number by number, then once across a block's tokens. Only free blocks need scores. They are
complete before the query's own block begins, so that there is no causal mask: what lies beyond a query's free blocks is
computed and never read.

scores: fp32 [queries, G, blocks], from which the kernels of scores.py select
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.launch import LOG2E, call, descriptors, padded
from tercet.attention.kernels.scores import SCRATCH_BYTES, WIDEST, choose
from tercet.attention.kernels.table import Launch, triton_launch
from tercet.attention.kernels.tiles import load_rows, load_tile
from tercet.attention.kernels.varlen import Documents, locate_queries


@triton.jit
def weight(x, scale):
    """Weights of products x: 2^y, linear between integers (docs/nsa.md); scale: y / 246 per unit of x (`weight_scale`).

    An exponential per query and key is what the choice costs at 64k, and the units for 2^y are slow. Here y + 127 is
    computed as an integer, in units of 2^-13: shifted by 10, its bits are those of the weight. Two multiply-adds, the
    first of which saturates, and no conversion. y is at most 119, so that sums are finite."""
    y = tl.minimum(tl.maximum(x * scale + 127 / 246, 0.0), 1.0)  # 0 for y = -127, 1 for 119
    bits = (y * (246.0 * 8192) + 12582912.0).to(tl.int32, bitcast=True)  # + 1.5 · 2^23: the lowest bits are an integer
    return (bits << 10).to(tl.float32, bitcast=True)


@triton.jit
def positive(x):
    """Numbers above 0 in the order of x, whose sign it may have: 30 bits of x, its lowest left out. NaN becomes 0."""
    x = tl.minimum(tl.where(x == 0, 0.0, x), 1.7e38)  # -0 is 0; larger numbers would become NaN
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 1
    return tl.where(x == x, (bits + 0x40000000).to(tl.float32, bitcast=True), 0.0)


@triton.jit(do_not_specialize=["docs", "length", "per_sequence", "first_query", "queries", "tile0", "blocks"])
def token_scores_kernel(
    Q, K, KD, SCORES, CU, docs, length, per_sequence, first_query, queries, tile0, blocks, q_t, q_h, k_t, k_h,
    scale, BLOCK: tl.constexpr, COUNT: tl.constexpr, LOCAL: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr, PACKED: tl.constexpr,
    QUERY_RANGE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    local_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    _, start, rows, size, first = locate_queries(
        CU, docs, tile0 + local_tile, length, per_sequence, first_query, queries, M, PACKED, QUERY_RANGE
    )
    last = tl.minimum(first + M, size) - 1
    # a query with at most COUNT blocks selects them all and needs no scores
    if (first < size) & (last // BLOCK >= COUNT):
        i = tl.arange(0, M)
        inside = first + i < size
        qs = ()
        for h in tl.static_range(0, HEADS):
            qs = qs + (load_rows(Q + (g * HEADS + h).to(tl.int64) * q_h, rows + first + i, q_t, inside, D, DP),)
        K += g.to(tl.int64) * k_h
        AT_ONCE: tl.constexpr = N // BLOCK
        block = tl.arange(0, AT_ONCE)
        out = SCORES + ((local_tile * M + i).to(tl.int64) * G + g)[:, None] * tl.multiple_of(blocks, 4) + block[None, :]
        free = last // BLOCK - LOCAL + 1
        end = tl.minimum(free, blocks)  # fewer if a packed document is longer than the caller's upper bound
        for j in tl.range(0, end, AT_ONCE):
            k = load_tile(K, KD, start + j * BLOCK, (end - j) * BLOCK, g, k_t, D, DP, N, TMA, False)
            kt = tl.trans(k)
            x = tl.dot(qs[0], kt, input_precision="ieee")
            for h in tl.static_range(1, HEADS):
                x = tl.maximum(x, tl.dot(qs[h], kt, input_precision="ieee"))
            if OWN:
                score = positive(tl.max(tl.reshape(x, [M, AT_ONCE, BLOCK]), 2))
            else:
                score = tl.sum(tl.reshape(weight(x, scale), [M, AT_ONCE, BLOCK]), 2)
            tl.store(out + j, score, mask=inside[:, None] & (block < end - j)[None, :])


def weight_scale(size: int) -> float:
    """What `weight` multiplies the products of vectors of this size by."""
    return size**-0.5 * LOG2E / 246


# Bytes of the queries that a program holds, of all heads of a group.
_MOST_QUERY_BYTES = 64 << 10


def select_by_tokens(
    q: Tensor, k: Tensor, config: NSAConfig, documents: Documents, launch: Launch | None = None,
    scratch_bytes: int = SCRATCH_BYTES, widest: int = WIDEST, own: bool = False,
) -> Tensor:  # fmt: skip
    """block_indices of every query from queries and keys [B, rows, G, size], both flat (ops.flat): a selector's, with
    queries [B, T, G, size], or the model's `own`, [B, T, H, size]. Keys and documents are those of the selected branch:
    row for row, with the same first query."""
    G, size = k.shape[2:]
    heads, room = q.shape[2] // G, padded(size) * q.element_size()
    block, count, local = config.select_block, config.select_count, config.select_local
    launch = launch or triton_launch("own_score" if own else "token_score", q, k)
    rows = launch.rows
    while rows > 16 and rows * heads * room > _MOST_QUERY_BYTES:
        rows //= 2
    keys = max(min(launch.keys, 8192 // padded(size)), block)  # larger tiles leave room for fewer programs
    (kd,) = descriptors(launch.tma, keys, k)
    cu, *bounds = documents.query_tokens(rows)

    def score(scores: Tensor, blocks: int, tile0: int, tiles: int) -> None:
        call(
            token_scores_kernel, (tiles, G), (q, k, kd, scores, cu), (*bounds, tile0, blocks),
            (q.stride(1), q.stride(2), k.stride(1), k.stride(2), weight_scale(size), block, count, local, G, heads,
             size, padded(size), rows, keys, own, documents.packed, documents.query_range, kd is not None),
            **launch.options,
        )  # fmt: skip

    return choose(q, G, config, documents, rows, score, scratch_bytes, widest)

"""Block importance, in place of scores.scores_kernel. Each product runs during the exponentials of the row tile before
it, also across key tiles. Whole sequences only."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.hopper.common import barrier, descriptor, locate, real_columns, tile_of, visible
from tercet.attention.kernels.launch import LOG2E, call, power_of_2
from tercet.attention.kernels.table import Launch
from tercet.attention.kernels.varlen import Documents


@gluon.jit
def _fetch(KD, k_s, bars, n, count, row, g, D: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    slot = n % STAGES
    there = n < count
    mbarrier.expect(bars.index(slot), 2 * N * D, there)
    tma.async_copy_global_to_shared(KD, [g, row + n * N, 0], bars.index(slot), k_s.index(slot), there)


@gluon.jit(do_not_specialize=["docs", "length", "per_sequence", "tile0", "blocks", "compressed_length", "rows"])
def hopper_scores(
    Q, LSE, SCORES, KD, CU, CCU, docs, length, per_sequence, tile0, blocks, compressed_length, rows, q_t, q_h, scale,
    L: gl.constexpr, S: gl.constexpr, BLOCK: gl.constexpr, COUNT: gl.constexpr, LOCAL: gl.constexpr, G: gl.constexpr,
    HEADS: gl.constexpr, SIZE: gl.constexpr, D: gl.constexpr, HT: gl.constexpr, QT: gl.constexpr, TILES: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = HT * QT
    NB: gl.constexpr = N * S // BLOCK
    NBP: gl.constexpr = NB if NB > 16 else 16
    products: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    pools: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NBP, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=pools, k_width=2)
    own: gl.constexpr = gl.SliceLayout(1, products)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    by_key: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    by_score: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    dtype: gl.constexpr = KD.dtype
    local_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    g = gl.program_id(1)
    doc, start, size, first = locate(CU, docs, tile0 + local_tile, length, per_sequence, QT, PACKED)
    last = gl.minimum(first + QT, size) - 1
    # a query with at most COUNT blocks selects them all and needs no scores
    if (first < size) & (last // BLOCK >= COUNT):
        if PACKED:
            c0 = gl.load(CCU + doc)
        else:
            c0 = doc * compressed_length
        q_s = gl.allocate_shared_memory(dtype, [TILES, M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))
        k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, N, D], KD.layout)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for b in gl.static_range(STAGES):
            mbarrier.init(bars.index(b), count=1)
        # blocks that are forced for every query of the tile need no scores
        end = gl.minimum(visible(last, L, S), (last // BLOCK - LOCAL + 1) * (BLOCK // S))
        count = (end + N - 1) // N
        barrier()
        for b in gl.static_range(STAGES):
            _fetch(KD, k_s, bars, gl.to_tensor(b), count, c0, g, D, N, STAGES)
        # all heads of the queries, in row tiles. The HT heads of a query follow one another, so that one warp adds them
        # up. Idle rows get +inf for their lse, hence p = 0
        r = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        row = (start + first + r // HT).to(gl.int64)
        o = gl.arange(0, M, layout=own)
        own_row = (start + first + o // HT).to(gl.int64)
        lses = ()
        for x in gl.static_range(TILES):
            h = x * HT + r % HT
            inside = real_columns((h < HEADS) & (first + r // HT < size), d, SIZE, D)
            q = gl.load(Q + (row * q_t + (g * HEADS + h) * q_h)[:, None] + d[None, :], mask=inside, other=0.0)
            q_s.index(x).store(q)
            h = x * HT + o % HT
            inside = (h < HEADS) & (first + o // HT < size)
            at = (g * HEADS + h).to(gl.int64) * rows + own_row
            lses = lses + (gl.load(LSE + at, mask=inside, other=float("inf")) - 100.0,)
        # the share of each compressed token's tokens that lies in a block, and in the next tile's first block
        i = gl.arange(0, N, layout=gl.SliceLayout(1, by_key))[:, None] * S
        b = gl.arange(0, NBP, layout=gl.SliceLayout(0, by_key))[None, :]
        overlap = gl.minimum(i + L, b * BLOCK + BLOCK) - gl.maximum(i, b * BLOCK)
        overlap = gl.where(b < NB, gl.maximum(overlap, 0), 0)
        share = (overlap.to(gl.float32) / L).to(gl.bfloat16)
        narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, NBP], gl.bfloat16)
        share_s = gl.allocate_shared_memory(gl.bfloat16, [N, NBP], narrow, share)
        key = gl.arange(0, N, layout=gl.SliceLayout(0, products))
        seen = gl.minimum(visible(first + o // HT, L, S), end)
        whole = gl.minimum(visible(first, L, S), end) // N
        carry = gl.zeros([M], gl.float32, layout=own)
        none = gl.zeros([M, N], gl.float32, layout=products)
        nothing = gl.zeros([M, NBP], gl.float32, layout=pools)
        column = gl.arange(0, NBP, layout=gl.SliceLayout(0, pools))
        if HT == 1:
            t = gl.arange(0, M, layout=gl.SliceLayout(1, pools))
            c = column
        else:
            t = gl.arange(0, QT, layout=gl.SliceLayout(1, by_score))
            c = gl.arange(0, NBP, layout=gl.SliceLayout(0, by_score))
        blocks = blocks // 4 * 4  # a multiple of 4, now to the compiler too
        out = SCORES + ((local_tile * QT + t).to(gl.int64) * G + g)[:, None] * blocks + c[None, :]
        there = (first + t < size)[:, None] & (c < NB)[None, :]
        fence_async_shared()
        barrier()
        mbarrier.wait(bars.index(0), 0, count > 0)
        first_keys = tile_of(k_s, 0).permute((1, 0))
        following = warpgroup_mma(q_s.index(0), first_keys, none, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(following,))
        for n in range(count):
            k = tile_of(k_s, n % STAGES).permute((1, 0))
            p = none
            for x in gl.static_range(TILES):
                if x + 1 < TILES:
                    following = warpgroup_mma(q_s.index(x + 1), k, none, use_acc=False, is_async=True)
                else:
                    after = n + 1
                    mbarrier.wait(bars.index(after % STAGES), after // STAGES & 1, after < count)
                    k = tile_of(k_s, after % STAGES).permute((1, 0))
                    following = warpgroup_mma(q_s.index(0), k, none, use_acc=False, is_async=True)
                p = p + gl.exp2(s * scale - lses[x][:, None])
                # p: its exponentials must not move behind the wait, where they would keep registers
                s, p = warpgroup_mma_wait(0, deps=(following, p))
            _fetch(KD, k_s, bars, n + STAGES, count, c0, g, D, N, STAGES)
            if n >= whole:
                token = n * N + key  # not kept in registers, since it depends on n
                p = gl.where(token[None, :] < seen[:, None], p, 0.0)
            # p cut to 17 bits, which two bf16 numbers hold exactly (scores.py). Rounded as integers, since converting
            # single numbers to bf16 takes as long as exponentials.
            bits = p.to(gl.int32, bitcast=True) & -128
            p = bits.to(gl.float32, bitcast=True)
            rounded = ((bits + 0x8000) & -0x10000).to(gl.float32, bitcast=True)
            high = gl.convert_layout(rounded.to(gl.bfloat16), operand)
            low = gl.convert_layout((p - rounded).to(gl.bfloat16), operand)
            by_high = warpgroup_mma(high, share_s, nothing, use_acc=False, is_async=True)
            by_low = warpgroup_mma(low, share_s, nothing, use_acc=False, is_async=True)
            of_high, of_low = warpgroup_mma_wait(0, deps=(by_high, by_low))
            score = of_high + of_low
            brought = gl.convert_layout(carry, gl.SliceLayout(1, pools))
            score = score + gl.where((column == 0)[None, :], brought[:, None], 0.0)
            carry = gl.zeros([M], gl.float32, layout=own)
            for m in gl.static_range((L - 1) // S):  # tokens that reach into the next tile
                reaching = gl.sum(gl.where((key == N - 1 - m)[None, :], p, 0.0), 1)
                carry = carry + reaching * ((L - (m + 1) * S) / L)
            if HT > 1:
                score = gl.convert_layout(gl.sum(gl.reshape(score, [QT, HT, NBP]), 1), by_score)
            gl.store(out + n * NB, score, mask=there & (n * NB + c < blocks)[None, :])


def launch_scores(
    q: Tensor, k: Tensor, lse: Tensor, scores: Tensor, config: NSAConfig, documents: Documents, blocks: int, tile0: int,
    tiles: int, together: int, launch: Launch,
) -> None:  # fmt: skip
    """Scores of `tiles` tiles of queries from tile0 on. together: heads of a row tile."""
    B, T, H, D = q.shape
    G = k.shape[2]
    queries = launch.rows // together
    cu, *bounds = documents.tokens(queries)
    call(
        hopper_scores, (tiles, G),
        (q, lse, scores, descriptor(k, launch.keys), cu, documents.ccu),
        (*bounds, tile0, blocks, documents.compressed_length, B * T),
        (q.stride(1), q.stride(2), D**-0.5 * LOG2E, config.compress_block, config.compress_stride, config.select_block,
         config.select_count, config.select_local, G, H // G, D, power_of_2(D), together, queries,
         -(-H // G // together), launch.keys, launch.stages, documents.packed),
        **launch.gluon_options,
    )  # fmt: skip

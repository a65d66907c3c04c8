"""Union tiles of the selected branch on Hopper's tensor cores, in Gluon: what union.py's kernels compute.

The product with the values of one block runs while the warps take the exponentials of the next (hopper.py says why the
kernels are shaped as they are). Blocks are fetched two steps ahead, their places read from the list a step earlier.
# rows of a tile: (query, head of the group); M of them, of which QT * h are there
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tercet.attention.kernels import union
from tercet.attention.kernels.hopper import meet

_token_of = gluon.jit(union.token_of.fn)


@gluon.jit
def _fetch(XD, x_s, bars, n, there, first, g, D: gl.constexpr, BS: gl.constexpr, STAGES: gl.constexpr):
    """Starts the copy of the block that begins at token `first`, for step n."""
    bar = bars.index(n % STAGES)
    mbarrier.expect(bar, 2 * BS * D, there)
    tma.async_copy_global_to_shared(XD, [first, g * D], bar, x_s.index(n % STAGES), there)


@gluon.jit
def _weights(s, m, l, first, bits, t, qi, earliest, scale, BS: gl.constexpr, scores: gl.constexpr):
    """One step of the online softmax; rows that did not choose the block sit out."""
    # Which rows take part is a matter of row vectors; only blocks that end after the tile begins need a mask.
    on = ((bits >> qi) & 1) == 1
    if first + BS - 1 > earliest:
        key = gl.arange(0, BS, layout=gl.SliceLayout(0, scores))
        s = gl.where(key[None, :] <= (t - first)[:, None], s, -1e30)
    top = gl.where(on, gl.maximum(m, gl.max(s, 1) * scale), m)
    fade = gl.exp2(m - top)
    p = gl.exp2(s * scale - gl.where(on, top, 1e30)[:, None])
    return top, l * fade + gl.sum(p, 1), fade, p


@gluon.jit(do_not_specialize=["queries", "first_query"])
def forward_kernel(
    Q, KD, VD, LISTS, COUNTS, DECISION, O, LSE, N, T, queries, first_query, tiles, range_tokens, scale, qb, qt, qh,
    G: gl.constexpr, h: gl.constexpr, QT: gl.constexpr, M: gl.constexpr, n: gl.constexpr, F: gl.constexpr,
    BS: gl.constexpr, D: gl.constexpr, LEFT: gl.constexpr, STRETCH: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = KD.dtype
    tile = gl.program_id(0)
    g = gl.program_id(1)
    # the list of this tile
    slot = g * tiles + tile
    entry = LISTS + slot.to(gl.int64) * (2 * QT * (n + F))
    length = QT * n
    if F > 0:
        if gl.load(DECISION + tile * QT // range_tokens) == 1:
            entry += 2 * QT * n
            length = QT * F
            slot += G * tiles
    count = gl.load(COUNTS + slot)
    q_s = gl.allocate_shared_memory(dtype, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))
    k_s = gl.allocate_shared_memory(dtype, [2, BS, D], KD.layout)
    v_s = gl.allocate_shared_memory(dtype, [2, BS, D], VD.layout)
    k_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(k_bars.index(b), count=1)
        mbarrier.init(v_bars.index(b), count=1)
    fence_async_shared()
    meet()
    last = gl.maximum(count - 1, 0)
    first0 = gl.load(entry)
    first1 = gl.load(entry + gl.minimum(last, 1))
    first2 = gl.load(entry + gl.minimum(last, 2))
    _fetch(KD, k_s, k_bars, gl.to_tensor(0), count > 0, first0, g, D, BS, 2)
    _fetch(KD, k_s, k_bars, gl.to_tensor(1), count > 1, first1, g, D, BS, 2)
    _fetch(VD, v_s, v_bars, gl.to_tensor(0), count > 0, first0, g, D, BS, 2)
    # rows as they are loaded and stored
    r = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
    i = tile * QT + r // h
    there = (r // h < QT) & (i < N)
    i64 = i.to(gl.int64)
    batch = (_token_of(i, T, queries, first_query, STRETCH) // T).to(gl.int64)
    head = g.to(gl.int64) * h + r % h
    q = gl.load(Q + (i64 * qt + batch * qb + head * qh)[:, None] + d[None, :], mask=there[:, None], other=0.0)
    q_s.store(q)
    # and as scores have them
    r = gl.arange(0, M, layout=gl.SliceLayout(1, scores))
    qi = r // h
    t = _token_of(tile * QT + qi, T, queries, first_query, STRETCH)
    earliest = _token_of(tile * QT, T, queries, first_query, STRETCH)
    m = gl.full([M], -1e20, gl.float32, layout=gl.SliceLayout(1, scores))
    l = gl.zeros([M], gl.float32, layout=gl.SliceLayout(1, scores))
    none = gl.zeros([M, BS], gl.float32, layout=scores)
    acc = gl.zeros([M, D], gl.float32, layout=sums)
    fence_async_shared()
    meet()
    if LEFT:
        q_l = q_s.load(gl.DotOperandLayout(operand_index=0, parent=scores, k_width=2))
    else:
        q_l = q_s
    bits = gl.where(count > 0, gl.load(entry + length), 0)
    next_bits = gl.load(entry + length + gl.minimum(last, 1))
    mbarrier.wait(k_bars.index(0), 0, count > 0)
    token = warpgroup_mma(q_l, k_s.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(token,))
    m, l, _, p = _weights(s, m, l, first0, bits, t, qi, earliest, scale, BS, scores)
    weights = gl.convert_layout(p.to(dtype), operand)
    _fetch(KD, k_s, k_bars, gl.to_tensor(2), count > 2, first2, g, D, BS, 2)
    _fetch(VD, v_s, v_bars, gl.to_tensor(1), count > 1, first1, g, D, BS, 2)
    mbarrier.wait(k_bars.index(1), 0, count > 1)
    mbarrier.wait(v_bars.index(0), 0, count > 0)
    for j in range(1, count):
        token = warpgroup_mma(q_l, k_s.index(j % 2).permute((1, 0)), none, use_acc=False, is_async=True)
        total = warpgroup_mma(weights, v_s.index((j + 1) % 2), acc, is_async=True)
        ahead = gl.load(entry + gl.minimum(last, j + 2))
        ahead_bits = gl.load(entry + length + gl.minimum(last, j + 1))
        s = warpgroup_mma_wait(1, deps=(token,))
        m, l, fade, p = _weights(s, m, l, first1, next_bits, t, qi, earliest, scale, BS, scores)
        first1 = first2
        first2 = ahead
        next_bits = ahead_bits
        # the next step's wait stands here so that the assembler does not move the exponentials behind the product's
        after = j + 1
        mbarrier.wait(k_bars.index(after % 2), after // 2 & 1, after < count)
        mbarrier.wait(v_bars.index(j % 2), j // 2 & 1)
        acc, p, fade = warpgroup_mma_wait(0, deps=(total, p, fade))
        weights = gl.convert_layout(p.to(dtype), operand)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, sums))[:, None]
        _fetch(KD, k_s, k_bars, j + 2, j + 2 < count, first2, g, D, BS, 2)
        _fetch(VD, v_s, v_bars, j + 1, j + 1 < count, first1, g, D, BS, 2)
    total = warpgroup_mma(weights, v_s.index((count + 1) % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(total,))
    some = l > 0
    share = gl.where(some, l, 1.0)
    value = gl.where(some, m + gl.log2(share), 1e30)
    at = (tile * QT + qi).to(gl.int64) * (G * h) + g * h + r % h
    gl.store(LSE + at, value, mask=(qi < QT) & (tile * QT + qi < N))
    share = gl.convert_layout(share, gl.SliceLayout(1, sums))[:, None]
    some = gl.convert_layout(l, gl.SliceLayout(1, sums))[:, None] > 0
    out = gl.convert_layout(gl.where(some, acc / share, 0.0).to(dtype), by_row)
    gl.store(O + ((i64 * (G * h) + head) * D)[:, None] + d[None, :], out, mask=there[:, None])


@gluon.jit(do_not_specialize=["queries", "first_query"])
def query_gradients_kernel(
    Q, KD, VD, DOUT, LSE, ROW_SUM, GATE, LISTS, COUNTS, DECISION, DQ, RECORDS, N, T, queries, first_query, tiles,
    range_tokens, scale, softmax_scale, qb, qt, qh, ob, ot, oh, gb, gt, gh,
    G: gl.constexpr, h: gl.constexpr, QT: gl.constexpr, M: gl.constexpr, n: gl.constexpr, F: gl.constexpr,
    BS: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, GATED: gl.constexpr,
    ADD: gl.constexpr, STRETCH: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = KD.dtype
    tile = gl.program_id(0)
    g = gl.program_id(1)
    wanted = tile >= 0
    if F > 0:
        wanted = gl.load(DECISION + tile * QT // range_tokens) == 0
    if wanted:
        slot = g * tiles + tile
        entry = LISTS + slot.to(gl.int64) * (2 * QT * (n + F))
        count = gl.load(COUNTS + slot)
        last = gl.maximum(count - 1, 0)
        q_s = gl.allocate_shared_memory(dtype, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))
        do_s = gl.allocate_shared_memory(dtype, [M, D], gl.NVMMASharedLayout.get_default_for([M, D], dtype))
        k_s = gl.allocate_shared_memory(dtype, [STAGES, BS, D], KD.layout)
        v_s = gl.allocate_shared_memory(dtype, [STAGES, BS, D], VD.layout)
        k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for b in gl.static_range(STAGES):
            mbarrier.init(k_bars.index(b), count=1)
            mbarrier.init(v_bars.index(b), count=1)
        fence_async_shared()
        meet()
        for b in gl.static_range(STAGES - 1):
            first = gl.load(entry + gl.minimum(last, b))
            _fetch(KD, k_s, k_bars, gl.to_tensor(b), b < count, first, g, D, BS, STAGES)
            _fetch(VD, v_s, v_bars, gl.to_tensor(b), b < count, first, g, D, BS, STAGES)
        # rows as they are loaded and stored
        r = gl.arange(0, M, layout=gl.SliceLayout(1, by_row))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, by_row))
        i = tile * QT + r // h
        there = (r // h < QT) & (i < N)
        i64 = i.to(gl.int64)
        batch = (_token_of(i, T, queries, first_query, STRETCH) // T).to(gl.int64)
        head = g.to(gl.int64) * h + r % h
        q = gl.load(Q + (i64 * qt + batch * qb + head * qh)[:, None] + d[None, :], mask=there[:, None], other=0.0)
        do = gl.load(DOUT + (i64 * ot + batch * ob + head * oh)[:, None] + d[None, :], mask=there[:, None], other=0.0)
        q_s.store(q)
        do_s.store(do)
        to = DQ + ((i64 * (G * h) + head) * D)[:, None] + d[None, :]
        # and as scores have them
        r = gl.arange(0, M, layout=gl.SliceLayout(1, scores))
        qi = r // h
        i = tile * QT + qi
        ok = (qi < QT) & (i < N)
        t = _token_of(i, T, queries, first_query, STRETCH)
        earliest = _token_of(tile * QT, T, queries, first_query, STRETCH)
        i64 = i.to(gl.int64)
        row = i64 * (G * h) + g * h + r % h
        lse = gl.load(LSE + row, mask=ok, other=1e30)
        row_sum = gl.load(ROW_SUM + row, mask=ok, other=0.0)
        gate = gl.full([M], 1.0, gl.float32, layout=gl.SliceLayout(1, scores))
        if GATED:
            gate_at = i64 * gt + (t // T).to(gl.int64) * gb + (g.to(gl.int64) * h + r % h) * gh
            gate = gl.load(GATE + gate_at, mask=ok, other=0.0).to(gl.float32)
        record = RECORDS + row * 4
        gl.store(record, lse, mask=ok)
        gl.store(record + 1, gate, mask=ok)
        gl.store(record + 2, row_sum, mask=ok)
        gl.store(record + 3, i.to(gl.float32, bitcast=True), mask=ok)
        none = gl.zeros([M, BS], gl.float32, layout=scores)
        acc = warpgroup_mma_init(gl.zeros([M, D], gl.float32, layout=sums))
        key = gl.arange(0, BS, layout=gl.SliceLayout(0, scores))
        fence_async_shared()
        meet()
        left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=scores, k_width=2)
        if LEFT:
            q_l = q_s.load(left)
            do_l = do_s.load(left)
        else:
            q_l = q_s
            do_l = do_s
        first = gl.load(entry)
        bits = gl.load(entry + QT * n)
        coming = gl.load(entry + gl.minimum(last, STAGES - 1))
        for j in range(count):
            slot = j % STAGES
            mbarrier.wait(k_bars.index(slot), j // STAGES & 1)
            mbarrier.wait(v_bars.index(slot), j // STAGES & 1)
            s_ = warpgroup_mma(q_l, k_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
            dp_ = warpgroup_mma(do_l, v_s.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
            s, dq = warpgroup_mma_wait(1, deps=(s_, acc))
            meet()
            _fetch(KD, k_s, k_bars, j + STAGES - 1, j + STAGES - 1 < count, coming, g, D, BS, STAGES)
            _fetch(VD, v_s, v_bars, j + STAGES - 1, j + STAGES - 1 < count, coming, g, D, BS, STAGES)
            next_first = gl.load(entry + gl.minimum(last, j + 1))
            next_bits = gl.load(entry + QT * n + gl.minimum(last, j + 1))
            coming = gl.load(entry + gl.minimum(last, j + STAGES))
            on = ((bits >> qi) & 1) == 1
            p = gl.exp2(s * scale - gl.where(on, lse, 1e30)[:, None])
            if first + BS - 1 > earliest:
                p = gl.where(key[None, :] <= (t - first)[:, None], p, 0.0)
            dp, p = warpgroup_mma_wait(0, deps=(dp_, p))
            ds = gl.convert_layout((p * (dp - row_sum[:, None])).to(dtype), operand)
            acc = warpgroup_mma(ds, k_s.index(slot), dq, is_async=True)
            first = next_first
            bits = next_bits
        dq = warpgroup_mma_wait(0, deps=(acc,))
        factor = gl.convert_layout(gate * softmax_scale, gl.SliceLayout(1, sums))
        out = gl.convert_layout(dq * factor[:, None], by_row)
        if ADD:
            out += gl.load(to, mask=there[:, None], other=0.0).to(gl.float32)
        gl.store(to, out.to(dtype), mask=there[:, None])

"""Reductions over the partial results of the KV-major kernels, in a fixed order.

Per query: partial outputs, weighted by their log-sum-exp, and partial dq. Per block: the pieces of dk and dv.
"""

import triton
import triton.language as tl

from tercet.attention.kernels.selected.query_major import in_columns


@triton.jit(do_not_specialize=["r", "begin", "pairs"])
def merge_partials(
    PARTIAL, PARTIAL_LSE, SPAN, DECISION, O, LSE, r, begin, pairs,
    G: tl.constexpr, h: tl.constexpr, n: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, HP: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """O, LSE: the forced blocks' on entry, all blocks' on return."""
    # One (token of the range, KV head) pair and HP heads of the group at a time: what it reads lies together in memory,
    # and SLOTS slots are in flight at once. Programs loop, since where the other design runs, launching one per pair
    # only to exit would take 20 µs.
    if tl.load(DECISION + r) == 1:
        hh = tl.program_id(1) * HP + tl.arange(0, HP)
        d = tl.arange(0, DVP)
        slot = tl.arange(0, SLOTS)
        for pair in tl.range(tl.program_id(0), pairs, tl.num_programs(0)):
            at = begin.to(tl.int64) * G + pair
            span = tl.load(SPAN + at)
            lo = span & 1023
            hi = (span >> 10) & 1023
            at = at * h + hh
            part = pair * (n * h) + hh
            forced = tl.load(LSE + at)
            forced = tl.where(forced < float("inf"), forced, -1e20)
            # first the maximum over the small array, so that the large one is only scaled and added
            top = forced
            for first in tl.range(0, n, SLOTS):
                i = (first + slot)[:, None]
                live = (i >= lo) & (i < hi)
                top = tl.maximum(top, tl.max(tl.load(PARTIAL_LSE + i * h + part, mask=live, other=-1e30), 0))
            l = tl.where(forced > -1e19, tl.exp2(forced - top), 0.0)
            to = O + at[:, None] * DV + d[None, :]
            inside = (d < DV)[None, :]
            acc = tl.load(to, mask=inside, other=0.0).to(tl.float32) * l[:, None]
            for first in tl.range(0, n, SLOTS):
                i = (first + slot)[:, None]
                live = (i >= lo) & (i < hi)
                row = i * h + part
                w = tl.exp2(tl.load(PARTIAL_LSE + row, mask=live, other=-1e30) - top[None, :])
                w = tl.where(live, w, 0.0)
                x = tl.load(
                    PARTIAL + (row * DV)[:, :, None] + d[None, None, :],
                    mask=live[:, :, None] & inside[None, :, :],
                    other=0.0,
                )
                l += tl.sum(w, 0)
                acc += tl.sum(x.to(tl.float32) * w[:, :, None], 0)
            some = l > 0
            l = tl.where(some, l, 1.0)
            # every thread reads the log-sum-exps and one writes them: it must not overtake those that still read
            tl.debug_barrier()
            tl.store(to, (acc / l[:, None]).to(O.dtype.element_ty), mask=inside)
            tl.store(LSE + at, tl.where(some, top + tl.log2(l), float("inf")))


@triton.jit(do_not_specialize=["r", "begin", "pairs"])
def sum_dq(
    PARTIAL_DQ, SPAN, DECISION, DQ, r, begin, pairs, softmax_scale,
    G: tl.constexpr, h: tl.constexpr, n: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, HP: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    # rows are (token of the range, KV head) pairs by heads of the group; few programs that loop, since where the other
    # design runs, launching thousands that exit at once would take 20 µs
    if tl.load(DECISION + r) == 1:
        row = tl.arange(0, ROWS * HP)
        for tile in tl.range(tl.program_id(0), tl.cdiv(pairs, ROWS), tl.num_programs(0)):
            pair = tile * ROWS + row // HP
            hh = tl.program_id(1) * HP + row % HP
            ok = (pair < pairs) & (hh < h)
            d = tl.arange(0, DKP)
            at = begin.to(tl.int64) * G + pair
            past = tl.load(SPAN + at, mask=ok, other=0) >> 20
            part = (pair * (n * h) + hh) * DK
            acc = tl.zeros([ROWS * HP, DKP], tl.float32)
            for i in tl.range(0, n, loop_unroll_factor=UNROLL):
                acc += tl.load(
                    PARTIAL_DQ + (part + i * (h * DK))[:, None] + d[None, :],
                    mask=in_columns(ok & (i < past), d, DK, DKP),
                    other=0.0,
                ).to(tl.float32)
            acc *= softmax_scale
            to = DQ + (at * h + hh)[:, None] * DK + d[None, :]
            whole = in_columns(ok, d, DK, DKP)
            if ADD:
                acc += tl.load(to, mask=whole, other=0.0).to(tl.float32)
            tl.store(to, acc.to(DQ.dtype.element_ty), mask=whole)


@triton.jit(do_not_specialize=["r", "begin", "end", "base", "lists", "slots", "L", "documents", "steps"])
def sum_dkv(
    SUMS, LISTS, CU, DKEY, DVALUE, r, begin, end, base, lists, slots, L, T, documents, steps, blocks_per_sequence,
    softmax_scale,
    G: tl.constexpr, BS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, HEAD_TILES: tl.constexpr,
    SEGMENT: tl.constexpr, CHUNK: tl.constexpr, DEPTH: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Program (block number, KV head, part of the block): adds up the pieces of split lists; LAST writes dk and dv."""
    number = tl.program_id(0)
    g = tl.program_id(1)
    x = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    SIZE: tl.constexpr = BS * (DK + DV)
    if PACKED:
        lo = number * 0
        hi = lo + documents
        for _ in range(steps):
            mid = (lo + hi) // 2
            below = tl.load(CU + mid) // BS + mid <= number
            lo = tl.where(below, mid, lo)
            hi = tl.where(below, hi, mid)
        start = tl.load(CU + lo)
        first = start + (number - start // BS - lo) * BS
        past = tl.minimum(first + BS, tl.load(CU + lo + 1))
    else:
        sequence = number // blocks_per_sequence
        first = sequence * T + number % blocks_per_sequence * BS
        past = tl.minimum(first + BS, (sequence + 1) * T)
    lst = (r * G + g) * L + number
    p0 = tl.load(LISTS + lst)
    entries = tl.load(LISTS + lists + lst) - p0
    cut = entries > SEGMENT
    # a list that is new in this range and empty has no sum yet
    new = (entries == 0) & (first >= begin)
    if (first < past) & (first < end) & (cut | new | LAST):
        total = tl.zeros([CHUNK], tl.float32)
        for tile in tl.static_range(HEAD_TILES):
            sums = SUMS + ((slots + g * L + number).to(tl.int64) * HEAD_TILES + tile) * SIZE + x
            defined = (x < SIZE) & ((first < begin) | ((entries > 0) & (entries <= SEGMENT)))
            acc = tl.load(sums, mask=defined, other=0.0)
            pieces = tl.where(cut, tl.cdiv(entries, SEGMENT), 0)
            piece = (p0 - base) // SEGMENT + g * L + number
            for i in tl.range(0, pieces, DEPTH):
                some = i + tl.arange(0, DEPTH)
                at = ((piece + some).to(tl.int64) * HEAD_TILES + tile) * SIZE
                part = tl.load(
                    SUMS + at[:, None] + x[None, :], mask=(some < pieces)[:, None] & (x < SIZE)[None, :], other=0.0
                )
                acc += tl.sum(part, 0)
            if LAST:
                total += acc
            else:
                tl.store(sums, acc, mask=x < SIZE)
        if LAST:
            key = x // (DK + DV)
            column = x % (DK + DV)
            mine = (x < SIZE) & (first + key < past)
            at = (first + key).to(tl.int64) * G + g
            tl.store(
                DKEY + at * DK + column,
                (total * softmax_scale).to(DKEY.dtype.element_ty),
                mask=mine & (column < DK),
            )
            tl.store(DVALUE + at * DV + (column - DK), total.to(DVALUE.dtype.element_ty), mask=mine & (column >= DK))

"""The kernels as PyTorch custom ops: forward and backward are one op each, with fake implementations for tracing.

    nsa_compressed -> nsa_select -> keep_selection -> nsa_attend        (backward: nsa_delta, nsa_backward)

Block-sparse attention needs no output of compressed attention and starts with nsa_compressed_lse instead.

Activation checkpointing policies can name each op. Op schemas are flat lists of tensors and numbers, which travel as
named tuples. This module's functions of the same names are the ops' bodies. A branch that does not run has None inputs;
the ops return empty tensors in place of None.

`span` is empty where q holds whole sequences. For a query range (varlen.py) it is [tokens of the whole, first query
among the compressed branch's tokens, among the selected keys, among the window keys]. Branches may then have different
document bounds: `cu` is [docs + 1], or [3, docs + 1] with a row per branch.

`longest` is an upper bound on document lengths, where the host knows one. Compiled graphs specialise on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig
from tercet.attention.kernels import compressed, window
from tercet.attention.kernels.block_scores import select_by_tokens
from tercet.attention.kernels.combine import by_branch, combine, deltas, row_shape
from tercet.attention.kernels.dq import compressed_window_dq
from tercet.attention.kernels.launch import operator
from tercet.attention.kernels.replay import replayed
from tercet.attention.kernels.scores import select
from tercet.attention.kernels.selected.launch import Saved, selected_backward, selected_forward, selected_saved_like
from tercet.attention.kernels.tiles import Branch
from tercet.attention.kernels.varlen import Documents


class Tensors(NamedTuple):
    """Tensor arguments of nsa_attend; its backward also reads the last four."""

    q: Tensor
    kc: Tensor | None = None
    vc: Tensor | None = None
    ks: Tensor | None = None
    vs: Tensor | None = None
    kw: Tensor | None = None
    vw: Tensor | None = None
    gates: Tensor | None = None
    o_c: Tensor | None = None
    lse_c: Tensor | None = None
    block_indices: Tensor | None = None
    cu: Tensor | None = None  # document bounds
    ccu: Tensor | None = None  # bounds of their compressed tokens
    o_s: Tensor | None = None
    lse_s: Tensor | None = None
    o_w: Tensor | None = None
    lse_w: Tensor | None = None


class Numbers(NamedTuple):
    """The other arguments of every op."""

    config: Sequence[int]  # the fields of an NSAConfig
    span: Sequence[int]
    longest: int | None


class Attended(NamedTuple):
    """What nsa_attend computes. With one branch and no gates, `out` is that branch's o and o_s, o_w are None."""

    out: Tensor
    o_s: Tensor | None
    lse_s: Tensor | None
    o_w: Tensor | None
    lse_w: Tensor | None
    saved: Saved


TENSORS = len(Tensors._fields)
GRADIENTS = 8  # the backward returns those of the first eight Tensors


def flat(x: Tensor | None) -> Tensor | None:
    """x itself if one stride addresses token b·T + t, else a contiguous copy. TMA takes no stride of 0 (expanded)."""
    if x is None or (
        x.stride(-1) == 1 and x.stride(1) > 0 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    ):
        return x
    return x.contiguous()


def sizes_of(config: NSAConfig) -> tuple[int, ...]:
    """The config at the op boundary. Not dataclasses.astuple: on Python 3.11 it deep-copies and breaks graphs."""
    return (
        config.compress_block, config.compress_stride, config.select_block, config.select_count,
        config.select_initial, config.select_local, config.window,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _config(sizes: tuple[int, ...]) -> NSAConfig:
    return NSAConfig(*sizes)


def _setting(
    q: Tensor, kc: Tensor | None, cu: Tensor | None, ccu: Tensor | None, numbers: Sequence, branch: int = 0,
    keys: Tensor | None = None,
) -> tuple[NSAConfig, Documents]:  # fmt: skip
    """The config, and the documents as a branch's kernels see them: 0 compressed, 1 selected, 2 window; the latter two
    with their keys."""
    sizes, span, longest = numbers
    config = _config(tuple(sizes))
    length, longest = 0 if kc is None else kc.shape[1], -1 if longest is None else longest
    if not span:
        return config, Documents(q.shape[0], q.shape[1], length, cu, ccu, longest=longest)
    tokens = span[0] if keys is None else keys.shape[1]
    bounds = cu if cu is None or cu.dim() == 1 else cu[branch]
    return config, Documents(q.shape[0], tokens, length, bounds, ccu, span[1 + branch], q.shape[1], longest)


def _rows_like(q: Tensor, v: Tensor, branch: str) -> tuple[Tensor, Tensor]:
    """Fake output and log-sum-exp."""
    B, T, H = q.shape[:3]
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(row_shape(branch, B, T, H), dtype=torch.float32)


def _filled(q: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Empty tensors in place of None, which an op cannot return."""
    return tuple(q.new_empty(0) if x is None else x for x in found)


# The parts of op schemas. Torch would infer them, but from signatures that name every field of the tuples above again.
_TENSORS = ", ".join(f"Tensor{'?' * (name in Tensors._field_defaults)} {name}" for name in Tensors._fields)
_NUMBERS = "SymInt[] config, SymInt[] span, SymInt? longest"


def _results(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


# ------------------------------------------------------------ compressed attention and selection


@operator(
    lambda q, kc, vc, *_: _rows_like(q, vc, "compressed"),
    f"(Tensor q, Tensor kc, Tensor vc, Tensor? cu, Tensor? ccu, {_NUMBERS}) -> {_results(2)}",
)
@replayed
def nsa_compressed(q, kc, vc, cu, ccu, *numbers):
    q, kc, vc = flat(q), flat(kc), flat(vc)
    return compressed.forward(q, kc, vc, *_setting(q, kc, cu, ccu, numbers))


@operator(
    lambda q, kc, *_: q.new_empty(row_shape("compressed", *q.shape[:3]), dtype=torch.float32),
    f"(Tensor q, Tensor kc, Tensor? cu, Tensor? ccu, {_NUMBERS}) -> Tensor",
)
@replayed
def nsa_compressed_lse(q, kc, cu, ccu, *numbers):
    q, kc = flat(q), flat(kc)
    return compressed.log_sum_exp(q, kc, *_setting(q, kc, cu, ccu, numbers))


def _selection_like(q: Tensor, k: Tensor, config: Sequence[int]) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[2], _config(tuple(config)).select_count, dtype=torch.int32)


@operator(
    lambda q, kc, lse, cu, ccu, config, *_: _selection_like(q, kc, config),
    f"(Tensor q, Tensor kc, Tensor lse, Tensor? cu, Tensor? ccu, {_NUMBERS}) -> Tensor",
)
@replayed
def nsa_select(q, kc, lse, cu, ccu, *numbers):
    q, kc = flat(q), flat(kc)
    return select(q, kc, lse, *_setting(q, kc, cu, ccu, numbers))


@operator(
    lambda q, k, cu, own, config, *_: _selection_like(q, k, config),
    f"(Tensor q, Tensor k, Tensor? cu, bool own, {_NUMBERS}) -> Tensor",
)
@replayed
def nsa_select_by_tokens(q, k, cu, own, *numbers):
    """By a learned selector's queries and keys, or the model's own; `cu` and `span` are the selected branch's."""
    q, k = flat(q), flat(k)
    return select_by_tokens(q, k, *_setting(q, None, cu, None, numbers, 1, k), own=own)


# ------------------------------------------------------------ the rest of the forward


@replayed
def attend(x: Tensors, numbers: Numbers, backward: bool = True) -> Attended:
    """Selected and window attention, and the gated sum with the compressed branch's output. `backward`: its backward
    pass may follow."""
    q, ks, vs, kw, vw, gates = flat(x.q), flat(x.ks), flat(x.vs), flat(x.kw), flat(x.vw), flat(x.gates)
    o_s = lse_s = o_w = lse_w = None
    saved = Saved()
    if ks is not None:
        setting = _setting(q, x.kc, x.cu, x.ccu, numbers, 1, ks)
        o_s, lse_s, saved = selected_forward(q, ks, vs, x.block_indices.contiguous(), *setting, backward=backward)
    if kw is not None:
        config, documents = _setting(q, x.kc, x.cu, x.ccu, numbers, 2, kw)
        o_w, lse_w = window.forward(q, kw, vw, config.window, documents)
    if _alone(x):
        return Attended(o_s if o_w is None else o_w, None, lse_s, None, lse_w, saved)
    return Attended(combine([x.o_c, o_s, o_w], gates), o_s, lse_s, o_w, lse_w, saved)


@replayed
def run_stages(
    x: Tensors, numbers: Numbers, compressed: bool, choose: bool, backward: bool = True
) -> tuple[Tensors, Attended]:
    """All stages at once: x completed by what `attend` read, and what it computed.

    `compressed`: the compressed branch runs; `choose`: select blocks by its scores, else they are given.
    """
    if compressed or choose:
        o_c, lse_c = nsa_compressed(x.q, x.kc, x.vc, x.cu, x.ccu, *numbers)
        x = x._replace(o_c=o_c, lse_c=lse_c)
    if choose:
        x = x._replace(block_indices=nsa_select(x.q, x.kc, x.lse_c, x.cu, x.ccu, *numbers))
    if not compressed:
        x = x._replace(kc=None, vc=None, o_c=None, lse_c=None)
    return x, attend(x, numbers, backward)


def _alone(x: Tensors) -> bool:
    """Whether the output is that of the selected or of the window branch alone, without a gate."""
    return x.gates is None and x.o_c is None and (x.ks is None) != (x.kw is None)


@torch.library.custom_op(
    "tercet::nsa_attend", mutates_args=(),
    schema=f"({_TENSORS}, {_NUMBERS}) -> {_results(len(Attended._fields) - 1 + len(Saved._fields))}",
)  # fmt: skip
def nsa_attend(*arguments):
    """An Attended, its `saved` unpacked."""
    x = Tensors(*arguments[:TENSORS])
    *found, saved = attend(x, Numbers(*arguments[TENSORS:]))
    return _filled(x.q, (*found, *saved))


@nsa_attend.register_fake
def _(*arguments):
    x = Tensors(*arguments[:TENSORS])
    q, alone = x.q, _alone(x)
    out, lse_w = _rows_like(q, next(v for v in (x.vc, x.vs, x.vw) if v is not None), "window")
    lse_s = q.new_empty(row_shape("selected", *q.shape[:3]), dtype=torch.float32)
    saved = Saved()
    if x.ks is not None:
        setting = _setting(q, x.kc, x.cu, x.ccu, arguments[TENSORS:], 1, x.ks)
        saved = selected_saved_like(q, x.ks, x.vs, x.block_indices, *setting)
    found = (
        out,
        None if x.ks is None or alone else torch.empty_like(out),
        None if x.ks is None else lse_s,
        None if x.kw is None or alone else torch.empty_like(out),
        None if x.kw is None else lse_w,
    )
    return _filled(q, (*found, *saved))


# ------------------------------------------------------------ backward


def _deltas_like(dout, gates, o_c, o_s, o_w):
    found = dout.new_empty(3, dout.shape[0] * dout.shape[1] * dout.shape[2], dtype=torch.float32)
    return found, torch.empty_like(found), gates.new_empty(gates.shape), dout.new_empty(dout.shape)


@operator(_deltas_like)
def nsa_delta(
    dout: Tensor, gates: Tensor, o_c: Tensor | None, o_s: Tensor | None, o_w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """combine.Deltas with the gated sum: all that the backward needs of the branches' outputs, so that they can be
    freed before the rest of it runs."""
    return tuple(deltas([o_c, o_s, o_w], flat(dout), flat(gates), mix=True))


@replayed
def gradients(
    dout: Tensor, x: Tensors, saved: Sequence[Tensor | None], numbers: Numbers, delta: Tensor | None = None,
    planes: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Of the first eight Tensors. A branch runs if its keys are given. With `delta` and `planes` (gates), as nsa_delta
    computes them, the branches' outputs are not needed, and the gradient of the gates is None."""
    dout, q, kc, vc, ks, vs, kw, vw, gates = map(flat, (dout, *x[:GRADIENTS]))
    dgates = None
    if delta is None:
        delta, planes, dgates, _ = deltas([x.o_c, x.o_s, x.o_w], dout, gates)
    (delta_c, delta_s, delta_w), (g_c, g_s, g_w) = by_branch(delta, dout.shape), by_branch(planes, dout.shape)
    dkc = dvc = dks = dvs = dkw = dvw = dq = None
    of_compressed = None if kc is None else Branch(kc, vc, x.lse_c, delta_c, g_c)
    of_window = None if kw is None else Branch(kw, vw, x.lse_w, delta_w, g_w)
    config, documents = _setting(q, kc, x.cu, x.ccu, numbers)
    blocks = windows = documents
    if numbers.span:
        blocks, windows = (_setting(q, kc, x.cu, x.ccu, numbers, i, k)[1] for i, k in ((1, ks), (2, kw)))
    if numbers.span and kc is not None and kw is not None:
        # two calls: the window's keys may start elsewhere, so that positions differ
        dq = compressed_window_dq(q, dout, of_compressed, None, config, documents)
        dq += compressed_window_dq(q, dout, None, of_window, config, windows)
    elif kc is not None or kw is not None:
        dq = compressed_window_dq(q, dout, of_compressed, of_window, config, windows if kc is None else documents)
    if of_compressed is not None:
        dkc, dvc = compressed.dkv(q, dout, of_compressed, config, documents)
    if of_window is not None:
        dkw, dvw = window.dkv(q, dout, of_window, config.window, windows)
    if ks is not None:
        dq, dks, dvs = selected_backward(
            q, ks, vs, x.block_indices.contiguous(), x.lse_s, dout, g_s, delta_s, config, blocks, saved, dq=dq
        )
    return dq, dkc, dvc, dks, dvs, dkw, dvw, dgates


def _gradients_like(dout, *arguments):
    x, sums = Tensors(*arguments[:TENSORS]), arguments[TENSORS + 1 + len(Numbers._fields) :]
    like = x[:GRADIENTS] if not sums or sums[0] is None else (*x[: GRADIENTS - 1], None)
    return _filled(x.q, [None if y is None else y.new_empty(y.shape) for y in like])


@operator(
    _gradients_like,
    f"(Tensor dout, {_TENSORS}, Tensor[] saved, {_NUMBERS}, Tensor? sums=None, Tensor? planes=None)"
    f" -> {_results(GRADIENTS)}",
)
def nsa_backward(dout, *arguments):
    """The gradients. `sums`, `planes`: the deltas and gates of nsa_delta."""
    x, saved, rest = Tensors(*arguments[:TENSORS]), arguments[TENSORS], arguments[TENSORS + 1 :]
    numbers, sums = rest[: len(Numbers._fields)], rest[len(Numbers._fields) :]
    return _filled(x.q, gradients(dout, x, saved, Numbers(*numbers), *sums))

"""The kernels as PyTorch operators: forward and backward each an op, with shapes for tracing, and one autograd.

`nsa_compressed` -> `nsa_select` -> `tercet::keep_selection` -> `nsa_attend`. The first two run without autograd;
`nsa_attend` takes everything that the result depends on and owns the whole gradient, so that backward folds the
gates in, adds dq once and materialises no gradient of a branch's output. Checkpointing policies can name each op.

Missing branches are None going in and empty tensors coming out.

`span` is empty where q holds whole sequences. Else q is a stretch of them (documents.py), and span is the tokens of the
whole, then the first query's place among the compressed branch's tokens, the selected keys' and the window keys'. The
keys' own bounds may then differ as well: `cu` is [3, docs + 1], a row for each branch, where they do.

`longest`: no packed document has more tokens, where the host knows. It is part of what a compiled graph is made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tercet.attention.config import NSAConfig
from tercet.attention.kernels.combine import by_branch, combine, row_sums
from tercet.attention.kernels.compressed import forward as compressed_forward
from tercet.attention.kernels.compressed import key_gradients as compressed_key_gradients
from tercet.attention.kernels.documents import Documents, compressed_bounds
from tercet.attention.kernels.output import Multiplied, multiply
from tercet.attention.kernels.query_gradient import query_gradients
from tercet.attention.kernels.registering import operator
from tercet.attention.kernels.score import select
from tercet.attention.kernels.selected import SAVED, selected_backward, selected_forward, selected_saved_like
from tercet.attention.kernels.window import forward as window_forward
from tercet.attention.kernels.window import key_gradients as window_key_gradients


def flat(x: Tensor) -> Tensor:
    """x itself where token b·T + t can be addressed by one stride, else a contiguous copy."""
    if x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def _flat(*tensors: Tensor | None) -> list:
    return [None if x is None else flat(x) for x in tensors]


def _sizes(config: NSAConfig) -> list[int]:
    """What `_config` makes a config of. By name: on Python 3.11 astuple copies deeply, and breaks graphs."""
    return [
        config.compress_block, config.compress_stride, config.select_block, config.select_count,
        config.select_initial, config.select_local, config.window,
    ]  # fmt: skip


@lru_cache(maxsize=64)
def _config(sizes: tuple[int, ...]) -> NSAConfig:
    return NSAConfig(*sizes)


def _documents(
    q: Tensor, kc: Tensor | None, cu: Tensor | None, ccu: Tensor | None, span: Sequence[int] = (),
    longest: int | None = None, branch: int = 0, keys: Tensor | None = None,
) -> Documents:  # fmt: skip
    """As a branch's kernels see them: 0 compressed, 1 selected, 2 window, the latter two with their keys."""
    compressed, longest = 0 if kc is None else kc.shape[1], -1 if longest is None else longest
    if not span:
        return Documents(q.shape[0], q.shape[1], compressed, cu, ccu, longest=longest)
    length = span[0] if keys is None else keys.shape[1]
    bounds = cu if cu is None or cu.dim() == 1 else cu[branch]
    return Documents(q.shape[0], length, compressed, bounds, ccu, span[1 + branch], q.shape[1], longest)


def _rows_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H = q.shape[:3]
    return q.new_empty(B, T, H, v.shape[3]), q.new_empty(H, B, T, dtype=torch.float32)


def _none(q: Tensor) -> Tensor:
    return q.new_empty(0)


# ------------------------------------------------------------ where documents' compressed tokens begin


@operator(lambda cu, block, stride: torch.empty_like(cu))
def nsa_compressed_bounds(cu: Tensor, block: int, stride: int) -> Tensor:
    return compressed_bounds(cu, block, stride)


# ------------------------------------------------------------ compressed attention and the selection


@operator(lambda q, kc, vc, *_: _rows_like(q, vc))
def nsa_compressed(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    cu: Tensor | None,
    ccu: Tensor | None,
    config: list[int],
    span: list[int],
    longest: int | None,
) -> tuple[Tensor, Tensor]:
    q, kc, vc = _flat(q, kc, vc)
    return compressed_forward(q, kc, vc, _config(tuple(config)), _documents(q, kc, cu, ccu, span, longest))


def _selection_like(q, kc, lse, cu, ccu, config, span, longest):
    count = _config(tuple(config)).select_count
    return q.new_empty(q.shape[0], q.shape[1], kc.shape[2], count, dtype=torch.int32)


@operator(_selection_like)
def nsa_select(
    q: Tensor,
    kc: Tensor,
    lse: Tensor,
    cu: Tensor | None,
    ccu: Tensor | None,
    config: list[int],
    span: list[int],
    longest: int | None,
) -> Tensor:
    q, kc = _flat(q, kc)
    return select(q, kc, lse, _config(tuple(config)), _documents(q, kc, cu, ccu, span, longest))


# ------------------------------------------------------------ the rest of the forward pass


@torch.library.custom_op("tercet::nsa_attend", mutates_args=())
def nsa_attend(
    q: Tensor,
    kc: Tensor | None,
    vc: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    kw: Tensor | None,
    vw: Tensor | None,
    gates: Tensor | None,
    o_c: Tensor | None,
    lse_c: Tensor | None,
    block_indices: Tensor | None,
    cu: Tensor | None,
    ccu: Tensor | None,
    config: list[int],
    span: list[int],
    longest: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, o of selected, its lse, o of window, its lse, and the index tensors that selected attention can
    use again). Without gates and with one branch, out is that o."""
    sizes = _config(tuple(config))
    found = _attend(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu, ccu, sizes, span, longest)
    return tuple(_none(q) if x is None else x for x in found)


def _attend(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu, ccu, sizes, span, longest):
    q, ks, vs, kw, vw, gates = _flat(q, ks, vs, kw, vw, gates)
    o_s = lse_s = o_w = lse_w = None
    saved: tuple[Tensor, ...] = ()
    if ks is not None:
        documents = _documents(q, kc, cu, ccu, span, longest, 1, ks)
        o_s, lse_s, saved = selected_forward(q, ks, vs, block_indices.contiguous(), sizes, documents)
    if kw is not None:
        o_w, lse_w = window_forward(q, kw, vw, sizes.window, _documents(q, kc, cu, ccu, span, longest, 2, kw))
    outputs = [o_c, o_s, o_w]
    if gates is None and sum(o is not None for o in outputs) == 1 and o_c is None:
        out, o_s, o_w = (o_s if o_s is not None else o_w), None, None
    else:
        out = combine(outputs, gates)
    return out, o_s, lse_s, o_w, lse_w, *saved, *(None,) * (SAVED - len(saved))


@nsa_attend.register_fake
def _(q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu, ccu, config, span, longest):
    out, lse = _rows_like(q, next(v for v in (vc, vs, vw) if v is not None))
    alone = gates is None and o_c is None and (ks is None) != (kw is None)
    o_s = _none(q) if ks is None or alone else torch.empty_like(out)
    o_w = _none(q) if kw is None or alone else torch.empty_like(out)
    lse_s = _none(q) if ks is None else q.new_empty(q.shape[:3], dtype=torch.float32)
    lse_w = _none(q) if kw is None else lse
    saved = ()
    if ks is not None:
        documents = _documents(q, kc, cu, ccu, span, longest, 1, ks)
        saved = selected_saved_like(q, ks, vs, block_indices, _config(tuple(config)), documents)
    return out, o_s, lse_s, o_w, lse_w, *saved, *(_none(q) for _ in range(SAVED - len(saved)))


# ------------------------------------------------------------ backward


def _row_sums_like(dout, gates, o_c, o_s, o_w):
    sums = dout.new_empty(3, dout.shape[0] * dout.shape[1] * dout.shape[2], dtype=torch.float32)
    return sums, torch.empty_like(sums), gates.new_empty(gates.shape), dout.new_empty(dout.shape)


@operator(_row_sums_like)
def nsa_row_sums(
    dout: Tensor, gates: Tensor, o_c: Tensor | None, o_s: Tensor | None, o_w: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row sums, gates by branch, gradient of the gates, the gated sum again), all that the backward pass asks of the
    branches' outputs: apart from the rest, so that they can be let go before it."""
    dout, gates = _flat(dout, gates)
    return row_sums([o_c, o_s, o_w], dout, gates, mix=True)


def _gradients_like(
    dout, q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, o_s, lse_s, o_w, lse_w, block_indices, cu, ccu, saved, config,
    span, longest, sums=None, planes=None,
):  # fmt: skip
    like = (q, kc, vc, ks, vs, kw, vw, gates if sums is None else None)
    return tuple(_none(q) if x is None else x.new_empty(x.shape) for x in like)


@operator(_gradients_like)
def nsa_backward(
    dout: Tensor,
    q: Tensor,
    kc: Tensor | None,
    vc: Tensor | None,
    ks: Tensor | None,
    vs: Tensor | None,
    kw: Tensor | None,
    vw: Tensor | None,
    gates: Tensor | None,
    o_c: Tensor | None,
    lse_c: Tensor | None,
    o_s: Tensor | None,
    lse_s: Tensor | None,
    o_w: Tensor | None,
    lse_w: Tensor | None,
    block_indices: Tensor | None,
    cu: Tensor | None,
    ccu: Tensor | None,
    saved: list[Tensor],
    config: list[int],
    span: list[int],
    longest: int | None,
    sums: Tensor | None = None,
    planes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, kc, vc, ks, vs, kw, vw, gates. A branch is there when its keys are. With `sums` and `planes`, as
    nsa_row_sums made them, the branches' outputs are not asked for, and the gates' gradient is not given."""
    grads = _gradients(
        dout, q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, o_s, lse_s, o_w, lse_w, block_indices, cu, ccu, saved,
        _config(tuple(config)), span, longest, sums, planes,
    )  # fmt: skip
    return tuple(_none(q) if x is None else x for x in grads)


def _gradients(
    dout, q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, o_s, lse_s, o_w, lse_w, block_indices, cu, ccu, saved, sizes,
    span, longest, sums=None, planes=None,
):  # fmt: skip
    dout, q, kc, vc, ks, vs, kw, vw, gates = _flat(dout, q, kc, vc, ks, vs, kw, vw, gates)
    dgates = None
    if sums is None:
        sums, planes, dgates, _ = row_sums([o_c, o_s, o_w], dout, gates)
    sums, (g_c, g_s, g_w) = by_branch(sums, dout.shape), by_branch(planes, dout.shape)
    dkc = dvc = dks = dvs = dkw = dvw = dq = None
    by_compressed = None if kc is None else (kc, vc, lse_c, sums[0], g_c)
    by_window = None if kw is None else (kw, vw, lse_w, sums[2], g_w)
    documents = _documents(q, kc, cu, ccu, span, longest)
    windows = _documents(q, kc, cu, ccu, span, longest, 2, kw) if span else documents
    if span and kc is not None and kw is not None:
        # positions may differ: the window's keys need not begin where the documents do
        dq = query_gradients(q, dout, by_compressed, None, sizes, documents)
        dq += query_gradients(q, dout, None, by_window, sizes, windows)
    elif kc is not None or kw is not None:
        dq = query_gradients(q, dout, by_compressed, by_window, sizes, windows if kc is None else documents)
    if kc is not None:
        dkc, dvc = compressed_key_gradients(q, kc, vc, lse_c, dout, g_c, sums[0], sizes, documents)
    if kw is not None:
        dkw, dvw = window_key_gradients(q, kw, vw, lse_w, dout, g_w, sums[2], sizes.window, windows)
    if ks is not None:
        blocks = _documents(q, kc, cu, ccu, span, longest, 1, ks) if span else documents
        dq, dks, dvs = selected_backward(
            q, ks, vs, block_indices.contiguous(), lse_s, dout, g_s, sums[1], sizes, blocks, saved, dq=dq
        )
    return dq, dkc, dvc, dks, dvs, dkw, dvw, dgates


def _keep(ctx, inputs, output) -> None:
    q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu, ccu, *ctx.numbers = inputs
    out, o_s, lse_s, o_w, lse_w, *saved = output
    # a branch alone and without gates: its output is the result
    if ks is not None and (o_s is None or o_s.numel() == 0):
        o_s = out
    if kw is not None and (o_w is None or o_w.numel() == 0):
        o_w = out
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, o_s if ks is not None else None, lse_s,
        o_w if kw is not None else None, lse_w, block_indices, cu, ccu, *saved,
    )  # fmt: skip


_KEPT = 17  # tensors before `saved`


@once_differentiable
def _attend_gradient(ctx, dout, *_unused):
    if dout is None:
        return (None,) * 16
    kept = ctx.saved_tensors
    grads = torch.ops.tercet.nsa_backward(dout, *kept[:_KEPT], list(kept[_KEPT:]), *ctx.numbers)
    return *(None if x is None else g for x, g in zip(kept[:8], grads, strict=True)), *(None,) * 8


nsa_attend.register_autograd(_attend_gradient, setup_context=_keep)


class _Attend(torch.autograd.Function):
    """nsa_attend and nsa_backward without the dispatcher, which costs more than the kernels on short sequences."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attend(*inputs)
        _keep(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        kept = ctx.saved_tensors
        if dout is None:
            return (None,) * 16
        return *_gradients(dout, *kept[:_KEPT], list(kept[_KEPT:]), *ctx.numbers), *(None,) * 8


def _watched() -> bool:
    """Whether someone looks at operators: the compiler, or a dispatch mode such as a checkpointing policy."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


class _Compressed(torch.autograd.Function):
    """nsa_compressed with its gradient, for compressed attention by itself."""

    @staticmethod
    def forward(ctx, *inputs):
        output = torch.ops.tercet.nsa_compressed(*inputs)
        q, kc, vc, cu, ccu, *ctx.numbers = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, kc, vc, *output, cu, ccu)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _lse):
        q, kc, vc, o_c, lse_c, cu, ccu = ctx.saved_tensors
        if dout is None:
            return (None,) * 8
        none = (None,) * 5
        dq, dkc, dvc, *_ = torch.ops.tercet.nsa_backward(
            dout, q, kc, vc, *none, o_c, lse_c, *none, cu, ccu, [], *ctx.numbers
        )
        return dq, dkc, dvc, *(None,) * 5


# ------------------------------------------------------------ what the package calls


def nsa(
    q: Tensor,
    kc: Tensor,
    vc: Tensor,
    ks: Tensor,
    vs: Tensor,
    kw: Tensor,
    vw: Tensor,
    gates: Tensor,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    branches: tuple[str, ...] = ("compressed", "selected", "window"),
    block_indices: Tensor | None = None,
    span: Sequence[int] = (),
    select: bool = False,
    output: tuple[Tensor, Tensor | None] | None = None,
    compressed_cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`output`: (weight, bias) of a product with the result, [B, T, size of its rows]. Compiled, what is multiplied is
    not kept: see output.py. `compressed_cu_seqlens`: the bounds of compressed tokens, where the caller has them.
    `max_seqlen`: no packed document is longer."""
    choose = block_indices is None and (select or "selected" in branches)
    watched = _watched()
    ops = torch.ops.tercet if watched else _Direct
    sizes = _sizes(config) if watched else config
    numbers = (sizes, list(span), max_seqlen)
    o_c = lse_c = None
    ccu = _bounds(cu_seqlens, config, ops) if compressed_cu_seqlens is None else compressed_cu_seqlens
    traced = output is not None and torch.compiler.is_compiling()
    # the gradient of these belongs to nsa_attend: autograd must not follow it twice
    with torch.no_grad():
        if choose or "compressed" in branches:
            o_c, lse_c = ops.nsa_compressed(q, kc, vc, cu_seqlens, ccu, *numbers)
        if choose:
            block_indices = ops.nsa_select(q, kc, lse_c, cu_seqlens, ccu, *numbers)
            if not traced:  # what is asked to make the sum again is not itself made again (NativeSparseAttention)
                block_indices = ops.keep_selection(block_indices)
    if "compressed" not in branches:
        kc = vc = o_c = lse_c = None
    if "selected" not in branches:
        ks = vs = None
    if "window" not in branches:
        kw = vw = None
    inputs = (q, kc, vc, ks, vs, kw, vw, gates, o_c, lse_c, block_indices, cu_seqlens, ccu, *numbers)
    if traced:
        return Multiplied.apply(*output, *inputs), block_indices
    found = ops.nsa_attend(*inputs)
    out = found[0] if watched else found
    return out if output is None else multiply(out, *output), block_indices


class _Direct:
    """The operators' bodies, called when nobody watches."""

    nsa_compressed_bounds = staticmethod(compressed_bounds)
    nsa_attend = _Attend.apply

    @staticmethod
    def nsa_compressed(q, kc, vc, cu, ccu, config, span, longest):
        q, kc, vc = _flat(q, kc, vc)
        return compressed_forward(q, kc, vc, config, _documents(q, kc, cu, ccu, span, longest))

    @staticmethod
    def nsa_select(q, kc, lse, cu, ccu, config, span, longest):
        q, kc = _flat(q, kc)
        return select(q, kc, lse, config, _documents(q, kc, cu, ccu, span, longest))

    @staticmethod
    def keep_selection(block_indices):
        return block_indices


def compressed_select(
    q: Tensor, kc: Tensor, vc: Tensor, config: NSAConfig, cu_seqlens: Tensor | None = None, span: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    numbers = (_sizes(config), list(span), None)
    ccu = _bounds(cu_seqlens, config, torch.ops.tercet)
    out, lse = _Compressed.apply(q, kc, vc, cu_seqlens, ccu, *numbers)
    with torch.no_grad():
        block_indices = torch.ops.tercet.nsa_select(q, kc, lse, cu_seqlens, ccu, *numbers)
        return out, torch.ops.tercet.keep_selection(block_indices)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, config: NSAConfig, cu_seqlens: Tensor | None = None,
    span: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    none = (None,) * 3
    return torch.ops.tercet.nsa_attend(
        q, None, None, k, v, None, None, *none, block_indices, cu_seqlens, None, _sizes(config), list(span), None
    )[0]


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, cu_seqlens: Tensor | None = None, span: Sequence[int] = ()
) -> Tensor:
    none = (None,) * 4
    return torch.ops.tercet.nsa_attend(
        q, None, None, None, None, k, v, *none, cu_seqlens, None, _sizes(config), list(span), None
    )[0]


def _bounds(cu_seqlens: Tensor | None, config: NSAConfig, ops) -> Tensor | None:
    """Of the compressed tokens, which are those of the whole sequences."""
    if cu_seqlens is None:
        return None
    whole = cu_seqlens if cu_seqlens.dim() == 1 else cu_seqlens[0]
    return ops.nsa_compressed_bounds(whole, config.compress_block, config.compress_stride)

"""Argument checks for the operator. Each error names the argument, its value, the rule and the fix in one line."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig, check_group_size
from tercet.attention.layout import Packing, Span


def shape_of(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def check_config(config: object) -> None:
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config is {type(config).__name__}: it must be a tercet.NSAConfig")


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}, not a torch.Tensor")


def check_tensors(tensors: dict[str, Tensor]) -> None:
    """All must be 4-dimensional, on one device and of one floating dtype (gates may differ in precision)."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {shape_of(x)}: expected 4 axes, [batch, tokens, heads, size]")
        if x is first and 0 in x.shape:
            raise ValueError(f"{name} has shape {shape_of(x)}: every axis must have at least one element")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} and {first_name} on {first.device}: move all to one device")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {x.dtype}: expected a floating-point dtype")
        if name != "gates" and x.dtype != first.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and {first_name} {first.dtype}: use one dtype for all")


def check_keys(q: Tensor, k: Tensor, v: Tensor, branch: str, tokens: int | None) -> None:
    """k and v of one branch must match q's batch, groups and head size; `tokens` None skips the length check. An empty
    branch name means that the arguments are called k and v."""
    k_name, v_name = (f"k_{branch}", f"v_{branch}") if branch else ("k", "v")
    for name, x in ((k_name, k), (v_name, v)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} has batch {x.shape[0]} and q has batch {q.shape[0]}: they must be equal")
        if tokens is not None and x.shape[1] != tokens:
            rule = (
                f"config.num_compressed({q.shape[1]}) = {tokens} compressed tokens"
                if branch == "compressed"
                else f"q's {tokens} tokens"
            )
            raise ValueError(
                f"{name} has {x.shape[1]} tokens (shape {shape_of(x)}, read as [batch, tokens, heads, size]): "
                f"expected {rule}"
            )
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{k_name} has {k.shape[1]} tokens and {v_name} {v.shape[1]}: they must be equal")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"{k_name} has {k.shape[2]} heads and {v_name} {v.shape[2]}: they must be equal")
    if v.shape[3] == 0:
        raise ValueError(f"{v_name} has shape {shape_of(v)}: values must have at least one element")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"{k_name} has head size {k.shape[3]} and q has {q.shape[3]}: they must be equal")
    check_group_size(q.shape[2], k.shape[2])


def check_span(q: Tensor, k: Tensor, branch: str, span: Span, config: NSAConfig, packing: Packing | None) -> None:
    """The given keys must reach as far as the queries, and as far back as their windows."""
    first, end = span.first_query, span.first_query + q.shape[1]
    if span.first_query < 0 or span.first_key < 0:
        raise ValueError(f"{span} counts tokens of the sequence: its fields must not be negative")
    if packing is not None and end > packing.length:
        raise ValueError(f"q holds tokens {first} to {end} of {packing.length}: it must end within the sequence")
    if branch == "compressed":
        if packing is None and k.shape[1] < config.num_compressed(end):
            raise ValueError(
                f"k_compressed has {k.shape[1]} tokens: queries up to token {end} need {config.num_compressed(end)}"
            )
        return
    if span.first_key + k.shape[1] < end:
        raise ValueError(
            f"k_{branch} holds tokens {span.first_key} to {span.first_key + k.shape[1]}: queries up to token {end} "
            f"need keys up to token {end}"
        )
    if branch == "window" and packing is None and span.first_key > max(0, first - config.window + 1):
        raise ValueError(
            f"k_window begins at token {span.first_key}: the window of query {first} begins at "
            f"{max(0, first - config.window + 1)}"
        )


def check_same_groups(keys: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    names = list(keys)
    for name in names[1:]:
        if keys[name].shape[2] != keys[names[0]].shape[2]:
            raise ValueError(
                f"k_{name} has {keys[name].shape[2]} KV heads and k_{names[0]} {keys[names[0]].shape[2]}: "
                "all branches must have the same number of KV heads"
            )
        if values[name].shape[3] != values[names[0]].shape[3]:
            raise ValueError(
                f"v_{name} has head size {values[name].shape[3]} and v_{names[0]} {values[names[0]].shape[3]}: "
                "all branches must have the same value size"
            )


def check_gates(gates: Tensor, q: Tensor) -> None:
    expected = (*q.shape[:3], 3)
    if tuple(gates.shape) != expected:
        raise ValueError(
            f"gates has shape {shape_of(gates)}: expected {list(expected)}, q's batch, tokens and heads, "
            "then one gate each for compressed, selected, window"
        )


def check_block_indices(block_indices: Tensor, q: Tensor, groups: int, config: NSAConfig) -> None:
    check_tensor("block_indices", block_indices)
    expected = (q.shape[0], q.shape[1], groups, config.select_count)
    if tuple(block_indices.shape) != expected or block_indices.dtype != torch.int32:
        raise ValueError(
            f"block_indices has shape {shape_of(block_indices)} and dtype {block_indices.dtype}: expected int32 "
            f"{list(expected)}, [batch, tokens, kv_heads, select_count]"
        )
    if block_indices.device != q.device:
        raise ValueError(f"block_indices is on {block_indices.device} and q on {q.device}: move all to one device")


def check_block_order(block_indices: Tensor) -> None:
    """Each query's blocks must ascend, each once, before the padding. Reads the values: synchronises on a device."""
    check_tensor("block_indices", block_indices)
    before, after = block_indices[..., :-1], block_indices[..., 1:]
    wrong = (after >= 0) & ((before < 0) | (after <= before))
    if bool(wrong.any()):
        batch, token, group, _ = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_indices[{batch}, {token}, {group}] is {block_indices[batch, token, group].tolist()}: each query's "
            "blocks must ascend, each once, padded with -1 at the end"
        )


def check_cu_seqlens(
    cu_seqlens: Tensor,
    batch: int,
    length: int,
    device: torch.device,
    *,
    values: bool,
    max_seqlen: int | None = None,
) -> None:
    """Check the bounds of packed documents. `values` also checks the numbers, which synchronises on a device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens is {type(cu_seqlens).__name__}: expected an int32 tensor [documents + 1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens has shape {shape_of(cu_seqlens)} and dtype {cu_seqlens.dtype}: "
            "expected int32 [documents + 1], from 0 to the number of tokens"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens was given with batch {batch}: pack the documents into one row, batch 1")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and q on {device}: move all to one device")
    if max_seqlen is not None and max_seqlen < 1:
        raise ValueError(f"max_seqlen={max_seqlen} must be at least 1: it bounds the documents' lengths")
    if not values:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[0]}: it must start at 0")
    for document, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end < first:
            raise ValueError(
                f"cu_seqlens gives document {document} length {end - first} (from {first} to {end}): "
                "it must not decrease"
            )
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]} but there are {length} tokens: it must end at {length}")
    longest, document = max((end - first, -i) for i, (first, end) in enumerate(itertools.pairwise(bounds)))
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(
            f"max_seqlen={max_seqlen} but document {-document} has {longest} tokens: "
            f"pass {longest} or more, or omit max_seqlen"
        )


def make_packing(
    cu_seqlens: Tensor,
    x: Tensor,
    config: NSAConfig,
    compressed_length: int | None = None,
    max_seqlen: int | None = None,
    *,
    validate: bool = False,
) -> Packing:
    """The Packing of x [B, T, ...] after checking cu_seqlens. Values are checked where reading them costs nothing, on
    the CPU, and with `validate`. compressed_length: T // d by default, enough for any documents."""
    length = x.shape[1]
    on_host = isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu"
    readable = validate or (on_host and not torch.compiler.is_compiling())
    check_cu_seqlens(cu_seqlens, x.shape[0], length, x.device, values=readable, max_seqlen=max_seqlen)
    count = length // config.compress_stride if compressed_length is None else compressed_length
    return Packing(cu_seqlens, length, count, config, max_seqlen)


def pack_documents(
    cu_seqlens: Tensor,
    q: Tensor,
    k_compressed: Tensor | None,
    config: NSAConfig,
    max_seqlen: int | None = None,
    *,
    validate: bool = False,
) -> Packing:
    """`make_packing` of q, with the compressed tokens that k_compressed has, if any."""
    if not isinstance(q, Tensor) or q.dim() != 4:
        check_tensors({"q": q})
    count = None if k_compressed is None else k_compressed.shape[1]
    packing = make_packing(cu_seqlens, q, config, count, max_seqlen, validate=validate)
    if k_compressed is not None and (validate or cu_seqlens.device.type == "cpu"):
        check_packed_compressed(k_compressed, cu_seqlens, config)
    return packing


def check_max_seqlen(max_seqlen: int | None, cu_seqlens: object) -> None:
    """max_seqlen needs cu_seqlens: unpacked rows have a known length, and a Packing has its own bound."""
    if max_seqlen is None:
        return
    if not isinstance(max_seqlen, int):
        raise TypeError(f"max_seqlen is {type(max_seqlen).__name__}: it must be an int, known on the host")
    if not isinstance(cu_seqlens, Tensor):
        found = "without cu_seqlens" if cu_seqlens is None else f"with a {type(cu_seqlens).__name__}"
        raise ValueError(f"max_seqlen={max_seqlen} was given {found}: it bounds the documents in cu_seqlens")


def check_packing(packing: Packing, q: Tensor, k_compressed: Tensor | None, config: NSAConfig) -> None:
    """A Packing must match the tensors of the call. Reads host values only."""
    compressed = packing.compressed_length if k_compressed is None else k_compressed.shape[1]
    for name, theirs, ours in (
        ("batch", 1, q.shape[0]),
        ("tokens", packing.length, q.shape[1]),
        ("compressed tokens", packing.compressed_length, compressed),
        ("device", packing.cu_seqlens.device, q.device),
        ("config", packing.config, config),
    ):
        if theirs != ours:
            raise ValueError(f"packing was made for {name} {theirs} but the call has {ours}: create one for this call")


def check_packed_compressed(k_compressed: Tensor, cu_seqlens: Tensor, config: NSAConfig) -> None:
    needed = int(config.compressed_cu_seqlens(cu_seqlens)[-1])
    if k_compressed.shape[1] < needed:
        raise ValueError(
            f"k_compressed has {k_compressed.shape[1]} tokens: these documents have {needed} compressed tokens "
            "(config.compressed_cu_seqlens gives their bounds; padding may follow)"
        )

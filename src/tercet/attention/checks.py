"""Argument checks for the operator. Each error names the argument, its value, the rule and the fix in one line."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tercet.attention.config import NSAConfig, check_group_size
from tercet.attention.layout import Packing


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
    cu_seqlens: Tensor | None,
    x: Tensor,
    config: NSAConfig,
    max_seqlen: int | None = None,
    *,
    compressed: Tensor | int | None = None,
    validate: bool = False,
) -> Packing | None:
    """The Packing of x [B, T, ...] after checking cu_seqlens; None without them. Values are checked where reading them
    costs nothing, on the CPU, and with `validate`. compressed: the compressed tokens of the call, or how many there
    are; T // d by default, enough for any documents."""
    check_max_seqlen(max_seqlen, cu_seqlens)
    if cu_seqlens is None:
        return None
    if not isinstance(x, Tensor) or x.dim() < 2:
        check_tensors({"q": x})
    length = x.shape[1]
    on_host = isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type == "cpu"
    readable = validate or (on_host and not torch.compiler.is_compiling())
    check_cu_seqlens(cu_seqlens, x.shape[0], length, x.device, values=readable, max_seqlen=max_seqlen)
    count = length // config.compress_stride if compressed is None else compressed
    if isinstance(count, Tensor):
        if validate or on_host:
            check_packed_compressed(count, cu_seqlens, config)
        count = count.shape[1]
    return Packing(cu_seqlens, length, count, config, max_seqlen)


def check_max_seqlen(max_seqlen: int | None, cu_seqlens: object) -> None:
    """max_seqlen needs cu_seqlens: unpacked rows have a known length, and a Packing has its own bound."""
    if max_seqlen is None:
        return
    if not isinstance(max_seqlen, int):
        raise TypeError(f"max_seqlen is {type(max_seqlen).__name__}: it must be an int, known on the host")
    if not isinstance(cu_seqlens, Tensor):
        found = "without cu_seqlens" if cu_seqlens is None else f"with a {type(cu_seqlens).__name__}"
        raise ValueError(f"max_seqlen={max_seqlen} was given {found}: it bounds the documents in cu_seqlens")


def check_packing(packing: Packing, x: Tensor, config: NSAConfig) -> None:
    """A Packing must match the tokens x of the call. Reads host values only."""
    for name, theirs, ours in (
        ("batch", 1, x.shape[0]),
        ("tokens", packing.length, x.shape[1]),
        ("device", packing.cu_seqlens.device, x.device),
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

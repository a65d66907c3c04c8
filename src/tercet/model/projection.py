"""All that a layer of Native Sparse Attention makes of x, by one product: where the kernels' own pass takes it apart.

Four products apart read x four times and write their gradients of x four times, and what stands between them and the
kernels (rotary turns, chunks for φ, gradients put together) is a dozen launches of the compiler's instead of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention.functional import NSAInputs
from tercet.attention.hardware import kernels_run_on
from tercet.attention.layout import Packing
from tercet.model.compression import compress_both
from tercet.model.plain import are_plain
from tercet.model.rope import Turns, rotate

if TYPE_CHECKING:
    from tercet.model.attention import NativeSparseAttention


def takes_one_product(layer: NativeSparseAttention, x: Tensor) -> bool:
    """Whether the kernel that takes it apart knows the layer: no norms between product and turn, keys and values of one
    size, tokens enough for a compressed one; and whether the layers whose weights it multiplies do nothing else."""
    return (
        layer.backend != "reference"
        and layer.q_norm is None
        and layer.value_dim == layer.head_dim
        and x.shape[1] >= layer.config.compress_block
        and kernels_run_on(x)
        and are_plain(layer.q_proj, layer.kv_proj, layer.gate.proj)
        and layer.compress_k.is_plain()
        and layer.compress_v.is_plain()
    )


def one_product(layer: NativeSparseAttention, x: Tensor, packing: Packing | None, turns: Turns) -> NSAInputs:
    from tercet.attention.kernels import qkv_split

    assert turns.compressed is not None
    weights = [layer.q_proj.weight, layer.kv_proj.weight, layer.gate.proj.weight]
    width = qkv_split.columns(layer.heads, layer.kv_heads, layer.head_dim, layer.key_sets)
    weights.append(weights[0].new_zeros(width - sum(w.shape[0] for w in weights), layer.dim))
    bias = None
    if layer.q_proj.bias is not None:
        given = (layer.q_proj.bias, layer.kv_proj.bias)
        bias = torch.cat((*given, given[0].new_zeros(width - sum(b.shape[0] for b in given))))
    y = F.linear(x, torch.cat(weights), bias)
    maps = (None,) * 4 if packing is None else tuple(packing.tokens_to_chunks)
    sizes = [layer.heads, layer.kv_heads, layer.head_dim, layer.config.compress_stride, layer.key_sets]
    q, ks, vs, kw, vw, chunks, logits = qkv_split.split_qkv(y, turns.tokens, maps, sizes)
    k_compressed, v_compressed = compress_both(chunks, layer.compress_k, layer.compress_v, packing)
    gates = layer.gate.opened(logits, layer.gate.proj.bias)
    return NSAInputs(q, rotate(k_compressed, turns.compressed), v_compressed, ks, vs, kw, vw, gates)

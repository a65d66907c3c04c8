"""The NSA layer around the operator in float64 numpy: projections, norms, φ, RoPE, gates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import oracle
from tercet.attention.config import BRANCHES

Array = np.ndarray[Any, Any]


def _numpy(p: Any) -> Array:
    return p.detach().double().numpy()


def linear(module: Any, x: Array) -> Array:
    out = x @ _numpy(module.weight).T
    return out if module.bias is None else out + _numpy(module.bias)


def rms_norm(module: Any, x: Array) -> Array:
    eps = np.finfo(np.float64).eps if module.eps is None else module.eps
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * _numpy(module.weight)


def gelu(x: Array) -> Array:
    return np.vectorize(lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))))(x)


def phi(module: Any, x: Array, cfg: Any, cu_seqlens: Any) -> tuple[Array, list[int]]:
    """The mean and, for "mlp", the learned correction from the l tokens with positions, block by block."""
    means, last = oracle.compress_mean(x, cfg, cu_seqlens)
    if module.kind == "mean" or not last:
        return means, last
    starts = []
    bounds = [0, x.shape[1]] if cu_seqlens is None else [int(c) for c in cu_seqlens]
    for start, end in itertools.pairwise(bounds):
        i = 0
        while i * cfg.compress_stride + cfg.compress_block <= end - start:
            starts.append(start + i * cfg.compress_stride)
            i += 1
    out = means.copy()
    place = _numpy(module.position)
    for row, first in enumerate(starts):
        for b in range(x.shape[0]):
            for g in range(x.shape[2]):
                tokens = [x[b, first + s, g] + place[s] for s in range(cfg.compress_block)]
                out[b, row, g] += linear(module.down, gelu(linear(module.up, np.concatenate(tokens))))
    return out, last


def gates_of(layer: Any, x: Array) -> Array:
    logits = linear(layer.gate.proj, x).reshape(*x.shape[:2], layer.heads, 3)
    if layer.gate.kind == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max(-1, keepdims=True))
    for c, branch in enumerate(BRANCHES):
        if branch not in layer.spec.branches:
            e[..., c] = 0.0
    return e / e.sum(-1, keepdims=True)


def run(layer: Any, x: Any, cu_seqlens: Any = None, *, theta: float = 10000.0, scaling: float = 1.0):
    """(y, the operator's Answer) of NativeSparseAttention; omitted branches have gate 0."""
    x = _numpy(x)
    cfg, groups, key_size, value_size = layer.config, layer.kv_heads, layer.head_dim, layer.value_dim
    batch, tokens, _ = x.shape
    positions = oracle.document_positions(tokens, cu_seqlens)

    q = linear(layer.q_proj, x).reshape(batch, tokens, layer.heads, key_size)
    if layer.q_norm is not None:
        q = rms_norm(layer.q_norm, q)
    # rows of kv_proj: keys and values of a branch, one branch after another
    kinds = "vkvkv" if layer.spec.compress_selected_keys else "kvkvkv" if layer.spec.compresses else "kvkv"
    if layer.spec.shared_kv:
        kinds = "kv"
    projected, at, keys, values = linear(layer.kv_proj, x), 0, [], []
    for kind in kinds:
        size = key_size if kind == "k" else value_size
        part = projected[..., at : at + groups * size].reshape(batch, tokens, groups, size)
        at += groups * size
        if kind == "v":
            values.append(part)
        else:
            keys.append(part if layer.k_norms is None else rms_norm(layer.k_norms[len(keys)], part))
    if layer.spec.shared_kv:
        keys, values = keys * 3, values * 3
    elif not layer.spec.compresses:  # any: nothing reads compressed tokens
        keys, values = [keys[0], *keys], [values[0], *values]
    elif layer.spec.compress_selected_keys:
        keys = [keys[0], *keys]
    k_cmp, k_sel, k_win = keys
    v_cmp, v_sel, v_win = values

    k_short, last = phi(layer.compress_k, k_cmp, cfg, cu_seqlens)
    v_short, _ = phi(layer.compress_v, v_cmp, cfg, cu_seqlens)
    gates = gates_of(layer, x)
    for c, branch in enumerate(BRANCHES):
        if branch not in layer.spec.branches:
            gates[..., c] = 0.0
    answer = oracle.nsa(
        oracle.rope(q, positions, theta, scaling),
        oracle.rope(k_short, last, theta, scaling),
        v_short,
        oracle.rope(k_sel, positions, theta, scaling),
        v_sel,
        oracle.rope(k_win, positions, theta, scaling),
        v_win,
        gates,
        cfg,
        cu_seqlens,
    )
    return linear(layer.o_proj, answer.out.reshape(batch, tokens, -1)), answer


def one_branch(layer: Any, x: Any, cu_seqlens: Any = None) -> oracle.Answer:
    """The Answer of a layer without gates, with its output projected: BlockSparseAttention or WindowAttention."""
    tokens, positions = _numpy(x), oracle.document_positions(x.shape[1], cu_seqlens)
    q = linear(layer.q_proj, tokens).reshape(*x.shape[:2], layer.heads, layer.head_dim)
    parts = np.split(linear(layer.kv_proj, tokens), [layer.kv_heads * layer.head_dim], -1)
    k, v = (part.reshape(*x.shape[:2], layer.kv_heads, -1) for part in parts)
    if layer.q_norm is not None:
        q, k = rms_norm(layer.q_norm, q), rms_norm(layer.k_norm, k)
    q, k = oracle.rope(q, positions), oracle.rope(k, positions)
    answer = oracle.block_sparse(q, k, v, layer.config, layer.spec.dense_below, cu_seqlens)
    out = answer.window if layer.kind == "window" else answer.out
    answer.out = linear(layer.o_proj, out.reshape(*x.shape[:2], -1))
    return answer

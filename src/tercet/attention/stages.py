"""The stages of Native Sparse Attention as separate functions, on the reference backend. Axes: as in operator.py."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.attention import checks, reference
from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import without_autocast
from tercet.attention.layout import Packing, keep_selection


def compress_mean(x: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """φ = mean: each block of l tokens, every d tokens, becomes its mean. [B, T, G, D] -> [B, Tc, G, D]

    With cu_seqlens, Tc is T // d, enough for any documents; unused rows at the end are zero.
    """
    checks.check_config(config)
    checks.check_tensors({"x": x})
    return compression_blocks(x, config, checks.make_packing(cu_seqlens, x, config)).mean(2)


def compression_blocks(x: Tensor, config: NSAConfig, packing: Packing | None = None) -> Tensor:
    """The l tokens of each compressed token. [B, T, G, D] -> [B, Tc, l, G, D], zeros in a packing's padding."""
    l, d = config.compress_block, config.compress_stride
    if packing is None:
        if x.shape[1] < l:
            return x.new_zeros(x.shape[0], 0, l, *x.shape[2:])
        return x.unfold(1, l, d).movedim(-1, 2)
    if x.shape[1] < l:
        return x.new_zeros(1, packing.compressed_length, l, *x.shape[2:])
    index = packing.compressed_first_token[:, None] + torch.arange(l, device=x.device)
    real = packing.compressed_document < packing.num_documents
    return torch.where(real[:, None, None, None], x[0, index], 0)[None]


def compressed_attention(
    q: Tensor,
    k_compressed: Tensor,
    v_compressed: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
    return_scores: bool = False,
) -> tuple[Tensor, Tensor]:
    """The compressed branch and its selection: (out [B, T, H, Dv], block_indices [B, T, G, n]).

    With return_scores, (out, scores [B, T, G, blocks]): the importance of Eq. 10, which takes T²/l' memory.
    """
    packing = _check(q, k_compressed, v_compressed, "compressed", config, cu_seqlens)
    with without_autocast(q.device.type):
        out, indices, scores = reference.compressed_attention(
            q, k_compressed, v_compressed, config, packing, want_indices=not return_scores, want_scores=return_scores
        )
    if return_scores:
        assert scores is not None
        return out, scores
    assert indices is not None
    return out, keep_selection(indices)


def select_blocks(scores: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """Selected blocks (Eq. 11) for scores [B, T, G, blocks]: int32 [B, T, G, n], ascending, padded with -1."""
    checks.check_config(config)
    checks.check_tensors({"scores": scores})
    length = scores.shape[1]
    if scores.shape[-1] < config.num_blocks(length) and cu_seqlens is None:
        raise ValueError(
            f"scores has {scores.shape[-1]} blocks: {length} tokens need {config.num_blocks(length)} selection blocks"
        )
    packing = checks.make_packing(cu_seqlens, scores, config)
    t = torch.arange(length, device=scores.device) if packing is None else packing.position
    return reference.select(scores.transpose(1, 2), t, config).transpose(1, 2)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The selected branch (Eq. 12) over given blocks [B, T, G, n]; blocks after a query's own are not read."""
    packing = _check(q, k, v, "selected", config, cu_seqlens)
    checks.check_block_indices(block_indices, q, k.shape[2], config)
    with without_autocast(q.device.type):
        return reference.selected_attention(q, k, v, block_indices, config, packing)


def window_attention(q: Tensor, k: Tensor, v: Tensor, *, config: NSAConfig, cu_seqlens: Tensor | None = None) -> Tensor:
    """The window branch: the last w tokens, including the current one."""
    packing = _check(q, k, v, "window", config, cu_seqlens)
    with without_autocast(q.device.type):
        return reference.window_attention(q, k, v, config, packing)


def combine(gates: Tensor, compressed: Tensor, selected: Tensor, window: Tensor) -> Tensor:
    """out = Σ_c g_c · branch_c (Eq. 5). gates [B, T, H, 3]; branches [B, T, H, Dv]."""
    checks.check_tensors({"compressed": compressed, "selected": selected, "window": window, "gates": gates})
    checks.check_gates(gates, compressed)
    for name, branch in (("selected", selected), ("window", window)):
        if branch.shape != compressed.shape:
            raise ValueError(
                f"{name} has shape {checks.shape_of(branch)} and compressed {checks.shape_of(compressed)}: "
                "all branches must have the same shape"
            )
    out = reference.combine(gates, {"compressed": compressed, "selected": selected, "window": window})
    return out.to(compressed.dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, branch: str, config: NSAConfig, cu_seqlens: Tensor | None
) -> Packing | None:
    """Check the arguments of one branch. Returns the packing of cu_seqlens."""
    checks.check_config(config)
    checks.check_tensors({"q": q, f"k_{branch}": k, f"v_{branch}": v})
    tokens: int | None = q.shape[1]
    if branch == "compressed":
        tokens = None if cu_seqlens is not None else config.num_compressed(q.shape[1])
    checks.check_keys(q, k, v, branch, tokens)
    return checks.make_packing(cu_seqlens, q, config, compressed=k if branch == "compressed" else None)

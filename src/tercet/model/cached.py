"""Attention of new tokens to a cache: reads only what each query may see, so that a decode step costs
num_cmp + Σ|selected tokens| + min(w, t+1) keys per group, and counts them.

Axes: q [B, C, H, Dk]; keys [B, S, G, Dk]; probabilities [B, G, C, h, S]. No gradients are kept in mind here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention.config import NSAConfig
from tercet.attention.reference import block_importance, combine, compute_dtype, select
from tercet.model.cache import DenseCache, NSACache
from tercet.model.cache_rows import Step

# Numbers gathered or scored at once: bounds the memory of a long chunk.
_CHUNK_NUMBERS = 1 << 24


def cached_nsa_attention(
    q: Tensor, gates: Tensor, cache: NSACache, step: Step, config: NSAConfig, branches: tuple[str, ...]
) -> Tensor:
    # as the whole-sequence operator does: scores, and with them the selection, are not left to half precision
    with torch.autocast(q.device.type, enabled=False):
        return _cached_nsa(q, gates, cache, step, config, branches)


def _cached_nsa(
    q: Tensor, gates: Tensor, cache: NSACache, step: Step, config: NSAConfig, branches: tuple[str, ...]
) -> Tensor:
    batch, width, heads, size = q.shape
    groups = cache.key["kv_heads"]
    per_query = max(
        groups * config.select_count * config.select_block * (size + cache.key["value_dim"]),
        heads * (config.num_compressed(step.longest) + config.window),
    )
    chunk = max(1, _CHUNK_NUMBERS // (batch * per_query))
    outs, reads = [], []
    for first in range(0, width, chunk):
        part = slice(first, min(first + chunk, width))
        rows = q[:, part].unflatten(2, (groups, -1)).to(compute_dtype(q)) * size**-0.5
        t = step.positions[:, part]
        results: dict[str, tuple[Tensor, Tensor]] = {}
        counts: list[Tensor] = []
        if "compressed" in branches or "selected" in branches:
            compressed, read, block_indices = _compressed(rows, t, cache, step, config)
            if "compressed" in branches:
                results["compressed"] = compressed, read
            else:
                counts.append(read)  # read for the selection alone
            if "selected" in branches:
                results["selected"] = _selected(rows, t, block_indices, cache, config)
        if "window" in branches:
            results["window"] = _window(rows, t, part, step, config)
        outs.append(combine(gates[:, part], {name: out.flatten(2, 3) for name, (out, _) in results.items()}))
        reads.append(torch.stack([*counts, *(read for _, read in results.values())]).sum(0))
    cache.reads = torch.cat(reads, dim=1)
    return torch.cat(outs, dim=1).to(q.dtype)


def _compressed(
    rows: Tensor, t: Tensor, cache: NSACache, step: Step, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, C, G, h, Dv], keys read [B, C, G] and selected blocks [B, C, G, n]."""
    batch, width, groups, h, _ = rows.shape
    num_blocks = config.num_blocks(step.longest)
    held = cache.compressed(step)
    if held is None:
        out = rows.new_zeros(batch, width, groups, h, cache.key["value_dim"])
        read = torch.zeros(batch, width, groups, dtype=torch.int64, device=rows.device)
        importance = rows.new_zeros(batch, groups, width, num_blocks)
    else:
        k, v = held
        i = torch.arange(k.shape[1], device=rows.device)
        sees = i * config.compress_stride + config.compress_block <= t[..., None] + 1
        s = torch.einsum("bcghd,bsgd->bgchs", rows, k.to(rows.dtype))
        p = _softmax(s, sees[:, None, :, None])
        out = torch.einsum("bgchs,bsgd->bcghd", p, v.to(rows.dtype))
        read = sees.sum(-1)[..., None].expand(-1, -1, groups)
        importance = block_importance(p.sum(3), 0, num_blocks, config)
    return out, read, select(importance, t[:, None], config).transpose(1, 2)


def _selected(
    rows: Tensor, t: Tensor, block_indices: Tensor, cache: NSACache, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    k, v = cache.selected()
    inside = torch.arange(config.select_block, device=rows.device)
    token = (block_indices[..., None] * config.select_block + inside).flatten(-2).long()
    sees = (block_indices >= 0).repeat_interleave(config.select_block, -1) & (token <= t[..., None, None])
    token = torch.where(sees, token, 0)
    row = torch.arange(rows.shape[0], device=rows.device)[:, None, None, None]
    group = torch.arange(rows.shape[2], device=rows.device)[:, None]
    s = torch.einsum("bcghd,bcgsd->bcghs", rows, k[row, token, group].to(rows.dtype))
    p = _softmax(s, sees[..., None, :])
    return torch.einsum("bcghs,bcgsd->bcghd", p, v[row, token, group].to(rows.dtype)), sees.sum(-1)


def _window(rows: Tensor, t: Tensor, part: slice, step: Step, config: NSAConfig) -> tuple[Tensor, Tensor]:
    assert step.window_k is not None
    assert step.window_v is not None
    # query c of the step sees entries c … c+w-1 of the context, those that exist
    keys = slice(part.start, part.stop - 1 + config.window)
    k, v = step.window_k[:, keys].to(rows.dtype), step.window_v[:, keys].to(rows.dtype)
    entry = torch.arange(k.shape[1], device=rows.device)
    back = torch.arange(rows.shape[1], device=rows.device)[:, None] + config.window - 1 - entry
    sees = (back >= 0) & (back < config.window) & (t[..., None] - back >= 0)
    s = torch.einsum("bcghd,bsgd->bgchs", rows, k)
    p = _softmax(s, sees[:, None, :, None])
    out = torch.einsum("bgchs,bsgd->bcghd", p, v)
    return out, sees.sum(-1)[..., None].expand(-1, -1, rows.shape[2])


def cached_dense_route(q: Tensor, cache: DenseCache, step: Step) -> tuple[str, str | None]:
    """What `cached_dense_attention` runs for these: (name, why not PyTorch's own kernel)."""
    if not q.is_cuda:
        return "reference", f"PyTorch's kernel for new tokens needs a CUDA device: they are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16) or q.dtype != cache.dtype:
        found = " and ".join(str(dtype).removeprefix("torch.") for dtype in (q.dtype, cache.dtype))
        return "reference", f"PyTorch's kernel takes tokens and cache in one half precision: here {found}"
    if (dk := cache.key["head_dim"]) != (dv := cache.key["value_dim"]):
        return "reference", f"PyTorch's kernel takes Dk = Dv: here Dk={dk} and Dv={dv}"
    if not step.level or step.padded:
        return "reference", "the rows do not all begin and end at one place: PyTorch's kernel has one triangle for all"
    return "sdpa", None


def cached_dense_attention(q: Tensor, cache: DenseCache, step: Step) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return _cached_dense(q, cache, step)


def _cached_dense(q: Tensor, cache: DenseCache, step: Step) -> Tensor:
    batch, width, heads, size = q.shape
    k, v = cache.all(step)
    groups = k.shape[2]
    if cached_dense_route(q, cache, step)[0] == "sdpa":
        # its triangle in the lower right corner: every key is seen by the last query
        # told by the rule, not counted: the kernel is not ours
        cache.reads = (step.positions + 1)[..., None].expand(-1, -1, groups)
        from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo: a second at start-up

        bias = causal_lower_right(width, k.shape[1])
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, enable_gqa=True
        )
        return out.transpose(1, 2)
    s_index = torch.arange(k.shape[1], device=q.device)
    chunk = max(1, _CHUNK_NUMBERS // (batch * heads * k.shape[1]))
    outs, reads = [], []
    for first in range(0, width, chunk):
        part = slice(first, min(first + chunk, width))
        rows = q[:, part].unflatten(2, (groups, -1)).to(compute_dtype(q)) * size**-0.5
        sees = s_index <= step.positions[:, part, None]
        p = _softmax(torch.einsum("bcghd,bsgd->bgchs", rows, k.to(rows.dtype)), sees[:, None, :, None])
        outs.append(torch.einsum("bgchs,bsgd->bcghd", p, v.to(rows.dtype)).flatten(2, 3))
        reads.append(sees.sum(-1)[..., None].expand(-1, -1, groups))
    cache.reads = torch.cat(reads, dim=1)
    return torch.cat(outs, dim=1).to(q.dtype)


def _softmax(s: Tensor, sees: Tensor) -> Tensor:
    """Over what is seen; all 0 where nothing is."""
    s = s.masked_fill(~sees, -torch.inf)
    highest = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    p = (s - highest).exp()
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total > 0, total, 1)

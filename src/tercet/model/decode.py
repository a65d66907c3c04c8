"""Attention of new tokens to a cache. Inference only; no autograd.

One token per row runs on the decode kernels, a chunk of tokens on the whole-sequence kernels; anything they cannot run
falls back to PyTorch here. Every path reads only the keys that a query may see, num_cmp + Σ|selected tokens| +
min(w, t+1) per group, and the cache reports how many were read. Keys that only score blocks, one small vector per
token, are not counted.

layer: an Attention (attention.py, which imports this module).
Axes: q [B, C, H, Dk]; keys [B, S, G, Dk]; probabilities [B, G, C, h, S].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tercet.attention.config import BRANCHES, NSAConfig
from tercet.attention.dispatch import REQUESTED, cannot_run, without_autocast
from tercet.attention.hardware import NO_TRITON, TRITON_INSTALLED, interpreting
from tercet.attention.layout import Span
from tercet.attention.operator import Attended, AttentionInputs, attend
from tercet.attention.reference import block_importance, combine, compressed_weights, select, softmax
from tercet.attention.selector import TokenScorer, choose_at
from tercet.attention.spec import AttentionSpec, without_kernel
from tercet.attention.tiling import compute_dtype
from tercet.model.cache import Cache, HostLengths, NewTokens
from tercet.model.compression import Compression
from tercet.model.linear import project

if TYPE_CHECKING:  # needs Triton
    from tercet.attention.kernels.decode import CompressionWeights, Heads, Held, Norms

# Elements gathered or scored at once: bounds the memory of a long chunk.
_CHUNK_NUMBERS = 1 << 24


# ------------------------------------------------------------ on the kernels


def why_not_kernels(layer: Any, x: Tensor, cache: Cache, lengths: Tensor | None) -> str | None:
    """Why the kernels cannot run the tokens x after the cache; None if they can. Raises if backend="triton" was asked
    for, unless the cache is empty: the whole-sequence operator then decides."""
    one = x.shape[1] == 1
    if not one and (layer.spec.dense or cache.is_empty):
        return None  # without further checks, for which a prompt would wait
    if layer.backend == "reference":
        return REQUESTED
    reason = why_not_token_kernels(layer, cache) if one else why_not_chunk_kernels(layer, x, cache, lengths)
    if reason is not None and layer.backend == "triton" and any(cache.host_lengths.tokens):
        raise cannot_run(reason)
    return reason


def why_not_token_kernels(layer: Any, cache: Cache) -> str | None:
    """Why the decode kernels cannot run one token per row; None if they can."""
    if not TRITON_INSTALLED:
        return NO_TRITON
    if cache.device.type != "cuda" and not interpreting():
        return f"the cache is on {cache.device} and the kernels need a CUDA device"
    if not layer.phi_is_plain():
        return "the linear layers of φ have hooks or adapters, and the kernels only read weights"
    if (reason := without_kernel(layer.spec.scorer)) is not None:
        return reason
    if layer.spec.exact_groups is not None:
        return "the decode kernels choose blocks for all KV heads in the same way, and exact_groups is set"
    from tercet.attention.kernels import decode

    config = None if layer.spec.dense else layer.config
    reason = decode.unsupported(cache.device, cache.dtype, kernel_heads(layer, cache), config)
    if reason is None and cache.keeps_blocks:
        # the kernels' scratch covers the whole capacity: check the capacity that this step would allocate
        reason = decode.too_long(cache.capacity_for(max(cache.host_lengths.tokens) + 1), layer.config)
    return reason


def why_not_chunk_kernels(layer: Any, x: Tensor, cache: Cache, lengths: Tensor | None) -> str | None:
    """Why the whole-sequence kernels cannot run several new tokens per row; None if they can."""
    cache.check(layer.cache_key(), x)
    if not TRITON_INSTALLED:
        return NO_TRITON
    if layer.gate is not None and not cache.keeps_tokens and not layer.spec.compresses:
        return "only the window is cached, and the kernels also need the keys of the selected branch"
    if x.device.type != "cuda" and not interpreting():
        return f"x is on {x.device} and the kernels need a CUDA device"
    from tercet.attention import kernels

    batch, width = x.shape[:2]
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else layer.q_proj.weight.dtype

    def like(tokens: int, heads: int, size: int, dtype: torch.dtype = cache.dtype) -> Tensor:
        return torch.empty((), dtype=dtype, device=x.device).expand(batch, tokens, heads, size)

    keys, values = (like(1, layer.kv_heads, size) for size in (layer.head_dim, layer.value_dim))
    q = like(width, layer.heads, layer.head_dim, dtype)
    reason = kernels.unsupported(q, keys, values, keys, values, keys, values, config=cache.config)
    if reason is not None:
        return reason
    if len(set(cache.known_lengths())) > 1:
        return "the rows hold unequal numbers of tokens, and the kernels need all rows' queries at the same positions"
    if lengths is not None and any(n != width for n in lengths.tolist()):
        return "some rows have fewer new tokens, and the kernels need all rows' queries at the same positions"
    return None


def attend_chunk(inputs: AttentionInputs, cache: Cache, new: NewTokens, scorer: TokenScorer | None) -> Attended:
    """A chunk that starts at the same position in every row, on the kernels: a query range of the sequences now in the
    cache. inputs: those of the new tokens."""
    start, first_window_key = new.longest - inputs.q.shape[1], 0
    if cache.keeps_tokens:
        k, v = cache.all(new)
        inputs = inputs._replace(k_selected=k, v_selected=v)
    if new.window_k is not None:
        k, v, first_window_key = _window_keys(new, cache.config)
        inputs = inputs._replace(k_window=k, v_window=v)
    if cache.spec.compresses or cache.spec.pools:
        k, values = cache.compressed(new)
        inputs = inputs._replace(k_compressed=k, v_compressed=values)
    span = Span(start, 0 if cache.keeps_tokens else start, first_window_key)
    # queries that read everything were separated by the caller
    spec = replace(cache.spec, dense_below=0)
    return attend(inputs, spec, backend="triton", span=span, scorer=scorer)


def _window_keys(new: NewTokens, config: NSAConfig) -> tuple[Tensor, Tensor, int]:
    """Keys and values that the windows of a chunk reach, and the position of the first."""
    assert new.window_k is not None
    assert new.window_v is not None
    start = new.longest - new.width
    first = max(0, start - config.window + 1)
    # skip those of the w-1 slots before the chunk that hold no token
    empty = config.window - 1 - (start - first)
    return new.window_k[:, empty:], new.window_v[:, empty:], first


def run_token(layer: Any, x: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
    """One token per row on the decode kernels."""
    layer._route = ("triton", None)
    counts = cache.begin_token(layer.cache_key(), x, lengths)
    try:
        out, read = _decode_token(layer, x, cache, counts)
    except BaseException:
        # The host has already counted this token; the device counts it in the last launch. If that may not have run,
        # mark the host's lengths as upper bounds.
        cache.host_lengths = HostLengths(cache.host_lengths.tokens, exact=False)
        raise
    cache.set_partial_reads(read)
    return layer.o_proj(out)


def _decode_token(layer: Any, x: Tensor, cache: Cache, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out [B, 1, H·Dv], keys read) of one token per row; the kernels advance the cache. counts: int32 [B], 0 for rows
    without a token."""
    from tercet.attention.kernels import decode as kernels

    spec = layer.spec
    q, kv, *more = project(x, cache, *layer.projections(cache))
    norms = kernel_norms(layer, q.dtype)
    if spec.dense:
        return kernels.dense_step(q, kv, kernel_cache(cache), counts, kernel_heads(layer, cache), norms=norms)
    gates = None if layer.gate is None else more.pop(0)
    out, read, cache.block_indices = kernels.nsa_step(
        q, kv, gates, kernel_cache(cache), counts, layer.config, kernel_heads(layer, cache), branches=spec.branches,
        shared=not spec.gated or spec.shared_kv, softmax_gate=spec.gate == "softmax", norms=norms,
        phi=None if layer.gate is None else (phi_weights(layer.compress_k), phi_weights(layer.compress_v)),
        absent=_absent(layer), selector=(more[0], more[1]) if more else None,
        dense_below=spec.dense_below if spec.dense_below > layer.config.selected_tokens else 0,
    )  # fmt: skip
    return out, read


def _absent(layer: Any) -> int:
    """Numbers per token by which kv_proj's output is shorter than three sets of keys and values."""
    if layer.gate is None or layer.spec.shared_kv:
        return 0
    return len(BRANCHES) * layer.kv_heads * (layer.head_dim + layer.value_dim) - sum(layer.kv_rows)


def kernel_cache(cache: Cache) -> Held:
    """The tensors of a cache, with the counters that a selection of blocks needs."""
    from tercet.attention.kernels.decode import Held, arrivals

    arrived = None
    if cache.keeps_blocks:
        arrived = cache.arrival_counters(arrivals(cache.batch, cache.key["kv_heads"]))
    return Held(
        cache.lengths, cache.rope_frequencies(), cache.capacity, **cache.stores(), arrived=arrived,
        selector_frequencies=cache.selector_frequencies(),
    )  # fmt: skip


def kernel_heads(layer: Any, cache: Cache) -> Heads:
    from tercet.attention.kernels.decode import Heads

    own = layer.spec.by_branch
    size = (cache.selector_size or layer.head_dim) if own else cache.selector_size
    return Heads(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, size, own)


def kernel_norms(layer: Any, dtype: torch.dtype) -> Norms | None:
    if layer.q_norm is None:
        return None
    from tercet.attention.kernels.decode import Norms

    norms = layer.key_norms if layer.gate is None else layer.per_branch(tuple(layer.key_norms))
    # without an eps, nn.RMSNorm uses that of the dtype it computes in: float32 for half precision
    eps = layer.q_norm.eps
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if eps is None else eps
    return Norms(layer.q_norm.weight, tuple(norm.weight for norm in norms), eps)


def phi_weights(compression: Compression) -> CompressionWeights:
    from tercet.attention.kernels.decode import CompressionWeights

    if compression.kind == "mean":
        return CompressionWeights()
    up, down = compression.up, compression.down
    return CompressionWeights(compression.position, up.weight, up.bias, down.weight, down.bias)


# ------------------------------------------------------------ in PyTorch


class CachedKeys(NamedTuple):
    """Keys and values of rows that may differ in length."""

    selected: tuple[Tensor, Tensor] | None = None
    compressed: tuple[Tensor, Tensor | None] | None = None  # no values where keys are means
    window: tuple[Tensor, Tensor] | None = None  # of the w-1 tokens before the new ones, and theirs


def cached_keys(cache: Cache, new: NewTokens) -> CachedKeys:
    compressed = cache.compressed(new) if cache.spec.compresses or cache.spec.pools else None
    window = None
    if new.window_k is not None and new.window_v is not None:
        window = new.window_k, new.window_v
    return CachedKeys(cache.all(new) if cache.keeps_tokens else None, compressed, window)


def attend_tokens(
    q: Tensor, gates: Tensor | None, keys: CachedKeys, t: Tensor, longest: int, spec: AttentionSpec,
    scorer: TokenScorer | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries at positions t [B, C] of their rows of keys. Returns their output [B, C, H, Dv], and how many keys they
    read [B, C, G]. longest: tokens of the longest row."""
    config, heads, branches = spec.blocks, q.shape[2], spec.branches
    pairs = [pair for pair in keys if pair is not None]
    groups, blocks = pairs[0][0].shape[2], config.num_blocks(longest)
    by_compressed = spec.selects and scorer is None
    per_query = [heads * (config.num_compressed(longest) + config.window)]
    if keys.selected is not None:
        k, v = keys.selected
        per_query += [groups * config.selected_tokens * (k.shape[3] + v.shape[3])]
    if scorer is not None:
        per_query.append(scorer.queries.shape[2] * longest)

    def run(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        at = t[:, part]
        outs: dict[str, Tensor] = {}
        reads: list[Tensor] = []
        block_indices = None
        if keys.compressed is not None and ("compressed" in branches or by_compressed):
            k, values = keys.compressed
            p, visible = compressed_weights(rows, k, at, config)
            reads.append(visible.sum(-1)[..., None].expand(-1, -1, groups))
            if "compressed" in branches:
                assert values is not None
                outs["compressed"] = torch.einsum("bgchs,bsgd->bcghd", p.to(rows.dtype), values.to(rows.dtype))
            if by_compressed:
                importance = block_importance(p.sum(3), 0, blocks, config)
                block_indices = select(importance, at[:, None], config).transpose(1, 2)
        if spec.selects:
            assert keys.selected is not None
            if scorer is not None:
                block_indices = choose_at(scorer, part, at, config)
            assert block_indices is not None
            outs["selected"], read = _selected(rows, at, block_indices, *keys.selected, config)
            reads.append(read)
        if "window" in branches:
            assert keys.window is not None
            outs["window"], read = _window(rows, at, part, *keys.window, config)
            reads.append(read)
        flat = {name: out.flatten(2, 3) for name, out in outs.items()}
        out = flat[branches[0]] if gates is None else combine(gates[:, part], flat)
        return out, torch.stack(reads).sum(0)

    return in_chunks(run, q, groups, max(per_query))


def _selected(
    rows: Tensor, t: Tensor, block_indices: Tensor, k: Tensor, v: Tensor, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Output [B, C, G, h, Dv] of queries at positions t [B, C], and keys read [B, C, G]."""
    inside = torch.arange(config.select_block, device=rows.device)
    token = (block_indices[..., None] * config.select_block + inside).flatten(-2).long()
    visible = (block_indices >= 0).repeat_interleave(config.select_block, -1) & (token <= t[..., None, None])
    token = torch.where(visible, token, 0)
    row = torch.arange(rows.shape[0], device=rows.device)[:, None, None, None]
    group = torch.arange(rows.shape[2], device=rows.device)[:, None]
    s = torch.einsum("bcghd,bcgsd->bcghs", rows, k[row, token, group].to(rows.dtype))
    p = softmax(s, visible[..., None, :])
    return torch.einsum("bcghs,bcgsd->bcghd", p, v[row, token, group].to(rows.dtype)), visible.sum(-1)


def _window(rows: Tensor, t: Tensor, part: slice, k: Tensor, v: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    # new token c sees entries c … c+w-1 of the window context, where they exist
    keys = slice(part.start, part.stop - 1 + config.window)
    k, v = k[:, keys].to(rows.dtype), v[:, keys].to(rows.dtype)
    entry = torch.arange(k.shape[1], device=rows.device)
    back = torch.arange(rows.shape[1], device=rows.device)[:, None] + config.window - 1 - entry
    visible = (back >= 0) & (back < config.window) & (t[..., None] - back >= 0)
    s = torch.einsum("bcghd,bsgd->bgchs", rows, k)
    p = softmax(s, visible[:, None, :, None])
    out = torch.einsum("bgchs,bsgd->bcghd", p, v)
    return out, visible.sum(-1)[..., None].expand(-1, -1, rows.shape[2])


# ------------------------------------------------------------ in PyTorch: dense


def cached_dense_route(q: Tensor, cache: Cache, new: NewTokens) -> tuple[str, str | None]:
    """What `cached_dense_attention` runs: (name, why not PyTorch's SDPA kernel)."""
    if not q.is_cuda:
        return "reference", f"SDPA for new tokens needs a CUDA device: they are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16) or q.dtype != cache.dtype:
        found = " and ".join(str(dtype).removeprefix("torch.") for dtype in (q.dtype, cache.dtype))
        return "reference", f"SDPA needs tokens and cache in the same half precision: here {found}"
    if (dk := cache.key["head_dim"]) != (dv := cache.key["value_dim"]):
        return "reference", f"SDPA needs Dk = Dv: here Dk={dk} and Dv={dv}"
    if not new.aligned or new.padded:
        return "reference", "SDPA has one causal mask for all rows, and the rows differ in position or length"
    return "sdpa", None


def cached_dense_attention(q: Tensor, cache: Cache, new: NewTokens) -> Tensor:
    width, heads = q.shape[1:3]
    k, v = cache.all(new)
    groups = k.shape[2]
    if cached_dense_route(q, cache, new)[0] == "sdpa":
        # the kernel does not count: every key up to the query
        cache.reads = (new.positions + 1)[..., None].expand(-1, -1, groups)
        # here, since it imports torch._dynamo, a second at every start
        from torch.nn.attention.bias import causal_lower_right

        # aligned to the lower right: the last query sees every key
        bias = causal_lower_right(width, k.shape[1])
        with without_autocast(q.device.type):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, enable_gqa=True
            )
        return out.transpose(1, 2)
    s_index = torch.arange(k.shape[1], device=q.device)

    def attend(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        visible = s_index <= new.positions[:, part, None]
        p = softmax(torch.einsum("bcghd,bsgd->bgchs", rows, k.to(rows.dtype)), visible[:, None, :, None])
        out = torch.einsum("bgchs,bsgd->bcghd", p, v.to(rows.dtype)).flatten(2, 3)
        return out, visible.sum(-1)[..., None].expand(-1, -1, groups)

    out, cache.reads = in_chunks(attend, q, groups, heads * k.shape[1])
    return out


# ------------------------------------------------------------ in PyTorch: shared


def in_chunks(
    attend: Callable[[Tensor, slice], tuple[Tensor, Tensor]], q: Tensor, groups: int, per_query: int
) -> tuple[Tensor, Tensor]:
    """`attend(rows, part)` for chunks of the queries, joined: output [B, C, H, Dv] in q's dtype, keys read [B, C, G].

    rows: scaled queries [B, part, G, h, Dk] in the dtype to compute in; as in the whole-sequence operator, scores and
    selection must not be computed in half precision. per_query: numbers that a query needs, see `query_chunks`.
    """
    outs, reads = [], []
    with without_autocast(q.device.type):
        for part in query_chunks(q.shape[1], q.shape[0] * per_query):
            rows = q[:, part].unflatten(2, (groups, -1)).to(compute_dtype(q)) * q.shape[-1] ** -0.5
            out, read = attend(rows, part)
            outs.append(out)
            reads.append(read)
    return torch.cat(outs, dim=1).to(q.dtype), torch.cat(reads, dim=1)


def query_chunks(width: int, per_query: int) -> Iterator[slice]:
    """Slices of `width` queries that need at most _CHUNK_NUMBERS numbers each, at `per_query` per query."""
    chunk = max(1, _CHUNK_NUMBERS // per_query)
    for first in range(0, width, chunk):
        yield slice(first, min(first + chunk, width))

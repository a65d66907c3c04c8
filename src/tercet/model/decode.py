"""Attention of new tokens to a cache. Inference only; no autograd.

One token per row runs on the decode kernels, a chunk of tokens on the whole-sequence kernels; anything they cannot run
falls back to PyTorch here. Every path reads only the keys that a query may see, num_cmp + Σ|selected tokens| +
min(w, t+1) per group, and the cache reports how many were read. The keys of a learned selector, one small vector per
token, are not counted.

Axes: q [B, C, H, Dk]; keys [B, S, G, Dk]; probabilities [B, G, C, h, S].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tercet.attention.config import NSAConfig
from tercet.attention.dispatch import REQUESTED, cannot_run, without_autocast
from tercet.attention.functional import NSAInputs, run_nsa, run_window
from tercet.attention.hardware import NO_TRITON, TRITON_INSTALLED, interpreting, kernels_run_on
from tercet.attention.layout import Span
from tercet.attention.reference import block_importance, combine, select, select_at
from tercet.attention.tiling import compute_dtype
from tercet.model.cache import Cache, DenseCache, HostLengths, NewTokens
from tercet.model.compression import Compression
from tercet.model.layer import AttentionLayer, are_plain
from tercet.model.nsa_cache import NSACache

if TYPE_CHECKING:  # needs Triton
    from tercet.attention.kernels.decode import CompressionWeights, Heads, Held, Norms

# Elements gathered or scored at once: bounds the memory of a long chunk.
_CHUNK_NUMBERS = 1 << 24

# Copies of a layer's weights that a cache may keep, so that its projections of a token are one product.
_FUSED_BYTES = 8 << 20


# ------------------------------------------------------------ on the kernels


def why_not_kernels(layer: AttentionLayer, x: Tensor, cache: NSACache, lengths: Tensor | None) -> str | None:
    """Why the kernels cannot run the tokens x after the cache; None if they can. Raises if backend="triton" was asked
    for, unless the cache is empty: the whole-sequence operator then decides."""
    if cache.is_empty and x.shape[1] > 1:
        return None  # without further checks, for which a prompt would wait
    if layer.backend == "reference":
        return REQUESTED
    if layer.chooses_randomly():
        reason: str | None = "the kernels do not support model.selector=random with a cache"
    elif x.shape[1] == 1:
        reason = why_not_token_kernels(layer, cache)
    else:
        reason = why_not_chunk_kernels(layer, x, cache, lengths)
    if reason is not None and layer.backend == "triton" and any(cache.host_lengths.tokens):
        raise cannot_run(reason)
    return reason


def why_not_token_kernels(layer: AttentionLayer, cache: Cache) -> str | None:
    """Why the decode kernels cannot run one token per row; None if they can."""
    if not TRITON_INSTALLED:
        return NO_TRITON
    if cache.device.type != "cuda" and not interpreting():
        return f"the cache is on {cache.device} and the kernels need a CUDA device"
    if not layer.phi_is_plain():
        return "the linear layers of φ have hooks or adapters, and the kernels only read weights"
    from tercet.attention.kernels import decode

    reason = decode.unsupported(cache.device, cache.dtype, kernel_heads(layer), layer.config)
    if reason is None and layer.config is not None and isinstance(cache, NSACache) and cache.keeps_blocks:
        # the kernels' scratch covers the whole capacity: check the capacity that this step would allocate
        reason = decode.too_long(cache.capacity_for(max(cache.host_lengths.tokens) + 1), layer.config)
    return reason


def why_not_chunk_kernels(layer: AttentionLayer, x: Tensor, cache: NSACache, lengths: Tensor | None) -> str | None:
    """Why the whole-sequence kernels cannot run several new tokens per row; None if they can."""
    cache.check(layer.cache_key(), x)
    if not TRITON_INSTALLED:
        return NO_TRITON
    if layer.kind == "nsa" and not cache.keeps_tokens and not cache.compresses:
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


def nsa_chunk(
    q: Tensor, gates: Tensor, keys: dict[str, Tensor], values: dict[str, Tensor], cache: NSACache, new: NewTokens,
    config: NSAConfig, branches: tuple[str, ...], selector: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[str, str | None]]:  # fmt: skip
    """A chunk that starts at the same position in every row: a query range of the sequences now in the cache."""
    start, first_window_key = new.longest - q.shape[1], 0
    pairs = {name: (keys[name], values[name]) for name in ("selected", "window")}
    if cache.keeps_tokens:
        k, v = cache.selected()
        pairs["selected"] = k[:, : new.longest], v[:, : new.longest]
    if new.window_k is not None:
        k, v, first_window_key = _window_keys(new, config)
        pairs["window"] = k, v
    compressed: tuple[Tensor | None, Tensor | None] = (None, None)
    if cache.compresses:
        compressed = cache.compressed(new) or (keys["selected"][:, :0], values["selected"][:, :0])
    out, _, route = run_nsa(
        NSAInputs(q, *compressed, *pairs["selected"], *pairs["window"], gates), config=config, backend="triton",
        branches=branches, span=Span(start, 0 if cache.keeps_tokens else start, first_window_key), selector=selector,
    )  # fmt: skip
    cache.reads = None
    return out, route


def window_chunk(
    q: Tensor, cache: NSACache, new: NewTokens, config: NSAConfig
) -> tuple[Tensor, tuple[str, str | None]]:
    """A chunk that starts at the same position in every row, in a layer with window attention only."""
    k, v, first = _window_keys(new, config)
    cache.reads = None
    return run_window(q, k, v, config=config, backend="triton", span=Span(new.longest - q.shape[1], first))


def _window_keys(new: NewTokens, config: NSAConfig) -> tuple[Tensor, Tensor, int]:
    """Keys and values that the windows of a chunk reach, and the position of the first."""
    assert new.window_k is not None
    assert new.window_v is not None
    start = new.longest - new.width
    first = max(0, start - config.window + 1)
    # skip those of the w-1 slots before the chunk that hold no token
    empty = config.window - 1 - (start - first)
    return new.window_k[:, empty:], new.window_v[:, empty:], first


def run_token(layer: AttentionLayer, x: Tensor, cache: Any, lengths: Tensor | None) -> Tensor:
    """One token per row on the decode kernels."""
    layer._route = ("triton", None)
    counts = cache.begin_token(layer.cache_key(), x, lengths)
    try:
        out, read = layer.decode_token(x, cache, counts)
    except BaseException:
        # The host has already counted this token; the device counts it in the last launch. If that may not have run,
        # mark the host's lengths as upper bounds.
        cache.host_lengths = HostLengths(cache.host_lengths.tokens, exact=False)
        raise
    cache.set_partial_reads(read)
    return layer.o_proj(out)


def project_together(x: Tensor, cache: Cache, *layers: nn.Linear) -> Tensor | None:
    """Outputs of small linear layers that read the same tokens, side by side, followed by padding: one product, since
    each launch costs a small model more than its work does. None if they are large, not plain, or not on a GPU."""
    if not kernels_run_on(x) or not are_plain(*layers):  # an adapter may have no weight
        return None
    if sum(layer.weight.numel() * layer.weight.element_size() for layer in layers) > _FUSED_BYTES:
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layers[0].weight.dtype
    return F.linear(x, *cache.fused_weights(layers, dtype))


def project(x: Tensor, cache: Cache, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of linear layers that read the same tokens."""
    y = project_together(x, cache, *layers)
    return tuple(layer(x) for layer in layers) if y is None else split_outputs(y, layers)


def split_outputs(y: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """The outputs of layers from those of `project_together`."""
    sizes = [layer.out_features for layer in layers]
    return y.split([*sizes, y.shape[-1] - sum(sizes)], -1)[:-1]


def kernel_cache(cache: NSACache) -> Held:
    """The tensors of a cache, with the counters that a selection of blocks needs."""
    from tercet.attention.kernels.decode import Held, arrivals

    return Held(
        cache.lengths, cache.rope_frequencies(), cache.capacity, **cache.stores(),
        arrived=cache.arrival_counters(arrivals(cache.batch, cache.key["kv_heads"])),
        selector_frequencies=cache.selector_frequencies(),
    )  # fmt: skip


def kernel_heads(layer: AttentionLayer) -> Heads:
    from tercet.attention.kernels.decode import Heads

    return Heads(layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim, layer.selector_size())


def kernel_norms(q: nn.RMSNorm | None, keys: Iterable[nn.RMSNorm] | None, dtype: torch.dtype) -> Norms | None:
    if q is None or keys is None:
        return None
    from tercet.attention.kernels.decode import Norms

    # without an eps, nn.RMSNorm uses that of the dtype it computes in: float32 for half precision
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if q.eps is None else q.eps
    return Norms(q.weight, tuple(norm.weight for norm in keys), eps)  # type: ignore[misc]


def phi_weights(compression: Compression) -> CompressionWeights:
    from tercet.attention.kernels.decode import CompressionWeights

    if compression.kind == "mean":
        return CompressionWeights()
    up, down = compression.up, compression.down
    return CompressionWeights(compression.position, up.weight, up.bias, down.weight, down.bias)


# ------------------------------------------------------------ in PyTorch: NSA


def cached_nsa_attention(
    q: Tensor, gates: Tensor, cache: NSACache, new: NewTokens, config: NSAConfig, branches: tuple[str, ...],
    selector: tuple[Tensor, Tensor] | None = None, given: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the new tokens' queries to a cache. Blocks are those given, block_indices [B, C, G, n]; else chosen
    by the selector, a pair of queries and keys; else by the compressed branch."""
    heads, groups = q.shape[2], cache.key["kv_heads"]
    per_query = max(
        groups * config.selected_tokens * (q.shape[3] + cache.key["value_dim"]),
        heads * (config.num_compressed(new.longest) + config.window),
        0 if selector is None else groups * new.longest,
    )
    select_by_compressed = "selected" in branches and selector is None and given is None

    def attend(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        t = new.positions[:, part]
        results: dict[str, tuple[Tensor, Tensor]] = {}
        counts: list[Tensor] = []
        if "compressed" in branches or select_by_compressed:
            compressed, read, block_indices = _compressed(rows, t, cache, new, config)
            if "compressed" in branches:
                results["compressed"] = compressed, read
            else:
                counts.append(read)  # read only to select blocks
        if "selected" in branches:
            if given is not None:
                block_indices = given[:, part]
            elif selector is not None:
                block_indices = select_at(selector[0][:, part], selector[1], t, config)
            results["selected"] = attend_selected(rows, t, block_indices, *cache.selected(), config)
        if "window" in branches:
            results["window"] = _window(rows, t, part, new, config)
        out = combine(gates[:, part], {name: out.flatten(2, 3) for name, (out, _) in results.items()})
        return out, torch.stack([*counts, *(read for _, read in results.values())]).sum(0)

    out, cache.reads = in_chunks(attend, q, groups, per_query)
    return out


def _compressed(
    rows: Tensor, t: Tensor, cache: NSACache, new: NewTokens, config: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, C, G, h, Dv], keys read [B, C, G] and selected blocks [B, C, G, n]."""
    batch, width, groups, h, _ = rows.shape
    num_blocks = config.num_blocks(new.longest)
    held = cache.compressed(new)
    if held is None:
        out = rows.new_zeros(batch, width, groups, h, cache.key["value_dim"])
        read = torch.zeros(batch, width, groups, dtype=torch.int64, device=rows.device)
        importance = rows.new_zeros(batch, groups, width, num_blocks)
    else:
        k, v = held
        p, visible = compressed_weights(rows, k, t, config)
        out = torch.einsum("bgchs,bsgd->bcghd", p.to(rows.dtype), v.to(rows.dtype))
        read = visible.sum(-1)[..., None].expand(-1, -1, groups)
        importance = block_importance(p.sum(3), 0, num_blocks, config)
    return out, read, select(importance, t[:, None], config).transpose(1, 2)


def compressed_weights(rows: Tensor, k: Tensor, t: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Weights, fp64 [B, G, C, h, S] as in `tiled_attention`, of scaled queries [B, C, G, h, D] at positions t [B, C] for
    compressed keys k, and which keys they see [B, C, S]."""
    i = torch.arange(k.shape[1], device=rows.device)
    visible = i * config.compress_stride + config.compress_block <= t[..., None] + 1
    s = torch.einsum("bcghd,bsgd->bgchs", rows, k.to(rows.dtype))
    return softmax(s.double(), visible[:, None, :, None]), visible


def attend_selected(
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


def _window(rows: Tensor, t: Tensor, part: slice, new: NewTokens, config: NSAConfig) -> tuple[Tensor, Tensor]:
    assert new.window_k is not None
    assert new.window_v is not None
    # new token c sees entries c … c+w-1 of the window context, where they exist
    keys = slice(part.start, part.stop - 1 + config.window)
    k, v = new.window_k[:, keys].to(rows.dtype), new.window_v[:, keys].to(rows.dtype)
    entry = torch.arange(k.shape[1], device=rows.device)
    back = torch.arange(rows.shape[1], device=rows.device)[:, None] + config.window - 1 - entry
    visible = (back >= 0) & (back < config.window) & (t[..., None] - back >= 0)
    s = torch.einsum("bcghd,bsgd->bgchs", rows, k)
    p = softmax(s, visible[:, None, :, None])
    out = torch.einsum("bgchs,bsgd->bcghd", p, v)
    return out, visible.sum(-1)[..., None].expand(-1, -1, rows.shape[2])


def cached_window_attention(q: Tensor, cache: NSACache, new: NewTokens, config: NSAConfig) -> Tensor:
    """Window attention only."""

    def attend(rows: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        out, read = _window(rows, new.positions[:, part], part, new, config)
        return out.flatten(2, 3), read

    out, cache.reads = in_chunks(attend, q, cache.key["kv_heads"], q.shape[2] * config.window)
    return out


# ------------------------------------------------------------ in PyTorch: dense


def cached_dense_route(q: Tensor, cache: DenseCache, new: NewTokens) -> tuple[str, str | None]:
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


def cached_dense_attention(q: Tensor, cache: DenseCache, new: NewTokens) -> Tensor:
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


def softmax(s: Tensor, visible: Tensor) -> Tensor:
    """Over visible keys; all 0 where there are none."""
    s = s.masked_fill(~visible, -torch.inf)
    highest = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
    p = (s - highest).exp()
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total > 0, total, 1)

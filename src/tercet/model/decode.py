"""Attention of new tokens to a cache. Inference only; no autograd.

One token per row runs on the decode kernels. Anything else is a query range of the operator, on any backend: one for
all rows if they agree in length, else one per row. Every path reads only the keys that a query may see, num_cmp +
Σ|selected tokens| + min(w, t+1) per group, and the cache reports how many were read. Keys that only score blocks, one
small vector per token, are not counted.

layer: an Attention (attention.py, which imports this module).
Axes: q [B, C, H, Dk]; keys [B, S, G, Dk].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tercet.attention.config import BRANCHES
from tercet.attention.dispatch import REQUESTED, cannot_run, why_not_triton
from tercet.attention.hardware import NO_TRITON, TRITON_INSTALLED, interpreting, kernels_run_on
from tercet.attention.layout import Span
from tercet.attention.operator import Attended, AttentionInputs, attend
from tercet.attention.reference import count_keys
from tercet.attention.selector import TokenScorer, pool_keys, take_channels
from tercet.attention.spec import without_kernel
from tercet.model.cache import Cache, HostLengths, NewTokens
from tercet.model.compression import Compression, are_plain, mean_keys
from tercet.model.rope import RopeCache, compressed_positions, rope_cache, rotate

if TYPE_CHECKING:  # needs Triton
    from tercet.attention.kernels.decode import CompressionWeights, Heads, Held, Norms

# Copies of a layer's weights that a cache may keep, so that its projections of a token are one product.
_FUSED_BYTES = 8 << 20


# ------------------------------------------------------------ new tokens after a cache


@torch.no_grad()  # inference only: cached tokens must not keep their autograd graph alive
def forward(layer: Any, x: Tensor, cache: Cache, lengths: Tensor | None, rope: RopeCache | None) -> Tensor:
    """`Attention.forward` of new tokens after those of a cache."""
    reason = None
    if x.shape[1] == 1:
        reason = REQUESTED if layer.backend == "reference" else why_not_token_kernels(layer, cache)
        if reason is None:
            layer._ran = layer.spec.branches
            return run_token(layer, x, cache, lengths)
        if layer.backend == "triton" and any(cache.host_lengths.tokens):
            raise cannot_run(reason)
    check_kernels(layer, x, cache)
    new = cache.begin(layer.cache_key(), x, lengths)
    x = new.zero_padding(x)
    inputs, scorer = _project_new(layer, x, new, cache, rope)
    cache.reads = None
    if new.fresh:  # as a whole sequence: causal masks hide right padding from every real token
        found = attend(inputs, layer.spec, backend=layer.backend, scorer=scorer)
    else:
        found = attend_cached(inputs, cache, new, scorer, layer.backend if reason is None else "reference")
        found = found._replace(route=(found.route[0], reason or found.route[1]))
    layer._ran, layer._route = found.branches, found.route
    return layer.o_proj(found.out.flatten(2))


def projections(layer: Any, cache: Cache) -> tuple[nn.Linear, ...]:
    """q_proj, kv_proj, gate.proj, and those of a learned selector, if the cache keeps its keys."""
    gate = () if layer.gate is None else (layer.gate.proj,)
    own = (layer.selector.q_proj, layer.selector.k_proj) if layer.selector is not None and cache.selector_size else ()
    return layer.q_proj, layer.kv_proj, *gate, *own


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


def _project_new(
    layer: Any, x: Tensor, new: NewTokens, cache: Cache, rope: RopeCache | None
) -> tuple[AttentionInputs, TokenScorer | None]:
    """The operator's inputs for new tokens, and what scores blocks by single tokens; the cache keeps its part."""
    if new.fresh and layer.can_fuse(x):
        return _project_prompt(layer, x, new, cache, rope)
    q, kv, *more = project(x, cache, *projections(layer, cache))
    cos_sin = layer.rotary.cos_sin(new.positions) if rope is None else rope.tokens
    q, raw_k, keys, values = layer.project(x, None, cos_sin, (q, kv))
    gates = None if layer.gate is None else layer.gate.activate(more.pop(0))
    completed = cache.append(new, raw_k, keys, values)
    scorer = None
    if layer.selector is not None and more:
        scorer = TokenScorer(*layer.selector.append(more, new, cache, None if rope is None else rope.selector))
    elif new.fresh:
        scorer = layer.branch_scorer(q, keys.get("selected"))
    elif layer.spec.exact_groups is not None:
        scorer = layer.branch_scorer(q, cache.all(new)[0].to(q.dtype))
    elif layer.spec.by_branch:
        of = cache.scored_channels
        queries = q if of is None else take_channels(q, of)
        scorer = TokenScorer(queries, cache.selector_keys(new).to(q.dtype), layer.spec.scorer)
    compressed: tuple[Tensor | None, Tensor | None] = (None, None)
    if new.fresh and layer.spec.pools:
        compressed = pool_keys(keys["selected"], layer.config), None
    elif new.fresh and raw_k is not None and layer.spec.compresses:
        compressed = layer.compress(raw_k, values["compressed"], None, rope)
    if new.fresh:
        cache.append_prompt(new, *compressed)
    elif completed is not None:
        index, block_k, block_v = completed
        if block_v is None:
            cache.append_compressed(new, k_compressed=mean_keys(block_k))
        else:
            cos_sin = layer.rotary.cos_sin(compressed_positions(index, layer.config))
            k = rotate(layer.compress_k.phi(block_k), cos_sin, layer.backend)
            cache.append_compressed(new, k_compressed=k, v_compressed=layer.compress_v.phi(block_v))
    return AttentionInputs.of_branches(q, compressed, keys, values, gates), scorer


def _project_prompt(
    layer: Any, x: Tensor, new: NewTokens, cache: Cache, rope: RopeCache | None
) -> tuple[AttentionInputs, TokenScorer | None]:
    """`_project_new` of the first tokens, on the kernel that splits a fused projection. The outputs of the
    projections are freed on return: attention does not need them."""
    rope = rope_cache(layer.rotary, x, None, layer.config) if rope is None else rope
    layers = projections(layer, cache)
    fused = project_together(x, cache, *layers)
    parts = None if fused is None else split_outputs(fused, layers)
    inputs = layer.fused_inputs(x, None, rope) if fused is None else layer.split(fused, None, rope, None)
    scorer = layer.branch_scorer(inputs.q, inputs.k_selected)
    if layer.selector is not None and cache.selector_size:
        projected = [layer(x) for layer in layers[3:]] if parts is None else parts[3:]
        scorer = TokenScorer(*layer.selector.append(projected, new, cache, rope.selector))
    raw_k = None
    keys = {"selected": inputs.k_selected, "window": inputs.k_window}
    values = {"selected": inputs.v_selected, "window": inputs.v_window}
    if layer.spec.compresses:  # the cache keeps the last raw tokens of each row
        last = slice(None) if new.padded else slice(-layer.config.compress_block, None)
        kv = layer.kv_proj(x[:, last]) if parts is None else parts[1][:, last]
        sets = layer.keys_and_values(kv.split(layer.kv_rows, dim=-1))
        raw_k, values["compressed"] = (each[0].unflatten(-1, (layer.kv_heads, -1)) for each in sets)
    cache.append(new, raw_k, keys, values)  # type: ignore[arg-type]
    cache.append_prompt(new, inputs.k_compressed, inputs.v_compressed)
    return inputs, scorer


# ------------------------------------------------------------ query ranges


def attend_cached(
    inputs: AttentionInputs, cache: Cache, new: NewTokens, scorer: TokenScorer | None, backend: str
) -> Attended:
    """New tokens after those of the cache, which holds them already. inputs: those of the new tokens."""
    if new.first is not None:
        found, cache.reads = _attend_rows(inputs, cache, new, slice(None), scorer, backend)
        return found
    q = inputs.q
    out = q.new_zeros(*q.shape[:3], cache.key["value_dim"])
    reads = torch.zeros(*q.shape[:2], cache.key["kv_heads"], dtype=torch.int64, device=q.device)
    for b, count in enumerate(new.added):
        if count:
            found, read = _attend_rows(inputs, cache, new, slice(b, b + 1), scorer, backend)
            out[b, :count] = found.out[0]
            if read is not None:
                reads[b, :count] = read[0]
    cache.reads = None if read is None else reads
    return found._replace(out=out)


def _attend_rows(
    inputs: AttentionInputs, cache: Cache, new: NewTokens, rows: slice, scorer: TokenScorer | None, backend: str
) -> tuple[Attended, Tensor | None]:
    """Rows that agree in length, without their padding, and how many keys each query read; None: not counted."""
    first, count = new.before[rows.start or 0], new.added[rows.start or 0]
    own, span = _query_range(inputs, cache, new, rows, first, count)
    chooser = None if scorer is None else scorer.of_rows(slice(count), slice(first + count), rows)
    found = attend(own, cache.spec, backend=backend, span=span, scorer=chooser)
    # the whole-sequence kernels do not count
    on_kernels = found.route[0] == "triton"
    read = None if on_kernels else count_keys(own, cache.spec, found.branches, found.block_indices, span)
    return found._replace(out=found.out.to(inputs.q.dtype)), read


def check_kernels(layer: Any, x: Tensor, cache: Cache) -> None:
    """Raise if backend="triton" was asked for and cannot run tokens x after the cache, before it is changed."""
    if layer.backend != "triton" or layer.spec.dense or cache.is_empty:
        return

    def like(heads: int, size: int) -> Tensor:
        return layer.q_proj.weight.new_empty(()).expand(*x.shape[:2], heads, size)

    q, k = like(layer.heads, layer.head_dim), like(layer.kv_heads, layer.head_dim)
    tensors = {"q": q, "k_selected": k, "v_selected": like(layer.kv_heads, layer.value_dim)}
    if (reason := why_not_triton(tensors, layer.config)) is not None:
        raise cannot_run(reason)


def _query_range(
    inputs: AttentionInputs, cache: Cache, new: NewTokens, row: slice, first: int, count: int
) -> tuple[AttentionInputs, Span]:
    """Of rows with `count` new tokens after `first`: their queries, and the keys that these read."""
    end, first_key, first_window_key = first + count, 0, first
    gates = None if inputs.gates is None else inputs.gates[row, :count]
    inputs = inputs._replace(gates=None).map(lambda x: x[row, :count])
    if cache.keeps_tokens:
        k, v = (x[row, :end] for x in cache.all(new))
        inputs = inputs._replace(k_selected=k, v_selected=v)
    else:
        first_key = first
    if new.window_k is not None and new.window_v is not None:
        first_window_key = max(0, first - cache.config.window + 1)
        # skip those of the w-1 slots before the new tokens that hold no token
        reached = slice(cache.config.window - 1 - (first - first_window_key), cache.config.window - 1 + count)
        inputs = inputs._replace(k_window=new.window_k[row, reached], v_window=new.window_v[row, reached])
    if cache.spec.reads_compressed:
        k, values = cache.compressed(new)
        seen = cache.config.num_compressed(end)
        values = None if values is None else values[row, :seen]
        inputs = inputs._replace(k_compressed=k[row, :seen], v_compressed=values)
    # a cache may be of another precision than its layer computes in
    dtype = torch.promote_types(inputs.q.dtype, cache.dtype)
    inputs = inputs.map(lambda x: x.to(dtype))._replace(gates=gates)
    return inputs, Span(first, first_key, first_window_key)


# ------------------------------------------------------------ one token per row, on the kernels


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
    q, kv, *more = project(x, cache, *projections(layer, cache))
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

    norms = layer.key_norms if layer.gate is None else layer.per_branch(layer.key_norms)
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

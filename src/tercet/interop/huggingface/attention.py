"""Block-sparse attention for the dense models of transformers: attn_implementation="tercet".

As transformers passes them, rotated: query [B, H, T, D]; key, value [B, G, S, D], S = cached tokens + T.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tercet.attention.config import NSAConfig
from tercet.attention.layout import WHOLE, Packing, RowMap, Span, move_rows
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.selector import TokenScorer, own_scorer, slow_channels
from tercet.attention.spec import SCORERS, AttentionSpec, block_sparse
from tercet.interop.huggingface.support import (
    LOCAL,
    NAME,
    UnsupportedError,
    attention_layers,
    check_arguments,
    check_config,
    check_model,
    read_forward,
    unsupported,
)
from tercet.model.config import ModelConfig
from tercet.parse import first_problem

_HIDDEN = -9984.0  # additive masks hide a key by -inf, the dtype's minimum or -10,000, here as bfloat16
_BLOCK_SPARSE = {
    "gate": "none", "shared_kv": True, "branches": ["selected"], "compression": "mean", "selector": "own",
}  # fmt: skip
SCORE_CHANNELS = 32


def use_block_sparse(
    model: PreTrainedModel,
    config: NSAConfig | None = None,
    *,
    scorer: str = "own",
    score_channels: int | str | None = None,
    layers: Sequence[int] | None = None,
    dense_below: int = 0,
    exact_groups: Sequence[Sequence[int]] = (),
) -> None:
    """Let a decoder of transformers read long contexts block by block (docs/convert.md).

    Weights stay as they are. The settings are kept in model.config.tercet, which save_pretrained writes; a model loaded
    with attn_implementation="tercet" reads them there, or takes these defaults.

    config          block sizes; `window` has no effect
    scorer          what chooses the blocks: "own" (the model's own queries and keys) or "compressed" (means of keys)
    score_channels  channels of a head that "own" reads, those that RoPE rotates slowest, or "all" of them. Default: 32,
                    or all where RoPE rotates only a part of them, or in a way that is not known
    layers          which layers are sparse, counted from 0; the others stay dense
    dense_below     queries at positions below this read everything, as in the dense model
    exact_groups    with "own": the KV heads of each layer that choose by it, such as [[0, 1], [], [1]]; the others
                    choose by means of keys. Empty: all choose by it
    """
    config = NSAConfig() if config is None else config
    known = [name for name, each in SCORERS.items() if each.reads != "projections"]
    if scorer not in known:
        raise UnsupportedError(f"scorer={scorer!r} is unknown: pick one of {', '.join(known)}")
    block_sparse(config, scorer, dense_below)  # which checks them
    check_model(model)
    stored = model.config.get_text_config()
    settings = {**_BLOCK_SPARSE, "nsa": asdict(config), "dense_below": dense_below, "selector": scorer}
    if score_channels is not None:
        _check_channels(model, scorer, score_channels)
        settings["score_channels"] = score_channels
    if layers is not None:
        count = stored.num_hidden_layers
        if not layers or not set(layers) <= {*range(count)}:
            raise UnsupportedError(f"layers={[*layers]} must be some of the model's layers, 0 to {count - 1}")
        settings |= {"layers": count, "attention": ["nsa" if i in layers else "dense" for i in range(count)]}
    if exact_groups:
        settings["exact_groups"] = [list(groups) for groups in exact_groups]
        read_settings(stored, settings)
    stored.tercet = settings
    model.set_attn_implementation(NAME)


def _check_channels(model: PreTrainedModel, scorer: str, channels: int | str) -> None:
    if scorer != "own":
        raise UnsupportedError(f'score_channels={channels!r} has no effect with scorer={scorer!r}: use scorer="own"')
    if channels == "all":
        return
    layers = [layer for _, layer, _ in attention_layers(model)]
    if not any(layer.tercet_rotation for layer in layers):
        raise UnsupportedError(
            f"score_channels={channels!r}: model_type={model.config.model_type!r} does not rotate whole heads in a "
            'known way, so it is unknown which channels are the slowest: use score_channels="all"'
        )
    size: Any = next(layer.head_dim for layer in layers if layer.tercet_rotation)
    if not isinstance(channels, int) or channels % 2 or not min(16, size) <= channels <= size:
        raise UnsupportedError(f'score_channels={channels!r} must be "all" or an even number from 16 to {size}')


class Settings(NamedTuple):
    spec: AttentionSpec
    dense_layers: frozenset[int] = frozenset()
    exact_groups: tuple[tuple[int, ...], ...] = ()
    score_channels: int | str | None = None
    given: bool = False
    """Whether the model came with settings; else these are the defaults."""

    def of_layer(self, layer: nn.Module) -> AttentionSpec:
        # a model that chooses blocks itself in some layers reads everything in the others
        kind: Any = type(layer)
        forward = None if self.given else read_forward(kind)
        index: Any = getattr(layer, "layer_idx", None)
        spec = replace(self.spec, exact_groups=self.exact_groups[index]) if self.exact_groups else self.spec
        if index in self.dense_layers or (forward and "block_indices" in forward.arguments):
            return replace(spec, dense_below=sys.maxsize)
        return spec

    def channels(self, layer: nn.Module, q: Tensor) -> Tensor | None:
        """Channels that "own" reads; None: all."""
        size, rotation = q.shape[-1], getattr(layer, "tercet_rotation", None)
        count = SCORE_CHANNELS if self.score_channels is None else self.score_channels
        if rotation is None or not isinstance(count, int) or count >= size:
            return None
        if rotation == "pairs":
            return torch.arange(size - count, size, device=q.device)
        return slow_channels(size, q.device, count // 2)


def saved_model(settings: Mapping[str, Any], layers: int, heads: int, kv_heads: int | None) -> ModelConfig:
    """The entry `tercet` of a config.json, less what only `use_block_sparse` knows; raises pydantic's error."""
    known = {name: value for name, value in settings.items() if name != "score_channels"}
    if known.get("exact_groups"):  # which are checked against the sizes of the model
        known = {"layers": layers, "heads": heads, "kv_heads": kv_heads or heads, **known}
    return ModelConfig.model_validate(known)


def read_settings(config: PretrainedConfig, settings: Mapping[str, Any] | None = None) -> Settings:
    """The settings in a model's configuration, as `use_block_sparse` or `tercet export hf --format llama` left them."""
    stored = settings or getattr(config, "tercet", None) or {}
    sizes = (getattr(config, f"num_{name}", 0) for name in ("hidden_layers", "attention_heads", "key_value_heads"))
    try:
        model = saved_model(stored or _BLOCK_SPARSE, *sizes)
    except ValidationError as error:
        raise UnsupportedError(f"config.json: {first_problem(error, 'tercet')}") from None
    kinds = model.attention_kinds
    if "window" in kinds or ("nsa" in kinds and model.spec("nsa").gated):
        raise unsupported(
            f"tercet.attention={model.attention!r}", "its layers must be block-sparse (gate=none) or dense"
        )
    if SCORERS[model.selector].reads == "projections":
        raise unsupported(
            f"tercet.selector={model.selector!r}",
            "its weights are not in the model; to choose by its own queries and keys, call use_block_sparse(model, …)",
        )
    dense = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    spec = block_sparse(model.nsa, model.selector, model.dense_below)
    return Settings(spec, dense, model.exact_groups, stored.get("score_channels"), bool(stored))


# ------------------------------------------------------------ where the tokens are


def read_mask(
    mask: Tensor, batch: int, width: int, keys: int, cached: int | None = None, *, longer: bool = False
) -> Tensor:
    """bool [B, cached + T], False for padding. Raises if the mask is anything but causal attention plus padding.

    mask    [B, keys]: 0 for padding, else 1. Or [B or 1, 1 or H, T, keys]: True or 0 where a query reads, False or at
            most -10,000 where it does not
    width   T new tokens
    keys    what the mask covers: cached and new tokens; if 4-dimensional, also the unused rest of a static cache
    cached  by default found in a 4-dimensional mask: behind the last key that the last real query reads, all is unused
    longer  the rest of a longer mask [B, columns] is ignored, as in transformers with a cache
    """

    def refuse(why: str) -> UnsupportedError:
        return UnsupportedError(
            f"attention_mask {list(mask.shape)} of {str(mask.dtype).removeprefix('torch.')} {why}: pass "
            f"{[batch, keys]}, 0 for padding and 1 for the {keys} cached and new tokens, or {[batch, 1, width, keys]}, "
            "causal plus padding, as bool or as 0 and -inf"
        )

    if mask.dim() == 2:
        if mask.shape[0] != batch or mask.shape[1] < keys or (mask.shape[1] > keys and not longer):
            raise refuse("does not fit the tokens")
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise refuse("has values other than 0 and 1")
        if mask.is_floating_point() and not bool(mask.any()):
            raise refuse("is 0 everywhere, which is no padding if it is added and all padding if not")
        return mask[:, :keys].bool()
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or list(mask.shape[2:]) != [width, keys]:
        raise refuse("does not fit the tokens")
    if mask.is_floating_point():
        if not bool(((mask == 0) | (mask <= _HIDDEN)).all()):
            raise refuse("has values other than 0 and -inf")
        mask = mask == 0
    elif mask.dtype != torch.bool:
        raise refuse("is neither bool nor floating point")
    seen = mask[:, 0]
    if not torch.equal(mask, mask[:, :1].expand_as(mask)):
        raise refuse("differs between heads")
    query, key = (torch.arange(n, device=mask.device) for n in (width, keys))
    # Some masks let padding on the left, which could read nothing, read everything instead.
    full = seen.all(-1)
    seen = seen & ~(full & ~full[:, -1:])[..., None]
    if cached is None:
        last = torch.where(seen, key, -1).amax(-1) - query
        cached = min(max(int(last.max()), 0), keys - width)
    own = seen.diagonal(cached, dim1=1, dim2=2)  # whether a query reads its own key; padding does not
    asked = own | ~own.any(1, keepdim=True)  # padding is only asked about earlier keys if there is nothing else
    before = (seen[..., :cached] & asked[..., None]).any(1)
    real = torch.cat((before, own), dim=1)
    expected = F.pad(real[:, None], (0, keys - real.shape[1])) & (key <= cached + query[:, None])
    free = ~own[..., None] & (key < cached)  # what padding reads does not matter
    if not bool(((seen == expected) | free).all()):
        raise refuse("is not causal plus padding")
    return real.expand(batch, -1)


class Documents(NamedTuple):
    """Real tokens, one document after another."""

    packing: Packing
    rows: RowMap | None
    """B·T tokens -> packed tokens; None if nothing is padding."""


Rows = list[tuple[Tensor, Tensor]]
"""Of each row: columns of its real tokens among cached and new ones, and which of the new tokens are real."""


class BatchLayout:
    """Where the tokens of one forward pass are. Takes the place of the mask; found by the first layer of a device."""

    ndim = 4  # with a static cache `generate` makes it before the forward pass, which must not take it for a mask

    def __init__(
        self, settings: Settings, real: Tensor | None, tokens: int, room: int, *, by_query: bool = False
    ) -> None:
        self.settings, self.tokens, self.room = settings, tokens, room  # room: keys, with the rest of a static cache
        # without any token no output has a meaning, but all must be finite: as without a mask
        self.blank = real is not None and not bool(real.any())
        self.real = None if real is None or self.blank or bool(real.all()) else real  # [B, S], False for padding
        self.by_query = by_query  # the mask says which keys each query reads, whatever its position
        self._found: dict[torch.device, Any] = {}

    def contiguous(self) -> BatchLayout:
        return self

    def documents(self, q: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> Documents | None:
        """None if every row is one document without padding."""
        if q.device not in self._found:
            self._found[q.device] = self._find_documents(q, position_ids, cu_seqlens)
        found: Documents | None = self._found[q.device]
        return found

    def _find_documents(self, q: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None) -> Documents | None:
        batch, width = q.shape[:2]
        nsa = self.settings.spec.blocks
        column = torch.arange(batch * width, device=q.device)
        # nothing but padding has no tokens to pack, and its outputs have no meaning
        real = None if self.real is None or not self.real.any() else self.real.to(q.device).flatten()
        if real is not None:
            column = column[real]
        if cu_seqlens is not None:
            if real is not None or batch != 1:
                raise UnsupportedError("cu_seq_lens_q was given with padding or several rows: pack into one row")
        else:
            starts = column.new_ones(column.shape[0], dtype=torch.bool)
            starts[1:] = (column // width).diff() != 0
            if position_ids is not None:
                step = position_ids.to(q.device).expand(batch, -1).flatten()[column].diff()
                # across padding, positions may count it or not
                restarts = (step != 1) & (step != column.diff()) & ~starts[1:]
                if self.by_query and bool(restarts.any()):
                    raise UnsupportedError(
                        f"position_ids {list(position_ids.shape)} restart within a row, and the attention_mask reads "
                        "across: pass one of the two"
                    )
                starts[1:] |= restarts
            if real is None and int(starts.sum()) == batch:
                return None
            cu_seqlens = F.pad(starts.nonzero()[:, 0], (0, 1), value=column.shape[0])
        longest = int(cu_seqlens.diff().max())
        packing = Packing(cu_seqlens, column.shape[0], column.shape[0] // nsa.compress_stride, nsa, longest)
        rows = None
        if real is not None:
            place = (real.cumsum(0) - 1).clamp(min=0)
            rows = RowMap(column, torch.ones_like(column, dtype=torch.bool), place, real)
        return Documents(packing, rows)

    def rows(self, q: Tensor, keys: int, position_ids: Tensor | None) -> Rows | None:
        """New tokens after a cache, by row; None if nothing is padding."""
        if q.device not in self._found:
            self._found[q.device] = self._find_rows(q, keys, position_ids)
        found: Rows | None = self._found[q.device]
        return found

    def _find_rows(self, q: Tensor, keys: int, position_ids: Tensor | None) -> Rows | None:
        width = q.shape[1]
        column = torch.arange(keys - width, keys, device=q.device)
        real = None if self.real is None else self.real.to(q.device)
        t = column[None] if real is None else real.cumsum(1)[:, -width:] - 1
        if position_ids is not None and not self.by_query:
            given = position_ids.to(q.device).expand(q.shape[0], -1)
            wrong = (given != t) & (given != column)
            if real is not None:
                wrong = wrong & real[:, -width:]
            if bool(wrong.any()):
                raise UnsupportedError(
                    f"position_ids {given[wrong.any(1)][0, 0].item()} … do not continue the {keys - width} tokens of "
                    "the cache: packed documents cannot be continued, pass use_cache=False"
                )
        return None if real is None else [(row.nonzero()[:, 0], row[-width:].nonzero()[:, 0]) for row in real]


class LocalMask:
    """The mask of layers with a sliding window or chunks, which stay as they are."""

    ndim = 4  # as of BatchLayout

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask

    def contiguous(self) -> LocalMask:
        return self


_CAUSAL = {"causal_mask_function", "and_masks", "packed_sequence_mask_function"}


def _parts(mask_function: Any) -> set[str]:
    """Names of the functions that a mask function of transformers was made of."""
    inside = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    functions = [f for value in inside for f in (value if isinstance(value, tuple) else (value,)) if callable(f)]
    own = mask_function.__qualname__.partition(".")[0]
    return {own}.union(*map(_parts, functions))


@torch.compiler.disable  # reads values of the mask
def layout_mask(
    *,
    batch_size: int,
    kv_length: int,
    config: PretrainedConfig,
    attention_mask: Tensor | BatchLayout | LocalMask | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **options: Any,
) -> BatchLayout | LocalMask:
    """transformers' AttentionMaskInterface. Its older versions give a `cache_position`."""
    if isinstance(attention_mask, BatchLayout | LocalMask):
        return attention_mask
    if options.get("local_size") is not None:
        return LocalMask(sdpa_mask(batch_size=batch_size, kv_length=kv_length, config=config,
                                   attention_mask=attention_mask, mask_function=mask_function, **options))  # fmt: skip
    check_config(config)
    if unknown := _parts(mask_function) - _CAUSAL:
        raise unsupported(
            f"model_type={config.model_type!r} with a mask of its own ({', '.join(sorted(unknown))})", "use sdpa"
        )
    at = options.get("cache_position")
    first, width = (options.get("q_offset", 0), options["q_length"]) if at is None else (at[0], len(at))
    tokens, real = int(first) + width, None
    if attention_mask is not None:
        real = read_mask(attention_mask, batch_size, width, tokens, longer=True)
    return BatchLayout(read_settings(config), real, tokens, kv_length)


# ------------------------------------------------------------ attention


@torch.compiler.disable  # reads values of the layout; the rest of the layer compiles
def layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BatchLayout | LocalMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' AttentionInterface. Returns the output [B, T, H, D], and no probabilities.

    block_indices  [B, G, T, n], padded with -1: what a model chose itself, of blocks of module.indexer.block_size
    """
    check_arguments(kwargs)
    if isinstance(attention_mask, LocalMask) or (isinstance(attention_mask, Tensor) and _is_local(module, kwargs)):
        mask = attention_mask.mask if isinstance(attention_mask, LocalMask) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if not isinstance(attention_mask, BatchLayout | Tensor):
        raise unsupported(f"attention_mask {type(attention_mask).__name__}", "pass a mask [batch, tokens]")
    if dropout:
        raise unsupported(f"attention_dropout={dropout}", "load the model with attention_dropout=0.0")
    if kwargs.get("output_attentions"):
        raise unsupported("output_attentions=True", "attention probabilities are never materialised; use eager")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if scaling is not None and not math.isclose(factor := scaling * math.sqrt(q.shape[-1]), 1, rel_tol=1e-6):
        q = q * factor
    if isinstance(attention_mask, Tensor):
        check_config(module.config)  # type: ignore[arg-type]
        real = read_mask(attention_mask, q.shape[0], q.shape[1], k.shape[1])
        attention_mask = BatchLayout(
            read_settings(module.config), real, real.shape[1], k.shape[1], by_query=True  # type: ignore[arg-type]
        )  # fmt: skip
    if k.shape[1] != attention_mask.room:
        raise UnsupportedError(
            f"attention_mask has {attention_mask.room} tokens, the input {k.shape[1]}: without a cache they must agree"
        )
    k, v = (x[:, : attention_mask.tokens] for x in (k, v))
    if attention_mask.blank:
        position_ids = None
    if torch.is_autocast_enabled(q.device.type):
        # RoPE of bf16 projections returns float32; as in PyTorch's attention, autocast decides
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if block_indices is not None:
        size: int = module.indexer.block_size  # type: ignore[assignment,union-attr]
        return _read_chosen(q, k, v, block_indices, size, attention_mask, position_ids), None
    spec, channels = attention_mask.settings.of_layer(module), attention_mask.settings.channels(module, q)
    if k.shape[1] > q.shape[1]:
        return _continue(q, k, v, spec, channels, attention_mask.rows(q, k.shape[1], position_ids)), None
    documents = attention_mask.documents(q, position_ids, cu_seq_lens_q)
    if documents is None:
        return _attend(q, k, v, spec, channels), None
    shape, rows = q.shape[:2], documents.rows
    q, k, v = (x.flatten(0, 1) if rows is None else move_rows(x.flatten(0, 1), rows) for x in (q, k, v))
    out = _attend(q[None], k[None], v[None], spec, channels, packing=documents.packing)[0]
    if rows is not None:
        out = move_rows(out, RowMap(rows.inverse, rows.inverse_valid, rows.source, rows.valid))
    return out.unflatten(0, shape), None


def _is_local(layer: nn.Module, arguments: Mapping[str, Any]) -> bool:
    kinds, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    return arguments.get("sliding_window") is not None or bool(kinds and index is not None and kinds[index] in LOCAL)


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, channels: Tensor | None, **options: Any) -> Tensor:
    scorer = None if "block_indices" in options else _scorer(q, k, spec, channels)
    return attend(AttentionInputs(q, k_selected=k, v_selected=v), spec, scorer=scorer, **options).out.contiguous()


def _scorer(q: Tensor, k: Tensor, spec: AttentionSpec, channels: Tensor | None) -> TokenScorer | None:
    return own_scorer(q, k, channels, spec) if spec.by_branch else None


def _read_chosen(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, size: int, layout: BatchLayout, position_ids: Tensor | None
) -> Tensor:
    """Attention over the blocks that a model chose, which count columns, padding included."""
    first, count = k.shape[1] - q.shape[1], chosen.shape[-1]
    if first:
        layout.rows(q, k.shape[1], position_ids)  # which checks them
    elif (documents := layout.documents(q, position_ids, None)) is not None and documents.rows is None:
        raise UnsupportedError("position_ids restart within a row, but the model's own blocks would reach across")
    if layout.real is not None:
        blocks = torch.arange(-(-k.shape[1] // size), device=q.device)
        read = (chosen[..., None] == blocks).any(-2).repeat_interleave(size, -1)[..., : k.shape[1]]
        column = torch.arange(k.shape[1], device=q.device)
        causal = column <= torch.arange(first, k.shape[1], device=q.device)[:, None]
        read = read & causal & layout.real.to(q.device)[:, None, None]
        # padding reads all alike, as in eager code: the model scores its keys, too
        hidden = torch.zeros(read.shape, dtype=q.dtype, device=q.device).masked_fill(~read, torch.finfo(q.dtype).min)
        return _sdpa(q, k, v, hidden.repeat_interleave(q.shape[2] // k.shape[2], 1))
    spec = block_sparse(NSAConfig(size, size, size, count, select_initial=0, select_local=1))
    none = torch.iinfo(chosen.dtype).max
    ascending = chosen.masked_fill(chosen < 0, none).sort(-1).values
    indices = ascending.masked_fill(ascending == none, -1).transpose(1, 2).int().contiguous()
    return _attend(q, k, v, spec, None, block_indices=indices, span=Span(first) if first else WHOLE)


def _continue(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, channels: Tensor | None, rows: Rows | None
) -> Tensor:
    """New tokens after a cache. Means of keys are pooled again from all cached keys."""
    width, first, reads_all = q.shape[1], k.shape[1] - q.shape[1], spec.reads_all_below
    if rows is not None:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for b, (columns, new) in enumerate(rows):
            if len(new):
                own_k, own_v = (x[b : b + 1, columns] for x in (k, v))
                out[b, new] = _continue(q[b : b + 1, new], own_k, own_v, spec, channels, None)[0]
        return out
    split = min(max(reads_all - first, 0), width)
    outs = []
    if split:
        outs.append(_read_all(q[:, :split], k[:, : first + split], v[:, : first + split]))
    if split < width:
        later = replace(spec, dense_below=0)
        outs.append(_attend(q[:, split:], k, v, later, channels, span=Span(first + split)))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _read_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of the last queries of a sequence."""
    return _sdpa(q, k, v, causal_lower_right(q.shape[1], k.shape[1]) if q.shape[1] > 1 else None)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

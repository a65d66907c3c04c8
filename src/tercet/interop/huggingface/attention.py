"""Block-sparse attention for the dense models of transformers: attn_implementation="tercet".

As transformers passes them, rotated: query [B, H, T, D]; key, value [B, G, S, D], S = cached tokens + T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from tercet.attention.config import NSAConfig
from tercet.attention.layout import WHOLE, Packing, RowMap, Span, move_rows
from tercet.attention.operator import AttentionInputs, attend
from tercet.attention.selector import Ranges, TokenScorer, own_scorer
from tercet.attention.spec import AttentionSpec, block_sparse
from tercet.interop.huggingface.support import (
    Settings,
    UnsupportedError,
    check_arguments,
    check_config,
    is_local,
    read_settings,
    unsupported,
)

# ------------------------------------------------------------ where the tokens are


def read_mask(mask: Tensor, batch: int, keys: int, *, longer: bool) -> Tensor:
    """bool [B, keys], False for padding.

    mask    [B, keys] of 0 and 1
    keys    cached and new tokens
    longer  the rest of a longer mask is ignored, as in transformers with a cache
    """
    fits = mask.dim() == 2 and mask.shape[0] == batch and (mask.shape[1] == keys or (longer and mask.shape[1] > keys))
    problem = "" if fits and bool(((mask == 0) | (mask == 1)).all()) else "does not fit the tokens"
    if not problem and mask.is_floating_point() and not bool(mask.any()):  # no padding, if it is meant to be added
        problem = "is 0 everywhere"
    if problem:
        raise UnsupportedError(
            f"attention_mask {list(mask.shape)} of {str(mask.dtype).removeprefix('torch.')} {problem}: "
            f"pass {[batch, keys]}, 0 for padding and 1 for the {keys} cached and new tokens"
        )
    return mask[:, :keys].bool()


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

    def __init__(self, settings: Settings, real: Tensor | None, tokens: int, room: int) -> None:
        self.settings, self.tokens, self.room = settings, tokens, room  # room: keys, with the rest of a static cache
        # without any token no output has a meaning, but all must be finite: as without a mask
        self.blank = real is not None and not bool(real.any())
        self.real = None if real is None or self.blank or bool(real.all()) else real  # [B, S], False for padding
        self._places: dict[torch.device, Documents | Rows | None] = {}

    def contiguous(self) -> BatchLayout:
        return self

    def places(self, q: Tensor, keys: int, position_ids: Tensor | None, cu_seqlens: Tensor | None = None) -> Any:
        """Rows of new tokens after a cache, else Documents. None: no padding, and each row is one document."""
        if q.device not in self._places:
            given = None if position_ids is None or self.blank else position_ids.to(q.device).expand(q.shape[0], -1)
            cached = keys > q.shape[1]
            if cu_seqlens is not None and (self.real is not None or q.shape[0] != 1 or cached):
                raise UnsupportedError("cu_seq_lens_q was given with padding, several rows or a cache: drop them")
            self._places[q.device] = (
                self._find_rows(q, keys, given) if cached else self._find_documents(q, keys, given, cu_seqlens)
            )
        return self._places[q.device]

    def _find_documents(
        self, q: Tensor, keys: int, position_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> Documents | None:
        batch, nsa = q.shape[0], self.settings.spec.blocks
        column = torch.arange(batch * keys, device=q.device)
        real = None if self.real is None else self.real.to(q.device).flatten()
        if real is not None:
            column = column[real]
        starts = column.new_ones(column.shape[0], dtype=torch.bool)
        starts[1:] = (column // keys).diff() != 0
        if cu_seqlens is not None:  # transformers makes position_ids that do not restart if none are given
            starts[1:] = False
            starts[cu_seqlens[:-1].to(q.device).long()] = True
        elif position_ids is not None:
            step = position_ids.flatten()[column].diff()
            starts[1:] |= (step != 1) & (step != column.diff())  # across padding, positions may count it or not
        if real is None and int(starts.sum()) == batch:
            return None
        cu_seqlens = F.pad(starts.nonzero()[:, 0], (0, 1), value=column.shape[0])
        longest = int(cu_seqlens.diff().max())
        packing = Packing(cu_seqlens, column.shape[0], column.shape[0] // nsa.compress_stride, nsa, longest)
        if real is None:
            return Documents(packing, None)
        place = (real.cumsum(0) - 1).clamp(min=0)
        return Documents(packing, RowMap(column, torch.ones_like(column, dtype=torch.bool), place, real))

    def _find_rows(self, q: Tensor, keys: int, position_ids: Tensor | None) -> Rows | None:
        width = q.shape[1]
        column = torch.arange(keys - width, keys, device=q.device)
        real = None if self.real is None else self.real.to(q.device)
        t = column[None] if real is None else real.cumsum(1)[:, -width:] - 1
        if position_ids is not None:
            wrong = (position_ids != t) & (position_ids != column)
            if real is not None:
                wrong = wrong & real[:, -width:]
            if bool(wrong.any()):
                raise UnsupportedError(
                    f"position_ids {position_ids[wrong.any(1)][0, 0].item()} … do not continue the cache's "
                    f"{keys - width} tokens: packed documents cannot be continued, pass use_cache=False"
                )
        return None if real is None else [(row.nonzero()[:, 0], row[-width:].nonzero()[:, 0]) for row in real]


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
    attention_mask: Tensor | BatchLayout | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **options: Any,
) -> BatchLayout | Tensor | None:
    """transformers' AttentionMaskInterface. Its older versions give a `cache_position`. Layers with a sliding window or
    chunks keep their mask."""
    if isinstance(attention_mask, BatchLayout):
        return attention_mask
    if options.get("local_size") is not None:
        given = {"batch_size": batch_size, "kv_length": kv_length, "config": config, "attention_mask": attention_mask}
        mask: Tensor | None = sdpa_mask(mask_function=mask_function, **given, **options)
        return mask
    check_config(config)
    if unknown := _parts(mask_function) - _CAUSAL:
        raise unsupported(
            f"model_type={config.model_type!r} with a mask of its own ({', '.join(sorted(unknown))})", "use sdpa"
        )
    at = options.get("cache_position")
    first, width = (options.get("q_offset", 0), options["q_length"]) if at is None else (at[0], len(at))
    tokens = int(first) + width
    real = None if attention_mask is None else read_mask(attention_mask, batch_size, tokens, longer=True)
    return BatchLayout(read_settings(config), real, tokens, kv_length)


# ------------------------------------------------------------ attention


@torch.compiler.disable  # reads values of the layout; the rest of the layer compiles
def layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BatchLayout | Tensor | None,
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
    layout = attention_mask
    if not isinstance(layout, BatchLayout):
        if is_local(module, kwargs):
            return sdpa_attention_forward(module, query, key, value, layout, dropout=dropout, scaling=scaling, **kwargs)
        given = None if layout is None else list(layout.shape)
        raise unsupported(f"attention_mask {given}", "pass one [batch, tokens], 0 for padding and 1 for tokens")
    if dropout:
        raise unsupported(f"attention_dropout={dropout}", "load the model with attention_dropout=0.0")
    if kwargs.get("output_attentions"):
        raise unsupported("output_attentions=True", "attention probabilities are never materialised; use eager")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if scaling is not None and not math.isclose(factor := scaling * math.sqrt(q.shape[-1]), 1, rel_tol=1e-6):
        q = q * factor
    if k.shape[1] != layout.room:
        raise UnsupportedError(
            f"attention_mask has {layout.room} tokens, the input {k.shape[1]}: without a cache they must agree"
        )
    k, v = (x[:, : layout.tokens] for x in (k, v))
    if torch.is_autocast_enabled(q.device.type):
        # RoPE of bf16 projections returns float32; as in PyTorch's attention, autocast decides
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    places = layout.places(q, k.shape[1], position_ids, cu_seq_lens_q)
    if block_indices is not None:
        size: int = module.indexer.block_size  # type: ignore[assignment,union-attr]
        return _read_chosen(q, k, v, block_indices, size, layout, places), None
    spec, channels = layout.settings.of_layer(module), layout.settings.channels(module, q.shape[-1])
    if k.shape[1] > q.shape[1]:
        return _continue(q, k, v, spec, channels, places), None
    if places is None:
        return _attend(q, k, v, spec, channels), None
    shape, rows = q.shape[:2], places.rows
    q, k, v = (x.flatten(0, 1) if rows is None else move_rows(x.flatten(0, 1), rows) for x in (q, k, v))
    out = _attend(q[None], k[None], v[None], spec, channels, packing=places.packing)[0]
    if rows is not None:
        out = move_rows(out, RowMap(rows.inverse, rows.inverse_valid, rows.source, rows.valid))
    return out.unflatten(0, shape), None


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, channels: Ranges | None, **options: Any) -> Tensor:
    scorer = None if "block_indices" in options else _scorer(q, k, spec, channels)
    return attend(AttentionInputs(q, k_selected=k, v_selected=v), spec, scorer=scorer, **options).out.contiguous()


def _scorer(q: Tensor, k: Tensor, spec: AttentionSpec, channels: Ranges | None) -> TokenScorer | None:
    return own_scorer(q, k, channels, spec) if spec.by_branch else None


def _read_chosen(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, size: int, layout: BatchLayout, places: Documents | Rows | None
) -> Tensor:
    """Attention over the blocks that a model chose, which count columns, padding included."""
    first, count = k.shape[1] - q.shape[1], chosen.shape[-1]
    if isinstance(places, Documents) and places.rows is None:
        raise UnsupportedError("documents restart within a row, but the model's own blocks would reach across")
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
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, channels: Ranges | None, rows: Rows | None
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

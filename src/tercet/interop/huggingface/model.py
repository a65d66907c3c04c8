"""Tercet models for transformers: TercetConfig, TercetCache, TercetForCausalLM.

input_ids, labels: int64 [B, T]; attention_mask: see `attention.read_mask`, padding on either side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from tercet.interop.huggingface.attention import read_mask
from tercet.interop.huggingface.folder import FolderError, check_folder
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer
from tercet.parse import first_problem

logger = logging.get_logger(__name__)

# transformers' name -> ours. For other tools only: the model is built from the `tercet` entry.
_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tie_embeddings",
}


# Read by transformers without `import tercet.interop.huggingface`, instead of advising to update transformers: it asks
# for trust_remote_code=True, and then for `pip install tercet` if that is missing.
_LOADER = "modeling_tercet.py"
_LOADER_TEXT = '''"""The model in this folder needs Tercet: pip install 'tercet[hub]'

Before AutoModelForCausalLM.from_pretrained: import tercet.interop.huggingface
transformers then does not read this file. Without that line it does, and needs trust_remote_code=True.
"""

from tercet.interop.huggingface import TercetConfig, TercetForCausalLM

__all__ = ["TercetConfig", "TercetForCausalLM"]
'''


class TercetConfig(PretrainedConfig):
    """The config.json of an exported model. `tercet` is the whole ModelConfig; transformers' names are derived from it.

    A config.json in which the two disagree is refused, since it is unclear which of them was edited.
    """

    model_type = "tercet"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (as in transformers)

    def __init__(
        self, tercet: dict[str, Any] | None = None, max_position_embeddings: int = 2048, **kwargs: Any
    ) -> None:
        try:
            model = ModelConfig.model_validate(tercet or {})
        except ValidationError as error:
            raise ValueError(f"config.json: {first_problem(error, 'tercet')}") from None
        for theirs, ours in _NAMES.items():
            expected = getattr(model, ours)
            given = kwargs.pop(theirs, expected)
            if given != expected:
                raise ValueError(
                    f"config.json has {theirs}={given} but tercet.{ours}={expected}: they must be equal; "
                    f"change both, or remove {theirs}"
                )
            setattr(self, theirs, expected)
        self.tercet = model.model_dump(mode="json")
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)
        # Again: the base class overwrites some of these with its defaults.
        for theirs, ours in _NAMES.items():
            setattr(self, theirs, getattr(model, ours))
        self.auto_map = {"AutoConfig": "modeling_tercet.TercetConfig",
                         "AutoModelForCausalLM": "modeling_tercet.TercetForCausalLM"}  # fmt: skip

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / _LOADER).write_text(_LOADER_TEXT, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """transformers would save the source of this module with every model."""

    def model(self) -> ModelConfig:
        return ModelConfig.model_validate(self.tercet)


class TercetCache(Cache):
    """Tercet's per-layer caches behind transformers' Cache interface.

    `columns` counts padding too, as transformers expects, and `real` [B, columns] is False for it (None: there is
    none); the layer caches know the real length of each row.
    """

    def __init__(self, model: Transformer, batch: int) -> None:
        # No super().__init__(): it would allocate transformers' own KV layers.
        self.layers: list[Any] = []
        self._model = model
        self.caches = [layer.make_cache(batch) for layer in model.attention_layers()]
        self.columns = 0
        self.real: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.take_rows(beam_idx)
        if self.real is not None:
            self.real = self.real[beam_idx.to(self.real.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.caches[0].batch, device=self.caches[0].device)
        self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        batch = self.caches[0].batch
        self.caches = [layer.make_cache(batch) for layer in self._model.attention_layers()]
        self.columns, self.real = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("TercetCache cannot be cropped: assisted generation is not supported")

    def nbytes(self) -> int:
        return sum(cache.nbytes() for cache in self.caches)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.columns > 0

    def __len__(self) -> int:
        return len(self.caches)

    def __repr__(self) -> str:
        return f"TercetCache(layers={len(self.caches)}, columns={self.columns}, bytes={self.nbytes()})"

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("Tercet's layers fill their caches themselves")


# Arguments that generation and Trainer pass to every model; accepted and ignored where they have no effect.
_KNOWN_ARGUMENTS = {"cache_position", "return_dict", "output_attentions", "output_hidden_states", "num_items_in_batch"}


class TercetForCausalLM(PreTrainedModel, GenerationMixin):
    """A Tercet model in transformers: generation with cache, beams and padding; loss with `labels`."""

    config_class = TercetConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012  (as in transformers)
    _is_stateful = True  # the cache cannot be rewound; transformers then refuses assisted generation

    def __init__(self, config: TercetConfig) -> None:
        super().__init__(config)
        self.model = Transformer(config.model())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TercetCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        _check_arguments(input_ids, past_key_values, kwargs)
        assert input_ids is not None
        if past_key_values is None and use_cache:
            past_key_values = TercetCache(self.model, input_ids.shape[0])
        real = _real_tokens(input_ids, attention_mask, past_key_values)
        _check_positions(position_ids, input_ids, real, past_key_values)
        if past_key_values is None or not torch.is_grad_enabled():
            hidden = self._hidden(input_ids, real, past_key_values, cu_seqlens)
        else:  # cached keys and values have no gradients
            first = past_key_values.columns == 0
            with torch.no_grad():
                hidden = self._hidden(input_ids, real, past_key_values, cu_seqlens)
            if first:
                logger.warning_once(
                    "use_cache=True with gradients computes the tokens twice: pass use_cache=False to train, or call "
                    "the model under torch.no_grad()"
                )
                hidden = self._hidden(input_ids, real, None, cu_seqlens)
            else:
                hidden = _RefuseGradients.apply(hidden, *self.model.parameters())
        if isinstance(logits_to_keep, int):
            kept = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        else:
            kept = hidden[:, logits_to_keep]
        logits = self.model.logits(kept)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=kwargs.get("num_items_in_batch"),
            )
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return out if kwargs.get("return_dict", True) in (True, None) else out.to_tuple()

    def _hidden(
        self, tokens: Tensor, real: Tensor | None, past: TercetCache | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        caches = None if past is None else past.caches
        if past is not None:
            past.columns, past.real = past.columns + tokens.shape[1], real
        real = None if real is None else real[:, -tokens.shape[1] :]
        if real is None or bool(real.all()):
            return self.model.hidden(tokens, cu_seqlens, caches)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens and an attention_mask with padding are both given: packing needs no padding")
        if past is not None and not bool(real.any()):  # a chunk of padding
            return torch.zeros_like(self.model.embedding(tokens))
        # Tercet pads on the right, where causality hides it: move each row's real tokens to the front, and back after.
        order = torch.argsort(real.logical_not().byte(), dim=1, stable=True)
        lengths = real.sum(1) if caches is not None else None
        hidden = self.model.hidden(tokens.gather(1, order), None, caches, lengths)
        # Padding after a prompt gets the output of its last token: `generate` samples from the last column.
        back = (real.long().cumsum(1) - 1).clamp(min=0)
        return hidden.gather(1, back[..., None].expand_as(hidden))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but missing weights are an error instead of being newly initialized."""
        if pretrained_model_name_or_path is not None and Path(pretrained_model_name_or_path).is_dir():
            check_folder(Path(pretrained_model_name_or_path))
        return_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(map(str, info.get(problem) or ()))
            if names:
                shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
                raise FolderError(
                    f"{pretrained_model_name_or_path}: {problem.replace('_', ' ')} in its weights ({shown}): it is "
                    "incomplete or from another version; export it again"
                )
        return (model, info) if return_info else model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        return  # Transformer initializes its own weights

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head


class _RefuseGradients(torch.autograd.Function):
    """Hidden states that were computed from a cache, without a graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *parameters: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ValueError(
            "past_key_values holds tokens, and cached tokens have no gradients: to train, pass the whole sequence "
            "without past_key_values"
        )


def _check_arguments(input_ids: Tensor | None, past: Any, kwargs: dict[str, Any]) -> None:
    if input_ids is None:
        raise ValueError("input_ids is missing: Tercet's models read tokens; inputs_embeds is not supported")
    if not isinstance(past, TercetCache | None):
        raise ValueError(
            f"past_key_values is a {type(past).__name__}: pass the TercetCache that use_cache=True returns, or nothing"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            raise ValueError(f"{name}=True is not supported: sparse attention does not compute what it would return")
    unknown = {name for name, value in kwargs.items() if value is not None} - _KNOWN_ARGUMENTS
    if unknown:
        raise ValueError(f"TercetForCausalLM does not support {', '.join(sorted(unknown))}: remove it")


def _real_tokens(tokens: Tensor, mask: Tensor | None, past: TercetCache | None) -> Tensor | None:
    """[B, cached + T], False for padding; None if nothing is padding."""
    batch, width = tokens.shape
    cached, before = (0, None) if past is None else (past.columns, past.real)
    if mask is None:
        return None if before is None else F.pad(before, (0, width), value=True)
    real = read_mask(mask.to(tokens.device), batch, width, cached + width, cached, longer=past is not None)
    if cached and not torch.equal(real[:, :cached], torch.ones_like(real[:, :cached]) if before is None else before):
        raise ValueError(
            f"attention_mask {list(mask.shape)} has other padding among its first {cached} tokens than the cache: pass "
            "the mask of the earlier calls, continued"
        )
    return None if before is None and bool(real.all()) else real


def _check_positions(given: Tensor | None, tokens: Tensor, real: Tensor | None, past: TercetCache | None) -> None:
    """Positions follow from the mask, and may count padding on the left. Refuse any others, such as positions that
    restart within a row."""
    if given is None:
        return
    cached, width = 0 if past is None else past.columns, tokens.shape[1]
    if real is None:
        real = torch.ones(1, cached + width, dtype=torch.bool, device=tokens.device)
    position = real.long().cumsum(1) - 1
    left = real.long().argmax(1, keepdim=True)
    padding, position = ~real[:, -width:], position[:, -width:]
    fine = ((given == position) | padding).all(1) | ((given == position + left) | padding).all(1)
    if cached:  # after right padding, `generate` goes on counting from the padding's position
        fine |= real[:, :cached].sum(1) != (cached - left[:, 0]).clamp(min=0)
    if not bool(fine.all()):
        raise ValueError(
            "position_ids do not describe one document per row: pass packed documents with cu_seqlens; to generate "
            "with use_cache=False, pad on the left"
        )

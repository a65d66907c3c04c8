"""Tercet models for transformers: TercetConfig, TercetCache, TercetForCausalLM.

input_ids, labels: int64 [B, T]; attention_mask: [B, tokens], 0 for padding on either side.
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
from tercet.interop.huggingface.folder import FolderError
from tercet.interop.huggingface.support import NAMES
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer
from tercet.parse import first_problem

logger = logging.get_logger(__name__)

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
        derived = {theirs: getattr(model, ours) for theirs, ours in NAMES.items()}
        for name, expected in derived.items():
            if (given := kwargs.pop(name, expected)) != expected:
                raise ValueError(
                    f"config.json has {name}={given} but tercet.{NAMES[name]}={expected}: they must be equal; "
                    f"change both, or remove {name}"
                )
        super().__init__(**kwargs, **derived)
        self.tercet = model.model_dump(mode="json")
        self.max_position_embeddings = max_position_embeddings
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
    """Tercet's per-layer caches behind transformers' Cache interface, as generation with beams needs it.

    `columns` counts padding too, as transformers expects, and `real` [B, columns] is False for it (None: there is
    none); the layer caches know the real length of each row.
    """

    is_croppable = False

    def __init__(self, model: Transformer, batch: int) -> None:
        # No super().__init__(): it would allocate transformers' own KV layers.
        self.layers: list[Any] = []
        self.caches = [layer.make_cache(batch) for layer in model.attention_layers()]
        self.columns = 0
        self.real: Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.take_rows(beam_idx)
        if self.real is not None:
            self.real = self.real[beam_idx.to(self.real.device)]

    def __len__(self) -> int:
        return len(self.caches)

    def _unsupported(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("TercetCache is filled by Tercet's layers, and cannot be cropped, reset or repeated")

    crop = update = reset = batch_repeat_interleave = batch_select_indices = _unsupported


# Arguments that generation and Trainer pass to every model.
_KNOWN_ARGUMENTS = {"cache_position", "return_dict", "num_items_in_batch"}


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
        first = past_key_values is None or past_key_values.columns == 0
        graph = torch.is_grad_enabled()
        with torch.set_grad_enabled(graph and past_key_values is None):  # cached keys and values have no gradients
            hidden = self._hidden(input_ids, real, past_key_values, cu_seqlens)
        if graph and past_key_values is not None:
            if first:
                logger.warning_once(
                    "use_cache=True with gradients computes the tokens twice: pass use_cache=False to train, or call "
                    "the model under torch.no_grad()"
                )
                hidden = self._hidden(input_ids, real, None, cu_seqlens)
            else:
                hidden = _RefuseGradients.apply(hidden, *self.model.parameters())
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            count, size = kwargs.get("num_items_in_batch"), self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, num_items_in_batch=count)
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
        return_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info.get(problem) or ())):
                raise FolderError(
                    f"{pretrained_model_name_or_path}: {problem.replace('_', ' ')} in its weights, such as {names[0]}: "
                    "it is incomplete or from another version; export it again"
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
    unknown = {name for name, value in kwargs.items() if value is not None and value is not False} - _KNOWN_ARGUMENTS
    if unknown:
        raise ValueError(f"TercetForCausalLM does not support {', '.join(sorted(unknown))}: remove it")


def _real_tokens(tokens: Tensor, mask: Tensor | None, past: TercetCache | None) -> Tensor | None:
    """[B, cached + T], False for padding; None if nothing is padding."""
    batch, width = tokens.shape
    cached, before = (0, None) if past is None else (past.columns, past.real)
    if mask is None:
        return None if before is None else F.pad(before, (0, width), value=True)
    real = read_mask(mask.to(tokens.device), batch, cached + width, longer=past is not None)
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

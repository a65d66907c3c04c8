"""TercetConfig: what config.json of an exported model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tercet.interop.huggingface.folder import FolderError, check_folder
from tercet.model.config import ModelConfig
from tercet.model.transformer import Transformer

# transformers' name -> ours. Tools read these; the model is built from `tercet` alone.
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


class TercetConfig(PretrainedConfig):
    """`tercet` holds the whole ModelConfig. The names that transformers knows are made from it, and a config.json in
    which the two disagree is refused: one of them was edited, and nobody can say which was meant."""

    model_type = "tercet"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers' own way)

    def __init__(
        self, tercet: dict[str, Any] | None = None, max_position_embeddings: int = 2048, **kwargs: Any
    ) -> None:
        try:
            model = ModelConfig.model_validate(tercet or {})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"config.json: tercet.{where}: {first['msg']}") from None
        for theirs, ours in _NAMES.items():
            made = getattr(model, ours)
            given = kwargs.pop(theirs, made)
            if given != made:
                raise ValueError(
                    f"config.json says {theirs}={given} and tercet.{ours}={made}: they must be equal; "
                    f"change both, or leave {theirs} out"
                )
            setattr(self, theirs, made)
        self.tercet = model.model_dump(mode="json")
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)
        # the base class has defaults of its own for some of these
        for theirs, ours in _NAMES.items():
            setattr(self, theirs, getattr(model, ours))

    def model(self) -> ModelConfig:
        """The sizes of the model."""
        return ModelConfig.model_validate(self.tercet)


# ------------------------------------------------------------------------------------------------
# Tercet's caches behind the face that transformers' generation knows.


class TercetCache(Cache):
    """One cache per layer, growing. Counts columns of the batch, padding included, as transformers does; how many
    tokens of each row are real, the layers' caches know."""

    def __init__(self, model: Transformer, batch: int) -> None:
        # Not the base class's: it would make layers of keys and values for all tokens.
        self.layers = []
        self._model = model
        self.caches = [layer.make_cache(batch) for layer in model.attention_layers()]
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.caches[0].batch, device=self.caches[0].device)
        self.reorder_cache(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        batch = self.caches[0].batch
        self.caches = [layer.make_cache(batch) for layer in self._model.attention_layers()]
        self.columns = 0

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a TercetCache cannot forget tokens: assisted generation needs a cache that can")

    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
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


# ------------------------------------------------------------------------------------------------
# TercetForCausalLM: the Transformer behind the face that transformers' users and tools know.
#
# input_ids, labels: int64 [B, T]; attention_mask: [B, tokens in the cache + T], 0 for padding on either side.

# Arguments that generation and Trainer hand to every model and that say nothing new here.
_KNOWN = {"cache_position", "return_dict", "output_attentions", "output_hidden_states", "num_items_in_batch"}


class TercetForCausalLM(PreTrainedModel, GenerationMixin):
    """`generate` with cache, beams and padding on either side; loss with `labels`."""

    config_class = TercetConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012  (transformers' own way)
    _is_stateful = True  # its cache cannot go back: transformers then refuses what would need that

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
        _check(input_ids, kwargs)
        assert input_ids is not None
        if past_key_values is None and use_cache:
            past_key_values = TercetCache(self.model, input_ids.shape[0])
        if past_key_values is None or past_key_values.columns == 0:
            _check_positions(position_ids, attention_mask, input_ids)
        hidden = self._hidden(input_ids, attention_mask, past_key_values, cu_seqlens)
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
        self, tokens: Tensor, mask: Tensor | None, past: TercetCache | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        caches = None if past is None else past.caches
        if past is not None:
            past.columns += tokens.shape[1]
        real = None if mask is None else mask[:, -tokens.shape[1] :].bool()
        if real is None or bool(real.all()):
            return self.model.hidden(tokens, cu_seqlens, caches)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens and an attention_mask with padding were both given: packing needs no padding")
        # Tercet pads on the right, where causality hides it: bring each row's real tokens to its front, and back.
        order = torch.argsort(real.logical_not().byte(), dim=1, stable=True)
        lengths = real.sum(1) if caches is not None else None
        hidden = self.model.hidden(tokens.gather(1, order), None, caches, lengths)
        return hidden.gather(1, order.argsort(1)[..., None].expand_as(hidden))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As everywhere in transformers, except that missing weights are an error and never drawn anew."""
        if pretrained_model_name_or_path is not None and Path(pretrained_model_name_or_path).is_dir():
            check_folder(Path(pretrained_model_name_or_path))
        told = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(map(str, info.get(what) or ()))
            if names:
                raise FolderError(
                    f"{pretrained_model_name_or_path}: {what.replace('_', ' ')} in its weights ({', '.join(names[:3])}"
                    f"{' …' if len(names) > 3 else ''}): it is not whole, or of another version; export it again"
                )
        return (model, info) if told else model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        # The Transformer draws its own weights when it is made, gates and φ in their known state.
        return

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head


def _check(input_ids: Tensor | None, kwargs: dict[str, Any]) -> None:
    if input_ids is None:
        raise ValueError("input_ids was not given: Tercet's models read tokens; inputs_embeds is not supported")
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            raise ValueError(f"{name}=True is not supported: sparse attention never forms what it would return")
    unknown = {name for name, value in kwargs.items() if value is not None} - _KNOWN
    if unknown:
        raise ValueError(f"TercetForCausalLM does not know {', '.join(sorted(unknown))}: leave it out")


def _check_positions(position_ids: Tensor | None, mask: Tensor | None, tokens: Tensor) -> None:
    """Positions follow from the mask. Others, such as those that restart within a row, are not read but refused."""
    if position_ids is None:
        return
    real = torch.ones_like(tokens) if mask is None else mask[:, -tokens.shape[1] :].long()
    expected = real.cumsum(1) - 1
    if bool(((position_ids != expected) & real.bool()).any()):
        raise ValueError("position_ids are not those of one document per row: give packed documents by cu_seqlens")

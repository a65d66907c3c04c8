"""TercetForCausalLM: the Transformer behind the face that transformers' users and tools know.

input_ids, labels: int64 [B, T]; attention_mask: [B, tokens in the cache + T], 0 for padding on either side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tercet.interop.huggingface.cache import TercetCache
from tercet.interop.huggingface.config import TercetConfig
from tercet.interop.huggingface.folder import FolderError, check_folder
from tercet.model.transformer import Transformer

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

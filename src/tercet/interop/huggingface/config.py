"""TercetConfig: what config.json of an exported model says."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from transformers import PretrainedConfig

from tercet.model.config import ModelConfig

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

"""The `model` section. It lives beside the model, which may not look up at config; this is its address here."""

from tercet.model.config import AttentionKind, ModelConfig

__all__ = ["AttentionKind", "ModelConfig"]

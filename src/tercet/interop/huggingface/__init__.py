"""Hugging Face transformers. Importing this package registers Tercet's models with the Auto classes.

Exported folders contain no code, so trust_remote_code is never needed.
"""

from __future__ import annotations

try:
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError:
    from tercet.errors import TercetError

    raise TercetError("tercet.interop.huggingface needs transformers: pip install 'tercet[hub]'") from None

from tercet.interop.huggingface.model import TercetCache, TercetConfig, TercetForCausalLM

AutoConfig.register(TercetConfig.model_type, TercetConfig, exist_ok=True)
AutoModelForCausalLM.register(TercetConfig, TercetForCausalLM, exist_ok=True)

__all__ = ["TercetCache", "TercetConfig", "TercetForCausalLM"]

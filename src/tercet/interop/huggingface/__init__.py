"""Hugging Face transformers. Importing this package registers Tercet's models with the Auto classes, and
attn_implementation="tercet" for dense models.

Once it is imported, no code of an exported folder runs, and trust_remote_code is not needed.
"""

from __future__ import annotations

try:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
except ImportError:
    from tercet.errors import TercetError

    raise TercetError("tercet.interop.huggingface needs transformers: pip install 'tercet[hub]'") from None

from tercet.interop.huggingface.attention import layer_attention, layout_mask
from tercet.interop.huggingface.model import TercetCache, TercetConfig, TercetForCausalLM
from tercet.interop.huggingface.support import NAME, check_when_loading, use_block_sparse

AutoConfig.register(TercetConfig.model_type, TercetConfig, exist_ok=True)
AutoModelForCausalLM.register(TercetConfig, TercetForCausalLM, exist_ok=True)
AttentionInterface.register(NAME, layer_attention)
AttentionMaskInterface.register(NAME, layout_mask)
check_when_loading()

__all__ = ["TercetCache", "TercetConfig", "TercetForCausalLM", "use_block_sparse"]

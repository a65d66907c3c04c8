"""Activation checkpointing: what each block saves for its backward pass and what it recomputes.

Every mode saves the selected block indices. Recomputed scores can differ in the last bit (a different kernel schedule
is enough); a near-tie would then select another block, and the gradient would not match the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Identity on block indices; every backend passes its selection through it (tercet.attention.layout).
SELECTION_OP = "tercet::keep_selection"

# Saved in selective mode: matmuls with weights, and attention in any implementation. Norms, RoPE and SwiGLU are cheap
# to recompute. Most batched matmuls are not saved either: in attention written in PyTorch they compute the scores.
SAVED_OPS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    }
)


def _full_policy(
    context: SelectiveCheckpointContext, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = op.name().split(".")[0]
    # the selection is saved anyway: choosing again would only cost time
    saved = name == SELECTION_OP or name.startswith("tercet::nsa_select")
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_policy(
    context: SelectiveCheckpointContext, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = op.name().split(".")[0]
    # Not tercet::heads_apart: it only rearranges a product that is saved.
    saved = name in SAVED_OPS or name.startswith(("tercet::nsa_", "tercet::keep_"))
    if op is torch.ops.aten.bmm.default:
        # The compression matmul (keys and values at once) does not widen its rows. Scores do: one column per key.
        saved = args[1].shape[2] <= args[0].shape[2]
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, Callable[..., CheckpointPolicy]] = {"full": _full_policy, "selective": _selective_policy}


def apply_activation_checkpointing(blocks: nn.ModuleList, mode: str) -> None:
    """Make every block recompute in its backward pass what `mode` does not save.

    Replaces each block's forward instead of wrapping the module, so parameter names, hooks and per-block compilation
    stay as they are. `partial` binds each block's own forward: a closure over the loop variable would recompute the
    last block for all of them.
    """
    if mode == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, POLICIES[mode])
    for block in blocks:
        block.forward = partial(_checkpointed_forward, block.forward, contexts)  # type: ignore[method-assign]


def _checkpointed_forward(
    forward: Callable[..., Any], contexts: Callable[[], Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(x, *args, **kwargs)
    # Blocks draw no random numbers, so there is no RNG state to preserve.
    return checkpoint(forward, x, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

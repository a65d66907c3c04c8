"""Activation checkpointing: what each block keeps for its backward pass, and what it computes again.

In every mode the selected block indices are kept. Recomputed scores can differ in the last bit from the first ones
(another kernel schedule is enough), a near-tie then selects another block, and the gradient is that of a computation
which never took place.
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

from tercet.errors import TercetError

# Identity on block indices, laid by every backend around what it selected (tercet.attention.layout).
SELECTION_OP = "tercet::keep_selection"

# Worth their memory: products with weights, and attention in any of its implementations. Norms, RoPE and SwiGLU are
# not; nor are most batched products, which in attention written out in PyTorch are all its scores.
COSTLY = frozenset(
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


def _keep_selection(
    context: SelectiveCheckpointContext, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = op.name().split(".")[0] == SELECTION_OP
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_costly(
    context: SelectiveCheckpointContext, op: torch._ops.OpOverload, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = op.name().split(".")[0]
    # tercet::heads_apart is not one of them: it lays out a product that is kept
    kept = name in COSTLY or name.startswith(("tercet::nsa_", "tercet::keep_"))
    if op is torch.ops.aten.bmm.default:
        # φ's, of keys and values at once, gives no wider rows than it takes; scores do: a row of keys for each query
        kept = args[1].shape[2] <= args[0].shape[2]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, Callable[..., CheckpointPolicy]] = {"full": _keep_selection, "selective": _keep_costly}


def apply_activation_checkpointing(blocks: nn.ModuleList, mode: str) -> None:
    """Make every block recompute in its backward pass what the mode does not keep.

    Each block's own bound forward is captured by value: a closure over the loop variable would recompute the last
    block for all of them. The forward is replaced rather than the module wrapped, so that parameter names, hooks and
    per-block compilation stay as they are.
    """
    if mode == "none":
        return
    if mode not in POLICIES:
        raise TercetError(f"activation_checkpointing={mode!r}: pick one of none, full, selective")
    contexts = partial(create_selective_checkpoint_contexts, POLICIES[mode])
    for block in blocks:
        # Nothing random happens in a block, so there is no generator state to bring back.
        block.forward = partial(  # type: ignore[method-assign]
            _run_block, block.forward, contexts
        )


def _run_block(
    forward: Callable[..., Any], contexts: Callable[[], Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(x, *args, **kwargs)
    return checkpoint(forward, x, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

"""Where a selection is handed from the stage that makes it to the stages that read it.

Activation checkpointing recomputes the forward pass, and a recomputed selection may differ from the first by a
near-tie: gradients would then belong to blocks that the forward pass never read. A checkpointing policy marks this
one operator "must save", in every mode and on every backend, and the recomputation gets the first selection back.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("tercet::keep_selection", mutates_args=())
def keep_selection(block_indices: torch.Tensor) -> torch.Tensor:
    return block_indices.clone()


@keep_selection.register_fake
def _(block_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(block_indices)

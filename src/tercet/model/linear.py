"""Linear layers whose weights are multiplied without calling them, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from tercet.attention.hardware import kernels_run_on

if TYPE_CHECKING:
    from tercet.model.cache import Cache

# Copies of a layer's weights that a cache may keep, so that its projections of a token are one product.
_FUSED_BYTES = 8 << 20


def are_plain(*layers: nn.Module) -> bool:
    """Whether these are bare linear layers, whose weights may be multiplied without calling them.

    Adapters, subclasses, parametrizations (which create a subclass) and hooks, also global ones, only act through the
    layer's call. FSDP2 wraps blocks, not the linear layers inside.
    """
    if _has_any_global_hook():
        return False
    for layer in layers:
        if type(layer) is not nn.Linear:
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    return True


def project_together(x: Tensor, cache: Cache, *layers: nn.Linear) -> Tensor | None:
    """Outputs of small linear layers that read the same tokens, side by side, followed by padding: one product, since
    each launch costs a small model more than its work does. None if they are large, not plain, or not on a GPU."""
    if not kernels_run_on(x) or not are_plain(*layers):  # an adapter may have no weight
        return None
    if sum(layer.weight.numel() * layer.weight.element_size() for layer in layers) > _FUSED_BYTES:
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else layers[0].weight.dtype
    return F.linear(x, *cache.fused_weights(layers, dtype))


def project(x: Tensor, cache: Cache, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Outputs of linear layers that read the same tokens."""
    y = project_together(x, cache, *layers)
    return tuple(layer(x) for layer in layers) if y is None else split_outputs(y, layers)


def split_outputs(y: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """The outputs of layers from those of `project_together`."""
    sizes = [layer.out_features for layer in layers]
    return y.split([*sizes, y.shape[-1] - sum(sizes)], -1)[:-1]

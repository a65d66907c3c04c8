"""Whether linear layers are their weights and biases and no more, so that these may be multiplied without calling them.

An adapter in a layer's place, a subclass, a parametrization (which makes it a subclass) and hooks are known to the
layer's call alone. FSDP2 is applied to blocks: the linear layers inside stay what they are.
"""

from __future__ import annotations

from torch import nn


def are_plain(*layers: nn.Module) -> bool:
    for layer in layers:
        if type(layer) is not nn.Linear:
            return False
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
            return False
    return True

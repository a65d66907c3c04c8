"""How one step is spread over ranks. The trainer knows only this face; which one stands behind it is config."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from tercet.errors import TercetError


class Strategy(Protocol):
    """What the trainer asks of a strategy."""

    name: str
    rank: int
    world_size: int

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model in place of the one given."""

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; gradients must be complete only after the last one."""

    def all_sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, on the device."""

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank; every rank must ask at the same step."""


class Single:
    """One device, one process."""

    name = "single"
    rank = 0
    world_size = 1

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def all_sum(self, value: Tensor) -> Tensor:
        return value

    def any_rank(self, flag: bool) -> bool:
        return flag


def build_strategy(name: str, device: torch.device) -> Strategy:
    """The strategy called `name`, set up on this rank's device."""
    if name == "single":
        return Single()
    raise TercetError(f"parallel.strategy={name} is not built yet: pick single")

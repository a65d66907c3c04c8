"""How one step is spread over ranks. The trainer knows only this face; which one stands behind it is config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Strategy(Protocol):
    """What the trainer asks of a strategy."""

    name: str
    rank: int
    world_size: int
    data_rank: int  # which share of the data this rank reads: ranks that share a sequence read the same
    data_ranks: int
    checkpoint_group: Any  # a process group for the saving thread alone; None without other ranks
    traffic: Mapping[str, int] | None  # bytes that came from ranks that share a sequence; None where none does

    def make(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """The model, on its device; or a shell without weights, where `prepare` will make them."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model in place of the one given."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model itself, behind what `prepare` put around it."""

    def share(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """This rank's part of a batch that is still on the host, and what its layers need to know of the rest."""

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; gradients must be complete only after the last one."""

    def all_sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, on the device."""

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank; every rank must ask at the same step."""

    def first(self, act: Callable[[], T]) -> T:
        """Do it on rank 0 alone, and give its result to all. Its error is every rank's error."""

    def settle(self) -> None:
        """The first step is made: from now on, waiting long for others means that they are stuck."""

    def watch(self, where: Callable[[], tuple[int, str]]) -> None:
        """Tell the other ranks, from time to time, at which step this one is and what it does."""

    def explain(self, error: BaseException) -> BaseException:
        """The error to leave with: who failed, where a collective only says that somebody did."""

    def close(self) -> None:
        """Part from the other ranks."""


def flatten(tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed documents as one long row."""
    if cu_seqlens is None:
        return tokens, targets, None
    return tokens.reshape(1, -1), targets.reshape(1, -1), cu_seqlens


class Single:
    """One device, one process."""

    name = "single"
    rank = data_rank = 0
    world_size = data_ranks = 1
    checkpoint_group = None
    traffic: Mapping[str, int] | None = None

    def make(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        return build().to(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def share(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        return flatten(tokens, targets, cu_seqlens)

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def all_sum(self, value: Tensor) -> Tensor:
        return value

    def any_rank(self, flag: bool) -> bool:
        return flag

    def first(self, act: Callable[[], T]) -> T:
        return act()

    def settle(self) -> None:
        pass

    def watch(self, where: Callable[[], tuple[int, str]]) -> None:
        pass

    def explain(self, error: BaseException) -> BaseException:
        return error

    def close(self) -> None:
        pass

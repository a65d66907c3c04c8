"""The interface between the trainer and a parallelism strategy, and the strategy for one process.

The trainer only calls `Strategy`; `parallel.strategy` in the configuration picks the implementation
(see distributed.py for DDP, FSDP2, HSDP and context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Strategy:
    """How one training step is distributed over ranks. This base class: not at all, one process on one device."""

    name = "single"
    rank = 0
    world_size = 1
    data_rank = 0  # which shard of the data this rank reads; ranks that share a sequence read the same one
    data_ranks = 1
    checkpoint_group: Any = None  # process group of the saving thread
    traffic: Mapping[str, int] | None = None  # bytes received from ranks that share a sequence; None without any

    def build_model(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """Build the model on its device, or on the meta device if `prepare` initialises the weights."""
        return build().to(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wrap or shard the model. Use the returned one."""
        return model

    def shard_batch(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """This rank's part of a batch that is still on the host, and what the layers take as `cu_seqlens`.

        Packed documents become one row [1, b*T]; batches without document bounds stay [b, T].
        """
        if cu_seqlens is None:
            return tokens, targets, None
        return tokens.reshape(1, -1), targets.reshape(1, -1), cu_seqlens

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        """Wraps forward and backward of a micro-batch. Gradients only need to be reduced after the last one."""
        return nullcontext()

    def all_sum(self, value: Tensor) -> Tensor:
        """Sum over all ranks, on the device."""
        return value

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Collective: every rank must call it at the same step."""
        return flag

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 only and broadcast its result, or its error, to all ranks."""
        return action()

    def shorten_timeouts(self) -> None:
        """Call after the first step: nothing compiles any more, so a rank that is late is stuck."""

    def publish_status(self, status: Callable[[], tuple[int, str]]) -> None:
        """Publish this rank's (step, activity) to the other ranks periodically."""

    def wait_for(self, done: Callable[[float], bool]) -> None:
        """Wait until `done(seconds)`, which waits up to that long, is true. Raises if another rank is frozen."""
        while not done(60.0):
            pass

    def explain(self, error: BaseException) -> BaseException:
        """The error to exit with: if a collective failed because of another rank, one that names that rank."""
        return error

    def close(self) -> None:
        """Leave the process groups."""


class Single(Strategy):
    """One process on one device."""

"""What all strategies of several ranks share: groups, sums, the share of the data, and how they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tercet.attention.config import NSAConfig
from tercet.config.sections import ParallelConfig, TrainConfig
from tercet.errors import TercetError
from tercet.parallel.context import apply_context_parallelism, shard
from tercet.parallel.failure import PeerFailed, Watch
from tercet.parallel.launch import World
from tercet.parallel.strategy import Single, Strategy, flatten

T = TypeVar("T")


class Distributed:
    """Several ranks. Subclasses say what `prepare` makes of the model, and when gradients travel."""

    def __init__(self, parallel: ParallelConfig, train: TrainConfig, world: World) -> None:
        self.parallel, self.train, self.world = parallel, train, world
        self.name: str = parallel.strategy
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_ranks = self.rank // parallel.context, parallel.data_ranks
        self.checkpoint_group = world.checkpoint
        self._counted: Counter[str] = Counter()
        self.traffic: Mapping[str, int] | None = self._counted if parallel.context > 1 else None
        self._watch: Watch | None = None
        self._nsa: NSAConfig | None = None
        self._context: dist.ProcessGroup | None = None
        if parallel.context > 1:
            # a group of its own, even when it has all ranks: gradients and keys must not queue behind each other
            for first in range(0, self.world_size, parallel.context):
                members = list(range(first, first + parallel.context))
                group = dist.new_group(members)
                if self.rank in members:
                    self._context = group

    # ------------------------------------------------------------ the model

    def make(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        return build().to(device)

    def prepare(self, model: nn.Module) -> nn.Module:
        self._nsa = model.config.nsa  # type: ignore[assignment, union-attr]
        if self._context is not None:
            apply_context_parallelism(model)
        return self.wrap(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    # ------------------------------------------------------------ the data

    def share(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        if self._context is None:
            return flatten(tokens, targets, cu_seqlens)
        assert self._nsa is not None
        batch, length = tokens.shape
        bounds = list(range(0, batch * length + 1, length)) if cu_seqlens is None else cu_seqlens.tolist()
        own_tokens, own_targets, share = shard(
            tokens.reshape(1, -1), targets.reshape(1, -1), bounds, self._nsa, self._context,
            by_blocks=self.parallel.context_fetch == "blocks",
        )  # fmt: skip
        share.device, share.traffic = self.world.device, self._counted
        return own_tokens, own_targets, share

    # ------------------------------------------------------------ sums and flags

    def all_sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def any_rank(self, flag: bool) -> bool:
        up = torch.tensor([int(flag)])
        dist.all_reduce(up, group=self.world.control)
        return bool(up.item())

    def first(self, act: Callable[[], T]) -> T:
        told: list[Any] = [None, None]
        if self.rank == 0:
            try:
                told[0] = act()
            except TercetError as problem:
                told[1] = problem
        dist.broadcast_object_list(told, src=0, group=self.world.control)
        result, error = told
        if error is not None:
            error.told = self.rank != 0
            raise error
        return result  # type: ignore[no-any-return]

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        self.world.settle(self.parallel.timeout_seconds)

    def watch(self, where: Callable[[], tuple[int, str]]) -> None:
        if self._watch is None:
            self._watch = Watch(self.world, where)
        self._watch.where = where

    def explain(self, error: BaseException) -> BaseException:
        if self._watch is None or isinstance(error, PeerFailed):
            return error
        return self._watch.explain(error)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self.world.close()


def build_strategy(parallel: ParallelConfig, train: TrainConfig, world: World | None) -> Strategy:
    """The strategy that the config names, over the ranks of `world`."""
    if parallel.strategy == "single":
        return Single()
    assert world is not None
    from tercet.parallel.ddp import DataParallel
    from tercet.parallel.fsdp import Sharded

    replicated = parallel.strategy == "ddp" or (parallel.strategy == "cp" and parallel.context_weights == "replicated")
    strategy: Strategy = DataParallel(parallel, train, world) if replicated else Sharded(parallel, train, world)
    return strategy

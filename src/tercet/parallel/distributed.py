"""Strategies for several ranks: replicated weights (DDP) or sharded weights (FSDP2, HSDP), with or without context
parallelism.

`Distributed` has what they share: process groups, batch sharding, reductions and error handling. `DataParallel` and
`FullySharded` wrap the model and decide when gradients are reduced. `build_strategy` picks one from the configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from tercet.attention.config import NSAConfig
from tercet.config.sections import ParallelConfig, TrainConfig, resolved_precision
from tercet.errors import TercetError, UsageError
from tercet.parallel.context import apply_context_parallelism, shard_sequence
from tercet.parallel.failure import FailureMonitor, PeerFailed
from tercet.parallel.launch import World, backend_of
from tercet.parallel.strategy import Single, Strategy

T = TypeVar("T")


def build_strategy(parallel: ParallelConfig, train: TrainConfig, world: World | None) -> Strategy:
    """The configured strategy over the ranks of `world`."""
    if parallel.strategy == "single":
        return Single()
    assert world is not None
    replicated = parallel.strategy == "ddp" or (parallel.strategy == "cp" and parallel.context_weights == "replicated")
    return DataParallel(parallel, train, world) if replicated else FullySharded(parallel, train, world)


class Distributed(Strategy):
    """Base class. Subclasses implement `_wrap` and `gradient_sync`."""

    def __init__(self, parallel: ParallelConfig, train: TrainConfig, world: World) -> None:
        self.parallel, self.train, self.world = parallel, train, world
        self.name: str = parallel.strategy
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_ranks = self.rank // parallel.context, parallel.data_ranks
        self.checkpoint_group = world.checkpoint
        self._traffic: Counter[str] = Counter()
        self.traffic: Mapping[str, int] | None = self._traffic if parallel.context > 1 else None
        self._monitor: FailureMonitor | None = None
        self._nsa: NSAConfig | None = None
        self._context: dist.ProcessGroup | None = None
        if parallel.context > 1:
            # A separate group even if it has all ranks: gradients and keys must not queue behind each other.
            for first in range(0, self.world_size, parallel.context):
                members = list(range(first, first + parallel.context))
                group = dist.new_group(members)
                if self.rank in members:
                    self._context = group

    def prepare(self, model: nn.Module) -> nn.Module:
        self._nsa = model.config.nsa  # type: ignore[assignment, union-attr]
        if self._context is not None:
            apply_context_parallelism(model)
        return self._wrap(model)

    def _wrap(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def shard_batch(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        if self._context is None:
            return super().shard_batch(tokens, targets, cu_seqlens)
        assert self._nsa is not None
        batch, length = tokens.shape
        bounds = list(range(0, batch * length + 1, length)) if cu_seqlens is None else cu_seqlens.tolist()
        own_tokens, own_targets, shard = shard_sequence(
            tokens.reshape(1, -1), targets.reshape(1, -1), bounds, self._nsa, self._context
        )  # fmt: skip
        shard.device, shard.traffic = self.world.device, self._traffic
        return own_tokens, own_targets, shard

    def all_sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def any_rank(self, flag: bool) -> bool:
        flags_set = torch.tensor([int(flag)])
        dist.all_reduce(flags_set, group=self.world.control)
        return bool(flags_set.item())

    def on_rank_0(self, action: Callable[[], T]) -> T:
        message: list[Any] = [None, None]
        if self.rank == 0:
            try:
                message[0] = action()
            except TercetError as problem:
                message[1] = problem
        dist.broadcast_object_list(message, src=0, group=self.world.control)
        result, error = message
        if error is not None:
            error.reported_elsewhere = self.rank != 0
            raise error
        return result  # type: ignore[no-any-return]

    def shorten_timeouts(self) -> None:
        self.world.set_timeout(self.parallel.timeout_seconds)

    def publish_status(self, status: Callable[[], tuple[int, str]]) -> None:
        if self._monitor is None:
            self._monitor = FailureMonitor(self.world, status)
        self._monitor.status = status

    def wait_for(self, done: Callable[[float], bool]) -> None:
        assert self._monitor is not None
        self._monitor.wait_for(done, self.parallel.timeout_seconds)

    def explain(self, error: BaseException) -> BaseException:
        if self._monitor is None or isinstance(error, PeerFailed):
            return error
        return self._monitor.explain(error)

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        self.world.close()


class DataParallel(Distributed):
    """DistributedDataParallel: every rank holds all weights; gradients are averaged during the backward pass."""

    _graph_recorded = False  # whether DDP has recorded its static graph

    def _wrap(self, model: nn.Module) -> nn.Module:
        on_gpu = self.world.device.type == "cuda"
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.world.device] if on_gpu else None,
            static_graph=True,
            gradient_as_bucket_view=True,
        )
        if self.parallel.gradient_compression == "bf16":
            wrapped.register_comm_hook(None, lambda _, bucket: bf16_all_reduce(bucket))
        return wrapped

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        # DDP records a static graph in the first backward pass, which must not run under no_sync (the reducer
        # asserts). Synchronising every pass of the first step is correct too: the mean of equal sums is that sum.
        recording = not self._graph_recorded
        self._graph_recorded = self._graph_recorded or last
        return nullcontext() if last or recording else cast(DistributedDataParallel, model).no_sync()


def bf16_all_reduce(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: average a bucket over ranks in bf16. PyTorch's own hook requires NCCL."""
    gradient = bucket.buffer()
    compressed = (gradient / dist.get_world_size()).bfloat16()
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda done: gradient.copy_(done.value()[0]))  # type: ignore[no-any-return]


class FullySharded(Distributed):
    """FSDP2: weights, gradients and moments are sharded, one unit per block. HSDP replicates groups of shards."""

    def build_model(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """On the meta device: no rank ever holds more than one full weight."""
        gloo = backend_of(self.parallel, self.world.device.type) == "gloo"
        if self.train.optimizer == "muon" and gloo and self.world.device.type == "cuda":
            # torch 2.11 crashes when it gathers GPU shards over gloo
            raise UsageError(
                f"train.optimizer=muon with parallel.strategy={self.name} needs NCCL: use one GPU per rank, "
                "or --parallel.strategy ddp, or --train.optimizer adamw"
            )
        with torch.device("meta"):
            return build()

    def _wrap(self, model: nn.Module) -> nn.Module:
        mesh = self._mesh()
        low_precision = resolved_precision(self.train.precision, self.world.device.type) == "bf16"
        reduce_dtype = torch.bfloat16 if self.parallel.gradient_compression == "bf16" else torch.float32
        # Autocast decides what is computed in bf16; this only sets what is communicated. Inputs are not cast, so the
        # residual stream stays in fp32 as on one device.
        blocks_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low_precision else None, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        rest_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        reshard = self.parallel.sharding == "full"
        blocks = [cast(FSDPModule, block) for block in cast(nn.ModuleList, model.blocks)]
        for block in blocks:
            fully_shard(cast(nn.Module, block), mesh=mesh, reshard_after_forward=reshard, mp_policy=blocks_policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=rest_policy)
        depth = self.parallel.prefetch
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + depth])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - depth) : i][::-1])
        if backend_of(self.parallel, self.world.device.type) == "gloo":
            # Not every supported torch has a mean reduction for gloo: sum, then divide.
            for module in (cast(FSDPModule, model), *blocks):
                module.set_force_sum_reduction_for_comms(True)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=self.world.device)
            with full_weight_init():
                model.init_weights()  # type: ignore[operator]
        return model

    @contextmanager
    def gradient_sync(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        sharded = cast(FSDPModule, model)
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)
        yield

    def _mesh(self) -> DeviceMesh:
        kind = self.world.device.type
        if self.parallel.strategy != "hsdp":
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("shard",))
        shard_ranks = self.parallel.shard_ranks or self.world.launch.local_world_size
        if self.world_size % shard_ranks:
            raise UsageError(
                f"{self.world_size} ranks cannot be split into groups of {shard_ranks}, the ranks of one machine: "
                "set --parallel.shard_ranks to a divisor of the number of ranks"
            )
        shape = (self.world_size // shard_ranks, shard_ranks)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


class full_weight_init(TorchFunctionMode):
    """Initialise sharded weights as a single process would.

    Each weight is drawn whole, from the same generator, and every rank keeps its shard: the same initial weights under
    every strategy. Only one weight is whole at a time.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if func is nn.init.normal_ and isinstance(target, DTensor):
            rest = {k: v for k, v in kwargs.items() if k != "tensor"}
            full = func(torch.empty(target.shape, dtype=target.dtype), *args[1:], **rest)
            # src_data_rank=None: every rank has drawn the same values, so nothing is sent
            own = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(own.to_local())
            return target
        return func(*args, **kwargs)

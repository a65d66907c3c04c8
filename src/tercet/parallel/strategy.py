"""Strategies: how a step is distributed over ranks. The trainer only calls the interface `Strategy`.

`Single` is one process on one device. `Distributed` has what several ranks share: process groups, batch sharding,
reductions and error handling; `DataParallel` (DDP) and `FullySharded` (FSDP2, HSDP) wrap the model and decide when
gradients are reduced. Context parallelism goes with both. `build_strategy` picks one from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
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
from tercet.errors import TercetError, UsageError, first_few
from tercet.parallel.context import apply_context_parallelism, shard_sequence
from tercet.parallel.failure import FailureMonitor
from tercet.parallel.launch import FIRST_STEP_SECONDS, World, backend_of

T = TypeVar("T")


class Strategy:
    """The interface. This base class: one process on one device."""

    name = "single"
    rank = 0
    world_size = 1
    data_rank = 0  # which shard of the data this rank reads; ranks that share a sequence read the same one
    data_ranks = 1
    checkpoint_group: Any = None  # process group of the saving thread

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

    def check_same_data(self, identity: Mapping[str, Any]) -> None:
        """Raise on all ranks if one reads other data than rank 0."""

    def shorten_timeouts(self) -> None:
        """Call after the first step: nothing compiles any more, and a rank that is late is stuck."""

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


class Distributed(Strategy):
    """Base class. Subclasses implement `_wrap` and `gradient_sync`."""

    def __init__(self, parallel: ParallelConfig, train: TrainConfig, world: World) -> None:
        self.parallel, self.train, self.world = parallel, train, world
        self.name: str = parallel.strategy
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_ranks = self.rank // parallel.context, parallel.data_ranks
        self.checkpoint_group = world.checkpoint
        self._monitor = FailureMonitor(world, lambda: (0, "starting"), parallel.timeout_seconds)
        self._nsa: NSAConfig | None = None
        self._context: dist.ProcessGroup | None = None
        if parallel.context > 1:
            # A separate group even if it has all ranks: gradients and keys must not queue behind each other.
            self._context, _ = dist.new_subgroups(parallel.context)

    def prepare(self, model: nn.Module) -> nn.Module:
        self._nsa = model.config.nsa  # type: ignore[assignment, union-attr]
        if self._context is not None:
            apply_context_parallelism(model)
        model = self._wrap(model)
        self.world.set_timeout(
            max(self.parallel.timeout_seconds, FIRST_STEP_SECONDS)
        )  # of the groups made on the way too
        return model

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
        shard.device = self.world.device
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

    def check_same_data(self, identity: Mapping[str, Any]) -> None:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, dict(identity), group=self.world.control)
        for member, theirs in zip(self.world.members, found, strict=True):
            if keys := [key for key in sorted({*theirs, *found[0]}) if theirs.get(key) != found[0].get(key)]:
                problem = UsageError(
                    f"rank {member['rank']} on {member['host']} reads other data than rank 0 ({first_few(keys)}): "
                    "let all machines read the same files"
                )
                problem.reported_elsewhere = self.rank != 0
                raise problem

    def shorten_timeouts(self) -> None:
        self.world.set_timeout(self.parallel.timeout_seconds)

    def publish_status(self, status: Callable[[], tuple[int, str]]) -> None:
        self._monitor.status = status

    def wait_for(self, done: Callable[[float], bool]) -> None:
        self._monitor.wait_for(done)

    def explain(self, error: BaseException) -> BaseException:
        return self._monitor.explain(error)

    def close(self) -> None:
        self._monitor.close()
        self.world.close()


class DataParallel(Distributed):
    """DistributedDataParallel: every rank holds all weights; gradients are averaged during the backward pass."""

    _graph_recorded = False  # whether DDP has recorded its static graph

    def _wrap(self, model: nn.Module) -> nn.Module:
        devices = [self.world.device] if self.world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, devices, static_graph=True, gradient_as_bucket_view=True)
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
        with torch.device("meta"):
            return build()

    def _wrap(self, model: nn.Module) -> nn.Module:
        low_precision = resolved_precision(self.train.precision, self.world.device.type) == "bf16"
        reduce_dtype = torch.bfloat16 if self.parallel.gradient_compression == "bf16" else torch.float32
        # Autocast decides what is computed in bf16; this only sets what is communicated. Inputs are not cast, so the
        # residual stream stays in fp32 as on one device.
        blocks_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low_precision else None, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        rest_policy = replace(blocks_policy, param_dtype=None)
        options: Any = {"mesh": self._mesh(), "reshard_after_forward": self.parallel.sharding == "full"}
        blocks = [fully_shard(block, mp_policy=blocks_policy, **options) for block in cast(nn.ModuleList, model.blocks)]
        fully_shard(model, mp_policy=rest_policy, **options)
        for i, block in enumerate(blocks):  # one block ahead
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - 1) : i])
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


def build_strategy(parallel: ParallelConfig, train: TrainConfig, world: World) -> Distributed:
    """The configured strategy over several ranks."""
    return (DataParallel if parallel.strategy == "ddp" else FullySharded)(parallel, train, world)

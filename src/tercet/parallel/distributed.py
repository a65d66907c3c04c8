"""What all strategies of several ranks share: groups, sums, the share of the data, and how they end."""

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
from tercet.parallel.context import apply_context_parallelism, shard
from tercet.parallel.failure import PeerFailed, Watch
from tercet.parallel.launch import World, backend_of
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

    replicated = parallel.strategy == "ddp" or (parallel.strategy == "cp" and parallel.context_weights == "replicated")
    strategy: Strategy = DataParallel(parallel, train, world) if replicated else Sharded(parallel, train, world)
    return strategy


# ------------------------------------------------------------------------------------------------
# Replicas: every rank has all weights, and gradients are averaged while the backward pass still runs.

WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DataParallel(Distributed):
    """PyTorch's DistributedDataParallel."""

    _recorded = False  # whether a static graph has been seen once

    def wrap(self, model: nn.Module) -> nn.Module:
        on_gpu = self.world.device.type == "cuda"
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.world.device] if on_gpu else None,
            static_graph=self.parallel.static_graph,
            bucket_cap_mb=self.parallel.bucket_mb,  # type: ignore[arg-type]
            gradient_as_bucket_view=True,
        )
        if self.parallel.gradient_compression != "none":
            wire = WIRE[self.parallel.gradient_compression]
            wrapped.register_comm_hook(None, lambda _, bucket: compressed_all_reduce(bucket, wire))
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, model.module)

    def gradient_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        # A static graph is recorded in the first backward pass, which must not be one without a sync (the reducer
        # asserts). Syncing all passes of the first step is right as well: a mean of equal sums is that sum.
        recording = self.parallel.static_graph and not self._recorded
        self._recorded = self._recorded or last
        return nullcontext() if last or recording else cast(DistributedDataParallel, model).no_sync()


def compressed_all_reduce(bucket: dist.GradBucket, wire: torch.dtype) -> torch.futures.Future[Tensor]:
    """The mean over ranks, sent in half precision. (PyTorch's own hook for bf16 asks for NCCL; this one is the same on
    gloo.) bf16 has fp32's range. fp16 has not: a bucket's gradients span more than its five exponent bits, and small
    ones would be sent as zeros, so that they are scaled by a power of two that all ranks agree on."""
    gradient, ranks = bucket.buffer(), dist.get_world_size()
    mean = gradient / ranks
    scale = _scale(mean, ranks) if wire == torch.float16 else None
    small = (mean if scale is None else mean * scale).to(wire)
    future = dist.all_reduce(small, async_op=True).get_future()

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        gradient.copy_(done.value()[0])
        return gradient if scale is None else gradient.div_(scale)

    return future.then(back)  # type: ignore[no-any-return]


def _scale(mean: Tensor, ranks: int) -> Tensor:
    """The power of two that takes the largest sum near fp16's end, on the device. What is not finite stays so."""
    largest = mean.abs().amax().float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    room = torch.finfo(torch.float16).max / 2 / ranks
    return torch.exp2(torch.floor(torch.log2(room / largest.clamp(min=1e-30))))


# ------------------------------------------------------------------------------------------------
# Sharded weights, gradients and moments: FSDP2, one unit per block; replicated over groups of ranks under hsdp.


class Sharded(Distributed):
    """PyTorch's fully_shard."""

    def make(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        """Without weights: no rank ever holds more than one of them whole."""
        with torch.device("meta"):
            return build()

    def wrap(self, model: nn.Module) -> nn.Module:
        mesh = self._mesh()
        low = resolved_precision(self.train.precision, self.world.device.type) == "bf16"
        reduce = torch.bfloat16 if self.parallel.reduce_dtype == "bf16" else torch.float32
        # Autocast decides what is computed in bf16; here only what travels is. Inputs are left alone, so that the
        # residual stream stays in fp32 as on one device.
        blocks_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None, reduce_dtype=reduce, cast_forward_inputs=False
        )
        rest_policy = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
        free = self.parallel.sharding == "full"
        blocks = [cast(FSDPModule, block) for block in cast(nn.ModuleList, model.blocks)]
        for block in blocks:
            fully_shard(cast(nn.Module, block), mesh=mesh, reshard_after_forward=free, mp_policy=blocks_policy)
        fully_shard(model, mesh=mesh, reshard_after_forward=free, mp_policy=rest_policy)
        for i, block in enumerate(blocks):
            ahead = self.parallel.prefetch
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])
        if backend_of(self.parallel, self.world.device.type) == "gloo":
            # gloo has no mean in every version of torch that is admitted: sums, and one division
            for module in (cast(FSDPModule, model), *blocks):
                module.set_force_sum_reduction_for_comms(True)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=self.world.device)
            with drawn_whole():
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
        shard = self.parallel.shard_ranks or self.world.launch.local_world_size
        if self.world_size % shard:
            raise UsageError(
                f"{self.world_size} ranks cannot be split into groups of {shard}, the ranks of one machine: "
                "give --parallel.shard-ranks"
            )
        return init_device_mesh(kind, (self.world_size // shard, shard), mesh_dim_names=("replicate", "shard"))


class drawn_whole(TorchFunctionMode):
    """Random initialisation of sharded weights by drawing each one whole, from the generator that a single process
    would use, and keeping this rank's part: the same weights under every strategy. One weight at a time is whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if func is nn.init.normal_ and isinstance(target, DTensor):
            rest = {k: v for k, v in kwargs.items() if k != "tensor"}
            whole = func(torch.empty(target.shape, dtype=target.dtype), *args[1:], **rest)
            # src_data_rank=None: every rank has drawn the same, nothing needs to be sent
            part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
            return target
        return func(*args, **kwargs)

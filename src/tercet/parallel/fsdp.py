"""Sharded weights, gradients and moments: FSDP2, one unit per block; replicated over groups of ranks under hsdp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

from tercet.config.sections import resolved_precision
from tercet.errors import UsageError
from tercet.parallel.distributed import Distributed
from tercet.parallel.launch import backend_of


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

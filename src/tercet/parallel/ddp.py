"""Replicas: every rank has all weights, and gradients are averaged while the backward pass still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tercet.parallel.distributed import Distributed

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

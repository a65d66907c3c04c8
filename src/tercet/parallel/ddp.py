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
    """The mean over ranks, sent in half precision. Divided before it is summed: fp16 sums would overflow.

    (PyTorch's own hook for bf16 asks for NCCL; this one is the same on gloo.)
    """
    gradient = bucket.buffer()
    small = (gradient / dist.get_world_size()).to(wire)
    future = dist.all_reduce(small, async_op=True).get_future()

    def back(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    return future.then(back)  # type: ignore[no-any-return]

"""One optimizer step: micro-batches, forward and backward, the non-finite guard, one update. No host sync, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tercet.config.sections import resolved_precision
from tercet.data.loader import Batch
from tercet.data.packing import LoaderStats
from tercet.model.loss import IGNORED
from tercet.parallel.strategy import Single, Strategy
from tercet.train.optim import gradient_norms, update


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass, on the device."""

    tokens: Tensor  # [b, T], or [1, b*T] with cu_seqlens
    targets: Tensor  # same shape; IGNORED where there is nothing to predict
    cu_seqlens: Any  # int32 [docs+1], a ContextShard under context parallelism, or None
    max_seqlen: int | None = None  # with cu_seqlens: upper bound on document length, constant over the run


class StepBatches:
    """Groups the loader's batches into steps and tracks the data cursor of the last batch consumed."""

    def __init__(self, loader: Iterable[Batch], accumulation: int, cursor: dict[str, Any] | None) -> None:
        self._batches: Iterator[Batch] = iter(loader)
        self._accumulation = accumulation
        self.cursor = cursor  # goes into the checkpoint
        self.stats = LoaderStats()

    def continue_with(self, loader: Iterable[Batch], accumulation: int) -> None:
        """Read the following steps from a loader that starts at the cursor."""
        self._batches, self._accumulation = iter(loader), accumulation

    def next_step(self) -> list[Batch]:
        """The batches of the next step: fewer in the last step of the data, then none."""
        batches = list(itertools.islice(self._batches, self._accumulation))
        if batches:
            self.cursor = batches[-1].state
            self.stats = batches[-1].stats
        return batches


def to_device(batch: Batch, device: torch.device, strategy: Strategy | None = None) -> MicroBatch:
    """This rank's part of a batch on the device, or the whole batch without a strategy.

    The copy is asynchronous (the loader pins its memory). Packed documents become one row.
    """
    tokens, targets, documents = (strategy or Single()).shard_batch(batch.tokens, batch.targets, batch.cu_seqlens)
    max_seqlen = None
    if isinstance(documents, torch.Tensor):
        documents = documents.to(device, non_blocking=True)
        max_seqlen = batch.tokens.shape[1]  # no document crosses the end of a sequence
    tokens, targets = (x.to(device, non_blocking=True) for x in (tokens, targets))
    return MicroBatch(tokens, targets, documents, max_seqlen)


# Called with the index and number of each micro-batch
Progress = Callable[[int, int], None]
# Times a phase of a step: forward, backward (or both as `passes`), optimizer or communication
Phase = Callable[[str], AbstractContextManager[None]]


def untimed(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


class StepExecutor(Protocol):
    """Alternative executor for forward and backward, e.g. CUDA graph replay (cuda_graph.py)."""

    def run(
        self, batches: Sequence[MicroBatch], scale: Tensor, phase: Phase, progress: Progress | None = None
    ) -> Tensor:
        """Returns the summed loss of all micro-batches; leaves the gradients of loss × scale in `.grad`."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step, on the device. The caller decides when to read them."""

    loss: Tensor  # mean over the target tokens of the whole step, all ranks
    grad_norm: Tensor  # global, before clipping
    nonfinite: Tensor  # bool: loss or gradients were not finite, so nothing was updated


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """bf16 compute with fp32 weights, or plain fp32."""
    if resolved_precision(precision, device.type) == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def loss_sum(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Cross-entropy summed over the targets of one micro-batch. [] fp32"""
    return model(batch.tokens, batch.cu_seqlens, batch.targets, max_seqlen=batch.max_seqlen).total


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[MicroBatch],
    *,
    step: int,
    lr: float,
    clip: float,
    precision: str,
    guard: NonFiniteGuard,
    strategy: Strategy,
    phase: Phase = untimed,
    executor: StepExecutor | None = None,
    progress: Progress | None = None,
) -> StepResult:
    """One update over all micro-batches.

    The loss is normalised by the number of targets in the whole step on all ranks, not per micro-batch: packed
    documents leave a different number of targets in each, so a mean of means would weight them unequally.
    """
    targets = torch.stack([(b.targets != IGNORED).sum() for b in batches]).sum()
    with phase("communication"):
        targets = strategy.all_sum(targets).clamp(min=1)
    # DDP and FSDP average gradients over ranks, but the loss is a sum over ranks.
    scale = strategy.world_size / targets
    if executor is None:
        total = run_eager(model, batches, scale, precision, strategy, phase, progress)
    else:
        total = executor.run(batches, scale, phase, progress)
    with phase("communication"):
        mean = strategy.all_sum(total) / targets
    with phase("optimizer"):
        norm, selector_norm = gradient_norms(model, optimizer)
        # the sum is finite only if both are
        nonfinite, skip = guard.check(step, mean, norm if selector_norm is None else norm + selector_norm)
        update(optimizer, lr, clip, norm, skip, selector_norm)
    return StepResult(mean, norm, nonfinite)


def run_eager(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    scale: Tensor,
    precision: str,
    strategy: Strategy,
    phase: Phase,
    progress: Progress | None = None,
) -> Tensor:
    """The default for StepExecutor.run: forward and backward of one micro-batch after another."""
    device = batches[0].tokens.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    for i, batch in enumerate(batches):
        if progress is not None:
            progress(i, len(batches))
        with strategy.gradient_sync(model, last=i == len(batches) - 1):
            with phase("forward"), autocast(device, precision):
                loss = loss_sum(model, batch)
            with phase("backward"):
                (loss * scale).backward()
        total += loss.detach()
    return total


MOST_SKIPPED_IN_A_ROW = 5  # non-finite steps


class NonFiniteGuard:
    """Skips and counts non-finite steps on the device; the host reads the counts at the next log line.

    Past a limit it freezes the weights until the host stops the run.
    """

    def __init__(self, device: torch.device, max_total: int, max_in_row: int = MOST_SKIPPED_IN_A_ROW) -> None:
        self.max_total, self.max_in_row = max_total, max_in_row
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._halted_at = torch.zeros((), dtype=torch.int64, device=device)  # 0: not halted

    def check(self, step: int, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(nonfinite, skip), both [] bool: whether loss or norm is not finite, and whether to skip the update."""
        nonfinite = ~(torch.isfinite(loss) & torch.isfinite(norm))
        live = self._halted_at == 0
        self._total += nonfinite & live
        self._in_row = torch.where(live, torch.where(nonfinite, self._in_row + 1, 0), self._in_row)
        over = (self._total > self.max_total) | (self._in_row > self.max_in_row)
        self._halted_at = torch.where(live & nonfinite & over, step, self._halted_at)
        return nonfinite, nonfinite | ~live

    def halted_at(self) -> int:
        """The step that exceeded a limit, 0 if none did. Waits for the device."""
        return int(self._halted_at.item())

    def total(self) -> int:
        """Non-finite steps so far. Waits for the device."""
        return int(self._total.item())

    def in_row(self) -> int:
        """Non-finite steps in a row, up to the last one or the one that exceeded a limit. Waits for the device."""
        return int(self._in_row.item())

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint. Waits for the device."""
        return {"total": self.total(), "in_row": self.in_row()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._total.fill_(state["total"])
        self._in_row.fill_(state["in_row"])

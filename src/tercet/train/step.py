"""One optimizer step: forward and backward of its micro-batches, then one update. No I/O, no host sync."""

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
from tercet.parallel.strategy import Single, Strategy
from tercet.train.optim import global_norm, update

IGNORED_TARGET = -100


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass eats, on the device."""

    tokens: Tensor  # [b, T], or [1, b*T] with cu_seqlens
    targets: Tensor  # likewise; IGNORED_TARGET where there is nothing to predict
    cu_seqlens: Any  # int32 [docs+1]; under context parallelism what this rank's layers must know; or None
    max_seqlen: int | None = None  # with cu_seqlens: no document is longer, one number for the whole run


class Observes(Protocol):
    """Whoever wants to know when the parts of a step begin and end."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around forward, backward (or both of them as `passes`), optimizer or communication."""


class Unobserved:
    """Nobody does."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class RunsPasses(Protocol):
    """Whoever makes forward and backward passes in another way than one launch after another (train/graph.py)."""

    def passes(
        self, batches: Sequence[MicroBatch], scale: Tensor, phase: Callable[[str], AbstractContextManager[None]]
    ) -> Tensor:
        """The summed loss of all micro-batches; the gradients of it times `scale` are left in `.grad`."""


@dataclass(frozen=True)
class StepResult:
    """Device-side results of a step; reading them is the caller's decision."""

    loss: Tensor  # mean over the target tokens of the whole step, all ranks
    grad_norm: Tensor  # global, before clipping
    bad: Tensor  # bool: loss or gradients were not finite, and nothing was updated


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """bf16 compute over fp32 weights, or plain fp32."""
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
    observer: Observes | None = None,
    graph: RunsPasses | None = None,
) -> StepResult:
    """One update over all micro-batches together.

    The loss is normalised by the targets of the whole step, on all ranks, not per micro-batch: packed
    documents leave a different number of targets in each, and a mean of means would weigh them unequally.
    """
    phase = (observer or Unobserved()).phase
    targets = torch.stack([(b.targets != IGNORED_TARGET).sum() for b in batches]).sum()
    with phase("communication"):
        targets = strategy.all_sum(targets).clamp(min=1)
    # Gradients are averaged over ranks by DDP and FSDP, while the loss is a sum over ranks.
    scale = strategy.world_size / targets
    if graph is None:
        total = passes(model, batches, scale, precision, strategy, phase)
    else:
        total = graph.passes(batches, scale, phase)
    with phase("communication"):
        mean = strategy.all_sum(total) / targets
    with phase("optimizer"):
        norm = global_norm(model.parameters())
        bad, skip = guard.judge(step, mean, norm)
        update(optimizer, lr, clip, norm, skip)
    return StepResult(mean, norm, bad)


def passes(
    model: nn.Module,
    batches: Sequence[MicroBatch],
    scale: Tensor,
    precision: str,
    strategy: Strategy,
    phase: Callable[[str], AbstractContextManager[None]],
) -> Tensor:
    """What RunsPasses does, launch by launch."""
    device = batches[0].tokens.device
    total = torch.zeros((), dtype=torch.float32, device=device)
    for i, batch in enumerate(batches):
        with strategy.gradient_sync(model, last=i == len(batches) - 1):
            with phase("forward"), autocast(device, precision):
                loss = loss_sum(model, batch)
            with phase("backward"):
                (loss * scale).backward()
        total += loss.detach()
    return total


# ------------------------------------------------------------------------------------------------
# Non-finite steps: judged, skipped and counted on the device; the host learns of them at the next log.


class NonFiniteGuard:
    """Counts bad steps and, past a limit, freezes the weights until the host reads and stops the run.

    The freeze is what makes the dump exact: between the bad step and the log line that notices it, no later
    update may move the weights that produced it.
    """

    def __init__(self, device: torch.device, max_total: int, max_in_row: int) -> None:
        self.max_total, self.max_in_row = max_total, max_in_row
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._halted_at = torch.zeros((), dtype=torch.int64, device=device)  # 0: not

    def judge(self, step: int, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(bad, skip), both [] bool: whether this step is not finite, and whether its update is skipped."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        live = self._halted_at == 0
        self._total += bad & live
        self._in_row = torch.where(live, torch.where(bad, self._in_row + 1, 0), self._in_row)
        over = (self._total > self.max_total) | (self._in_row > self.max_in_row)
        self._halted_at = torch.where(live & bad & over, step, self._halted_at)
        return bad, bad | ~live

    def halted_at(self) -> int:
        """The step that passed a limit, 0 if none did. Waits for the device."""
        return int(self._halted_at.item())

    def total(self) -> int:
        """Bad steps so far. Waits for the device."""
        return int(self._total.item())

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint. Waits for the device."""
        return {"total": int(self._total.item()), "in_row": int(self._in_row.item())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting where a checkpoint left off."""
        self._total.fill_(state["total"])
        self._in_row.fill_(state["in_row"])


# ------------------------------------------------------------------------------------------------
# From the loader's batches to what a step eats, with the cursor of the last batch that was really consumed.


def to_device(batch: Batch, device: torch.device, strategy: Strategy | None = None) -> MicroBatch:
    """This rank's part, copied without waiting (the loader pins its memory); packed documents as one long row.

    Without a strategy: the whole batch.
    """
    tokens, targets, documents = (strategy or Single()).shard_batch(batch.tokens, batch.targets, batch.cu_seqlens)
    longest = None
    if isinstance(documents, torch.Tensor):
        documents = documents.to(device, non_blocking=True)
        longest = batch.tokens.shape[1]  # sequences end documents
    tokens, targets = (x.to(device, non_blocking=True) for x in (tokens, targets))
    return MicroBatch(tokens, targets, documents, longest)


class StepBatches:
    """The micro-batches of one step after another."""

    def __init__(self, loader: Iterable[Batch], accumulation: int, cursor: dict[str, Any] | None) -> None:
        self._batches: Iterator[Batch] = iter(loader)
        self._accumulation = accumulation
        self.cursor = cursor  # after the last batch handed out: what a checkpoint must hold
        self.epoch = 0
        self.stats: LoaderStats | None = None
        self.bad_records = 0

    def next_step(self) -> list[Batch]:
        """The next step's batches. Fewer at the end of the data, where the last step is smaller; then none."""
        batches = list(itertools.islice(self._batches, self._accumulation))
        if batches:
            self.cursor = batches[-1].state
            self.epoch = batches[-1].stats.epoch
            self.stats = batches[-1].stats
            self.bad_records = batches[-1].stats.skipped
        return batches

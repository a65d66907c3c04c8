"""A step's forward and backward passes as a CUDA graph: the host orders one launch where it ordered some 1,600.

What is recorded is one pass over one micro-batch, on buffers that stay where they are: tokens, targets, bounds, the
scale of the loss, the loss. A step fills them and replays the recording, once for each of its micro-batches; norm,
guard and update follow as ever. A recording holds for one shape of tokens and for as many documents as its buffer of
bounds has room for: the rest of the room is empty documents at the end. More documents, another shape, or the first
step whose layers are looked at: everything is recorded anew, so that there is never more than one set of recordings.

Memory. Recordings share one pool and one stream, and passes outside of them (to warm up) happen only while there is no
recording: a step needs what it needs without graphs, and not twice. The allocator calls the pool's memory free between
replays, though nobody else may have it; `held_bytes` makes up for that. Validation and samples run beside the pool.

Gradients. Where one micro-batch makes a step, each recording writes its own into the pool, and there is nothing to
clear or to add. Nothing holds their memory: they are read after a replay and before the next, so that other recordings
may use it, and they are not there at the peak of any. (One set for all recordings was there at the peak of all but the
first.) With several micro-batches they are added to buffers that a step clears first, and live as long as without
graphs.

Bits. Replays compute what the same launches compute; but how some sums are divided (compressed keys' gradients,
FlashAttention's dQ when it is to be reproducible) depends on the number of documents, and here that is the room.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from tercet.errors import TercetError
from tercet.model.attention import DenseAttention, NativeSparseAttention
from tercet.parallel.strategy import Single
from tercet.train.step import MicroBatch, autocast, loss_sum, passes

LEAST_ROOM = 16
# The first pass compiles; the second adds to gradients that are there, which is other code.
_WARM_UPS = 2


def room_for(documents: int) -> int:
    """Documents that bounds have room for: a power of two, so that recordings grow old slowly."""
    return max(LEAST_ROOM, 1 << (documents - 1).bit_length())


def fill_bounds(room: Tensor, bounds: Tensor, tokens: int) -> None:
    """The bounds of the documents, then those of empty documents at the end, without waiting for the device."""
    count = bounds.shape[0]
    room[:count].copy_(bounds)
    room[count:].fill_(tokens)


class Replays(Protocol):
    def replay(self) -> None: ...


class Records(Protocol):
    """Who makes recordings of what is launched."""

    held_bytes: int  # at the peak of a replay, beyond what the allocator counts
    kept_bytes: int  # taken from the device for all recordings, and kept

    def warm_up(self, act: Callable[[], None]) -> None:
        """Do it as it will be recorded, so that all is compiled and every library has its workspace."""

    def record(self, act: Callable[[], None]) -> Replays:
        """Without doing it. Memory is shared with the recordings made since `forget`."""

    def lend(self, made: Tensor) -> Tensor:
        """What a recording has made, where it is: until the next replay, and without holding its memory."""

    def forget(self) -> None:
        """Nobody replays what has been recorded so far: its memory is given back."""


class CudaRecorder:
    """CUDA's stream capture, by the pattern for whole networks in PyTorch's notes."""

    def __init__(self, device: torch.device) -> None:
        # One stream for warming up and for recording: a block of memory is used again on its own stream only, and
        # gradients are accumulated on the stream that they were first accumulated on.
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.held_bytes = self.kept_bytes = 0

    def warm_up(self, act: Callable[[], None]) -> None:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            act()
        here.wait_stream(self._stream)

    def record(self, act: Callable[[], None]) -> Replays:
        torch.cuda.synchronize(self._device)
        gc.collect()  # what dies in the middle of a capture may end it
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before, kept = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        collects = gc.isenabled()
        gc.disable()
        try:
            # thread_local: the loader pins memory and a save copies in threads of their own, which is none of ours
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                _tell_what_breaks(act)
        except RuntimeError as error:
            broke = _what_broke(error)
            if isinstance(broke, torch.OutOfMemoryError):
                raise broke from None
            said = f"{type(broke).__name__}: {(str(broke).strip().splitlines() or [''])[0]}"
            raise TercetError(
                f"a step could not be recorded as a CUDA graph ({said}): "
                "--train.cuda-graph off launches kernel by kernel"
            ) from broke
        finally:
            torch.cuda.set_stream(here)  # PyTorch stays on the recording's when a capture ends in an error
            if collects:
                gc.enable()
        self._graphs.append(graph)
        self.kept_bytes += torch.cuda.memory_reserved(self._device) - kept
        self.held_bytes = max(self.held_bytes, torch.cuda.max_memory_allocated(self._device) - before)
        # From here on a peak is what lives beside the pool; the whole is that and held_bytes.
        torch.cuda.reset_peak_memory_stats(self._device)
        return graph

    def lend(self, made: Tensor) -> Tensor:
        if made.dtype != torch.float32:  # the interface knows no bf16; such a tensor keeps its memory
            return made
        lent = torch.as_tensor(_Place(made), device=made.device)
        assert lent.data_ptr() == made.data_ptr()
        return lent

    def forget(self) -> None:
        if self._graphs:
            torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.held_bytes = self.kept_bytes = 0
        torch.cuda.empty_cache()


class _Place:
    """Where a tensor is, for another that does not hold the memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


class _Broke(RuntimeError):
    """Marks what went wrong while recording: a capture that fails ends with another error, which says nothing of it."""


def _tell_what_breaks(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        raise _Broke from error


def _what_broke(error: BaseException) -> BaseException:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, _Broke):
        seen = seen.__context__
    return error if seen is None or seen.__cause__ is None else seen.__cause__


@dataclass(frozen=True)
class Fit:
    """What recordings can be replayed for."""

    tokens: tuple[int, ...]
    room: int | None  # documents; None for rows without bounds
    max_seqlen: int | None
    adds: bool  # gradients, to those of the micro-batches before

    def holds(self, batch: MicroBatch) -> bool:
        if tuple(batch.tokens.shape) != self.tokens or batch.max_seqlen != self.max_seqlen:
            return False
        documents = _documents(batch)
        return documents is None if self.room is None else documents is not None and documents <= self.room


def _documents(batch: MicroBatch) -> int | None:
    return None if batch.cu_seqlens is None else int(batch.cu_seqlens.shape[0]) - 1


class StepGraph:
    """The passes of one model's steps, recorded when they are first asked for.

    `may_fail`: where they cannot be recorded, steps are launched kernel by kernel from then on, and `failures` says so.
    Else that is an error.
    """

    def __init__(
        self, model: nn.Module, precision: str, recorder: Records | None = None, *, may_fail: bool = False
    ) -> None:
        self._model, self._precision, self._may_fail = model, precision, may_fail
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._device = device = self._trained[0].device
        self._recorder = recorder or CudaRecorder(device)
        self._layers = [m for m in model.modules() if isinstance(m, (NativeSparseAttention, DenseAttention))]
        self._stats = [m.stats for m in self._layers if isinstance(m, NativeSparseAttention)]
        self._scale = torch.ones((), dtype=torch.float32, device=device)
        self._loss = torch.zeros((), dtype=torch.float32, device=device)
        self._sums = torch.stack([s.sums(device) for s in self._stats]) if self._stats else None
        self._fit: Fit | None = None
        self._batch: MicroBatch | None = None  # the buffers
        self._recorded: dict[bool, Replays] = {}  # by whether layers are looked at
        self._grads: dict[bool, list[Tensor | None]] = {}  # likewise, where its replay leaves them
        self._routes: list[dict] = []
        self._news: list[str] = []
        self._given_up = False
        self._failures: list[str] = []
        # Documents that there has been room for. Saved and taken up with a run: bits may depend on it.
        self.room = 0

    @property
    def held_bytes(self) -> int:
        """Memory that replays use, and that the allocator does not count."""
        return self._recorder.held_bytes

    def news(self) -> list[str]:
        """What has been recorded since the last call, in words."""
        told, self._news = self._news, []
        return told

    def failures(self) -> list[str]:
        """Why steps are not recorded any more, if that has been found out since the last call."""
        told, self._failures = self._failures, []
        return told

    def passes(
        self, batches: Sequence[MicroBatch], scale: Tensor, phase: Callable[[str], AbstractContextManager[None]]
    ) -> Tensor:
        """The summed loss of all micro-batches; the gradients of it times `scale` are left in `.grad`.

        Nothing waits for the device but what records.
        """
        looked_at = any(s.enabled for s in self._stats)
        self._scale.copy_(scale)
        if not self._prepared(batches, looked_at):
            return passes(self._model, batches, scale, self._precision, Single(), phase)
        assert self._fit is not None
        grads = self._grads[looked_at]
        total, seen = torch.zeros_like(self._loss), None
        for i, batch in enumerate(batches):
            with phase("passes"):
                if i == 0 and self._fit.adds:
                    torch._foreach_zero_([g for g in grads if g is not None])
                self._fill(batch)
                self._recorded[looked_at].replay()
                total += self._loss
                if looked_at and self._sums is not None:
                    seen = self._sums.clone() if seen is None else seen + self._sums
                # what ran last from Python may have been a sample
                for layer, routes in zip(self._layers, self._routes, strict=True):
                    layer.routes = routes
        if seen is not None:
            for stats, row in zip(self._stats, seen, strict=True):
                stats.add(row)
        self._attach(grads)
        return total

    def _prepared(self, batches: Sequence[MicroBatch], looked_at: bool) -> bool:
        """Whether these can be replayed; nothing has been computed of them yet. After a capture that CUDA itself has
        ended, PyTorch keeps what the capture had allocated until then."""
        if not self._given_up:
            try:
                self._prepare(batches, looked_at)
            except (TercetError, torch.OutOfMemoryError) as error:
                if not self._may_fail:
                    raise
                failure = (str(error).strip().splitlines() or [type(error).__name__])[0]
            else:
                return True
            # The error is gone, and with it the frames that hold what was being computed.
            self._given_up = True
            self._failures.append(failure)
            gc.collect()
            self._clear()
            self._look(looked_at)
        return False

    def _clear(self) -> None:
        self._recorded, self._grads, self._batch = {}, {}, None
        self._attach([None] * len(self._trained))
        self._recorder.forget()

    def _prepare(self, batches: Sequence[MicroBatch], looked_at: bool) -> None:
        fit = self._fit
        fits = fit is not None and all(map(fit.holds, batches)) and (fit.adds or len(batches) == 1)
        if fits and looked_at in self._recorded:
            return
        documents = [d for d in map(_documents, batches) if d is not None]
        first = batches[0]
        room = max(room_for(max(documents)), self.room) if documents else None
        adds = len(batches) > 1 or (fit is not None and fit.adds)
        fit = Fit(tuple(first.tokens.shape), room, first.max_seqlen, adds)
        if odd := next((b for b in batches if not fit.holds(b)), None):
            raise TercetError(
                f"a micro-batch of tokens {list(odd.tokens.shape)} beside one of {list(first.tokens.shape)} in one "
                "step: a CUDA graph has one shape; train with --train.cuda-graph off"
            )
        self._record(fit, first, looked_at)

    def _record(self, fit: Fit, batch: MicroBatch, looked_at: bool) -> None:
        """Recordings for these sizes, of passes with layers looked at as well once there has been one."""
        kinds = sorted({*self._recorded, looked_at})
        nothing: list[Tensor | None] = [None] * len(self._trained)
        self._clear()
        bounds = None
        if fit.room is not None:
            self.room = fit.room
            bounds = torch.zeros(fit.room + 1, dtype=torch.int32, device=self._device)
        tokens, targets = torch.empty_like(batch.tokens), torch.empty_like(batch.targets)
        self._fit, self._batch = fit, MicroBatch(tokens, targets, bounds, fit.max_seqlen)
        self._fill(batch)
        reached = [False] * len(self._trained)
        for kind in kinds:
            self._look(kind)
            for _ in range(_WARM_UPS):
                self._recorder.warm_up(self._pass)
            reached = [p.grad is not None for p in self._trained]
            self._attach(nothing)
        added = nothing
        if fit.adds:
            added = [torch.zeros_like(p) if r else None for p, r in zip(self._trained, reached, strict=True)]
        for kind in kinds:
            self._look(kind)
            self._attach(added)
            self._recorded[kind] = self._recorder.record(self._pass)
            made = [p.grad for p in self._trained]
            self._grads[kind] = added if fit.adds else [g if g is None else self._recorder.lend(g) for g in made]
            del made
            self._attach(nothing)  # the memory of what was made is free for the next recording
        self._look(looked_at)
        self._routes = [layer.routes for layer in self._layers]
        rows = " × ".join(map(str, fit.tokens)) + " tokens"
        documents = "" if fit.room is None else f", up to {fit.room} documents"
        kept = f"{self._recorder.kept_bytes / 2**30:.2f} GiB kept for them"
        variants = " and of those that are looked at" if len(kinds) > 1 else ""
        self._news.append(f"CUDA graph: passes of {rows}{documents} recorded{variants}, {kept}")

    def _pass(self) -> None:
        """What is recorded. All that it reads and all that outlives it stays in one place."""
        assert self._batch is not None
        with autocast(self._device, self._precision):
            loss = loss_sum(self._model, self._batch)
        (loss * self._scale).backward()
        self._loss.copy_(loss.detach())
        if self._sums is not None and self._stats[0].enabled:
            self._sums.copy_(torch.stack([s.sums(self._device) for s in self._stats]))
            for stats in self._stats:
                stats.reset()

    def _fill(self, batch: MicroBatch) -> None:
        assert self._batch is not None
        self._batch.tokens.copy_(batch.tokens)
        self._batch.targets.copy_(batch.targets)
        if self._batch.cu_seqlens is not None:
            fill_bounds(self._batch.cu_seqlens, batch.cu_seqlens, batch.tokens.numel())

    def _look(self, on: bool) -> None:
        for stats in self._stats:
            stats.enabled = on
            stats.reset()

    def _attach(self, grads: Sequence[Tensor | None]) -> None:
        for parameter, grad in zip(self._trained, grads, strict=True):
            parameter.grad = grad

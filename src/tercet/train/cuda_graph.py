"""Run the forward and backward passes of a step as a CUDA graph: one launch instead of about 1,600.

One graph holds the pass over one micro-batch, on static buffers for tokens, targets, document bounds, loss scale and
loss. A step fills the buffers and replays the graph once per micro-batch; norm, guard and update run as usual. A graph
fits one token shape and up to a fixed number of documents: unused capacity is empty documents at the end. More
documents, another shape, or the first step that collects layer statistics: all graphs are captured again, so there is
never more than one set.

Memory. All graphs share one pool and one stream, and eager warm-up passes only run while there is no graph, so a step
does not need its memory twice. The allocator reports the pool as free between replays although nothing else can use
it; `held_bytes` corrects for that. Validation and samples run outside the pool.

Gradients. With one micro-batch per step, each graph writes its gradients into the pool: nothing to clear or add.
Nothing keeps that memory alive; gradients are read between one replay and the next, so other graphs can reuse it. (A
single set for all graphs would be allocated at the peak of every graph but the first.) With several micro-batches,
gradients are added to buffers that a step clears first and that live as long as in eager execution.

Reproducibility. A replay is bitwise identical to the same launches in eager execution. But how some sums are split
(gradients of compressed keys, FlashAttention's deterministic dQ) depends on the number of documents, which is the
capacity here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tercet.config.schema import AUTO_GRAPH_TOKENS
from tercet.errors import TercetError
from tercet.model.attention import Attention
from tercet.parallel.strategy import Single
from tercet.telemetry.events import Event, GraphCaptureFailed, Noted
from tercet.train.step import MicroBatch, Phase, Progress, autocast, loss_sum, run_eager

MIN_CAPACITY = 16
# The first pass compiles; the second adds to existing gradients, which is different code.
_WARM_UPS = 2


def capacity_for(documents: int) -> int:
    """Document capacity of the bounds buffer: a power of two, so that graphs are rarely captured again."""
    return max(MIN_CAPACITY, 1 << (documents - 1).bit_length())


def fill_bounds(buffer: Tensor, bounds: Tensor, tokens: int) -> None:
    """Copy the document bounds and fill the rest with empty documents, without waiting for the device."""
    count = bounds.shape[0]
    buffer[:count].copy_(bounds)
    buffer[count:].fill_(tokens)


class GraphCapturer:
    """Captures GPU work as CUDA graphs, following PyTorch's notes on whole-network capture.

    held_bytes  used at the peak of a replay and not counted by the allocator
    pool_bytes  reserved on the device for all graphs
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for warm-up and capture: memory is only reused on its own stream, and gradients are accumulated
        # on the stream that first accumulated them.
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self.held_bytes = self.pool_bytes = 0

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it as it will be captured, so that everything is compiled and every library has its workspace."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture it without executing it. Shares memory with the graphs captured since the last `reset`."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # an object freed during a capture can break it
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        gc_was_enabled = gc.isenabled()
        gc.disable()
        first: Exception | None = None
        try:
            # thread_local: the loader pins memory and saves copy tensors in other threads meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    run()
                except Exception as error:
                    first = error  # a failed capture ends with another error, which hides it
                    raise
        except Exception as error:
            cause = first or error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            summary = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
            raise TercetError(
                f"a step could not be captured as a CUDA graph ({summary}): "
                "--train.cuda_graph off launches kernel by kernel"
            ) from cause
        finally:
            torch.cuda.set_stream(current)  # PyTorch stays on the capture stream if the capture fails
            if gc_was_enabled:
                gc.enable()
        self._graphs.append(graph)
        self.pool_bytes += torch.cuda.memory_reserved(self._device) - reserved
        self.held_bytes = max(self.held_bytes, torch.cuda.max_memory_allocated(self._device) - allocated)
        # From here on the allocator's peak is what lives outside the pool; the total adds held_bytes.
        torch.cuda.reset_peak_memory_stats(self._device)
        return graph

    def borrow(self, output: Tensor) -> Tensor:
        """An alias of a graph's output that does not keep its memory alive. Valid until the next replay."""
        if output.dtype != torch.float32:  # the array interface has no bf16; such a tensor keeps its memory
            return output
        alias = torch.as_tensor(_ArrayInterface(output), device=output.device)
        assert alias.data_ptr() == output.data_ptr()
        return alias

    def reset(self) -> None:
        """Free all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.held_bytes = self.pool_bytes = 0
        torch.cuda.empty_cache()


class _ArrayInterface:
    """The address of a tensor without a reference to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _size(tokens: Sequence[int]) -> str:
    return " × ".join(map(str, tokens)) + " tokens"


@dataclass(frozen=True)
class GraphShape:
    """What a set of graphs can be replayed for."""

    tokens: tuple[int, ...]
    capacity: int | None  # documents; None without document bounds
    max_seqlen: int | None
    accumulates: bool  # gradients are added to those of earlier micro-batches

    def fits(self, batch: MicroBatch) -> bool:
        if tuple(batch.tokens.shape) != self.tokens or batch.max_seqlen != self.max_seqlen:
            return False
        documents = _documents(batch)
        return documents is None if self.capacity is None else documents is not None and documents <= self.capacity


def _documents(batch: MicroBatch) -> int | None:
    return None if batch.cu_seqlens is None else int(batch.cu_seqlens.shape[0]) - 1


class StepGraph:
    """A StepExecutor that captures a model's passes on first use and replays them.

    `auto`: only small micro-batches, and if they cannot be captured, fall back to eager execution and log it;
    otherwise that is an error.
    """

    def __init__(self, model: nn.Module, precision: str, capturer: GraphCapturer | None = None, *, auto: bool) -> None:
        self._model, self._precision, self._auto = model, precision, auto
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._device = device = self._trained[0].device
        self._capturer = capturer or GraphCapturer(device)
        self._layers = [m for m in model.modules() if isinstance(m, Attention)]
        self._stats = [m.stats for m in self._layers if m.spec.sparse]
        self._scale, self._loss = torch.ones((), device=device), torch.zeros((), device=device)
        self._stat_sums = torch.stack([s.sums(device) for s in self._stats]) if self._stats else None
        self._shape: GraphShape | None = None
        self._buffers: MicroBatch | None = None
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether statistics are collected
        self._grads: dict[bool, list[Tensor | None]] = {}  # by the same key: where a replay leaves the gradients
        self._routes: list[dict] = []
        self._gave_up = False
        self._events: list[Event] = []
        # Largest document capacity so far. Saved in checkpoints, because bits may depend on it.
        self.capacity = 0

    @property
    def held_bytes(self) -> int:
        """Memory that replays use and the allocator does not count."""
        return self._capturer.held_bytes

    def reset(self) -> None:
        """Drop the graphs: the next step captures new ones, or tries to if captures have failed."""
        self._clear()
        self._shape, self._gave_up = None, False

    def take_events(self, step: int = 0) -> list[Event]:
        """What was captured or failed to be captured since the last call, as events of this step."""
        taken = [replace(event, step=step) for event in self._events]
        self._events.clear()
        return taken

    def run(
        self, batches: Sequence[MicroBatch], scale: Tensor, phase: Phase, progress: Progress | None = None
    ) -> Tensor:
        """See StepExecutor. Only capturing waits for the device."""
        with_stats = any(s.enabled for s in self._stats)
        self._scale.copy_(scale)
        if not self._try_prepare(batches, with_stats):
            return run_eager(self._model, batches, scale, self._precision, Single(), phase, progress)
        assert self._shape is not None
        grads = self._grads[with_stats]
        total, stat_sums = torch.zeros_like(self._loss), None
        for i, batch in enumerate(batches):
            with phase("passes"):
                if i == 0 and self._shape.accumulates:
                    torch._foreach_zero_([g for g in grads if g is not None])
                self._fill(batch)
                self._graphs[with_stats].replay()
                total += self._loss
                if with_stats and self._stat_sums is not None:
                    stat_sums = self._stat_sums.clone() if stat_sums is None else stat_sums + self._stat_sums
                # the last Python call of a layer may have been a sample
                for layer, routes in zip(self._layers, self._routes, strict=True):
                    layer.routes = routes
        if stat_sums is not None:
            for stats, row in zip(self._stats, stat_sums, strict=True):
                stats.add(row)
        self._set_grads(grads)
        return total

    def _try_prepare(self, batches: Sequence[MicroBatch], with_stats: bool) -> bool:
        """Whether the batches can be replayed. Nothing has been computed from them yet.

        After a capture that CUDA itself aborted, PyTorch does not free what the capture had allocated.
        """
        if self._gave_up or (self._auto and batches[0].tokens.numel() > AUTO_GRAPH_TOKENS):
            return False
        try:
            self._prepare(batches, with_stats)
        except (TercetError, torch.OutOfMemoryError) as error:
            if not self._auto:
                raise
            failure = (str(error).strip().splitlines() or [type(error).__name__])[0]
        else:
            return True
        # The exception is gone here, and with it the frames that kept tensors alive.
        self._gave_up = True
        self._events.append(GraphCaptureFailed(step=0, reason=failure))
        gc.collect()
        self._clear()
        self._enable_stats(with_stats)
        return False

    def _clear(self) -> None:
        self._graphs, self._grads, self._buffers = {}, {}, None
        self._set_grads(None)
        self._capturer.reset()

    def _prepare(self, batches: Sequence[MicroBatch], with_stats: bool) -> None:
        shape = self._shape
        fits = shape is not None and all(map(shape.fits, batches)) and (shape.accumulates or len(batches) == 1)
        if fits and with_stats in self._graphs:
            return
        documents = [d for d in map(_documents, batches) if d is not None]
        first = batches[0]
        capacity = max(capacity_for(max(documents)), self.capacity) if documents else None
        accumulates = len(batches) > 1 or (shape is not None and shape.accumulates)
        shape = GraphShape(tuple(first.tokens.shape), capacity, first.max_seqlen, accumulates)
        if other := next((b for b in batches if not shape.fits(b)), None):
            raise TercetError(
                f"micro-batches of {list(other.tokens.shape)} and {list(first.tokens.shape)} tokens in one step: "
                "a CUDA graph needs one shape; train with --train.cuda_graph off"
            )
        self._capture(shape, first, with_stats)

    def _capture(self, shape: GraphShape, batch: MicroBatch, with_stats: bool) -> None:
        """Capture graphs of this shape: without statistics, with them, or both once both have been used."""
        variants = sorted({*self._graphs, with_stats})
        self._clear()
        bounds = None
        if shape.capacity is not None:
            self.capacity = shape.capacity
            bounds = torch.zeros(shape.capacity + 1, dtype=torch.int32, device=self._device)
        tokens, targets = torch.empty_like(batch.tokens), torch.empty_like(batch.targets)
        self._shape, self._buffers = shape, MicroBatch(tokens, targets, bounds, shape.max_seqlen)
        self._fill(batch)
        has_grad = self._warm_up(variants)
        accumulators: list[Tensor | None] | None = None
        if shape.accumulates:
            accumulators = [torch.zeros_like(p) if h else None for p, h in zip(self._trained, has_grad, strict=True)]
        for variant in variants:
            self._enable_stats(variant)
            self._set_grads(accumulators)
            self._graphs[variant] = self._capturer.capture(self._pass)
            self._grads[variant] = accumulators or self._borrow_grads()
            self._set_grads(None)  # the next graph can reuse the memory of these gradients
        self._enable_stats(with_stats)
        self._routes = [layer.routes for layer in self._layers]
        self._events.append(Noted(step=0, text=self._describe(shape, len(variants))))

    def _warm_up(self, variants: Sequence[bool]) -> list[bool]:
        """Run the passes that will be captured. Returns which parameters got a gradient."""
        has_grad = [False] * len(self._trained)
        for variant in variants:
            self._enable_stats(variant)
            for _ in range(_WARM_UPS):
                self._capturer.warm_up(self._pass)
            has_grad = [p.grad is not None for p in self._trained]
            self._set_grads(None)
        return has_grad

    def _describe(self, shape: GraphShape, variants: int) -> str:
        documents = "" if shape.capacity is None else f", up to {shape.capacity} documents"
        statistics = " (with and without statistics)" if variants > 1 else ""
        pool = f"{self._capturer.pool_bytes / 2**30:.2f} GiB reserved"
        return f"CUDA graph: captured passes of {_size(shape.tokens)}{documents}{statistics}, {pool}"

    def _pass(self) -> None:
        """What a graph contains. Everything it reads and everything that outlives it has a fixed address."""
        assert self._buffers is not None
        with autocast(self._device, self._precision):
            loss = loss_sum(self._model, self._buffers)
        (loss * self._scale).backward()
        self._loss.copy_(loss.detach())
        if self._stat_sums is not None and self._stats[0].enabled:
            self._stat_sums.copy_(torch.stack([s.sums(self._device) for s in self._stats]))
            for stats in self._stats:
                stats.reset()

    def _fill(self, batch: MicroBatch) -> None:
        assert self._buffers is not None
        self._buffers.tokens.copy_(batch.tokens)
        self._buffers.targets.copy_(batch.targets)
        if self._buffers.cu_seqlens is not None:
            fill_bounds(self._buffers.cu_seqlens, batch.cu_seqlens, batch.tokens.numel())

    def _enable_stats(self, on: bool) -> None:
        for stats in self._stats:
            stats.enabled = on
            stats.reset()

    def _set_grads(self, grads: Sequence[Tensor | None] | None) -> None:
        for parameter, grad in zip(self._trained, grads or [None] * len(self._trained), strict=True):
            parameter.grad = grad

    def _borrow_grads(self) -> list[Tensor | None]:
        """Where the graph just captured leaves the gradients, without keeping that memory alive."""
        return [None if p.grad is None else self._capturer.borrow(p.grad) for p in self._trained]

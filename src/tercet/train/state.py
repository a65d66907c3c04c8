"""The training state: model, optimizer, counters and random generators; built, resumed from a checkpoint, saved.

`Interval` collects what is measured between two log lines, and `Stages` prepares the state for each of train.stages.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tercet.config.schema import RunConfig, uses_cuda_graph
from tercet.config.sections import SelectorConfig
from tercet.data.loader import Loader
from tercet.errors import UsageError
from tercet.model.attention import Attention
from tercet.model.config import ModelConfig
from tercet.model.cost import flops_per_token
from tercet.model.selector import BlockSelector, rotated_channels
from tercet.model.transformer import Block, Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Strategy
from tercet.parse import one_line_errors
from tercet.telemetry.events import StageStarted
from tercet.train import checkpoint, manifest, resume
from tercet.train.cuda_graph import StepGraph
from tercet.train.optim import build_optimizer
from tercet.train.step import NonFiniteGuard, StepResult


class Measured(NamedTuple):
    """One step's values, on the host."""

    step: int
    loss: float
    grad_norm: float
    nonfinite: bool


class Interval:
    """Measurements since the last log line. Losses stay on the device until `read`; times are the host's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read: list[Measured] = []  # already read, e.g. for a checkpoint between two log lines
        self._unread: list[tuple[int, StepResult]] = []
        self.start_clock()

    def add(self, step: int, result: StepResult) -> None:
        """Add a step without waiting for it."""
        self._unread.append((step, result))
        self.steps_timed += 1

    def read(self) -> list[Measured]:
        """All steps since the last `clear`, in one copy from the device."""
        if self._unread:
            rows = [torch.stack([x.double() for x in (r.loss, r.grad_norm, r.nonfinite)]) for _, r in self._unread]
            for (step, _), (loss, norm, nonfinite) in zip(self._unread, torch.stack(rows).tolist(), strict=True):
                self._read.append(Measured(step, loss, norm, bool(nonfinite)))
            self._unread.clear()
        return list(self._read)

    def seconds_per_step(self) -> float:
        """Mean over the interval without excluded time. Call after `read`, which waits for the device."""
        return (time.perf_counter() - self._started - self._excluded) / max(1, self.steps_timed)

    def clear(self) -> None:
        """Start the next interval."""
        self._read.clear()
        self._unread.clear()
        self.start_clock()

    def start_clock(self) -> None:
        """Start timing, after building, loading and resuming."""
        self.steps_timed = 0  # by this process; a resumed interval also holds steps from the checkpoint
        self._excluded, self._started = 0.0, time.perf_counter()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Wraps work that does not count as training time: validation, samples, saving."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def state_dict(self) -> list[list[Any]]:
        """Steps measured but not logged yet, so that a resumed run logs the same interval. Waits for the device."""
        # JSON has no nan; repr keeps every float exactly.
        return [[m.step, repr(m.loss), repr(m.grad_norm), m.nonfinite] for m in self.read()]

    def load_state_dict(self, state: list[list[Any]]) -> None:
        self._read = [Measured(step, float(loss), float(norm), bad) for step, loss, norm, bad in state]


@dataclass
class TrainState:
    """Everything that training changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: NonFiniteGuard
    interval: Interval
    device: torch.device
    step: int = 0  # optimizer updates so far
    tokens: int = 0  # tokens seen in them, over all ranks
    cursor: dict[str, Any] | None = None  # data position after the last batch consumed
    parent: dict[str, Any] | None = None  # the checkpoint named by train.init_from
    graph: StepGraph | None = None  # runs the passes as CUDA graphs, if enabled

    @property
    def held_bytes(self) -> int:
        """Device memory that CUDA graphs use and the allocator does not count."""
        return 0 if self.graph is None else self.graph.held_bytes

    def run_state(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """State that is the same on every rank, and the run's configuration, for JSON. Waits for the device."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.cursor,
            "guard": self.guard.state_dict(),
            "interval": self.interval.state_dict(),
            "parent": self.parent,
            "graph_room": 0 if self.graph is None else self.graph.capacity,
            # The learning-rate schedule follows from config and step; it has no state.
            "config": config,
        }

    def rank_state(self) -> dict[str, Any]:
        """State that differs between ranks, for JSON."""
        return {"rng": capture_rng(self.device)}


def build_state(
    config: RunConfig, device: torch.device, strategy: Strategy, start: resume.FoundCheckpoint | None
) -> TrainState:
    """A new state, or the one saved in the checkpoint `start`."""
    use_graph = uses_cuda_graph(config, device.type)  # raises before anything is built
    model = strategy.build_model(lambda: _build_model(config), device)
    if config.train.selector.only:
        freeze_all_but_selectors(model)  # before ranks decide which gradients to exchange
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    apply_activation_checkpointing(blocks, config.train.activation_checkpointing)
    if uses_compile(config, device):
        compile_blocks(model, config.train.activation_checkpointing)
    model = strategy.prepare(model)
    configure_selectors(model, config.stages[0])
    optimizer = build_optimizer(model, config.train)
    guard = NonFiniteGuard(device, config.train.max_skipped)
    state = TrainState(model, optimizer, guard, Interval(device), device)
    if use_graph:
        state.graph = StepGraph(model, config.train.precision, auto=config.train.cuda_graph == "auto")
    if start is not None:
        _load_checkpoint(state, start, strategy)
    elif config.train.init_from is not None:
        _load_initial_weights(state, config)
    return state


def _build_model(config: RunConfig) -> nn.Module:
    """The model with its initial weights; without them if the default device is meta: the strategy draws them later.

    Built on the meta device: layers also draw weights in their constructors, which takes 14 seconds for `350m`.
    """
    device = torch.get_default_device()
    with torch.device("meta"):
        model = Transformer(config.model)
    torch.manual_seed(config.run.seed)  # the same on all ranks, so that they draw the same weights
    if device.type != "meta":
        model.to_empty(device=device)
        model.init_weights()
    return model


def freeze_all_but_selectors(model: nn.Module) -> None:
    """train.selector.only: all other parameters are frozen."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".selector." in name)
    for module in model.modules():
        if isinstance(module, Block):
            module.frozen = True


def configure_selectors(model: nn.Module, config: RunConfig) -> None:
    """Settings of train.selector. The loss is a mean over the step's micro-batches, like the loss of the model."""
    for module in model.modules():
        if isinstance(module, BlockSelector):
            module.weight = 1.0 / config.accumulation
        if isinstance(module, Transformer):
            module.selector_every = config.train.selector.every


def start_stage(state: TrainState, config: RunConfig) -> None:
    """Prepare for the stage of `config` (RunConfig.at_step), as a new process would: what was compiled or captured for
    another length or RoPE base is dropped."""
    for module in state.model.modules():
        if isinstance(module, Attention | Transformer):
            module.rotary.theta = config.model.rope_theta
        if isinstance(module, BlockSelector) and module.rotary is not None:
            module.rotary.theta = config.model.rope_theta
        if isinstance(module, Transformer):
            module.config = config.model
    configure_selectors(state.model, config)
    if uses_compile(config, state.device):
        torch._dynamo.reset()  # it would compile for any length, which is slower
    if state.graph is not None:
        state.graph.reset()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()  # blocks of other sizes would stay reserved


class Stages:
    """Where a run is in its stages. Without train.stages, the whole run is one stage."""

    def __init__(
        self, run: RunConfig, state: TrainState, open_loader: Callable[[RunConfig, int | None], Loader]
    ) -> None:
        """open_loader: batches of a stage after the state's cursor; called with the stage's configuration and, if the
        run has stages, the number of its steps that are left."""
        self._run, self._state, self._open_loader = run, state, open_loader
        self._enter()

    def _enter(self) -> None:
        run, step = self._run, self._state.step
        self.index = run.stage_index(step + 1)
        self.config = run.stages[self.index]
        if run.train.stages:
            start_stage(self._state, self.config)
        self.loader = self._open_loader(self.config, self.last_step - step if run.train.stages else None)

    @property
    def last_step(self) -> int:
        """Of the current stage."""
        return self._run.train.stage_ends[self.index]

    @property
    def is_over(self) -> bool:
        """Whether the next step belongs to the next stage."""
        return self._run.stage_index(self._state.step + 1) != self.index

    def advance(self) -> None:
        """Change to the stage of the next step. Its loader continues at the cursor: what was prefetched for this stage
        is dropped, and read again at the new length."""
        self.loader.close()
        self._enter()

    def event(self) -> StageStarted | None:
        """The start of the current stage; None without train.stages."""
        if not self._run.train.stages:
            return None
        train, config, stages = self._run.train, self.config, self._run.stages
        later = zip(train.stage_steps[self.index + 1 :], stages[self.index + 1 :], strict=True)
        return StageStarted(
            step=self.last_step - train.stage_steps[self.index], stage=self.index + 1, stages=len(stages),
            last_step=self.last_step, seq_len=config.data.seq_len, micro_batch=config.train.micro_batch,
            tokens_per_step=config.train.tokens_per_step, accumulation=config.accumulation,
            rope_theta=config.model.rope_theta,
            later_steps=sum(steps * step_flops(stage) for steps, stage in later) / step_flops(config),
        )  # fmt: skip


def step_flops(stage: RunConfig) -> float:
    """FLOPs of a step of a stage."""
    only = stage.train.selector.only
    return stage.train.tokens_per_step * flops_per_token(stage.model, stage.data.seq_len, selectors_only=only)


def set_teacher(model: nn.Module, config: SelectorConfig, step: int) -> None:
    """Set which blocks learned selectors learn from in this step (train.selector.teacher)."""
    teacher = "all" if step < config.all_until else config.teacher
    for module in model.modules():
        if isinstance(module, BlockSelector):
            module.teacher = teacher


def compile_blocks(model: nn.Module, activation_checkpointing: str) -> None:
    """Compile the loss and each block; all blocks share the compiled code.

    Without activation checkpointing, layers recompute their gated sums, which saves a sixteenth of the activation
    memory.
    """
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.keep_sum = activation_checkpointing != "none"
    model.compiled = True  # type: ignore[assignment]
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    for block in blocks:
        block.compile()


def uses_compile(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: on request, and by default on a GPU."""
    if config.parallel.strategy == "cp":
        return False
    return config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")


def _load_checkpoint(state: TrainState, start: resume.FoundCheckpoint, strategy: Strategy) -> None:
    checkpoint.load_tensors(start.path, state.model, state.optimizer)
    saved = start.run_state
    rank_file = start.path / manifest.rank_file(strategy.rank)
    fix = "restore it from a backup, or resume from an earlier checkpoint"
    with one_line_errors(manifest.CheckpointError, f"{start.path} has a value of the wrong type: {fix}"):
        state.step, state.tokens = int(saved["step"]), int(saved["tokens"])
        state.cursor, state.parent = saved["data"], saved["parent"]
        state.guard.load_state_dict(saved["guard"])
        state.interval.load_state_dict(saved["interval"])
        if state.graph is not None:  # missing in old checkpoints
            state.graph.capacity = int(saved.get("graph_room", 0))
        if rank_file.exists():  # with more ranks than were saved, the new ones keep their seed
            restore_rng(manifest.read_json(rank_file)["state"]["rng"], state.device)


def _load_initial_weights(state: TrainState, config: RunConfig) -> None:
    """Load weights, or weights and moments, of another run, but not its step and data cursor."""
    path = Path(config.train.init_from or "")
    optimizer = state.optimizer if config.train.init_state == "optimizer" else None
    if path.suffix == ".safetensors":
        if optimizer is not None:
            raise UsageError(f"train.init_from={path} holds weights only: use --train.init_state weights")
        checkpoint.load_weights_file(path, state.model)
        state.parent = {"path": str(path)}
        return
    found = resume.find_initial(path, verify=config.checkpoint.verify)
    damaged = f"{found.path}: {manifest.RUN_STATE} is damaged: restore it from a backup"
    with one_line_errors(manifest.CheckpointError, damaged):
        _check_rotation(found.path, found.run_state["config"]["model"], config.model)
        state.parent = {"path": str(found.path), **{k: found.run_state[k] for k in ("step", "tokens")}}
    checkpoint.load_tensors(found.path, state.model, optimizer)


def _check_rotation(path: Path, saved: Mapping[str, Any], model: ModelConfig) -> None:
    """Learned selectors have the same shapes however many channels they rotate."""
    if saved.get("selector") != "learned" or model.selector != "learned":
        return
    was = rotated_channels(saved["selector_dim"], saved.get("selector_rotary", 0))  # missing in old checkpoints
    now = rotated_channels(model.selector_dim, model.selector_rotary)
    if was != now:
        raise UsageError(
            f"the learned selectors rotate {now} channels, and those in train.init_from={path} were trained with "
            f"{was}: use --model.selector_rotary {was}"
        )


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The states of torch's generators (CPU, this rank's device), for JSON. Nothing in training draws from others."""
    state = {"torch": _encode(torch.get_rng_state())}
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restore the generators. A state saved on a CPU has none for a GPU, which then keeps its seed."""
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

"""The training state: model, optimizer, counters and random generators; built, resumed from a checkpoint, saved."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tercet.config.schema import RunConfig, uses_cuda_graph
from tercet.config.sections import SelectorConfig
from tercet.errors import UsageError
from tercet.model.attention import Attention
from tercet.model.config import ModelConfig
from tercet.model.selector import BlockSelector, rotated_channels
from tercet.model.transformer import Block, Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Strategy
from tercet.parse import one_line_errors
from tercet.train import checkpoint, manifest, resume
from tercet.train.cuda_graph import StepGraph
from tercet.train.device import device_name
from tercet.train.graph_choice import CudaClock, GraphChoice
from tercet.train.interval import Interval
from tercet.train.optim import build_optimizer
from tercet.train.step import NonFiniteGuard


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
    # What earlier processes with CUDA graphs saved: document capacity, and the decisions of train.cuda_graph=auto
    graph_capacity: int = 0
    graph_choices: dict[str, bool] = field(default_factory=dict)

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
            "graph_room": self.graph_capacity if self.graph is None else self.graph.capacity,
            # a copy: the next steps may decide while a background thread writes this
            "graph_choices": dict(self.graph.choice.made if self.graph and self.graph.choice else self.graph_choices),
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
    seed_all(config.run.seed)
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
    guard = NonFiniteGuard(device, config.train.max_skipped, config.train.max_skipped_in_row)
    state = TrainState(model, optimizer, guard, Interval(device), device)
    if use_graph:
        auto = config.train.cuda_graph == "auto"
        choice = GraphChoice(CudaClock(device), device_name(device)) if auto else None
        state.graph = StepGraph(model, config.train.precision, may_fail=auto, choice=choice)
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
    seed_all(config.run.seed)
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
            module.weight = config.train.selector.weight / config.accumulation
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
        # missing in old checkpoints
        state.graph_capacity, state.graph_choices = int(saved.get("graph_room", 0)), saved.get("graph_choices", {})
        if state.graph is not None:
            state.graph.capacity = state.graph_capacity
            if state.graph.choice is not None:
                state.graph.choice.made |= state.graph_choices
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
    with resume.damaged_state(found):
        saved = found.run_state["config"]["train"].get("optimizer", "adamw")  # missing in old checkpoints
        if optimizer is not None and saved != config.train.optimizer:
            raise UsageError(
                f"train.init_state=optimizer, but {found.path} has the state of {saved}, not "
                f"{config.train.optimizer}: use --train.init_state weights, or --train.optimizer {saved}"
            )
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


def seed_all(seed: int) -> None:
    """Seed every generator, the same on all ranks, so that they draw the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The states of all random generators (Python, numpy, torch, this rank's device), for JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restore all generators. A state saved on a CPU has none for a GPU, which then keeps its seed."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

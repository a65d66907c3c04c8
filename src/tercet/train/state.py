"""Everything a run is at one moment, built from its config or from a checkpoint, and what of it is saved."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tercet.config.schema import RunConfig
from tercet.errors import UsageError
from tercet.model.attention import NativeSparseAttention
from tercet.model.transformer import Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Strategy
from tercet.train import manifest, resume
from tercet.train.cuda_graph import StepGraph
from tercet.train.interval import Interval
from tercet.train.optim import build_optimizer
from tercet.train.step import NonFiniteGuard


@dataclass
class TrainState:
    """The model in training and where it has got to."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    guard: NonFiniteGuard
    interval: Interval
    device: torch.device
    step: int = 0  # optimizer updates made
    tokens: int = 0  # seen in them, over all ranks
    cursor: dict[str, Any] | None = None  # of the last batch consumed
    parent: dict[str, Any] | None = None  # the checkpoint that train.init_from named
    graph: StepGraph | None = None  # the passes of a step, where they are recorded

    @property
    def held_bytes(self) -> int:
        """Memory of the device that a step uses and that the allocator does not count."""
        return 0 if self.graph is None else self.graph.held_bytes

    def run_state(self, config: RunConfig) -> dict[str, Any]:
        """What is the same on every rank, JSON-able. Waits for the device."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "data": self.cursor,
            "guard": self.guard.state_dict(),
            "interval": self.interval.state_dict(),
            "parent": self.parent,
            "graph_room": 0 if self.graph is None else self.graph.room,
            # The schedule is a function of config and step; nothing else of it exists to be saved.
            "config": config.model_dump(mode="json"),
        }

    def rank_state(self) -> dict[str, Any]:
        """What differs between ranks, JSON-able."""
        return {"rng": capture_rng(self.device)}


def build_state(config: RunConfig, device: torch.device, strategy: Strategy, start: resume.Found | None) -> TrainState:
    """A fresh state, or the one of the checkpoint `start`."""
    recorded = records(config, device)  # refused before anything is built
    seed_all(config.run.seed)
    model = strategy.build_model(lambda: _draw(config), device)
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    apply_activation_checkpointing(blocks, config.train.activation_checkpointing)
    if compiles(config, device):
        compile_blocks(model, config.train.activation_checkpointing)
    model = strategy.prepare(model)
    optimizer = build_optimizer(model, config.train)
    guard = NonFiniteGuard(device, config.train.max_skipped, config.train.max_skipped_in_row)
    state = TrainState(model, optimizer, guard, Interval(device), device)
    if recorded:
        state.graph = StepGraph(model, config.train.precision, may_fail=config.train.cuda_graph == "auto")
    if start is not None:
        _take_up(state, start, strategy)
    elif config.train.init_from is not None:
        _initialise(state, config)
    return state


def _draw(config: RunConfig) -> nn.Module:
    """The model with its first weights. Building draws as well, though not on the meta device: the generator is set
    again after it, so that weights are the same wherever, and whenever, they are drawn."""
    model = Transformer(config.model)
    seed_all(config.run.seed)
    if not any(p.is_meta for p in model.parameters()):
        model.init_weights()
    return model


def compile_blocks(model: nn.Module, activation_checkpointing: str) -> None:
    """The loss, and the model block by block: the code of one serves all. A block that is not made again as a whole
    makes its gated sums again, for a sixteenth of the activations' memory."""
    for layer in model.modules():
        if isinstance(layer, NativeSparseAttention):
            layer.keep_sum = activation_checkpointing != "none"
    model.compiled = True  # type: ignore[assignment]
    blocks: nn.ModuleList = model.blocks  # type: ignore[assignment]
    for block in blocks:
        block.compile()


def compiles(config: RunConfig, device: torch.device) -> bool:
    """Whether blocks are compiled: asked for, or on a GPU."""
    if config.parallel.strategy == "cp":
        if config.train.compile == "on":
            raise UsageError("train.compile=on with parallel.strategy=cp: blocks that exchange keys are not compiled")
        return False
    return config.train.compile == "on" or (config.train.compile == "auto" and device.type == "cuda")


def records(config: RunConfig, device: torch.device) -> bool:
    """Whether a step's passes are recorded as a CUDA graph: asked for, or allowed where it can be done."""
    asked, strategy = config.train.cuda_graph, config.parallel.strategy
    if asked == "off":
        return False
    reason = None
    if device.type != "cuda":
        reason = f"on a {device.type}: CUDA graphs are a GPU's; take --train.cuda-graph off, or auto"
    elif strategy != "single":
        reason = (
            f"with parallel.strategy={strategy}: the ranks' exchange is not recorded; take --train.cuda-graph off, "
            "or --parallel.strategy single"
        )
    if reason is not None and asked == "on":
        raise UsageError(f"train.cuda_graph=on {reason}")
    return reason is None


def _take_up(state: TrainState, start: resume.Found, strategy: Strategy) -> None:
    resume.load_tensors(start.path, state.model, state.optimizer)
    saved = start.run_state
    state.step, state.tokens = int(saved["step"]), int(saved["tokens"])
    state.cursor, state.parent = saved["data"], saved["parent"]
    state.guard.load_state_dict(saved["guard"])
    state.interval.load_state_dict(saved["interval"])
    if state.graph is not None:
        state.graph.room = int(saved.get("graph_room", 0))  # unknown to checkpoints from before there were graphs
    own = start.path / manifest.rank_file(strategy.rank)
    if own.exists():  # on more ranks than saved, the new ones keep their seed
        restore_rng(manifest.read_json(own)["state"]["rng"], state.device)


def _initialise(state: TrainState, config: RunConfig) -> None:
    """Weights, or weights and moments, of another run; its step and data cursor stay behind."""
    path = Path(config.train.init_from or "")
    moments = state.optimizer if config.train.init_state == "optimizer" else None
    if path.suffix == ".safetensors":
        if moments is not None:
            raise UsageError(f"train.init_from={path} holds weights only: use --train.init-state weights")
        resume.load_weights_file(path, state.model)
        state.parent = {"path": str(path)}
        return
    try:
        found = resume.choose(str(path), path, verify=config.checkpoint.verify)
    except manifest.CheckpointError as error:
        raise type(error)(f"train.init_from={path}: {error}") from None
    assert found is not None
    resume.load_tensors(found.path, state.model, moments)
    state.parent = {"path": str(found.path), **{k: found.run_state[k] for k in ("step", "tokens")}}


# ------------------------------------------------------------------------------------------------
# The state of every random generator, as JSON: Python's, numpy's, torch's, and this rank's device's.


def capture_rng(device: torch.device) -> dict[str, Any]:
    """All generator states, JSON-able."""
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
    """Put every generator back. A state saved on a CPU has none for a GPU, which then keeps its seed."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def seed_all(seed: int) -> None:
    """Seed every generator, on every rank alike: they draw the same weights."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

"""A model that is trained step by step, eagerly or as CUDA graphs; shared by the graph tests on CPU and GPU."""

from __future__ import annotations

import torch

from tercet.config.schema import RunConfig
from tercet.model.attention import Attention
from tercet.model.transformer import Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Single
from tercet.train.cuda_graph import GraphCapturer, StepGraph
from tercet.train.optim import build_optimizer
from tercet.train.state import compile_blocks
from tercet.train.step import MicroBatch, NonFiniteGuard, StepResult, train_step


def compile_counted(model: Transformer) -> list[object]:
    """Compile each block to one graph. Returns the list of graphs that were compiled, which grows as the model runs."""
    compiled: list[object] = []

    def count(module, inputs):  # type: ignore[no-untyped-def]
        compiled.append(module)
        return module.forward

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend=count, fullgraph=True)
    return compiled


class SteppedModel:
    """Uses the device and precision of the config, and a constant learning rate."""

    def __init__(self, config: RunConfig, *, seed: int, compiled: bool = False) -> None:
        self.config, self.device = config.train, torch.device(config.run.device)
        torch.manual_seed(seed)
        self.model = Transformer(config.model).to(self.device)
        apply_activation_checkpointing(self.model.blocks, self.config.activation_checkpointing)
        if compiled:
            compile_blocks(self.model, self.config.activation_checkpointing)
        self.optimizer = build_optimizer(self.model, self.config)
        self.guard = NonFiniteGuard(self.device, 100, 5)
        self.stats = [m.stats for m in self.model.modules() if isinstance(m, Attention) and m.spec.sparse]
        self.graph: StepGraph | None = None
        self.number = 0

    def use_graphs(self, capturer: GraphCapturer | None = None, *, auto: bool = False) -> None:
        """Run the following steps as graphs, captured by `capturer` or by CUDA."""
        self.capturer = capturer
        self.graph = StepGraph(self.model, self.config.precision, capturer, auto=auto)

    def logged(self, field: str) -> list[str]:
        """What the graph logged since the last call: the `text` of its notes, or the `reason` of failed captures."""
        assert self.graph is not None
        return [getattr(event, field) for event in self.graph.take_events() if hasattr(event, field)]

    def step(self, batches: list[MicroBatch], *, with_stats: bool = False) -> StepResult:
        self.number += 1
        for stats in self.stats:
            stats.enabled = with_stats
        return train_step(
            self.model, self.optimizer, batches, step=self.number, lr=self.config.lr, clip=1.0,
            precision=self.config.precision, guard=self.guard, strategy=Single(), executor=self.graph,
        )  # fmt: skip

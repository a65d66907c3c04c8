"""A model and its steps one by one, recorded or not: what tests of recordings on the CPU and on a GPU share."""

from __future__ import annotations

import torch

from tercet.config.schema import RunConfig
from tercet.model.attention import NativeSparseAttention
from tercet.model.transformer import Transformer
from tercet.parallel.activation_checkpointing import apply_activation_checkpointing
from tercet.parallel.strategy import Single
from tercet.train.cuda_graph import Records, StepGraph
from tercet.train.optim import build_optimizer
from tercet.train.state import compile_blocks
from tercet.train.step import MicroBatch, NonFiniteGuard, StepResult, train_step


class SteppedModel:
    """On the config's device, with its precision and its learning rate at every step."""

    def __init__(self, config: RunConfig, *, seed: int, compiled: bool = False) -> None:
        self.config, self.device = config.train, torch.device(config.run.device)
        torch.manual_seed(seed)
        self.model = Transformer(config.model).to(self.device)
        apply_activation_checkpointing(self.model.blocks, self.config.activation_checkpointing)
        if compiled:
            compile_blocks(self.model, self.config.activation_checkpointing)
        self.optimizer = build_optimizer(self.model, self.config)
        self.guard = NonFiniteGuard(self.device, 100, 5)
        self.stats = [m.stats for m in self.model.modules() if isinstance(m, NativeSparseAttention)]
        self.graph: StepGraph | None = None
        self.number = 0

    def record(self, recorder: Records | None = None, *, may_fail: bool = False) -> None:
        """From the next step on: with `recorder`, or as CUDA graphs."""
        self.recorder = recorder
        self.graph = StepGraph(self.model, self.config.precision, recorder, may_fail=may_fail)

    def step(self, batches: list[MicroBatch], *, looked_at: bool = False) -> StepResult:
        self.number += 1
        for stats in self.stats:
            stats.enabled = looked_at
        return train_step(
            self.model,
            self.optimizer,
            batches,
            step=self.number,
            lr=self.config.lr,
            clip=1.0,
            precision=self.config.precision,
            guard=self.guard,
            strategy=Single(),
            graph=self.graph,
        )

"""When a run is unwell: the rules, their thresholds, and what each does. The `health` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tercet.config.section import Section

Action = Literal["off", "warn", "halt"]


class HealthConfig(Section):
    """Each rule can be off, warn once per episode, or halt the run. Thresholds that verdicts use are the defaults."""

    gate_collapse: Action = "warn"
    """Gates of a layer put almost everything on one branch."""
    gate_collapse_share: float = Field(default=0.5, gt=0, le=1)
    """gate_collapse: share of (token, head) with one gate above 95% of the three."""
    dead_branch: Action = "warn"
    """A layer has stopped using one of its branches."""
    dead_branch_share: float = Field(default=0.01, ge=0, lt=1)
    """dead_branch: mean share of the gates below which a branch is dead."""
    selection_stuck: Action = "warn"
    """Selection reads only the forced blocks, or the same blocks for every token."""
    selection_forced_share: float = Field(default=0.98, gt=0, le=1)
    """selection_stuck: share of selected blocks that were forced."""
    selection_overlap: float = Field(default=0.9995, gt=0, le=1)
    """selection_stuck: mean share of the blocks a token chose freely that the token before it read too."""
    patience: int = Field(default=3, ge=1)
    """Log intervals in a row that gates, selection, throughput or data must look bad before their rule fires."""

    loss_spike: Action = "warn"
    """The loss jumped far above where it was."""
    loss_spike_nats: float = Field(default=0.5, gt=0)
    """loss_spike: nats above the median of the last loss_window steps..."""
    loss_spike_deviations: float = Field(default=8.0, gt=0)
    """loss_spike: ...and as many median deviations above it."""
    loss_window: int = Field(default=50, ge=8)
    """loss_spike: steps that the median is taken over."""
    nonfinite: Action = "warn"
    """A step's loss or gradients were not finite; train.max_skipped stops the run whatever this says."""
    zero_grad: Action = "warn"
    """The gradient norm of every step in a log interval was zero."""
    zero_grad_norm: float = Field(default=1e-12, ge=0)
    """zero_grad: norms at or below this are zero."""

    throughput_drop: Action = "warn"
    """Tokens per second fell far below this process's own median."""
    throughput_share: float = Field(default=0.6, gt=0, lt=1)
    """throughput_drop: share of the median below which it counts."""
    data_starvation: Action = "warn"
    """Steps wait for data."""
    data_wait_share: float = Field(default=0.2, gt=0, le=1)
    """data_starvation: share of the step time spent waiting."""
    fallback: Action = "warn"
    """A branch ran on a slower backend than this device has, unasked."""

    stall: Literal["off", "warn", "end"] = "warn"
    """No progress: warn dumps all stacks and goes on; end also ends the process, so that torchrun starts it again."""
    stall_seconds: float = Field(default=180.0, gt=0)
    """stall: never called before this many seconds without progress."""
    stall_factor: float = Field(default=5.0, ge=1)
    """stall: nor before this many times the median time between two log lines."""
    stall_start_seconds: float = Field(default=900.0, gt=0)
    """stall: the same for the time before the first log line, which may hold compilation."""

    doctor: bool = True
    """Examine device, kernels, disk and data in short form before training."""
    memory_every: int = Field(default=0, ge=0)
    """Steps between mem_step{N}.json files beside those of the start and step 1; 0 writes only these."""

    @model_validator(mode="after")
    def _floor(self) -> Self:
        if self.stall_start_seconds < self.stall_seconds:
            raise ValueError(
                f"stall_start_seconds={self.stall_start_seconds:g} is below stall_seconds={self.stall_seconds:g}: "
                "the first step is never the fastest; raise it"
            )
        return self

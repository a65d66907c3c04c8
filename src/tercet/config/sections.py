"""What all sections of a configuration share: frozen, typed, and no key that is not known."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A docstring under a field is its help text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


# ------------------------------------------------------------------------------------------------
# How a run learns, saves itself and speaks: the `train`, `checkpoint` and `log` sections.

Schedule = Literal["cosine", "wsd", "constant"]
Precision = Literal["auto", "bf16", "fp32"]
ActivationCheckpointing = Literal["none", "full", "selective"]
Switch = Literal["auto", "on", "off"]
InitState = Literal["weights", "optimizer"]


def resolved_precision(asked: str, device_type: str) -> str:
    """bf16 or fp32: what `auto` means on a device."""
    return asked if asked != "auto" else ("bf16" if device_type == "cuda" else "fp32")


class TrainConfig(Section):
    """The optimisation: how many steps, of how many tokens, at which learning rate, in which arithmetic."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer updates in the whole run; schedule, logs and checkpoints count in these."""
    tokens_per_step: int = Field(default=65536, ge=1)
    """Tokens per optimizer update, over all devices and accumulated micro-batches."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per device and forward pass; accumulation is derived from tokens_per_step."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate, reached after warmup_steps."""
    schedule: Schedule = "cosine"
    """cosine: falls to min_lr_ratio over the run; wsd: stable, then a decay at the end; constant: stays."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps of linear warm-up from 0 to lr."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """wsd only: share of the run, at its end, over which lr falls linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of lr."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW decay of matrices; norms, biases and other 1-D parameters have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    clip: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this global norm; 0 leaves them as they are."""

    precision: Precision = "auto"
    """Arithmetic of forward and backward; weights stay fp32. auto: bf16 on a GPU, fp32 on a CPU."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """none; selective: recompute what is cheap; full: recompute each block. Selected blocks are always kept."""
    compile: Switch = "auto"
    """torch.compile of each block; auto: on a GPU only (on a CPU it costs half a minute, for no gain)."""
    cuda_graph: Switch = "off"
    """Record forward and backward as a CUDA graph, for steps where the host is slower than the GPU. on: an error where
    it cannot be; auto: where it can be (one GPU, one rank), else without, said and counted."""

    val_every: int = Field(default=250, ge=0)
    """Steps between validations; 0 validates at the end only."""
    val_tokens: int = Field(default=262144, ge=0)
    """Tokens of each validation, the same ones every time, rounded up to whole passes of micro_batch sequences on each
    rank; 0 turns validation off."""
    sample_every: int = Field(default=0, ge=0)
    """Steps between text samples; 0 samples at the end only."""
    sample_tokens: int = Field(default=256, ge=0)
    """Tokens of each text sample; 0 turns samples off."""
    sample_prompt: str = "def "
    """What the text samples go on from."""
    sample_temperature: float = Field(default=0.7, ge=0)
    """Temperature of the text samples; 0 is greedy."""

    max_skipped: int = Field(default=100, ge=0)
    """Non-finite steps skipped in the whole run before it stops; 0 stops at the first."""
    max_skipped_in_row: int = Field(default=5, ge=0)
    """Non-finite steps skipped one after another before the run stops; 0 stops at the first."""

    init_from: str | None = None
    """Checkpoint folder, or .safetensors file, to start from: at step 0, with fresh data."""
    init_state: InitState = "weights"
    """What init_from gives: weights, or also the optimizer's moments (to go on at a longer data.seq_len)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{i}]={beta} is not in [0, 1): usual values are 0.9 and 0.95")
        if self.init_state == "optimizer" and self.init_from is None:
            raise ValueError(
                "init_state=optimizer without init_from: name the checkpoint folder that has the optimizer"
            )
        return self


class CheckpointConfig(Section):
    """When the run saves itself, and what it keeps."""

    every: int = Field(default=500, ge=0)
    """Steps between checkpoints; the last step is always saved; 0 saves at the end only."""
    keep: int = Field(default=3, ge=0)
    """Newest checkpoints kept; 0 keeps all."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for good; 0: none are."""
    async_save: bool = True
    """Write in the background while training goes on; false waits for each save."""
    failures_allowed: int = Field(default=0, ge=0)
    """Failed saves in a row that the run survives, each said and counted, before it stops."""
    verify: bool = True
    """Compare all checksums before anything is loaded."""
    allow_config_change: bool = False
    """Resume although settings that shape the trajectory (data, lr, ...) differ from the saved ones."""


class LogConfig(Section):
    """What the run says of itself, and how often."""

    every: int = Field(default=10, ge=1)
    """Steps between log lines: the moments at which the host waits for the device."""
    tensorboard: bool = True
    """Write TensorBoard files under tb/ in the run folder."""
    wandb: bool = False
    """Also tell Weights & Biases (needs the wandb extra)."""
    progress: Switch = "auto"
    """The live line; auto: on a terminal, plain lines elsewhere."""
    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Seconds between lines of heartbeat_rank{r}.jsonl."""


# ------------------------------------------------------------------------------------------------
# How the work is split over ranks: the `parallel` section.

StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "cp"]


class ParallelConfig(Section):
    """How the work is split over ranks, one rank per device. Ranks are started by torchrun."""

    strategy: StrategyName = "single"
    """One device, replicas (ddp), sharded weights (fsdp, hsdp) or a sharded sequence (cp)."""
    world_size: int = Field(default=1, ge=1)
    """Ranks in all; torchrun tells it, and a launch with another number than given here is refused."""

    static_graph: bool = True
    """ddp: the same parameters take part in every step, so that buckets are arranged once."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """ddp: megabytes of gradients per all-reduce."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """ddp: what gradients are sent as."""

    sharding: Literal["full", "grad_op"] = "full"
    """fsdp, hsdp: shard weights too, or gradients and optimizer only."""
    prefetch: int = Field(default=1, ge=0)
    """fsdp, hsdp: blocks whose weights are gathered ahead of time."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp, hsdp: what gradients are summed in over ranks."""
    shard_ranks: int = Field(default=0, ge=0)
    """hsdp: ranks that share one copy of the weights; 0: those of one machine."""

    context_ranks: int = Field(default=0, ge=0)
    """cp: ranks that share one sequence; 0: all."""
    context_weights: Literal["sharded", "replicated"] = "sharded"
    """cp: weights as under fsdp, over all ranks, or as under ddp."""
    context_fetch: Literal["documents", "blocks"] = "documents"
    """cp: fetch selected keys by whole documents, ahead of time, or chosen blocks only, at a round trip per layer."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Transport; auto: NCCL between GPUs, gloo between CPUs and between ranks that share GPUs."""
    share_gpus: bool = False
    """Let more ranks than a machine has GPUs share them, through gloo: slow, for trying out what takes several."""
    arrival_seconds: float = Field(default=300.0, gt=0)
    """How long ranks wait for each other at the start, before those missing are named."""
    first_step_seconds: float = Field(default=1800.0, gt=0)
    """Longest wait for other ranks until the first step is made: compilation and loading may differ."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for other ranks after that; a rank that is later is taken for stuck, and the run stops."""
    allow_single_rank: bool = False
    """Train on one GPU of a machine that has several."""

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        if self.strategy != "cp":
            return 1
        return self.context_ranks or self.world_size

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of them, that read different data."""
        return self.world_size // self.context

    @model_validator(mode="after")
    def _read_by_this_strategy(self) -> Self:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(f"world_size={self.world_size} with strategy=single: pick ddp or fsdp, or world_size=1")
        if self.share_gpus and self.backend == "nccl":
            raise ValueError("share_gpus=true with backend=nccl: NCCL needs a GPU for each rank, take backend=gloo")
        reads = _READS[self.strategy]
        if self.strategy == "cp":
            reads = reads + (_SHARDED if self.context_weights == "sharded" else _REPLICATED)
        for name in _ALL:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if name not in reads and value != default:
                readers = [s for s, names in _READS.items() if name in names]
                raise ValueError(
                    f"{name}={value} is not read by strategy={self.strategy}: drop it, or pick {' or '.join(readers)}"
                )
        for name, ranks in (("context_ranks", self.context), ("shard_ranks", self.shard_ranks or 1)):
            if self.world_size % ranks:
                choices = ", ".join(str(n) for n in range(1, self.world_size + 1) if self.world_size % n == 0)
                raise ValueError(f"{name}={ranks} does not divide world_size={self.world_size}: pick one of {choices}")
        return self


_REPLICATED = ("static_graph", "bucket_mb", "gradient_compression")
_SHARDED = ("sharding", "prefetch", "reduce_dtype")
_READS: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": _REPLICATED,
    "fsdp": _SHARDED,
    "hsdp": (*_SHARDED, "shard_ranks"),
    "cp": ("context_ranks", "context_weights", "context_fetch"),
}
_ALL = (*_REPLICATED, *_SHARDED, "shard_ranks", "context_ranks", "context_weights", "context_fetch")


# ------------------------------------------------------------------------------------------------
# What to look at closely, and when: the `profile` section.


class ProfileConfig(Section):
    """A trace of a few steps. It starts, ends and is written by itself; training goes on."""

    steps: str | None = None
    """FIRST:LAST steps to trace, both included, such as 10:15; none traces nothing."""
    memory: bool = True
    """Also record allocations on a GPU, as a snapshot for pytorch.org/memory_viz."""
    stacks: bool = False
    """Record Python stacks with each operator: larger and slower."""
    rows: int = Field(default=40, ge=1)
    """Rows of the kernel table."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        self.range()
        return self

    def range(self) -> tuple[int, int] | None:
        """(first, last) step to trace."""
        if self.steps is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.steps)
        if not found:
            raise ValueError(f"steps={self.steps!r} is not FIRST:LAST: write 10:15 for steps 10 to 15")
        first, last = int(found[1]), int(found[2])
        if not 1 <= first <= last:
            raise ValueError(f"steps={self.steps!r} does not count upwards from 1: write 10:15 for steps 10 to 15")
        return first, last


# ------------------------------------------------------------------------------------------------
# When a run is unwell: the rules, their thresholds, and what each does. The `health` section.

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

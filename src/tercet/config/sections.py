"""Sections of a run's configuration: train, checkpoint, log, parallel, profile and health.

The docstring under a field is its help text in `--help` and `tercet config show`. Sections are frozen and reject
unknown keys.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tercet.attention.config import divisors

Switch = Literal["auto", "on", "off"]
Schedule = Literal["cosine", "wsd", "constant"]
Precision = Literal["auto", "bf16", "fp32"]
ActivationCheckpointing = Literal["none", "full", "selective"]
InitState = Literal["weights", "optimizer"]
StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "cp"]
Action = Literal["off", "warn", "halt"]


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            # --help wraps lines itself; this file's line breaks would leave ragged ones.
            field.description = " ".join((field.description or "").split())


def resolved_precision(precision: str, device_type: str) -> str:
    """bf16 or fp32: what train.precision means on a device."""
    return precision if precision != "auto" else ("bf16" if device_type == "cuda" else "fp32")


class SelectorConfig(Section):
    """How a learned selector is trained (model.selector = learned). Its loss changes no other parameter."""

    only: bool = False
    """Train only the selectors and freeze all other parameters, which needs less memory and time. Use it first after
    converting a dense model, whose new selectors start at random."""
    teacher: Literal["all", "selected"] = "all"
    """Which attention the selector learns to predict: over all blocks up to the query, or only over the selected
    blocks, those that the query read."""
    all_until: int = Field(default=0, ge=0)
    """With teacher=selected: use teacher=all before this step."""
    every: int = Field(default=128, ge=1)
    """Compute the selector's loss on one query in this many. Lower it if that is fewer than 64 queries per step."""
    weight: float = Field(default=1.0, ge=0)
    """Weight of the selector's loss; 0: the selector does not learn."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate, with train.schedule; none: train.lr."""
    weight_decay: float = Field(default=0.01, ge=0)
    """AdamW weight decay."""
    clip: float = Field(default=1.0, ge=0)
    """Clip the selectors' gradients to this norm, separately from train.clip; 0: no clipping."""


class MuonConfig(Section):
    """Muon's settings (train.optimizer = muon), for the matrices inside the blocks."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate, with train.schedule; none: train.lr."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the gradients."""
    nesterov: bool = True
    """Nesterov momentum."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay; none: train.weight_decay."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the learning rate depends on the shape of a matrix. match_rms_adamw: scales updates to the size of AdamW's,
    so that its learning rate works. original: as in Muon's first publication; needs a learning rate of about 0.02."""


class StageConfig(Section):
    """One stage of a run (train.stages): steps at one sequence length."""

    seq_len: int = Field(ge=2)
    """Tokens per sequence, in place of data.seq_len."""
    steps: int = Field(ge=1)
    """Optimizer updates in this stage."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Sequences per device and forward pass; none: the largest number that divides a step and has no more tokens than
    train.micro_batch × data.seq_len, at least 1."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Tokens per optimizer update; none: as in the stage before, at first train.tokens_per_step."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary position embedding; none: as in the stage before, at first model.rope_theta."""

    def __str__(self) -> str:
        """The compact form, as on the command line."""
        options = {name: value for name, value in self if name not in ("seq_len", "steps") and value is not None}
        named = (f"{name}={value:.17g}" for name, value in options.items())
        return ":".join([str(self.seq_len), str(self.steps), *named])

    @classmethod
    def parse(cls, text: str) -> dict[str, str]:
        """The fields of the compact form, SEQ_LEN:STEPS[:NAME=VALUE…]."""
        example = "write 1024:700 for 700 steps at length 1024"
        length, *rest = text.split(":")
        if not rest:
            raise ValueError(f"{text!r} is not SEQ_LEN:STEPS: {example}")
        fields = {"seq_len": length, "steps": rest[0]}
        for option in rest[1:]:
            name, equals, value = option.partition("=")
            if not equals or name not in cls.model_fields or name in fields:
                names = ", ".join(f"{name}=…" for name in cls.model_fields if name not in ("seq_len", "steps"))
                raise ValueError(f"{option!r} in {text!r} is not a field of a stage: after SEQ_LEN:STEPS give {names}")
            fields[name] = value
        return fields


class TrainConfig(Section):
    """Optimization: steps, batch size, learning rate, precision, validation and sampling."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer updates in the whole run; with train.stages, their sum. Schedules, logs and checkpoints count in these
    steps."""
    stages: tuple[StageConfig, ...] = ()
    """Train in stages of different sequence lengths, as SEQ_LEN:STEPS (1024:700 8192:250) or as [[train.stages]]
    tables. Fields after STEPS: micro_batch, tokens_per_step and rope_theta, as in 8192:250:rope_theta=500000. none: one
    stage at data.seq_len."""
    tokens_per_step: int = Field(default=65536, ge=1)
    """Tokens per optimizer update, over all ranks and accumulated micro-batches."""
    micro_batch: int = Field(default=8, ge=1)
    """Sequences per device and forward pass. Gradient accumulation is derived from tokens_per_step."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: for all parameters. muon: Muon for the matrices of attention and feed-forward layers, and AdamW for
    embeddings, head, norms, gates, compression and learned selectors."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate, reached after warmup_steps."""
    schedule: Schedule = "cosine"
    """cosine: decay to min_lr_ratio over the run. wsd: constant, then linear decay at the end. constant: no decay."""
    warmup_steps: int = Field(default=100, ge=0)
    """Steps of linear warm-up from 0 to lr."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """wsd: the learning rate decays over this last fraction of the run."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the last step, as a fraction of lr."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW weight decay of matrices. Norms, biases and other 1-D parameters have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    clip: float = Field(default=1.0, ge=0)
    """Clip gradients to this global norm; 0: no clipping."""
    muon: MuonConfig = MuonConfig()
    """Muon's settings."""
    selector: SelectorConfig = SelectorConfig()
    """Training of a learned selector."""

    precision: Precision = "auto"
    """Precision of forward and backward; weights stay fp32. auto: bf16 on a GPU, fp32 on a CPU."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Recompute activations in backward to save memory. selective: cheap operations only. full: whole blocks. Selected
    block indices are always kept."""
    compile: Switch = "auto"
    """torch.compile each block. auto: on a GPU only (on a CPU it costs half a minute for no gain)."""
    cuda_graph: Switch = "auto"
    """Capture forward and backward as a CUDA graph. auto: if the first steps show that the GPU waits for kernel
    launches; stay eager where capture is impossible. on: fail if capture is impossible."""

    val_every: int = Field(default=250, ge=0)
    """Steps between validations; 0: only at the end."""
    val_tokens: int = Field(default=262144, ge=0)
    """Tokens per validation, the same ones every time, rounded up to whole passes of micro_batch sequences per rank; 0:
    no validation."""
    sample_every: int = Field(default=0, ge=0)
    """Steps between text samples; 0: only at the end."""
    sample_tokens: int = Field(default=256, ge=0)
    """Tokens per text sample; 0: no samples."""
    sample_prompt: str = ""
    """Prompt of the text samples; empty: "def " for data.source=python-source, else the beginning of a document."""
    sample_temperature: float = Field(default=0.7, ge=0)
    """Temperature of the text samples; 0: greedy."""

    max_skipped: int = Field(default=100, ge=0)
    """Non-finite steps to skip in the whole run before stopping; 0: stop at the first."""
    max_skipped_in_row: int = Field(default=5, ge=0)
    """Consecutive non-finite steps to skip before stopping; 0: stop at the first."""

    init_from: str | None = None
    """Checkpoint folder or .safetensors file with initial weights. Training starts at step 0 with fresh data."""
    init_state: InitState = "weights"
    """What to take from init_from: weights only, or also the optimizer moments (to continue at a longer
    data.seq_len)."""

    @field_validator("stages", mode="before")
    @classmethod
    def _parse_stages(cls, stages: Any) -> Any:
        """Stages in the compact form, separated by commas or spaces; `none` is no stage."""
        if isinstance(stages, str):
            stages = [stages]
        if not isinstance(stages, list | tuple):
            return stages
        words: list[Any] = []
        for stage in stages:
            words += re.findall(r"[^,\s]+", stage) if isinstance(stage, str) else [stage]
        if stages and not words:
            raise ValueError("is empty: write stages such as 1024:700 8192:250, or none")
        return [StageConfig.parse(word) if isinstance(word, str) else word for word in words if word != "none"]

    @model_validator(mode="after")
    def _steps_are_those_of_the_stages(self) -> Self:
        total = sum(stage.steps for stage in self.stages)
        if self.stages and "steps" not in self.model_fields_set:
            object.__setattr__(self, "steps", total)
        if self.stages and self.steps != total:
            counts = " + ".join(str(stage.steps) for stage in self.stages)
            raise ValueError(
                f"steps={self.steps} is not the sum of the stages, {counts} = {total}: drop train.steps, or change the "
                "steps of a stage"
            )
        return self

    @property
    def stage_steps(self) -> tuple[int, ...]:
        """The number of steps of each stage; without stages, of the run."""
        return tuple(stage.steps for stage in self.stages) or (self.steps,)

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The last step of each stage; without stages, the last step."""
        return tuple(accumulate(self.stage_steps))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{i}]={beta} is not in [0, 1): usual values are 0.9 and 0.95")
        changed = next((name for name, value in MuonConfig() if value != getattr(self.muon, name)), None)
        if self.optimizer != "muon" and changed is not None:
            raise ValueError(
                f"muon.{changed}={getattr(self.muon, changed)} has no effect with optimizer={self.optimizer}: drop it, "
                "or set train.optimizer to muon"
            )
        if self.init_state == "optimizer" and self.init_from is None:
            raise ValueError(
                "init_state=optimizer without init_from: set init_from to a checkpoint folder with optimizer state"
            )
        return self


class CheckpointConfig(Section):
    """When checkpoints are saved, which are kept, and how they are loaded."""

    every: int = Field(default=500, ge=0)
    """Steps between checkpoints; 0: only at the end. The last step is always saved."""
    keep: int = Field(default=3, ge=0)
    """How many of the newest checkpoints to keep; 0: all."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    async_save: bool = True
    """Write checkpoints in the background while training continues. false: wait for each save."""
    failures_allowed: int = Field(default=0, ge=0)
    """Consecutive failed saves to tolerate before the run stops. Each is logged."""
    verify: bool = True
    """Verify checksums before loading a checkpoint."""
    allow_config_change: bool = False
    """Resume even if settings that affect the training trajectory (data, lr, ...) differ from the checkpoint's,
    or start from train.init_from with another tokenizer. Not saved in config.toml."""


class LogConfig(Section):
    """What a run logs, and how often."""

    every: int = Field(default=10, ge=1)
    """Steps between log lines. The host waits for the device only then."""
    tensorboard: bool | Literal["auto"] = "auto"
    """Write TensorBoard files to tb/ in the run folder. auto: if tensorboard is installed."""
    wandb: bool = False
    """Also log to Weights & Biases (needs the wandb extra)."""
    progress: Switch = "auto"
    """Live progress line. auto: on a terminal; plain lines elsewhere."""
    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Seconds between lines of heartbeat_rank{r}.jsonl."""


class ParallelConfig(Section):
    """How the work is split over ranks, one rank per device. Start the ranks with torchrun."""

    strategy: StrategyName = "single"
    """single: one device. ddp: replicas. fsdp: weights sharded over all ranks. hsdp: sharded within groups, replicated
    between them. cp: each sequence sharded over ranks (context parallelism)."""
    world_size: int = Field(default=1, ge=1)
    """Number of ranks; set by torchrun. A launch with a different number than given here fails."""

    static_graph: bool = True
    """ddp: assume that every step uses the same parameters, so that buckets are arranged once."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """ddp: megabytes of gradients per all-reduce."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """ddp: dtype in which gradients are communicated; none: their own dtype."""

    sharding: Literal["full", "grad_op"] = "full"
    """fsdp, hsdp: full frees gathered weights after forward and gathers them again in backward; grad_op keeps them
    until backward (more memory, less communication)."""
    prefetch: int = Field(default=1, ge=0)
    """fsdp, hsdp: blocks whose weights are gathered in advance."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp, hsdp: dtype in which gradients are reduced."""
    shard_ranks: int = Field(default=0, ge=0)
    """hsdp: ranks that share one copy of the weights; 0: the ranks of one machine."""

    context_ranks: int = Field(default=0, ge=0)
    """cp: ranks that share one sequence; 0: all."""
    context_weights: Literal["sharded", "replicated"] = "sharded"
    """cp: weights sharded over all ranks as with fsdp, or replicated as with ddp."""
    context_fetch: Literal["documents", "blocks"] = "documents"
    """cp: how selected keys are fetched from other ranks. documents: whole documents, prefetched. blocks: only the
    selected blocks, with one round trip per layer."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend. auto: NCCL between GPUs; gloo between CPUs and between ranks that share GPUs."""
    share_gpus: bool = False
    """Let several ranks share a GPU, over gloo: slow, for trying out multi-rank runs on one GPU."""
    arrival_seconds: float = Field(default=300.0, gt=0)
    """Seconds to wait for all ranks at startup before the missing ones are reported."""
    first_step_seconds: float = Field(default=1800.0, gt=0)
    """How long to wait for other ranks until the first step is done: compilation and loading may take unequal times."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """How long to wait for other ranks after the first step. A rank that takes longer counts as stuck, and the run
    stops."""
    allow_single_rank: bool = False
    """Allow training on one GPU of a machine that has several."""

    @property
    def context(self) -> int:
        """Ranks that share one sequence."""
        if self.strategy != "cp":
            return 1
        return self.context_ranks or self.world_size

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that read different data."""
        return self.world_size // self.context

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(f"world_size={self.world_size} with strategy=single: pick ddp or fsdp, or world_size=1")
        if self.share_gpus and self.backend == "nccl":
            raise ValueError("share_gpus=true with backend=nccl: NCCL needs one GPU per rank, use backend=gloo")
        used = _USED_BY[self.strategy]
        if self.strategy == "cp":
            used = used + (_SHARDED if self.context_weights == "sharded" else _REPLICATED)
        for name in _STRATEGY_KEYS:
            value, default = getattr(self, name), type(self).model_fields[name].default
            if name not in used and value != default:
                users = [strategy for strategy, names in _USED_BY.items() if name in names]
                raise ValueError(
                    f"{name}={value} is not used by strategy={self.strategy}: drop it, or pick {' or '.join(users)}"
                )
        for name, ranks in (("context_ranks", self.context), ("shard_ranks", self.shard_ranks or 1)):
            if self.world_size % ranks:
                choices = ", ".join(map(str, divisors(self.world_size)))
                raise ValueError(f"{name}={ranks} does not divide world_size={self.world_size}: pick one of {choices}")
        return self


# Keys that only some strategies use; setting one that the strategy ignores is an error.
_REPLICATED = ("static_graph", "bucket_mb", "gradient_compression")
_SHARDED = ("sharding", "prefetch", "reduce_dtype")
_USED_BY: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": _REPLICATED,
    "fsdp": _SHARDED,
    "hsdp": (*_SHARDED, "shard_ranks"),
    "cp": ("context_ranks", "context_weights", "context_fetch"),
}
_STRATEGY_KEYS = (*_REPLICATED, *_SHARDED, "shard_ranks", "context_ranks", "context_weights", "context_fetch")


class ProfileConfig(Section):
    """Trace a few steps with the PyTorch profiler. Training continues afterwards."""

    steps: str | None = None
    """Steps to trace, as FIRST:LAST (inclusive), such as 10:15; none: no trace."""
    memory: bool = True
    """On a GPU, also record allocations, as a snapshot for pytorch.org/memory_viz."""
    stacks: bool = False
    """Record the Python stack of each operator: larger and slower."""
    rows: int = Field(default=40, ge=1)
    """Rows of the kernel table."""

    @model_validator(mode="after")
    def _check(self) -> Self:
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
            raise ValueError(f"steps={self.steps!r} must satisfy 1 <= FIRST <= LAST: write 10:15 for steps 10 to 15")
        return first, last


class HealthConfig(Section):
    """Rules that watch a run: each is off, warns once when a problem begins, or halts the run.

    `tercet report` ignores these settings and uses the default thresholds.
    """

    gate_collapse: Action = "warn"
    """A layer's gates put almost all weight on one branch."""
    gate_collapse_share: float = Field(default=0.5, gt=0, le=1)
    """gate_collapse: threshold for the fraction of (token, head) pairs with one gate above 95% of the sum of
    all."""
    dead_branch: Action = "warn"
    """A layer no longer uses one of its branches."""
    dead_branch_share: float = Field(default=0.01, ge=0, lt=1)
    """dead_branch: mean gate share below which a branch counts as dead."""
    selection_stuck: Action = "warn"
    """Selection picks only the forced blocks, or the same blocks for every token."""
    selection_forced_share: float = Field(default=0.98, gt=0, le=1)
    """selection_stuck: threshold for the fraction of selected blocks that were forced."""
    selection_overlap: float = Field(default=0.9995, gt=0, le=1)
    """selection_stuck: threshold for the mean fraction of a token's freely selected blocks that the previous token also
    selected."""
    patience: int = Field(default=3, ge=1)
    """Consecutive bad log intervals before a rule on gates, selection, throughput or data fires."""

    loss_spike: Action = "warn"
    """The loss jumped far above its recent median."""
    loss_spike_nats: float = Field(default=0.5, gt=0)
    """loss_spike: minimum jump in nats above the median of the last loss_window steps; loss_spike_deviations must be
    exceeded too."""
    loss_spike_deviations: float = Field(default=8.0, gt=0)
    """loss_spike: minimum jump in median absolute deviations, scaled to standard deviations."""
    loss_window: int = Field(default=50, ge=8)
    """loss_spike: number of steps in the median."""
    nonfinite: Action = "warn"
    """A step's loss or gradients were not finite. train.max_skipped stops the run regardless of this setting."""
    zero_grad: Action = "warn"
    """The gradient norm was zero in every step of a log interval."""
    zero_grad_norm: float = Field(default=1e-12, ge=0)
    """zero_grad: norms up to this count as zero."""

    throughput_drop: Action = "warn"
    """Tokens per second fell far below this process's median."""
    throughput_share: float = Field(default=0.6, gt=0, lt=1)
    """throughput_drop: fraction of the median below which throughput counts as dropped."""
    data_starvation: Action = "warn"
    """Steps spend too long waiting for data."""
    data_wait_share: float = Field(default=0.2, gt=0, le=1)
    """data_starvation: threshold for the fraction of step time spent waiting for data."""
    fallback: Action = "warn"
    """A branch fell back to a slower backend than this device supports."""

    stall: Literal["off", "warn", "end"] = "warn"
    """No progress. warn: dump all stacks and continue. end: also exit, so that torchrun can restart the run."""
    stall_seconds: float = Field(default=180.0, gt=0)
    """stall: minimum seconds without progress."""
    stall_factor: float = Field(default=5.0, ge=1)
    """stall: minimum time without progress, as a multiple of the median time between log lines."""
    stall_start_seconds: float = Field(default=900.0, gt=0)
    """stall: minimum seconds without progress before the first log line, which may include compilation."""

    doctor: bool = True
    """Run a short form of `tercet doctor` before training: versions, device, kernels and disk."""
    memory_every: int = Field(default=0, ge=0)
    """Steps between mem_step{N}.json memory reports; 0: only at startup and after step 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stall_start_seconds < self.stall_seconds:
            raise ValueError(
                f"stall_start_seconds={self.stall_start_seconds:g} is below stall_seconds={self.stall_seconds:g}: "
                "raise it; the first step is the slowest"
            )
        return self

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
HealthRule = Literal[
    "gate_collapse", "dead_branch", "selection_stuck", "loss_spike", "nonfinite", "zero_grad", "throughput_drop",
    "data_starvation", "fallback",
]  # fmt: skip


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


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
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate, with train.schedule; none: train.lr."""


class MuonConfig(Section):
    """Muon's settings (train.optimizer = muon), for the matrices inside the blocks."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate, with train.schedule; none: train.lr."""


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
    """Capture forward and backward as a CUDA graph. auto: if a micro-batch has at most 32,768 tokens, where the
    GPU waits for kernel launches; stay eager where capture is impossible. on: fail if capture is impossible."""

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

    max_skipped: int = Field(default=100, ge=0)
    """Non-finite steps to skip in the whole run, and at most 5 in a row, before stopping; 0: stop at the first."""

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
    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Seconds between lines of heartbeat_rank{r}.jsonl."""


class ParallelConfig(Section):
    """How the work is split over ranks, one rank per device. Start the ranks with torchrun."""

    strategy: StrategyName = "single"
    """single: one device. ddp: replicas. fsdp: weights sharded over all ranks. hsdp: sharded within groups, replicated
    between them. cp: each sequence sharded over ranks (context parallelism)."""
    world_size: int = Field(default=1, ge=1)
    """Number of ranks; set by torchrun. A launch with a different number than given here fails."""

    gradient_compression: Literal["none", "bf16"] = "none"
    """All but single: bf16 halves what gradients take on the wire; none: fp32."""

    sharding: Literal["full", "grad_op"] = "full"
    """fsdp, hsdp, cp: full frees gathered weights after forward and gathers them again in backward; grad_op keeps them
    until backward (more memory, less communication)."""
    shard_ranks: int = Field(default=0, ge=0)
    """hsdp: ranks that share one copy of the weights; 0: the ranks of one machine."""

    context_ranks: int = Field(default=0, ge=0)
    """cp: ranks that share one sequence; 0: all."""

    share_gpus: bool = False
    """Let several ranks share a GPU, over NCCL 2.30 or newer, else gloo: slow, for trying out multi-rank runs."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """How long to wait for other ranks at startup and after the first step. A rank that takes longer counts as stuck,
    and the run stops. The first step has half an hour: compilation may take unequal times."""
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
        for name, users in _USED_BY.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.strategy not in users and value != default:
                raise ValueError(
                    f"{name}={value} is not used by strategy={self.strategy}: drop it, or pick {' or '.join(users)}"
                )
        for name, ranks in (("context_ranks", self.context), ("shard_ranks", self.shard_ranks or 1)):
            if self.world_size % ranks:
                choices = ", ".join(map(str, divisors(self.world_size)))
                raise ValueError(f"{name}={ranks} does not divide world_size={self.world_size}: pick one of {choices}")
        return self


# The strategies that use a key; setting one that the strategy ignores is an error.
_USED_BY: dict[str, tuple[StrategyName, ...]] = {
    "gradient_compression": ("ddp", "fsdp", "hsdp", "cp"),
    "sharding": ("fsdp", "hsdp", "cp"),
    "shard_ranks": ("hsdp",),
    "context_ranks": ("cp",),
}


class ProfileConfig(Section):
    """Trace a few steps with the PyTorch profiler. Training continues afterwards."""

    steps: str | None = None
    """Steps to trace, as FIRST:LAST (inclusive), such as 10:15; none: no trace."""

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
    """Rules that watch a run: each warns once when a problem begins, or halts the run."""

    halt: tuple[HealthRule, ...] = ()
    """Rules that stop the run. gate_collapse: a layer's gates put almost all weight on one branch. dead_branch: a layer
    no longer uses a branch. selection_stuck: only the forced blocks are selected, or the same ones for every token.
    loss_spike: the loss jumped far above its recent median. nonfinite: loss or gradients were not finite
    (train.max_skipped stops the run regardless). zero_grad: the gradient norm was zero. throughput_drop: tokens per
    second fell far below their median. data_starvation: steps wait too long for data. fallback: a branch fell back to a
    slower backend than this device supports."""

    stall: Literal["off", "warn", "end"] = "warn"
    """No progress. warn: dump all stacks and continue. end: also exit, so that torchrun can restart the run."""
    stall_seconds: float = Field(default=180.0, gt=0)
    """stall: minimum seconds without progress; also at least five times the median time between log lines, and 15
    minutes before the first, which may include compilation."""

    doctor: bool = True
    """Run a short form of `tercet doctor` before training: versions, device, kernels and disk."""

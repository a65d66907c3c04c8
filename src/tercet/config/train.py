"""How a run learns, saves itself and speaks: `[train]`, `[checkpoint]` and `[log]` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Schedule = Literal["cosine", "wsd", "constant"]
Precision = Literal["auto", "bf16", "fp32"]
ActivationCheckpointing = Literal["none", "full", "selective"]
Switch = Literal["auto", "on", "off"]
InitState = Literal["weights", "optimizer"]

# Ctrl-C anywhere must lose at most one step, so nothing here may be derived from the environment or the clock.
FROZEN = ConfigDict(frozen=True, extra="forbid")


class TrainConfig(BaseModel):
    """The optimisation: how many steps, of how many tokens, at which learning rate, in which arithmetic."""

    model_config = FROZEN

    steps: int = Field(1000, ge=1, description="optimizer updates in the whole run; schedule, logs and checkpoints count in these")
    tokens_per_step: int = Field(65536, ge=1, description="tokens per optimizer update, over all devices and accumulated micro-batches")
    micro_batch: int = Field(8, ge=1, description="sequences per device and forward pass; accumulation is derived from tokens_per_step")

    lr: float = Field(3e-4, gt=0, description="peak learning rate, reached after warmup_steps")
    schedule: Schedule = Field("cosine", description="cosine: down to min_lr_ratio over the run; wsd: stable, then a final decay; constant")
    warmup_steps: int = Field(100, ge=0, description="steps of linear warm-up from 0 to lr")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="wsd only: share of the run, at its end, over which lr falls linearly")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the end of the run, as a share of lr")
    weight_decay: float = Field(0.1, ge=0, description="AdamW decay of matrices; norms, biases and other 1-D parameters have none")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moment decays")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    clip: float = Field(1.0, ge=0, description="clip gradients to this global norm; 0 leaves them as they are")

    precision: Precision = Field("auto", description="arithmetic of forward and backward; weights are always fp32. auto: bf16 on GPU, fp32 on CPU")
    activation_checkpointing: ActivationCheckpointing = Field(
        "none",
        description="none: keep all activations; selective: recompute the cheap ones; full: recompute every block. Selected blocks are saved in all",
    )
    compile: Switch = Field("auto", description="torch.compile of each block; auto: on GPU only (on CPU it costs half a minute and gains nothing)")

    val_every: int = Field(250, ge=0, description="steps between validations; 0 validates at the end only")
    val_tokens: int = Field(262144, ge=0, description="tokens of each validation, always the same ones; 0 turns validation off")
    sample_every: int = Field(0, ge=0, description="steps between text samples; 0 samples at the end only")
    sample_tokens: int = Field(256, ge=0, description="tokens of each text sample; 0 turns samples off")
    sample_prompt: str = Field("def ", description="what the text samples go on from")
    sample_temperature: float = Field(0.7, ge=0, description="temperature of the text samples; 0 is greedy")

    max_skipped: int = Field(100, ge=0, description="non-finite steps skipped in the whole run before it stops; 0 stops at the first")
    max_skipped_in_row: int = Field(5, ge=0, description="non-finite steps skipped one after another before the run stops; 0 stops at the first")

    init_from: str | None = Field(None, description="checkpoint folder or weights (.safetensors) to start from, at step 0 and on fresh data")
    init_state: InitState = Field(
        "weights",
        description="what init_from gives: weights, or weights and optimizer moments (a length-extension stage: a longer data.seq_len with model.rope_scaling)",
    )

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{i}]={beta} is not in [0, 1): AdamW would never forget; usual values are 0.9 and 0.95")
        if self.warmup_steps >= self.steps and self.warmup_steps > 0:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} is not below steps={self.steps}: the peak lr would never be reached; "
                f"pick warmup_steps <= {max(0, self.steps - 1)} or more steps"
            )
        if self.init_state == "optimizer" and self.init_from is None:
            raise ValueError("init_state='optimizer' without init_from: name the checkpoint folder that holds the optimizer state")
        return self


class CheckpointConfig(BaseModel):
    """When the run saves itself, and what it keeps."""

    model_config = FROZEN

    every: int = Field(500, ge=0, description="steps between checkpoints; the last step is always saved; 0 saves at the end only")
    keep: int = Field(3, ge=0, description="newest checkpoints kept; 0 keeps all")
    keep_every: int = Field(0, ge=0, description="also keep, for ever, each checkpoint whose step is a multiple of this; 0 for none")
    async_save: bool = Field(True, description="write in the background while training goes on; false waits for each save")
    failures_allowed: int = Field(0, ge=0, description="failed saves in a row that the run survives, each said and counted, before it stops")
    verify: bool = Field(True, description="compare all checksums before anything is loaded")
    allow_config_change: bool = Field(
        False, description="resume although model-independent settings that shape the trajectory (data, lr, ...) differ from the saved ones"
    )


class LogConfig(BaseModel):
    """What the run says of itself, and how often."""

    model_config = FROZEN

    every: int = Field(10, ge=1, description="steps between log lines; the only moments at which the host waits for the device")
    tensorboard: bool = Field(True, description="write TensorBoard files under tb/ in the run folder")
    progress: Switch = Field("auto", description="the live line; auto: on a terminal, plain lines elsewhere")
    heartbeat_seconds: float = Field(10.0, gt=0, description="seconds between lines of heartbeat_rank{r}.jsonl")

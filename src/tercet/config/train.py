"""How a run learns, saves itself and speaks: the `train`, `checkpoint` and `log` sections."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tercet.config.section import Section

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

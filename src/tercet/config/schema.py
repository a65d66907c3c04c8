"""RunConfig: everything that decides what a run computes, in one frozen object. No torch at import."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tercet.config.data import DataConfig
from tercet.config.health import HealthConfig
from tercet.config.model import ModelConfig
from tercet.config.profile import ProfileConfig
from tercet.config.section import Section
from tercet.config.train import CheckpointConfig, LogConfig, TrainConfig


class RunSection(Section):
    """The run itself: where it is kept, on what it runs, and its randomness."""

    name: str = Field(default="run", min_length=1)
    """Name of the run; part of its folder's name when run.dir is not given."""
    dir: str | None = None
    """Folder of the run; none: runs/NAME-DATE-TIME."""
    seed: int = Field(default=1337, ge=0)
    """Seed of the weights and of the order of the data."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; none: as torch chooses."""


class ParallelConfig(Section):
    """How the work is split over ranks, one rank per device. Ranks are started by torchrun."""

    strategy: Literal["single", "ddp", "fsdp", "hsdp", "cp"] = "single"
    """One device, replicas (ddp), sharded weights (fsdp, hsdp) or a sharded sequence (cp)."""
    world_size: int = Field(default=1, ge=1)
    """Ranks this configuration is meant for; a launch with another number is refused."""
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

    @model_validator(mode="after")
    def _read_by_this_strategy(self) -> Self:
        if self.strategy == "single" and self.world_size != 1:
            raise ValueError(f"world_size={self.world_size} with strategy=single: pick ddp or fsdp, or world_size=1")
        for strategies, names in _READ_BY.items():
            for name in names:
                value, default = getattr(self, name), type(self).model_fields[name].default
                if self.strategy not in strategies and value != default:
                    raise ValueError(
                        f"{name}={value} is not read by strategy={self.strategy}: "
                        f"drop it, or pick {' or '.join(strategies)}"
                    )
        return self


_READ_BY = {
    ("ddp",): ("static_graph", "bucket_mb", "gradient_compression"),
    ("fsdp", "hsdp"): ("sharding", "prefetch"),
}


class RunConfig(Section):
    """A whole run. Values come from the defaults, a preset, a TOML file and flags; later ones win."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    health: HealthConfig = HealthConfig()
    profile: ProfileConfig = ProfileConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def _tokens_per_step_divides(self) -> Self:
        one = self.tokens_per_pass
        asked = self.train.tokens_per_step
        if asked % one:
            below, above = asked // one * one, (asked // one + 1) * one
            works = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"train.tokens_per_step={asked} is not a multiple of train.micro_batch × data.seq_len × "
                f"parallel.world_size = {self.train.micro_batch} × {self.data.seq_len} × "
                f"{self.parallel.world_size} = {one}: take {works}"
            )
        return self

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward pass, over all ranks."""
        return self.train.micro_batch * self.data.seq_len * self.parallel.world_size

    @property
    def accumulation(self) -> int:
        """Forward and backward passes in one step: derived, never asked for."""
        return self.train.tokens_per_step // self.tokens_per_pass

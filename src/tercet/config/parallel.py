"""How the work is split over ranks: the `parallel` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tercet.config.section import Section

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

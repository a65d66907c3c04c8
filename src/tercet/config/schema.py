"""RunConfig: everything that decides what a run computes, in one frozen object. No torch at import."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from tercet.config.data import DataConfig
from tercet.config.sections import (
    CheckpointConfig,
    HealthConfig,
    LogConfig,
    ParallelConfig,
    ProfileConfig,
    Section,
    TrainConfig,
)
from tercet.model.config import ModelConfig


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
                f"train.tokens_per_step={asked} is not a multiple of train.micro_batch × data.seq_len × ranks = "
                f"{self.train.micro_batch} × {self.data.seq_len} × {self.parallel.data_ranks} = {one}: take {works}"
                f"{self._other_ways()}"
            )
        return self

    @model_validator(mode="after")
    def _context_splits(self) -> Self:
        # The layout of the sequence asks for the same, of each batch: here it is known before anything is written.
        batch, length, ranks = self.train.micro_batch, self.data.seq_len, self.parallel.context
        if self.parallel.strategy == "cp" and batch * length % (2 * ranks):
            unit = 2 * ranks // math.gcd(2 * ranks, batch)
            lengths = [n for n in (length // unit * unit, (length // unit + 1) * unit) if n >= 2]
            batches = 2 * ranks // math.gcd(2 * ranks, length)
            raise ValueError(
                f"train.micro_batch × data.seq_len = {batch} × {length} = {batch * length} is not a multiple of "
                f"2 × context ranks = 2 × {ranks} = {2 * ranks}, two equal chunks of tokens for each: take "
                f"data.seq_len {_some(lengths)}, or train.micro_batch {(batch // batches + 1) * batches}"
            )
        return self

    def _other_ways(self) -> str:
        """Numbers of ranks, and sizes of micro-batches, into which the sequences of a step can be dealt."""
        sequences, rest = divmod(self.train.tokens_per_step, self.data.seq_len)
        if rest:
            return ""
        ways = ""
        ranks, here = self.parallel.data_ranks, sequences // self.train.micro_batch
        if ranks > 1 and sequences % self.train.micro_batch == 0:
            fit = [n * self.parallel.context for n in range(1, here + 1) if here % n == 0]
            ways += f", or launch {_some(fit)} rank{'s' * (fit != [1])}"
        if sequences % ranks == 0:
            fit = [n for n in range(1, sequences // ranks + 1) if sequences // ranks % n == 0]
            ways += f", or train.micro_batch {_some(fit)}"
        return ways

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward pass, over all ranks."""
        return self.train.micro_batch * self.data.seq_len * self.parallel.data_ranks

    @property
    def validation_passes(self) -> int:
        """Forward passes of one validation: whole ones, so that train.val_tokens is never undershot."""
        return -(-self.train.val_tokens // self.tokens_per_pass)

    @property
    def accumulation(self) -> int:
        """Forward and backward passes in one step: derived, never asked for."""
        return self.train.tokens_per_step // self.tokens_per_pass


def _some(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers[-4:]))

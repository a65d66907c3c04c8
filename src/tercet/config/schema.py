"""RunConfig: the complete configuration of a run, frozen and validated. No torch at import."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tercet.config.data import DataConfig, absolute
from tercet.config.sections import (
    CheckpointConfig,
    HealthConfig,
    LogConfig,
    ParallelConfig,
    ProfileConfig,
    Section,
    SelectorConfig,
    TrainConfig,
)
from tercet.model.config import ModelConfig


class RunSection(Section):
    """The run itself: its folder, seed and device."""

    name: str = Field(default="run", min_length=1)
    """Name of the run; part of its folder's name if run.dir is not given."""
    dir: str | None = None
    """Run folder; none: runs/NAME-DATE-TIME."""
    seed: int = Field(default=1337, ge=0)
    """Seed of the initial weights and of the data order."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto: a GPU if there is one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; none: torch's default."""

    @field_validator("name")
    @classmethod
    def _name_is_one_path_component(cls, name: str) -> str:
        if "/" in name or "\0" in name:
            raise ValueError('must be a file name without "/": to choose the folder, set run.dir')
        return name


class RunConfig(Section):
    """A complete run. Values come from defaults, preset, TOML file and flags; later ones win."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    health: HealthConfig = HealthConfig()
    profile: ProfileConfig = ProfileConfig()
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="before")
    @classmethod
    def _values_can_be_saved(cls, values: Any) -> Any:
        # The parsers of JSON and TOML return larger integers, which overflow later, and JSON has lone surrogates.
        pending = [("", values)]
        while pending:
            key, value = pending.pop()
            if isinstance(value, dict):
                pending += [(f"{key}.{name}".lstrip("."), inner) for name, inner in value.items()]
            elif isinstance(value, (list, tuple)):
                pending += [(key, inner) for inner in value]
            elif isinstance(value, int) and abs(value) >= 2**63:
                raise ValueError(f"{key} is an integer of {len(str(abs(value)))} digits: it must fit in 64 bits")
            elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"{key}={value!a} is not Unicode text: write it in UTF-8")
        return values

    @model_validator(mode="after")
    def _tokens_per_step_divides(self) -> Self:
        unit = self.tokens_per_pass
        tokens = self.train.tokens_per_step
        if tokens % unit:
            below, above = tokens // unit * unit, (tokens // unit + 1) * unit
            choices = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"train.tokens_per_step={tokens} is not a multiple of train.micro_batch × data.seq_len × ranks = "
                f"{self.train.micro_batch} × {self.data.seq_len} × {self.parallel.data_ranks} = {unit}: use {choices}"
                f"{self._other_fixes()}"
            )
        return self

    @model_validator(mode="after")
    def _context_divides(self) -> Self:
        # ContextLayout checks each batch too; checking here fails before the run folder is created.
        batch, length, ranks = self.train.micro_batch, self.data.seq_len, self.parallel.context
        if self.parallel.strategy == "cp" and batch * length % (2 * ranks):
            unit = 2 * ranks // math.gcd(2 * ranks, batch)
            lengths = [n for n in (length // unit * unit, (length // unit + 1) * unit) if n >= 2]
            batch_unit = 2 * ranks // math.gcd(2 * ranks, length)
            raise ValueError(
                f"train.micro_batch × data.seq_len = {batch} × {length} = {batch * length} is not a multiple of "
                f"2 × context ranks = 2 × {ranks} = {2 * ranks} (two equal chunks of tokens per rank): use "
                f"data.seq_len {_last_few(lengths)}, or train.micro_batch {(batch // batch_unit + 1) * batch_unit}"
            )
        return self

    @model_validator(mode="after")
    def _selector_is_supported(self) -> Self:
        selector = self.train.selector
        changed = next((name for name, value in SelectorConfig() if value != getattr(selector, name)), None)
        if self.model.selector == "compressed" and changed is not None:
            raise ValueError(
                f"train.selector.{changed} has no effect with model.selector=compressed: nothing of it is learned; "
                "drop it, or use model.selector learned"
            )
        if self.model.selector == "learned" and self.parallel.strategy == "cp":
            chunk = self.train.micro_batch * self.data.seq_len // (2 * self.parallel.context)
            if self.parallel.context_fetch == "blocks":
                raise ValueError(
                    "model.selector=learned with parallel.context_fetch=blocks: the selector learns from keys that are "
                    "not fetched then; use parallel.context_fetch documents"
                )
            if chunk % selector.every:
                raise ValueError(
                    f"train.selector.every={selector.every} does not divide the {chunk} tokens of a chunk (train."
                    f"micro_batch × data.seq_len / (2 × context ranks)): use {math.gcd(chunk, selector.every)}"
                )
        if selector.all_until and (selector.teacher == "all" or self.train.cuda_graph == "on"):
            raise ValueError(
                f"train.selector.all_until={selector.all_until} needs train.selector.teacher selected, and "
                "train.cuda_graph off or auto"
            )
        return self

    def with_absolute_paths(self) -> Self:
        """With data and weights that are found from every folder, so that a run can be resumed from another one."""
        source = self.train.init_from
        train = self.train.model_copy(update={"init_from": None if source is None else absolute(source)})
        return self.model_copy(update={"data": self.data.with_absolute_paths(), "train": train})

    def _other_fixes(self) -> str:
        """Rank counts and micro-batch sizes that divide the sequences of a step, as the end of an error message."""
        sequences, rest = divmod(self.train.tokens_per_step, self.data.seq_len)
        if rest:
            return ""
        fixes = ""
        ranks, micro_batches = self.parallel.data_ranks, sequences // self.train.micro_batch
        if max(sequences, micro_batches) > 2**20:  # looking for divisors would take too long
            return ""
        if ranks > 1 and sequences % self.train.micro_batch == 0:
            fit = [n * self.parallel.context for n in range(1, micro_batches + 1) if micro_batches % n == 0]
            fixes += f", or launch {_last_few(fit)} rank{'s' * (fit != [1])}"
        if sequences % ranks == 0:
            fit = [n for n in range(1, sequences // ranks + 1) if sequences // ranks % n == 0]
            fixes += f", or train.micro_batch {_last_few(fit)}"
        return fixes

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one forward and backward pass, over all ranks."""
        return self.train.micro_batch * self.data.seq_len * self.parallel.data_ranks

    @property
    def accumulation(self) -> int:
        """Gradient accumulation: forward and backward passes per step."""
        return self.train.tokens_per_step // self.tokens_per_pass

    @property
    def validation_passes(self) -> int:
        """Forward passes per validation: enough to cover train.val_tokens."""
        return -(-self.train.val_tokens // self.tokens_per_pass)


def _last_few(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers[-4:]))

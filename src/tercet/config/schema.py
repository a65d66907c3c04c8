"""RunConfig: the complete configuration of a run, frozen and validated. No torch at import."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tercet.attention.config import NoChoice, check_reach, nothing_to_choose, unsupported_sizes
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
from tercet.errors import UsageError
from tercet.model.config import ModelConfig

AUTO_GRAPH_TOKENS = 32_768
"""train.cuda_graph=auto: up to this size of a micro-batch the GPU waits for kernel launches (docs/performance.md)."""


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
    """CPU threads of torch, at most the machine's cores; none: torch's default."""

    @field_validator("name")
    @classmethod
    def _name_is_one_path_component(cls, name: str) -> str:
        if "/" in name or "\0" in name:
            raise ValueError('must be a file name without "/": to choose the folder, set run.dir')
        return name


def check_storable(values: Any) -> None:
    """Refuse what the parsers of JSON, TOML and flags return, but which overflows later or cannot be written."""
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
        check_storable(values)
        return values

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self.data.check_exercises_fit(self.longest_sequence)
        if "nsa" in self.model.attention_kinds:
            check_reach(self.model.nsa, self.longest_sequence)
        traced = self.profile.range()
        if traced is not None and traced[0] > self.train.steps:
            raise ValueError(
                f"profile.steps={self.profile.steps} begins after the last step, train.steps={self.train.steps}: trace "
                "earlier steps, or raise train.steps"
            )
        for number, stage in enumerate(self.stages):
            try:
                stage._check_tokens_per_step()
                stage._check_context()
                stage._check_selector()
            except ValueError as error:
                if not self.train.stages:
                    raise
                # What the message says of train.tokens_per_step also holds for the stage's own.
                raise ValueError(f"train.stages: stage {number + 1} ({self.train.stages[number]}): {error}") from None
        if self.train.selector.only and (found := self.nothing_to_choose):
            raise ValueError(
                f"train.selector.only=true has nothing to train: {found.reason}: {found.fix}, or drop "
                "train.selector.only"
            )
        return self

    def _check_tokens_per_step(self) -> None:
        unit, tokens = self.tokens_per_pass, self.train.tokens_per_step
        if tokens % unit:
            below, above = tokens // unit * unit, (tokens // unit + 1) * unit
            raise ValueError(
                f"train.tokens_per_step={tokens} is not a multiple of train.micro_batch × data.seq_len × ranks = "
                f"{self.train.micro_batch} × {self.data.seq_len} × {self.parallel.data_ranks} = {unit}: "
                f"set it to {f'{below} or ' if below else ''}{above}, or use a smaller train.micro_batch or fewer ranks"
            )

    def _check_context(self) -> None:
        if self.parallel.strategy != "cp":
            return
        if self.model.dense_below > (covered := self.model.nsa.selected_tokens):
            raise ValueError(
                f"model.dense_below={self.model.dense_below} with parallel.strategy=cp must be at most "
                f"model.nsa.select_count × select_block = {covered}: lower it, or raise these"
            )
        if self.train.compile == "on":
            raise ValueError(
                "train.compile=on with parallel.strategy=cp: blocks that exchange keys cannot be compiled; "
                "use train.compile off, or auto"
            )
        # context_layout.ContextLayout checks each batch too; checking here fails before the run folder is created.
        batch, length, ranks = self.train.micro_batch, self.data.seq_len, self.parallel.context
        if batch * length % (2 * ranks):
            unit = 2 * ranks // math.gcd(2 * ranks, batch)
            below, above = length // unit * unit, (length // unit + 1) * unit
            raise ValueError(
                f"train.micro_batch × data.seq_len = {batch} × {length} = {batch * length} is not a multiple of "
                f"2 × context ranks = {2 * ranks}: use data.seq_len {f'{below} or ' if below else ''}{above}"
            )

    def _check_selector(self) -> None:
        selector = self.train.selector
        changed = next((name for name, value in SelectorConfig() if value != getattr(selector, name)), None)
        kind = self.model.selector
        if kind != "learned" and changed is not None:
            raise ValueError(
                f"train.selector.{changed} has no effect with model.selector={kind}, which is not trained: drop it, or "
                "use model.selector learned"
            )
        if selector.only and "nsa" not in self.model.attention_kinds:
            raise ValueError(
                f"train.selector.only has nothing to train with model.attention={self.model.attention}: only nsa "
                "layers have selectors; drop it, or use model.attention nsa"
            )
        if kind == "learned" and self.parallel.strategy == "cp":
            chunk = self.train.micro_batch * self.data.seq_len // (2 * self.parallel.context)
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

    @property
    def nothing_to_choose(self) -> NoChoice | None:
        """Why no query has a choice of blocks, in any stage; None if some have."""
        return nothing_to_choose(self.model.nsa, self.longest_sequence, self.model.dense_below)

    @property
    def longest_sequence(self) -> int:
        """data.seq_len of the stage with the longest."""
        return max(stage.data.seq_len for stage in self.stages)

    def with_absolute_paths(self) -> Self:
        """With data and weights that are found from every folder, so that a run can be resumed from another one."""
        source = self.train.init_from
        train = self.train.model_copy(update={"init_from": None if source is None else absolute(source)})
        return self.model_copy(update={"data": self.data.with_absolute_paths(), "train": train})

    @property
    def stages(self) -> tuple[Self, ...]:
        """The configuration of each stage (train.stages), as if the whole run were like it; else only this one."""
        found: list[Self] = []
        model, train = self.model, self.train.model_copy(update={"stages": ()})
        for stage in self.train.stages:
            if stage.rope_theta is not None:
                model = model.model_copy(update={"rope_theta": stage.rope_theta})
            if stage.tokens_per_step is not None:
                train = train.model_copy(update={"tokens_per_step": stage.tokens_per_step})
            sequences = train.tokens_per_step // (stage.seq_len * self.parallel.data_ranks)  # of a step, per rank
            largest = max(1, self.train.micro_batch * self.data.seq_len // stage.seq_len)
            batch = train.model_copy(update={"micro_batch": stage.micro_batch or largest_divisor(sequences, largest)})
            data = self.data.model_copy(update={"seq_len": stage.seq_len})
            found.append(self.model_copy(update={"model": model, "train": batch, "data": data}))
        return tuple(found) or (self,)

    def stage_index(self, step: int) -> int:
        """The stage, from 0, that makes the update `step`, from 1. After the last step: the last stage."""
        ends = self.train.stage_ends
        return min(bisect_left(ends, step), len(ends) - 1)

    def at_step(self, step: int) -> Self:
        """The configuration of the stage that makes the update `step`; the weights it leaves need its rope_theta."""
        return self.stages[self.stage_index(step)]

    @property
    def largest_shuffle(self) -> DataConfig:
        """The data settings of the stage with the largest block of shuffled sequences. A block ends with its stage."""
        found = [stage.data for stage in self.stages]
        for i, (data, stage) in enumerate(zip(found, self.train.stages, strict=False)):
            sequences = stage.steps * self.stages[i].train.tokens_per_step // stage.seq_len
            found[i] = data.model_copy(update={"shuffle_sequences": min(data.shuffle_sequences, sequences)})
        return max(found, key=lambda data: data.shuffle_bytes(self.model.vocab_size))

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        stages = zip(self.train.stage_steps, self.stages, strict=True)
        return sum(steps * stage.train.tokens_per_step for steps, stage in stages)

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

    @property
    def sample_prompt(self) -> str:
        """What text samples begin with; empty for the beginning of a document."""
        return self.train.sample_prompt or ("def " if self.data.source == "python-source" else "")


def uses_cuda_graph(config: RunConfig, device_type: str) -> bool:
    """Whether passes run as CUDA graphs: on request, or with `auto` those of a stage with small micro-batches, where
    nothing prevents it."""
    asked, strategy = config.train.cuda_graph, config.parallel.strategy
    problem = None
    if device_type != "cuda":
        problem = f"on a {device_type}: CUDA graphs need a GPU"
    elif strategy != "single":
        problem = f"with parallel.strategy={strategy}: communication between ranks cannot be captured"
    if asked == "on" and problem is not None:
        raise UsageError(f"train.cuda_graph=on {problem}; use --train.cuda_graph off, or auto")
    small = any(s.train.micro_batch * s.data.seq_len <= AUTO_GRAPH_TOKENS for s in config.stages)
    # a graph can change the last bits
    return problem is None and (asked == "on" or (asked == "auto" and small and not config.run.deterministic))


def kernel_warning(config: RunConfig, device_type: str) -> str | None:
    """Why NSA layers would not train with kernels on a GPU. Refuses model.backend=triton there."""
    model = config.model
    if device_type != "cuda" or model.backend == "reference" or "nsa" not in model.attention_kinds:
        return None
    reason = unsupported_sizes(model.nsa)
    if reason is not None and model.backend == "triton":
        raise UsageError(f"model.backend=triton cannot run: {reason}; use auto, which falls back to the reference")
    return reason and f"the kernels cannot run, and the reference backend is slow on a GPU: {reason}"


def largest_divisor(number: int, largest: int) -> int:
    """The largest divisor of `number` that is at most `largest`; 1 for 0."""
    below = range(min(number, largest, 2**20), 1, -1)
    return next((n for n in below if number % n == 0), 1)

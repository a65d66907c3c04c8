"""Stages of a run (train.stages): the configuration and the loader of the current one, and the change to the next."""

from __future__ import annotations

from collections.abc import Callable

from tercet.config.schema import RunConfig
from tercet.data.loader import Loader
from tercet.data.synthetic import make_task
from tercet.data.tokenizers import Tokenizer
from tercet.model.cost import flops_per_token
from tercet.telemetry.events import StageStarted
from tercet.train.state import TrainState, start_stage


class Stages:
    """Where a run is in its stages. Without train.stages, the whole run is one stage."""

    def __init__(
        self, run: RunConfig, state: TrainState, open_loader: Callable[[RunConfig, int | None], Loader]
    ) -> None:
        """open_loader: batches of a stage after the state's cursor; called with the stage's configuration and, if the
        run has stages, the number of its steps that are left."""
        self._run, self._state, self._open_loader = run, state, open_loader
        self._enter()

    def _enter(self) -> None:
        run, step = self._run, self._state.step
        self.index = run.stage_index(step + 1)
        self.config = run.stages[self.index]
        if run.train.stages:
            start_stage(self._state, self.config)
        self.loader = self._open_loader(self.config, self.last_step - step if run.train.stages else None)

    @property
    def last_step(self) -> int:
        """Of the current stage."""
        return self._run.train.stage_ends[self.index]

    @property
    def is_over(self) -> bool:
        """Whether the next step belongs to the next stage."""
        return self._run.stage_index(self._state.step + 1) != self.index

    def advance(self) -> None:
        """Change to the stage of the next step. Its loader continues at the cursor: what was prefetched for this stage
        is dropped, and read again at the new length."""
        self.loader.close()
        self._enter()

    def event(self) -> StageStarted | None:
        """The start of the current stage; None without train.stages."""
        if not self._run.train.stages:
            return None
        train, config, stages = self._run.train, self.config, self._run.stages
        later = zip(train.stage_steps[self.index + 1 :], stages[self.index + 1 :], strict=True)
        return StageStarted(
            step=self.last_step - train.stage_steps[self.index],
            stage=self.index + 1,
            stages=len(stages),
            last_step=self.last_step,
            seq_len=config.data.seq_len,
            micro_batch=config.train.micro_batch,
            tokens_per_step=config.train.tokens_per_step,
            accumulation=config.accumulation,
            rope_theta=config.model.rope_theta,
            later_steps=sum(steps * step_flops(stage) for steps, stage in later) / step_flops(config),
        )


def check_stage_data(run: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise before the first step if synthetic documents do not fit the length of a later stage."""
    for stage in run.stages:
        for part in (stage.data, *stage.data.mixture):
            if part.source == "synthetic":
                length = part.synthetic.length or stage.data.seq_len
                make_task(part.synthetic, length, tokenizer.vocab_size, tokenizer.eos_id)


def step_flops(stage: RunConfig) -> float:
    only = stage.train.selector.only
    return stage.train.tokens_per_step * flops_per_token(stage.model, stage.data.seq_len, selectors_only=only)

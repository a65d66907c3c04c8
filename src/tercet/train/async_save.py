"""Saves of a run in work: ordered, collected, counted when they fail."""

from __future__ import annotations

from tercet.config.schema import RunConfig
from tercet.parallel.strategy import Strategy
from tercet.telemetry.events import CheckpointFailed, CheckpointSaved, EventLog
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.train.checkpoint import Checkpointer
from tercet.train.manifest import CheckpointError
from tercet.train.run_folder import RunFolder
from tercet.train.state import TrainState


class Saving:
    """At most one save is under way; what came of it is told in the log."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        strategy: Strategy,
        log: EventLog,
        observer: Observer,
        state: TrainState,
    ) -> None:
        self._config, self._log, self._observer, self._state = config, log, observer, state
        self._checkpointer = Checkpointer(
            folder.checkpoints,
            config.checkpoint,
            rank=strategy.rank,
            world_size=strategy.world_size,
            process_group=strategy.checkpoint_group,
        )
        self._saved_step = state.step
        self._failed = 0  # in a row

    @property
    def up_to_date(self) -> bool:
        """Whether the step that was made last has been saved, or is where this process began."""
        return self._state.step == self._saved_step

    def order(self) -> None:
        """Save this very step, in the background if the config says so."""
        state = self._state
        with state.interval.excluded():
            self.collect(wait=True)
            self._observer.tell_passes(state.step)
            self._log.sync()
            self._checkpointer.save(
                state.step, state.model, state.optimizer, state.run_state(self._config), state.rank_state()
            )
            self._saved_step = state.step
            if not self._config.checkpoint.async_save:
                self.collect(wait=True)

    def collect(self, *, wait: bool) -> None:
        """Tell of a save that has ended; with `wait`, of the one under way. Raises after too many failures."""
        try:
            saved = self._checkpointer.collect(wait=wait)
        except CheckpointError as error:
            self._failed += 1
            self._saved_step = -1
            self._log.emit(CheckpointFailed(step=self._state.step, reason=str(error)))
            if self._failed > self._config.checkpoint.failures_allowed:
                raise
            return
        if saved is not None:
            self._failed = 0
            self._observer.outside("checkpoint", saved.blocked_seconds)
            self._log.emit(
                CheckpointSaved(
                    step=saved.step,
                    path=str(saved.path),
                    bytes=saved.bytes,
                    seconds=saved.seconds,
                    blocked_seconds=saved.blocked_seconds,
                )
            )

    def finish(self) -> None:
        """The last save of a run, which must succeed."""
        self.collect(wait=True)
        if self._failed:
            raise CheckpointError("the last checkpoint could not be written; see the warning above")

    def rescue(self, screen: Screen) -> None:
        """Steps since the last save, when what came between two steps has failed: nothing that a step made has changed.
        A failure here must not hide the first, whatever it is: after some errors a GPU answers nothing any more."""
        if self.up_to_date:
            return
        try:
            if not self._state.guard.halted_at():  # steps made since the weights froze are no progress
                self.order()
                self.collect(wait=True)
        except Exception as error:
            screen.say(f"warning: step {self._state.step} could not be saved ({error})", "bold red")

    def let_end(self, screen: Screen) -> None:
        """A save under way when the run fails is still worth having; its own failure must not hide the first."""
        try:
            self.collect(wait=True)
        except (CheckpointError, OSError) as error:
            screen.say(f"warning: {error}", "bold red")

"""Checkpoint saves during training: start them, collect them, count and report failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tercet.telemetry.event_log import EventLog
from tercet.telemetry.events import CheckpointFailed, CheckpointSaved
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.train.checkpoint import Checkpointer
from tercet.train.manifest import CheckpointError
from tercet.train.state import TrainState


class AsyncSaver:
    """At most one save is in progress. Every result is logged as an event."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        state: TrainState,
        config: Mapping[str, Any],
        log: EventLog,
        observer: Observer,
    ) -> None:
        """config: the run's configuration as JSON, which every checkpoint contains."""
        self._checkpointer, self._state, self._config = checkpointer, state, config
        self._log, self._observer = log, observer
        self._saved_step = state.step
        self._failures_in_row = 0
        self._logged: Exception | None = None  # the last failure that `collect` has logged

    @property
    def up_to_date(self) -> bool:
        """Whether the current step has been saved, or is where this process started."""
        return self._state.step == self._saved_step

    def save(self) -> None:
        """Save the current step; in the background if `checkpoint.async_save` is set."""
        state = self._state
        with state.interval.excluded():
            self.collect(wait=True)
            self._observer.flush_routes(state.step)
            self._log.sync()
            self._checkpointer.save(
                state.step, state.model, state.optimizer, state.run_state(self._config), state.rank_state()
            )
            self._saved_step = state.step
            if not self._checkpointer.config.async_save:
                self.collect(wait=True)

    def collect(self, *, wait: bool) -> None:
        """Log a save that has ended; with `wait`, wait for the one in progress. Raises after too many failures."""
        try:
            saved = self._checkpointer.collect(wait=wait)
        except CheckpointError as error:
            self._failures_in_row += 1
            self._saved_step = -1
            self._log.emit(CheckpointFailed(step=self._state.step, reason=str(error)))
            self._logged = error
            if self._failures_in_row > self._checkpointer.config.failures_allowed:
                raise
            return
        if saved is not None:
            self._failures_in_row = 0
            self._observer.add_excluded("checkpoint", saved.blocked_seconds)
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
        """Wait for the last save of a run, which must succeed."""
        self.collect(wait=True)
        if self._failures_in_row:
            raise CheckpointError("the last checkpoint could not be written; see the warning above")

    def save_after_error(self, screen: Screen) -> None:
        """Save the current step after a failure between two steps, which leaves the training state intact.

        A failure here must not hide the first one: after some errors a GPU does not respond at all.
        """
        if self.up_to_date:
            return
        try:
            if not self._state.guard.halted_at():  # steps since the weights froze are not progress
                self.save()
                self.collect(wait=True)
        except Exception as error:
            if error is not self._logged:
                screen.say(f"warning: step {self._state.step} could not be saved ({error})", "bold red")

    def wait_after_error(self, screen: Screen) -> None:
        """Let the save in progress complete when the run fails. A failure here must not hide the first one."""
        try:
            self.collect(wait=True)
        except (CheckpointError, OSError) as error:
            if error is not self._logged:
                screen.say(f"warning: {error}", "bold red")

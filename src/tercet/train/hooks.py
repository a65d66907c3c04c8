"""What surrounds the training loop: the other ranks, readers of the event log, checkpoint saves, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch

from tercet.config.keys import flatten_table
from tercet.config.schema import RunConfig
from tercet.errors import EXIT_FAILURE, TercetError
from tercet.parallel.launch import Launch, LaunchError, check_launch, join
from tercet.parallel.strategy import Single, Strategy, build_strategy
from tercet.telemetry.event_log import EventLog
from tercet.telemetry.events import CheckpointFailed, Event
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import BackgroundSink, Sink, TensorBoardSink, WandbSink, csv_sinks, tensorboard_wanted
from tercet.telemetry.watchdog import Watchdog
from tercet.terminal import printable
from tercet.train import manifest
from tercet.train.checkpoint import Checkpointer
from tercet.train.console import precision_of
from tercet.train.manifest import CheckpointError
from tercet.train.run_folder import locate
from tercet.train.state import TrainState


def join_run(
    config: RunConfig, resume: str | None, launch: Launch, device: torch.device
) -> tuple[Strategy, Path, str | None]:
    """The strategy, the run folder that all ranks agreed on, and what to resume from.

    A process that torchrun restarted resumes from the newest checkpoint, whatever the first one was asked to do.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    try:
        warnings = check_launch(config.parallel, launch, device.type, gpus)
    except LaunchError as error:
        error.reported_elsewhere = launch.rank > 0  # all ranks see the same error
        raise
    for warning in warnings if launch.local_rank == 0 else []:  # once per machine
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if config.parallel.strategy == "single":
        return Single(), locate(config.run, resume), resume

    def folder(earlier: str | None) -> Path:
        return Path(earlier) if earlier else locate(config.run, resume)

    world = join(launch, config.parallel, device, flatten_table(config.model_dump(mode="json")), folder)
    path = Path(world.folder)
    # a machine that joins again counts its restarts from zero
    restarts = max(member["restarts"] for member in world.members)
    if restarts and (resume is None or manifest.complete_checkpoints(path / "checkpoints")):
        resume = "auto"
    return build_strategy(config.parallel, config.train, world), path, resume


@contextmanager
def rank_context(strategy: Strategy) -> Iterator[None]:
    """Leave the process groups at the end. On an error, exit at once: closing groups would wait for other ranks."""
    try:
        yield
    except BaseException as error:
        if strategy.world_size == 1:
            raise
        cause = strategy.explain(error)
        if not isinstance(cause, TercetError) or "--debug" in sys.argv:
            traceback.print_exception(cause)
        elif not cause.reported_elsewhere:
            print(f"error: {printable(str(cause))}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        code = 130 if isinstance(cause, KeyboardInterrupt) else EXIT_FAILURE  # as a single process with this error
        os._exit(cause.exit_code if isinstance(cause, TercetError) else code)
    strategy.close()


def attach(
    stack: ExitStack, config: RunConfig, state: TrainState, strategy: Strategy, folder: Path, log: EventLog,
    beat: Watchdog, screen: Screen, past: list[Event],
) -> Observer:  # fmt: skip
    """Attach sinks, watchdog and observer; `stack` closes them. Rank 0 writes the files that all ranks share."""
    if strategy.rank == 0:
        log.readers += [screen, *csv_sinks(folder, past)]
        slow: dict[str, Sink] = {}
        if tensorboard_wanted(config.log.tensorboard):
            slow["TensorBoard"] = TensorBoardSink(folder / "tb", state.step)
        elif config.log.tensorboard and not past:
            screen.say("TensorBoard is not installed, so tb/ is not written: pip install 'tercet[report]' adds it")
        if config.log.wandb:
            slow["W&B"] = WandbSink(folder, config.run.name, config.model_dump(mode="json"))
        log.readers += [
            stack.enter_context(closing(BackgroundSink(name, sink, screen.say))) for name, sink in slow.items()
        ]
    log.readers.append(beat.observe)
    observer = Observer(
        config, folder, strategy.rank, state.device, state.model, state.optimizer, log,
        precision_of(config, state.device), strategy.all_sum, state.interval.excluded, lambda: state.held_bytes,
    )  # fmt: skip
    return stack.enter_context(closing(observer))


class AsyncSaver:
    """At most one save is in progress. Every result is logged as an event."""

    def __init__(
        self, checkpointer: Checkpointer, state: TrainState, config: Mapping[str, Any], log: EventLog,
        observer: Observer,
    ) -> None:  # fmt: skip
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
            self._log.emit(saved)

    def finish(self) -> None:
        """Wait for the last save of a run, which must succeed."""
        self.collect(wait=True)
        if self._failures_in_row:
            raise CheckpointError("the last checkpoint could not be written; see the warning above")

    def save_after_error(self, screen: Screen, *, between_steps: bool) -> None:
        """Complete the save in progress when the run fails. Between two steps, also save the current one: such a
        failure leaves the training state intact.

        A failure here must not hide the first one: after some errors a GPU does not respond at all.
        """
        try:
            # steps since the weights froze are not progress
            if between_steps and not self.up_to_date and not self._state.guard.halted_at():
                self.save()
            self.collect(wait=True)
        except Exception as error:
            if error is not self._logged:
                screen.say(f"warning: step {self._state.step} could not be saved ({error})", "bold red")


class StopSignals:
    """SIGTERM, SIGHUP or Ctrl-C asks the run to save and exit; a second Ctrl-C exits immediately.

    Use as a context manager and check `signal` between steps.
    """

    def __init__(self, *, watch_parent: bool = False) -> None:
        """watch_parent: the end of the parent process counts as SIGTERM. A killed torchrun leaves its ranks running."""
        self._signal: signal.Signals | None = None
        self._parent = os.getppid() if watch_parent else None
        self._previous: dict[signal.Signals, object] = {}
        self.reason = ""

    @property
    def signal(self) -> signal.Signals | None:
        """The first signal, None while there is none."""
        if self._signal is None and self._parent not in (None, os.getppid()):
            self._stop(signal.SIGTERM, f"torchrun (pid {self._parent}) is gone")
        return self._signal

    def _stop(self, number: int, reason: str) -> None:
        self._signal, self.reason = signal.Signals(number), reason
        _write_stderr(f"{reason}: saving after this step, then exiting (Ctrl-C again exits at once)\n")

    def __enter__(self) -> Self:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            # No clean-up: a save in progress is in a temporary folder that is never loaded.
            _write_stderr("exiting immediately; complete checkpoints are intact\n")
            os._exit(128 + number)
        if self._signal is None:
            self._stop(number, signal.Signals(number).name)


def _write_stderr(text: str) -> None:
    # A signal handler may interrupt a print. Writing to the descriptor needs no lock.
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())

"""Attachments of a training run: event sinks, the watchdog, the observer, and signal handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from tercet.config.schema import RunConfig
from tercet.model.cost import parameters
from tercet.parallel.strategy import Strategy
from tercet.telemetry.event_log import EventLog
from tercet.telemetry.events import Event, RunStarted
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import BackgroundSink, ExchangeSink, WandbSink, csv_sinks, slow_sinks
from tercet.telemetry.watchdog import Heartbeat, Watchdog
from tercet.train.console import precision_of
from tercet.train.device import device_name
from tercet.train.state import TrainState


def attach(
    stack: ExitStack,
    config: RunConfig,
    state: TrainState,
    strategy: Strategy,
    folder: Path,
    log: EventLog,
    beat: Heartbeat,
    screen: Screen,
    past: list[Event],
) -> Observer:
    """Attach sinks, watchdog and observer; `stack` closes them. Rank 0 writes the files that all ranks share."""
    if strategy.rank == 0:
        log.readers += [screen, *csv_sinks(folder, past)]
        slow = slow_sinks(folder, past, config.log.tensorboard, state.step)
        if config.log.tensorboard and "TensorBoard" not in slow and not past:
            screen.say("TensorBoard is not installed, so tb/ is not written: pip install 'tercet[report]' adds it")
        if config.log.wandb:
            slow["W&B"] = WandbSink(folder, config.run.name, config.model_dump(mode="json"))
        log.readers += [
            stack.enter_context(closing(BackgroundSink(name, sink, screen.say))) for name, sink in slow.items()
        ]
    if strategy.traffic is not None:
        table = folder / f"exchange_rank{strategy.rank}.csv"
        log.readers.append(ExchangeSink(table, strategy.traffic, state.step))
    log.readers.append(stack.enter_context(Watchdog(folder, strategy.rank, config.health, beat, log)).observe)
    return stack.enter_context(
        closing(
            Observer(
                config,
                folder,
                strategy.rank,
                state.device,
                state.model,
                state.optimizer,
                log,
                precision_of(config, state.device),
                strategy.all_sum,
                state.interval.excluded,
                lambda: state.held_bytes,
            )
        )
    )


def run_started(
    config: RunConfig, state: TrainState, strategy: Strategy, resumed_from: Path | None, superseded: int
) -> RunStarted:
    """The first event of this process."""
    return RunStarted(
        step=state.step,
        name=config.run.name,
        steps=config.train.steps,
        world_size=strategy.world_size,
        strategy=strategy.name,
        device=device_name(state.device),
        parameters=parameters(config.model).total,
        tokens_per_step=config.train.tokens_per_step,
        accumulation=config.at_step(state.step + 1).accumulation,
        resumed_from=str(resumed_from.resolve()) if resumed_from else None,
        superseded=superseded,
    )


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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

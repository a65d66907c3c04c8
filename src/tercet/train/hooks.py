"""Everyone who follows a run from inside: the readers of its log, the watchdog, and the observer of its steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from tercet.config.schema import RunConfig
from tercet.model.cost import parameters
from tercet.parallel.strategy import Strategy
from tercet.telemetry.events import Event, EventLog, RunStarted
from tercet.telemetry.observer import Observer
from tercet.telemetry.progress import Screen
from tercet.telemetry.sinks import (
    ExchangeTable,
    InBackground,
    LayerTable,
    RouteTable,
    TensorBoardSink,
    WandbSink,
    csv_sinks,
)
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
    """Let them follow; they leave with the stack. Files that all ranks would write alike are rank 0's."""
    if strategy.rank == 0:
        log.readers += [screen, *csv_sinks(folder, past)]
        slow: dict[str, Callable[[Event], None]] = {"the layer table": LayerTable(folder / "k_stats.csv", past)}
        slow["the route table"] = RouteTable(folder / "fallback_counters.csv", past)
        if config.log.tensorboard:
            slow["TensorBoard"] = TensorBoardSink(folder / "tb", state.step)
        if config.log.wandb:
            slow["W&B"] = WandbSink(folder, config.run.name, config.model_dump(mode="json"))
        log.readers += [
            stack.enter_context(closing(InBackground(name, sink, screen.say))) for name, sink in slow.items()
        ]
    if strategy.traffic is not None:
        table = folder / f"exchange_rank{strategy.rank}.csv"
        log.readers.append(ExchangeTable(table, strategy.traffic, state.step))
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
    config: RunConfig, state: TrainState, strategy: Strategy, path: Path | None, superseded: int
) -> RunStarted:
    """The event that opens this process's part of the log."""
    return RunStarted(
        step=state.step,
        name=config.run.name,
        steps=config.train.steps,
        world_size=strategy.world_size,
        strategy=strategy.name,
        device=device_name(state.device),
        parameters=parameters(config.model).total,
        tokens_per_step=config.train.tokens_per_step,
        accumulation=config.accumulation,
        resumed_from=str(path) if path else None,
        superseded=superseded,
    )


# ------------------------------------------------------------------------------------------------
# SIGTERM and Ctrl-C: the first asks the run to save and leave, a second Ctrl-C leaves at once.


class StopSignals:
    """`with StopSignals() as stop:` and look at `stop.signal` between steps."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            # No clean-up at all: a save under way is a folder without its name yet, and harms nothing.
            _announce("leaving at once; complete checkpoints are untouched\n")
            os._exit(128 + number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            _announce(f"{self.signal.name}: saving after this step, then leaving (Ctrl-C again leaves at once)\n")


def _announce(text: str) -> None:
    # A handler may interrupt a print; the raw descriptor has no lock to be re-entered.
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())

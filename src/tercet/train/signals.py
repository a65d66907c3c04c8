"""SIGTERM and Ctrl-C: the first asks the run to save and leave, a second Ctrl-C leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self


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
            _tell("leaving at once; complete checkpoints are untouched\n")
            os._exit(128 + number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            _tell(f"{self.signal.name}: saving after this step, then leaving (Ctrl-C again leaves at once)\n")


def _tell(text: str) -> None:
    # A handler may interrupt a print; the raw descriptor has no lock to be re-entered.
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())

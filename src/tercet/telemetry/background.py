"""A reader of events that may be slow, in a thread of its own: while it writes, the device works on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tercet.telemetry.events import Event

# Longer than any sink needs for what is left; a network that hangs must not keep a finished run.
LEAVE_SECONDS = 30.0


class InBackground:
    """Hands events over and returns. A reader that fails is left out from then on, and that is said once."""

    def __init__(self, name: str, reader: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._name, self._reader, self._say = name, reader, say
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def close(self) -> None:
        """Wait until everything is told."""
        self._queue.put(None)
        self._thread.join(LEAVE_SECONDS)
        if self._thread.is_alive():
            self._say(f"warning: {self._name} did not finish in {LEAVE_SECONDS:.0f} s; the events have everything")

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._reader(event)
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                self._say(f"warning: {self._name} stopped ({what}); the events in the run folder have everything")
                return

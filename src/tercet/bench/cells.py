"""Cells of a grid, each in a process of its own with a time limit: what kills one loses only that one. No torch."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True)
class Ended:
    """A process that has ended. late: seconds after which it was stopped, None if it ended on its own."""

    code: int
    output: str
    late: float | None = None

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.late is not None

    @property
    def reason(self) -> str:
        """Why it failed: too slow, out of memory, or the last line of its error."""
        if self.late is not None:
            return f"too slow ({self.late:.0f} s)"
        if is_out_of_memory(self.output) or self.code in (-9, 137):
            return "out of memory"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"exit code {self.code}"])[-1]


def is_out_of_memory(text: str) -> bool:
    return any(sign in text for sign in _OUT_OF_MEMORY)


def run(words: Sequence[str], seconds: float, on_line: Callable[[str], None] | None = None) -> Ended:
    """Run a command, and stop it after `seconds`.

    on_line: called with each line of stdout as soon as it is printed; the time limit then applies to each line.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        started, late = time.monotonic(), []
        stdout = log if on_line is None else subprocess.PIPE
        process = subprocess.Popen(words, stdout=stdout, stderr=log, text=True)

        def stop() -> None:
            late.append(time.monotonic() - started)
            process.terminate()  # torchrun forwards it to its ranks
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()

        def timer() -> threading.Timer:
            waiting = threading.Timer(seconds, stop)
            waiting.start()
            return waiting

        limit = timer()
        try:
            for line in process.stdout or ():
                limit.cancel()
                assert on_line is not None
                on_line(line)
                started, limit = time.monotonic(), timer()
            process.wait()
        finally:
            limit.cancel()
            if process.poll() is None:  # interrupted
                process.terminate()
        log.seek(0)
        return Ended(process.returncode, log.read(), late[0] if late else None)

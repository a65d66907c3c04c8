"""One cell of a sweep: a `tercet train` in its own process, with a time limit and a temporary run folder. No torch."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.telemetry.event_log import events_file, read_events
from tercet.telemetry.events import Event

_OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "can't allocate memory", "Cannot allocate memory")


@dataclass(frozen=True)
class CellRun:
    """A run that has ended. late: seconds after which it was stopped, None if it ended on its own."""

    events: Sequence[Event]
    code: int
    output: str
    late: float | None = None

    @property
    def failed(self) -> bool:
        return self.code != 0 or self.late is not None


def run_cell(words: Sequence[str], settings: Mapping[str, Any], seconds: float) -> CellRun:
    """Run the command `words` with the configuration keys `settings`, for at most `seconds`."""
    scratch = Path(tempfile.mkdtemp(prefix="tercet-sweep-"))
    run = scratch / "run"
    flags = as_flags({**settings, "run.dir": run})
    try:
        with (scratch / "output").open("w+") as output:
            process = subprocess.Popen([*words, *flags], stdout=output, stderr=subprocess.STDOUT)
            started, late = time.monotonic(), None
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                late = time.monotonic() - started
                process.terminate()  # torchrun forwards it to its ranks
                try:
                    process.wait(timeout=45)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            output.seek(0)
            text = output.read()
        events = list(read_events(events_file(run))) if events_file(run).exists() else []
        return CellRun(events, process.returncode, text, late)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Configuration keys as words of a command line."""
    return [part for key, value in settings.items() for part in (f"--{key}", _text(value))]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def failure(run: CellRun) -> str:
    """Why a run failed: too slow, out of memory, or the last line of its error."""
    if run.late is not None:
        return f"too slow ({run.late:.0f} s)"
    if any(sign in run.output for sign in _OUT_OF_MEMORY) or run.code in (-9, 137):
        return "out of memory"
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    lines = errors or [line for line in run.output.splitlines() if line.strip()] or [f"exit code {run.code}"]
    return lines[-1].strip()

"""What a person sees: a header, a live line on a terminal or plain lines elsewhere, and a summary. Reads events."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tercet.telemetry.events import (
    CheckpointFailed,
    CheckpointSaved,
    DoctorReported,
    Event,
    HealthFired,
    Noted,
    Sampled,
    StepLogged,
    StepsSkipped,
    Validated,
)
from tercet.telemetry.units import duration, quantity


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read the output is gone. rich would leave with SystemExit(1); a run goes on, and its folder has all
        that would have been said."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, or stderr gone as well
            if self.file is sys.stdout:
                # what is still buffered would fail again when the process ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
            os.write(sys.stderr.fileno(), b"nobody reads the output any more: the run goes on without it\n")


class Screen:
    """Follows the events of rank 0. Other ranks have a quiet one."""

    def __init__(self, mode: str = "auto", *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._console = _Console(file=stream or sys.stdout, quiet=quiet, soft_wrap=True, highlight=False)
        self._live = not quiet and (mode == "on" or (mode == "auto" and self._console.is_terminal))
        self._bar: Progress | None = None
        self._steps = 0
        self._estimated = False

    def say(self, text: str, style: str = "") -> None:
        """A sentence; above the live line where there is one. Markup in it is shown, not obeyed."""
        console = self._bar.console if self._bar else self._console
        console.print(Text(text, style=style))

    def header(self, lines: list[tuple[str, str]]) -> None:
        """What is about to run, one fact a line."""
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            self.say(f"{name:<{width}}  {value}")

    def begin(self, step: int, steps: int) -> None:
        """Training is about to start or go on."""
        self._steps = steps
        if self._live:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("first step…", total=steps, completed=step)
            self._bar.start()

    def advance(self, step: int) -> None:
        """A step was ordered; only moves the bar."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def end(self) -> None:
        """Take the live line away."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepLogged):
            left = (self._steps - event.step) * event.step_seconds
            if self._bar:
                self._bar.update(self._task, completed=event.step, description=step_line(event, left))
            else:
                self.say(f"step {event.step:>{len(str(self._steps))}}/{self._steps}  {step_line(event, left)}")
            self._estimate(event, left)
        elif isinstance(event, Validated):
            self.say(f"validation after step {event.step}: loss {event.loss:.4f} over {quantity(event.tokens)} tokens")
        elif isinstance(event, Sampled):
            body = "\n".join("  | " + line for line in printable(event.prompt + event.text).split("\n"))
            self.say(f"sample after step {event.step}:\n{body}")
        elif isinstance(event, CheckpointSaved):
            self.say(
                f"checkpoint of step {event.step}: {event.path} "
                f"({event.bytes / 2**20:.1f} MiB, training stood still for {event.blocked_seconds:.2f} s)",
            )
        elif isinstance(event, CheckpointFailed):
            self.say(f"warning: {event.reason}", "bold red")
        elif isinstance(event, StepsSkipped):
            self.say(
                f"warning: loss or gradients were not finite in step {', '.join(map(str, event.steps))}: "
                f"no update was made there ({event.total} so far)",
                "bold yellow",
            )
        elif isinstance(event, HealthFired):
            word = "halting" if event.action == "halt" else "warning"
            self.say(f"{word}: {event.rule}: {event.sentence}", "bold yellow")
        elif isinstance(event, DoctorReported):
            for check, verdict, finding, mend in zip(
                event.check, event.verdict, event.finding, event.mend, strict=True
            ):
                if verdict == "warning":
                    self.say(f"warning: doctor: {check}: {finding}: {mend}", "bold yellow")
        elif isinstance(event, Noted):
            self.say(event.text)

    def _estimate(self, event: StepLogged, left: float) -> None:
        # The very first step of a process also pays for warming up; an estimate needs others beside it.
        if self._estimated or len(event.losses) < 2 or left < 30:
            return
        self._estimated = True
        until = time.strftime("%H:%M" if left < 43200 else "%a %d %b %H:%M", time.localtime(time.time() + left))
        self.say(f"about {duration(left)} to go, until {until}")


def step_line(event: StepLogged, seconds_left: float) -> str:
    """loss, learning rate, gradient norm, speed, utilisation, memory and time left, in one line."""
    mfu = "" if event.mfu is None else f"  mfu {100 * event.mfu:.1f}%"
    return (
        f"loss {event.loss:.4f}  lr {event.lr:.2e}  grad {event.grad_norm:.3f}  "
        f"{quantity(event.tokens_per_s)} tok/s{mfu}  mem {event.memory_gib:.2f} GiB  eta {duration(seconds_left)}"
    )


def printable(text: str) -> str:
    """Model output may hold anything; a terminal must only see characters."""
    return "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)

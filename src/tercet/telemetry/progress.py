"""Terminal output of a run: header, live progress line or plain lines, and events as text."""

from __future__ import annotations

import contextlib
import errno
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
    is_disk_full,
)
from tercet.telemetry.units import duration, quantity
from tercet.terminal import printable


class _Console(Console):
    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if is_disk_full(error):
                del self._buffer[:]  # the file keeps it, and writes it once there is space
            elif error.errno == errno.EIO:  # the terminal is gone
                self.on_broken_pipe()
            else:
                raise

    def on_broken_pipe(self) -> None:
        """The reader of the output is gone. rich would raise SystemExit(1); the run continues without output."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # stream without a descriptor, or stderr is gone too
            if self.file is sys.stdout:
                # buffered text would fail again at exit
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, sys.stdout.fileno())
                os.close(null)
            os.write(sys.stderr.fileno(), b"output is closed: the run continues without it\n")


class Screen:
    """Prints the events of rank 0. Other ranks have a quiet one."""

    def __init__(self, mode: str = "auto", *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._console = _Console(file=stream or sys.stdout, quiet=quiet, soft_wrap=True, highlight=False)
        self._live = not quiet and (mode == "on" or (mode == "auto" and self._console.is_terminal))
        self._bar: Progress | None = None
        self._steps = 0
        self._estimated = False

    def say(self, text: str, style: str = "") -> None:
        """Print a line, above the live line if there is one. Markup and control characters are printed literally."""
        console = self._bar.console if self._bar else self._console
        console.print(Text(printable(text), style=style))

    def header(self, lines: list[tuple[str, str]]) -> None:
        """Print the facts about a run, one per line."""
        width = max(len(name) for name, _ in lines)
        for name, value in lines:
            self.say(f"{name:<{width}}  {value}")

    def begin(self, step: int, steps: int) -> None:
        """Training starts or resumes."""
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
        """Move the bar."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def end(self) -> None:
        """Remove the live line."""
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
            bits = "" if event.bits_per_byte is None else f" ({event.bits_per_byte:.4f} bits per byte)"
            over = f"over {quantity(event.tokens)} tokens"
            self.say(f"validation after step {event.step}: loss {event.loss:.4f}{bits} {over}")
        elif isinstance(event, Sampled):
            body = "\n".join("  | " + line for line in (event.prompt + event.text).split("\n"))
            self.say(f"sample after step {event.step}:\n{body}")
        elif isinstance(event, CheckpointSaved):
            self.say(
                f"checkpoint of step {event.step}: {event.path} "
                f"({event.bytes / 2**20:.1f} MiB, training blocked for {event.blocked_seconds:.2f} s)",
            )
        elif isinstance(event, CheckpointFailed):
            self.say(f"warning: {event.reason}", "bold red")
        elif isinstance(event, StepsSkipped):
            self.say(
                f"warning: loss or gradients were not finite in step {', '.join(map(str, event.steps))}: "
                f"skipped the update ({event.total} so far)",
                "bold yellow",
            )
        elif isinstance(event, HealthFired) and (event.rule, event.action) == ("nonfinite", "warn"):
            pass  # StepsSkipped has said it
        elif isinstance(event, HealthFired):
            word = "halting" if event.action == "halt" else "warning"
            self.say(f"{word}: {event.rule}: {event.sentence}", "bold yellow")
        elif isinstance(event, DoctorReported):
            for check, verdict, finding, fix in zip(event.check, event.verdict, event.finding, event.mend, strict=True):
                if verdict == "warning":
                    self.say(f"warning: doctor: {check}: {finding}: {fix}", "bold yellow")
        elif isinstance(event, Noted):
            self.say(event.text)

    def _estimate(self, event: StepLogged, left: float) -> None:
        # The first step of a process includes warmup: wait for an interval with more steps.
        if self._estimated or len(event.losses) < 2 or left < 30:
            return
        self._estimated = True
        until = time.strftime("%H:%M" if left < 43200 else "%a %d %b %H:%M", time.localtime(time.time() + left))
        self.say(f"about {duration(left)} left, until {until}")


def step_line(event: StepLogged, seconds_left: float) -> str:
    """Loss, learning rate, gradient norm, throughput, MFU, memory and time left."""
    mfu = "" if event.mfu is None else f"  mfu {100 * event.mfu:.1f}%"
    return (
        f"loss {event.loss:.4f}  lr {event.lr:.2e}  grad {event.grad_norm:.3f}  "
        f"{quantity(event.tokens_per_s)} tok/s{mfu}  mem {event.memory_gib:.2f} GiB  eta {duration(seconds_left)}"
    )

"""Terminal output of a run: header, live progress line or plain lines, and events as text."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import textwrap
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from tercet.telemetry import events
from tercet.telemetry.event_log import is_disk_full
from tercet.telemetry.events import Event, describe
from tercet.terminal import duration, gradient_norm, passes_of, printable, quantity

HISTORY_LINES = 100  # of a whole run, above the live line
MICRO_BATCHES_AFTER = 2.0  # seconds of a step, after which the live line counts micro-batches
FIRST_STEP = "first step …"
STYLES = {"failure": "bold red", "warning": "bold yellow", "": ""}  # by severity


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

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._console = _Console(file=stream or sys.stdout, quiet=quiet, soft_wrap=True, highlight=False)
        self._live = not quiet and self._console.is_terminal
        self._display: Progress | None = None
        self._steps = 0  # of the run
        self._doing = FIRST_STEP  # what takes time now; empty: training
        self._fields: list[tuple[int, str]] = []  # of the last log line
        self._advanced = time.monotonic()  # when the last step was completed
        self._last_line = 0  # step of the last line printed above the live line
        self.warming_up = False  # then the speed of the next log line says nothing about the time left
        self._stage: events.StageStarted | None = None  # the current one

    def say(self, text: str, style: str = "", *, wrap: bool = False) -> None:
        """Print a line, above the live line if there is one. Markup and control characters are printed literally.

        wrap: break it between words on a narrow terminal. The terminal breaks other lines, and what is copied from
        them stays one line, as commands must.
        """
        if wrap:
            text = self._wrapped(text, "  ")
        self._console.print(Text(printable(text), style=style))

    def header(self, lines: list[tuple[str, str]]) -> None:
        """Print the facts about a run, one per line. A terminal shows long ones wrapped under their first word."""
        width = max(len(name) for name, _ in lines) + 2
        for name, value in lines:
            self.say(self._wrapped(f"{name:<{width}}{value}", " " * width))

    def _wrapped(self, text: str, indent: str) -> str:
        if not self._console.is_terminal:
            return text
        width = max(40, self._console.width)
        return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    def begin(self, step: int, steps: int) -> None:
        """Training starts or resumes."""
        self._steps, self._last_line, self._doing, self._advanced = steps, step, FIRST_STEP, time.monotonic()
        if self._live:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop"))
            width = min(40, self._console.width // 5)
            columns = (BarColumn(width), MofNCompleteColumn(), text, TimeElapsedColumn())
            self._display = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
            self._display.add_task(FIRST_STEP, total=steps, completed=step)
            self._display.start()
        elif step < steps:
            self.say(FIRST_STEP)

    def _update(self, **changes: Any) -> None:
        """Refresh the live line: what takes time now, or was measured last."""
        if self._display:
            room = self._console.width - min(40, self._console.width // 5) - 2 * len(str(self._steps)) - 12
            text = (self._doing or fit(self._fields, room))[: max(0, room)]
            self._display.update(self._display.task_ids[0], description=text, **changes)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._doing, self._advanced = "", time.monotonic()
        self._update(completed=step)

    def micro_batch(self, index: int, count: int) -> None:
        """Show the progress of a step that takes long. Without a live line, print it in the first step, whenever the
        number of finished micro-batches has doubled."""
        seconds = time.monotonic() - self._advanced
        if count == 1 or seconds <= MICRO_BATCHES_AFTER:
            return
        first = self._doing.startswith(FIRST_STEP)
        self._doing = f"{FIRST_STEP} " * first + f"micro-batch {index + 1}/{count}"
        self._update()
        if first and self._display is None and index.bit_count() == 1:  # a power of two
            self.say(f"first step: {index} of {count} micro-batches done after {seconds:.1f} s")

    def doing(self, text: str, *, announce: bool = False) -> None:
        """Show in the live line what takes time now. Without a live line, print it if `announce`."""
        self._doing = text
        self._update()
        if announce and self._display is None:
            self.say(text)

    def end(self) -> None:
        """Remove the live line."""
        if self._display:
            self._display.stop()
            self._display = None

    def __call__(self, event: Event) -> None:
        """Print what the event reports; events of other kinds are not shown."""
        if isinstance(event, events.Validated | events.Sampled):
            self._doing = ""
        match event:
            case events.StepLogged():
                self._show_step(event)
            case events.StageStarted():
                self.say(stage_line(event, self._stage), wrap=True)
                self._stage = event
            case events.Sampled():
                width = max(40, self._console.width) - 4 if self._console.is_terminal else sys.maxsize
                lines = printable(event.prompt + event.text).split("\n")
                cut = [line[at : at + width] for line in lines for at in range(0, max(1, len(line)), width)]
                self.say("\n".join([f"sample after step {event.step}:", *("  | " + line for line in cut)]))
            case events.DoctorReported():
                for check, verdict, *found in zip(event.check, event.verdict, event.finding, event.fix, strict=True):
                    if verdict == "warning":
                        self.say(f"warning: doctor: {check}: {': '.join(found)}", "bold yellow")
            case events.RunStarted() | events.RunEnded() | events.Stalled():
                pass  # the trainer and the watchdog print them
            case events.HealthFired(rule="nonfinite", action="warn"):
                pass  # events.StepsSkipped reports that
            case _ if described := describe(event):
                severity, sentence = described
                # A note may name a command, which stays one line.
                self.say(sentence, STYLES[severity], wrap=not isinstance(event, events.Noted))

    def _show_step(self, event: events.StepLogged) -> None:
        """In the live line. Print it too if that is a while ago, or always without a live line."""
        steps = self._steps
        left = None if self.warming_up else steps_left(steps, event.step, self._stage) * event.step_seconds
        self._fields = step_fields(event, left)
        self._update()
        if self._display is None or event.step - self._last_line >= steps // HISTORY_LINES:
            self._last_line = event.step
            count = f"step {event.step:>{len(str(steps))}}/{steps}  "
            room = self._console.width - len(count) if self._console.is_terminal else sys.maxsize
            self.say(count + fit(self._fields, room))


def steps_left(steps: int, done: int, stage: events.StageStarted | None) -> float:
    """What is left of a run, in steps of the current stage if it has stages."""
    return steps - done if stage is None else stage.last_step - done + stage.later_steps


def stage_line(stage: events.StageStarted, before: events.StageStarted | None) -> str:
    """What a stage of a run changes."""
    batches = f"{stage.tokens_per_step} tokens: {passes_of(stage.accumulation, stage.micro_batch)}"
    facts = {"sequences of": stage.seq_len, "rope_theta": f"{stage.rope_theta:g}", "steps of": batches}
    if before is not None:
        was = {"sequences of": before.seq_len, "rope_theta": f"{before.rope_theta:g}", "steps of": ""}
        facts |= {k: f"{v} (was {was[k]})" for k, v in facts.items() if was[k] and v != was[k]}
    steps = f"steps {stage.step + 1} to {stage.last_step}"
    return f"stage {stage.stage}/{stage.stages}, {steps}: {', '.join(f'{k} {v}' for k, v in facts.items())}"


def step_fields(event: events.StepLogged, seconds_left: float | None) -> list[tuple[int, str]]:
    """What a log line shows: (rank, text). On a narrow terminal the highest ranks are left out."""
    mfu = [] if event.mfu is None else [(4, f"mfu {100 * event.mfu:.1f}%")]
    eta = [] if seconds_left is None else [(1, f"eta {duration(seconds_left)}")]
    return [
        (0, f"loss {event.loss:.4f}"),
        (3, f"lr {event.lr:.2e}"),
        (5, f"grad {gradient_norm(event.grad_norm)}"),
        (2, f"{quantity(event.tokens_per_s)} tok/s"),
        *mfu,
        (6, f"mem {event.memory_gib:.2f} GiB"),
        *eta,
    ]


def fit(fields: list[tuple[int, str]], width: int) -> str:
    """The fields in one line of at most `width` columns, without those of the highest rank if they do not fit.

    Short fields reserve 10 columns, so that lines that follow each other show the same fields.
    """
    kept = list(fields)
    while kept and sum(max(10, len(text)) + 2 for _, text in kept) - 2 > width:
        kept.remove(max(kept))
    return "  ".join(text for _, text in kept)

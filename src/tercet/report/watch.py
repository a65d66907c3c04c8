"""`tercet watch`: a live terminal view of all ranks, read from events and heartbeats."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tercet.errors import UsageError
from tercet.report.facts import describe
from tercet.report.plots import PHASES
from tercet.report.read import MEASUREMENTS, ROUTES, read_config, read_run, stale_after
from tercet.telemetry import events
from tercet.telemetry.event_log import last_heartbeat, rank_files
from tercet.telemetry.events import Event, decode
from tercet.telemetry.progress import steps_left
from tercet.telemetry.units import duration, gradient_norm, quantity
from tercet.terminal import printable

BLOCKS = "▁▂▃▄▅▆▇█"
BRANCHES = (("compressed", "blue"), ("selected", "magenta"), ("window", "cyan"))


class Follower:
    """Follows the event file of one rank, reading only what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reset()

    def reset(self) -> None:
        self._offset = 0
        self.last: dict[type[Event], Any] = {}
        self.losses: deque[float] = deque(maxlen=2000)
        self.speeds: deque[float] = deque(maxlen=400)
        self.problems: deque[Event] = deque(maxlen=6)
        self.ended = False

    def poll(self) -> None:
        """Read new events. Of those that a long run has many of, only the last ones count."""
        with contextlib.suppress(OSError), self.path.open("rb") as stream:
            if self.path.stat().st_size < self._offset:
                self.reset()  # the file was rewritten: the run resumed from an earlier step
            stream.seek(self._offset)
            latest: dict[bytes, deque[bytes]] = {}
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                if line.startswith(MEASUREMENTS):
                    latest.setdefault(line[: line.find(b",")], deque(maxlen=2000)).append(line)
                elif not line.startswith(ROUTES):
                    self._handle(line)
            for line in itertools.chain(*latest.values()):
                self._handle(line)

    def _handle(self, line: bytes) -> None:
        try:
            event = decode(line)
        except ValueError:
            return
        if event is None:
            return
        self.last[type(event)] = event
        if isinstance(event, events.RunStarted | events.RunEnded):
            self.ended = isinstance(event, events.RunEnded)
        elif isinstance(event, events.StepLogged):
            self.losses.extend(v for v in event.losses if abs(v) < 1e100)
            self.speeds.append(_finite(event.tokens_per_s))
        elif isinstance(event, (events.HealthFired, events.Stalled, events.StepsSkipped, events.CheckpointFailed)):
            self.problems.append(event)


class View:
    """All ranks of a run, rendered with rich."""

    def __init__(self, folder: Path) -> None:
        self.stale_after = stale_after(read_config(folder, []))
        if not any(path.stat().st_size for path in rank_files(folder, "events").values()):
            read_run(folder)  # raises: no event yet, or not a run folder
        self.folder = folder
        self.ranks: dict[int, Follower] = {}

    def poll(self) -> None:
        """Read new events of all ranks, including ranks that just appeared."""
        for rank, path in rank_files(self.folder, "events").items():
            self.ranks.setdefault(rank, Follower(path))
        for follower in self.ranks.values():
            follower.poll()

    @property
    def ended(self) -> bool:
        started = self.ranks[0].last.get(events.RunStarted) if 0 in self.ranks else None
        ranks = started.world_size if started else len(self.ranks)  # a resumed run may have fewer than before
        return bool(self.ranks) and all(f.ended for rank, f in self.ranks.items() if rank < ranks)

    def draw(self) -> RenderableType:
        """Render one frame."""
        first = self.ranks[min(self.ranks)]
        parts: list[RenderableType] = [self._title(first), _figures(first)]
        if layers := first.last.get(events.LayersObserved):
            parts.append(_gates(layers))
        parts.append(self._ranks())
        problems = sorted((e for f in self.ranks.values() for e in f.problems), key=lambda e: e.time)[-6:]
        if problems:
            lines = Text(printable("\n".join(map(_problem, problems))), style="yellow")
            parts.append(Panel(lines, title="problems", title_align="left", border_style="yellow"))
        return Group(*parts)

    def _title(self, first: Follower) -> RenderableType:
        started, ended, step, stage = (
            first.last.get(kind)
            for kind in (events.RunStarted, events.RunEnded, events.StepLogged, events.StageStarted)
        )
        done, steps = (step.step if step else 0), (started.steps if started else 0)
        state = ended.outcome if first.ended and ended else "running"
        left = "" if first.ended or not step else f"eta {duration(steps_left(steps, done, stage) * step.step_seconds)}"
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(printable(started.name if started else self.folder.name), style="bold"),
            ProgressBar(total=max(1, steps), completed=done, width=30),
            Text(f"{done:,}/{steps:,} steps{f', stage {stage.stage}/{stage.stages}' if stage else ''}"),
            Text(printable(state), style={"completed": "green", "running": "cyan"}.get(state, "bold red")),
            Text(left),
        )
        return grid

    def _ranks(self) -> RenderableType:
        table = Table(
            "rank", "step", "doing", "for", "heartbeat", "logged", box=None, padding=(0, 2), header_style="dim"
        )
        for rank, follower in sorted(self.ranks.items()):
            beat = last_heartbeat(self.folder / f"heartbeat_rank{rank}.jsonl")
            step = follower.last.get(events.StepLogged)
            logged = str(step.step if step else 0)
            if not beat:
                table.add_row(str(rank), "?", "no heartbeat", "", "", logged)
                continue
            age = time.time() - beat["time"]
            stale = age > self.stale_after and not follower.ended
            table.add_row(
                str(rank),
                Text(printable(str(beat.get("step")))),
                Text(printable(str(beat.get("doing")))),
                duration(_finite(beat.get("for_seconds")) + (0 if follower.ended else age)),
                Text(f"{duration(age)} ago{' (frozen or dead)' * stale}", style="bold red" if stale else ""),
                logged,
            )
        return table


def _figures(follower: Follower) -> RenderableType:
    last = follower.last
    step = last.get(events.StepLogged)
    if step is None:
        return Text("no step logged yet: the first one may be compiling", style="dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("loss", f"{step.loss:.4f}", sparkline(list(follower.losses)))
    grid.add_row("tokens/s", quantity(step.tokens_per_s), sparkline(list(follower.speeds)))
    if used := last.get(events.ResourcesObserved):
        grid.add_row("step", f"{1e3 * step.step_seconds:.1f} ms", _phases(used))
        parts = f"allocated {used.allocated_gib:.2f}, reserved {used.reserved_gib:.2f}, host {used.host_gib:.2f} GiB"
        grid.add_row("memory", f"{step.memory_gib:.2f} GiB", Text(parts, style="dim"))
    mfu = "" if step.mfu is None else f"  mfu {100 * step.mfu:.1f}%"
    rest = f"lr {step.lr:.2e}{mfu}  tokens {quantity(step.tokens)}  skipped {step.skipped}"
    grid.add_row("gradient", gradient_norm(step.grad_norm), Text(rest, style="dim"))
    if validation := last.get(events.Validated):
        grid.add_row("validation", f"{validation.loss:.4f}", Text(f"after step {validation.step}", style="dim"))
    if saved := last.get(events.CheckpointSaved):
        grid.add_row("saved", f"step {saved.step}", Text(f"{saved.bytes / 2**20:.1f} MiB", style="dim"))
    return Panel(grid, border_style="dim")


def _finite(value: Any) -> float:
    """A number of a heartbeat or of an event; 0 for infinity, NaN and everything that is not a number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e100 else 0.0


def sparkline(values: list[float]) -> Text:
    """A line chart of at most 48 block characters."""
    if not values:
        return Text("")
    size = max(1, -(-len(values) // 48))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return Text("".join(BLOCKS[round((v - low) * scale)] for v in means), style="cyan")


def _phases(resources: Any) -> str:
    """The share of each phase in the step time."""
    seconds = {name: max(0.0, _finite(getattr(resources, f"{name}_seconds"))) for name, _ in PHASES}
    total = sum(seconds.values()) or 1.0
    return "  ".join(f"{name} {100 * t / total:.0f}%" for name, t in seconds.items() if t / total >= 0.005)


def _gates(layers: Any) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for branch, colour in BRANCHES:
        shares = [v for v in getattr(layers, f"gate_share_{branch}") if v is not None]
        if not shares:  # model.branches leaves it out
            continue
        bars = "".join(BLOCKS[min(len(BLOCKS) - 1, int(v * len(BLOCKS)))] if 0 <= v <= 1 else "?" for v in shares)
        text = f"{100 * min(shares):.0f}% to {100 * max(shares):.0f}%"
        grid.add_row(branch, Text(bars, style=colour), Text(text, style="dim"))
    if not grid.row_count:
        return Text("")
    return Panel(grid, title=f"gate shares by layer, step {layers.step}", title_align="left", border_style="dim")


def _problem(event: Event) -> str:
    described = describe(event)
    assert described is not None
    _, kind, text = described
    return f"step {event.step}, rank {event.rank}: {kind}: {text}"


def watch_run(folder: Path, *, every: float = 1.0, once: bool = False) -> int:
    """Show a run until it ends or Ctrl-C. Prints one frame with `once` or without a terminal."""
    if every <= 0:
        raise UsageError(f"every={every:g} must be a positive number of seconds")
    view, console = View(folder), Console()
    view.poll()
    if once or not console.is_terminal:
        console.print(view.draw())
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(view.draw(), console=console, refresh_per_second=4) as live:
        while not view.ended:
            time.sleep(every)
            view.poll()
            live.update(view.draw())
    return 0

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
from tercet.report.read import MEASUREMENTS, ROUTES, last_heartbeat, read_config, read_run, stale_after
from tercet.telemetry import events
from tercet.telemetry.event_log import rank_files
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
        self.last: dict[type[Event], Event] = {}
        self.losses: deque[float] = deque(maxlen=2000)
        self.speeds: deque[float] = deque(maxlen=400)
        self.problems: deque[Event] = deque(maxlen=6)
        self.ended = False

    def poll(self) -> None:
        """Read new events."""
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if size < self._offset:
                self.reset()  # the file was rewritten: the run resumed from an earlier step
            latest: dict[bytes, deque[bytes]] = {}  # lines that a long run has many of: only the last ones count
            with self.path.open("rb") as stream:
                stream.seek(self._offset)
                for line in stream:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    kind = line[: line.find(b",")]
                    if line.startswith(MEASUREMENTS):
                        latest.setdefault(kind, deque(maxlen=2000)).append(line)
                    elif not line.startswith(ROUTES):
                        self._read(line)
            for line in itertools.chain(*latest.values()):
                self._read(line)

    def _read(self, line: bytes) -> None:
        with contextlib.suppress(ValueError):
            if (event := decode(line)) is not None:
                self._handle(event)

    def _handle(self, event: Event) -> None:
        self.last[type(event)] = event
        if isinstance(event, events.RunStarted):
            self.ended = False
        elif isinstance(event, events.RunEnded):
            self.ended = True
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
        started: Any = self.ranks[0].last.get(events.RunStarted) if 0 in self.ranks else None
        ranks = started.world_size if started else len(self.ranks)  # a resumed run may have fewer than before
        return bool(self.ranks) and all(f.ended for rank, f in self.ranks.items() if rank < ranks)

    def draw(self) -> RenderableType:
        """Render one frame."""
        first = self.ranks[min(self.ranks)]
        parts: list[RenderableType] = [self._title(first), self._figures(first)]
        if layers := first.last.get(events.LayersObserved):
            parts.append(_gates(layers))
        parts.append(self._ranks())
        problems = sorted((e for f in self.ranks.values() for e in f.problems), key=lambda e: e.time)[-6:]
        if problems:
            lines = Text(printable("\n".join(map(_problem, problems))), style="yellow")
            parts.append(Panel(lines, title="problems", title_align="left", border_style="yellow"))
        return Group(*parts)

    def _title(self, first: Follower) -> RenderableType:
        started: Any = first.last.get(events.RunStarted)
        ended: Any = first.last.get(events.RunEnded)
        step: Any = first.last.get(events.StepLogged)
        done, steps = (step.step if step else 0), (started.steps if started else 0)
        grid = Table.grid(padding=(0, 2))
        state = ended.outcome if first.ended and ended else "running"
        stage: Any = first.last.get(events.StageStarted)
        left = "" if first.ended or not step else f"eta {duration(steps_left(steps, done, stage) * step.step_seconds)}"
        grid.add_row(
            Text(printable(started.name if started else self.folder.name), style="bold"),
            ProgressBar(total=max(1, steps), completed=done, width=30),
            Text(f"{done:,}/{steps:,} steps{f', stage {stage.stage}/{stage.stages}' if stage else ''}"),
            Text(printable(state), style={"completed": "green", "running": "cyan"}.get(state, "bold red")),
            Text(left),
        )
        return grid

    def _figures(self, first: Follower) -> RenderableType:
        step: Any = first.last.get(events.StepLogged)
        if step is None:
            return Text("no step logged yet: the first one may be compiling", style="dim")
        resources: Any = first.last.get(events.ResourcesObserved)
        validation: Any = first.last.get(events.Validated)
        saved: Any = first.last.get(events.CheckpointSaved)
        grid = Table.grid(padding=(0, 2))
        grid.add_row("loss", f"{step.loss:.4f}", sparkline(list(first.losses)))
        grid.add_row("tokens/s", quantity(step.tokens_per_s), sparkline(list(first.speeds)))
        if resources:
            grid.add_row("step", f"{1e3 * step.step_seconds:.1f} ms", _phases(resources))
            memory = (
                f"allocated {resources.allocated_gib:.2f}, reserved {resources.reserved_gib:.2f}, "
                f"host {resources.host_gib:.2f} GiB"
            )
            grid.add_row("memory", f"{step.memory_gib:.2f} GiB", Text(memory, style="dim"))
        mfu = "" if step.mfu is None else f"  mfu {100 * step.mfu:.1f}%"
        rest = f"lr {step.lr:.2e}{mfu}  tokens {quantity(step.tokens)}  skipped {step.skipped}"
        grid.add_row("gradient", gradient_norm(step.grad_norm), Text(rest, style="dim"))
        if validation:
            grid.add_row("validation", f"{validation.loss:.4f}", Text(f"after step {validation.step}", style="dim"))
        if saved:
            grid.add_row("saved", f"step {saved.step}", Text(f"{saved.bytes / 2**20:.1f} MiB", style="dim"))
        return Panel(grid, border_style="dim")

    def _ranks(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("rank", "step", "doing", "for", "heartbeat", "logged"):
            table.add_column(name)
        for rank, follower in sorted(self.ranks.items()):
            beat = last_heartbeat(self.folder / f"heartbeat_rank{rank}.jsonl")
            step: Any = follower.last.get(events.StepLogged)
            if not beat:
                table.add_row(str(rank), "?", "no heartbeat", "", "", str(step.step if step else 0))
                continue
            age = time.time() - beat["time"]
            stale = age > self.stale_after and not follower.ended
            table.add_row(
                str(rank),
                Text(printable(str(beat.get("step")))),
                Text(printable(str(beat.get("doing")))),
                duration(_finite(beat.get("for_seconds")) + (0 if follower.ended else age)),
                Text(
                    f"{duration(age)} ago" + (" (frozen or dead)" if stale else ""), style="bold red" if stale else ""
                ),
                str(step.step if step else 0),
            )
        return table


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

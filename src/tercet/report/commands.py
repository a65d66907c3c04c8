"""`tercet report` and `tercet watch`."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tercet.atomic_io import check_writable_folder
from tercet.errors import TercetError, UsageError
from tercet.parse import one_line_errors
from tercet.report import pages
from tercet.report.gates import GO, NO_GO, NOT_TESTED, Thresholds
from tercet.report.read import Run, baseline_mismatch, read_config, read_run, stale_after
from tercet.report.verdict import Verdict, judge
from tercet.telemetry.event_log import events_file, tail
from tercet.telemetry.events import RunEnded, StepLogged, decode, describe
from tercet.telemetry.progress import fit, step_fields
from tercet.telemetry.watchdog import heartbeats
from tercet.terminal import printable

# What `watch` shows at most, and where it looks for it: in the end of the event file.
WATCHED_LINES = 30
WATCHED_BYTES = 2**20


def report(
    runs: list[Path],
    *,
    out: Path | None = None,
    target_tokens_per_s: float | None = None,
    require_go: bool = False,
) -> int:
    """Judge runs and write a page for each; with several runs, also a comparison page.

    The headline says whether a run is healthy; GO also needs every gate to apply and pass. Exit codes: 3 if a run is
    NO-GO, otherwise 0; with --require-go, 4 if a run is neither.

    Args:
        runs: Run folders; finished, crashed or still running. A dense baseline among them is detected.
        out: Output folder; by default report/ in the run folder, or comparison/ for several runs.
        target_tokens_per_s: Require this throughput instead of comparing with a dense baseline.
        require_go: For scripts: exit with code 4 unless every run is GO; 3 if one is NO-GO.
    """
    if target_tokens_per_s is not None and not 0 < target_tokens_per_s < math.inf:
        raise UsageError(f"target_tokens_per_s={target_tokens_per_s:g} must be a positive number")
    if not runs:
        raise UsageError("no run folder given: tercet report runs/NAME-DATE-TIME")
    for number, path in enumerate(runs):
        if path.resolve() in [other.resolve() for other in runs[:number]]:
            raise UsageError(f"{path} is given twice: give each run once")
    limits = Thresholds(tokens_per_s=target_tokens_per_s)
    loaded = [read_run(path) for path in runs]
    out = out or (Path("comparison") if len(runs) > 1 else runs[0] / "report")
    check_writable_folder("--out", out)
    folders = [run.folder / "report" for run in loaded] if len(loaded) > 1 else [out]
    for folder in folders:
        check_writable_folder("the report folder", folder)
    verdicts, paths = [], []
    for run, folder in zip(loaded, folders, strict=True):
        print(printable(f"{run.name} ({run.folder})"), flush=True)
        with one_line_errors(TercetError, f"{run.folder} has damaged records: restore them, or leave this run out"):
            verdict = judge(run, _dense_baseline(run, loaded), limits)
            paths.append(pages.write_report(run, verdict, folder))
            verdicts.append(verdict)
            print(printable(_summary(verdict, paths[-1])))
    if len(loaded) > 1:
        page, figures = pages.write_comparison(pages.columns(loaded, verdicts, paths), out)
        print(printable(f"{figures}\ncomparison: {page}"))
    accepted = (GO,) if require_go else (GO, NOT_TESTED)
    codes = [0 if v.verdict in accepted else v.exit_code for v in verdicts]
    return max(codes, key=(0, 4, 3).index)


def _dense_baseline(run: Run, runs: list[Run]) -> Run | None:
    """The dense run among `runs` to compare this one with: the first that matches it, or else the first."""
    dense = [other for other in runs if set(other.attention) == {"dense"}]
    if run in dense:
        return None
    return next((other for other in dense if not baseline_mismatch(run, other)), next(iter(dense), None))


def watch(run: Path, *, every: float = 1.0, once: bool = False) -> int:
    """Show the newest events of a run and what its ranks are doing, until it ends or Ctrl-C.

    Args:
        run: The run folder.
        every: Seconds between updates.
        once: Print what there is and exit.
    """
    if not 0 < every < math.inf:
        raise UsageError(f"every={every:g} must be a positive number of seconds")
    if not events_file(run).is_file():
        raise UsageError(f"{run} has no events to show: pass the folder of a run that has started")
    console = Console()
    if once or not console.is_terminal:
        print(printable(_newest_lines(run)[0]))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, refresh_per_second=4) as live:
        ended = False
        while not ended:
            text, ended = _newest_lines(run)
            live.update(Text(printable(text)))
            time.sleep(every)
    return 0


def _newest_lines(run: Path) -> tuple[str, bool]:
    """The newest events of a run in words and the heartbeats of its ranks; and whether it has ended."""
    lines, ended = deque[str](maxlen=WATCHED_LINES), False
    with one_line_errors(TercetError, f"{run} has damaged records"):
        for line in tail(events_file(run), WATCHED_BYTES):
            with contextlib.suppress(ValueError):  # the first line may be cut
                event = decode(line)
                ended = isinstance(event, RunEnded)
                if isinstance(event, StepLogged):
                    lines.append(f"step {event.step}  {fit(step_fields(event, None), 200)}")
                elif event is not None and (described := describe(event)):
                    lines.append(described[1])
    beats = [] if ended else heartbeats(run, stale_after(read_config(run, [])))
    return "\n".join([*lines, *beats]), ended


def _summary(verdict: Verdict, path: Path) -> str:
    width, verdicts = (max(len(getattr(g, name)) for g in verdict.gates) for name in ("name", "verdict"))
    gates = "\n".join(f"  {g.verdict:<{verdicts}}  {g.name:<{width}}  {g.sentence}" for g in verdict.gates)
    fixes = "".join(f"to fix {g.name}: {g.fix}\n" for g in verdict.gates if g.verdict == NO_GO and g.fix)
    return f"{gates}\n{verdict.headline}\n{verdict.sentence}\n{fixes}{path}"

"""`tercet report` and `tercet watch`."""

from __future__ import annotations

import math
from pathlib import Path

from tercet.atomic_io import check_writable_folder
from tercet.errors import TercetError, UsageError
from tercet.parse import one_line_errors
from tercet.report import pages
from tercet.report.gates import GO, NO_GO, NOT_TESTED, Thresholds
from tercet.report.read import baseline_mismatch, read_run
from tercet.report.verdict import Verdict, judge
from tercet.terminal import printable


def report(
    runs: list[Path],
    *,
    out: Path | None = None,
    baseline: Path | None = None,
    target_tokens_per_s: float | None = None,
    min_dense_ratio: float = Thresholds.dense_ratio,
    min_steps: int = Thresholds.min_steps,
    require_go: bool = False,
) -> int:
    """Judge runs and write a page for each; with several runs, also a comparison page.

    The headline says whether a run is healthy; GO also needs every gate to apply and pass. Exit codes: 3 if a run is
    NO-GO, otherwise 0; with --require-go, 4 if a run is neither.

    Args:
        runs: Run folders; finished, crashed or still running.
        out: Output folder; by default report/ in the run folder, or comparison/ for several runs.
        baseline: Run folder of the dense baseline to compare throughput with; detected among several runs.
        target_tokens_per_s: Require this throughput instead of comparing with a dense baseline.
        min_dense_ratio: Required throughput as a multiple of the dense baseline's.
        min_steps: Steps a verdict needs; can be raised but not lowered.
        require_go: For scripts: exit with code 4, and say why, unless every run is GO; 3 if one is NO-GO.
    """
    if min_steps < Thresholds.min_steps:
        raise UsageError(
            f"min_steps={min_steps} is below {Thresholds.min_steps}, the fewest a verdict can be based on: raise it"
        )
    for name, number in (("min_dense_ratio", min_dense_ratio), ("target_tokens_per_s", target_tokens_per_s)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{name}={number:g} must be a positive number")
    if not runs:
        raise UsageError("no run folder given: tercet report runs/NAME-DATE-TIME")
    _check_distinct(runs, baseline)
    limits = Thresholds(min_steps=min_steps, dense_ratio=min_dense_ratio, tokens_per_s=target_tokens_per_s)
    loaded = [read_run(path) for path in runs]
    out = out or (Path("comparison") if len(runs) > 1 else runs[0] / "report")
    check_writable_folder("--out", out)
    folders = [run.folder / "report" for run in loaded] if len(loaded) > 1 else [out]
    for folder in folders:
        check_writable_folder("the report folder", folder)
    given_baseline = read_run(baseline) if baseline is not None else None
    verdicts, paths = [], []
    for run, folder in zip(loaded, folders, strict=True):
        others = (other for other in loaded if other is not run and not baseline_mismatch(run, other))
        dense = given_baseline or next(others, None)
        print(printable(f"{run.name} ({run.folder})"), flush=True)
        with one_line_errors(TercetError, f"{run.folder} has damaged records: restore them, or leave this run out"):
            verdict = judge(run, dense, limits)
            paths.append(pages.write_report(run, verdict, folder, dense))
            verdicts.append(verdict)
            print(printable(_summary(verdict, paths[-1])))
            if require_go and verdict.verdict == NOT_TESTED:
                print(printable(verdict.why_not_go()))
    if len(loaded) > 1:
        page, figures = pages.write_comparison(pages.columns(loaded, verdicts, paths), out)
        print(printable(f"{figures}\ncomparison: {page}"))
    accepted = (GO,) if require_go else (GO, NOT_TESTED)
    codes = [0 if v.verdict in accepted else v.exit_code for v in verdicts]
    return max(codes, key=(0, 4, 3).index)


def watch(run: Path, *, every: float = 1.0, once: bool = False) -> int:
    """Show a live view of a run and all its ranks until it ends or Ctrl-C.

    Args:
        run: The run folder.
        every: Seconds between updates.
        once: Print one frame and exit; implied if the output is not a terminal.
    """
    from tercet.report.watch import watch_run

    return watch_run(run, every=every, once=once)


def _check_distinct(runs: list[Path], baseline: Path | None) -> None:
    """Refuse to compare a run with itself, also under another path."""
    seen: dict[Path, Path] = {}
    for path in runs:
        if (first := seen.get(path.resolve())) is not None:
            problem = f"{path} is given twice" if first == path else f"{first} and {path} are the same folder"
            raise UsageError(f"{problem}: give each run once")
        seen[path.resolve()] = path
    if baseline is not None and baseline.resolve() in seen:
        raise UsageError(
            f"--baseline {baseline} is also one of the runs to judge: give the run's dense baseline, or give both as "
            "runs without --baseline to have it detected"
        )


def _summary(verdict: Verdict, path: Path) -> str:
    shown = (*verdict.gates, *verdict.informational)
    name_width, verdict_width = max(len(g.name) for g in shown), max(len(g.verdict) for g in shown)
    gates = "\n".join(f"  {g.verdict:<{verdict_width}}  {g.name:<{name_width}}  {g.sentence}" for g in shown)
    fixes = "".join(f"to fix {g.name}: {g.fix}\n" for g in shown if g.verdict == NO_GO and g.fix)
    return f"{gates}\n{verdict.headline}\n{verdict.sentence}\n{fixes}{path}"

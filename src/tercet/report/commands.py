"""`tercet report`: from run folders to pages, a verdict and an exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tercet.errors import TercetError, UsageError
from tercet.report import render, side_by_side
from tercet.report.dense_baseline import not_a_twin
from tercet.report.gates import Thresholds
from tercet.report.read import Run, read_run
from tercet.report.verdict import Verdict, judge


def report(
    runs: list[Path],
    *,
    out: Path | None = None,
    baseline: Path | None = None,
    target_tokens_per_s: float | None = None,
    min_dense_ratio: float = Thresholds.dense_ratio,
    min_steps: int = Thresholds.min_steps,
) -> int:
    """Judge runs and write a page for each, and one for all of them together if there are several.

    The exit code is that of the worst verdict: 0 GO, 3 NO-GO, 4 NOT TESTED.

    Args:
        runs: Run folders, finished, crashed or still running.
        out: Where to write; none: report/ in the run folder, or comparison/ for several runs.
        baseline: Run folder of the dense twin that throughput is held against; found by itself among several runs.
        target_tokens_per_s: Hold throughput against this instead.
        min_dense_ratio: How many times the dense twin's tokens/s a run must reach.
        min_steps: Steps that a verdict needs; can be raised, not lowered.
    """
    if min_steps < Thresholds.min_steps:
        raise UsageError(
            f"min_steps={min_steps} is below {Thresholds.min_steps}: a verdict over fewer steps says nothing; raise it"
        )
    if not runs:
        raise UsageError("no run folder was given: tercet report runs/NAME-DATE-TIME")
    _refuse_itself(runs, baseline)
    limits = Thresholds(min_steps=min_steps, dense_ratio=min_dense_ratio, tokens_per_s=target_tokens_per_s)
    read = [read_run(path) for path in runs]
    given = read_run(baseline) if baseline is not None else None
    verdicts, pages = [], []
    for run in read:
        twin = given or _twin_among(run, read)
        verdict = judge(run, twin, limits)
        folder = run.folder / "report" if out is None or len(read) > 1 else out
        pages.append(render.write(run, verdict, folder, twin))
        verdicts.append(verdict)
        print(_told(run, verdict, pages[-1]))
    if len(read) > 1:
        _compare(read, verdicts, pages, out or Path("comparison"))
    return max((v.exit_code for v in verdicts), key=(0, 4, 3).index)


def watch(run: Path, *, every: float = 1.0, once: bool = False) -> int:
    """A live view of a run and all its ranks, until it ends or Ctrl-C.

    Args:
        run: The run folder.
        every: Seconds between two looks.
        once: Show one frame and leave, as when the output is no terminal.
    """
    from tercet.report.watch import watch as show

    return show(run, every=every, once=once)


def _refuse_itself(runs: list[Path], baseline: Path | None) -> None:
    """A run beside itself, by whatever names, looks like two that agree."""
    seen: dict[Path, Path] = {}
    for path in runs:
        if (first := seen.get(path.resolve())) is not None:
            names = f"{path} was given twice" if first == path else f"{first} and {path} are the same folder"
            raise UsageError(f"{names}: a run beside itself shows nothing; give each run once")
        seen[path.resolve()] = path
    if baseline is not None and baseline.resolve() in seen:
        raise UsageError(
            f"--baseline {baseline} is among the runs to judge: a run held against itself shows nothing; name its "
            "dense twin, or give both as runs without --baseline, where the twin is found by itself"
        )


def _twin_among(run: Run, runs: list[Run]) -> Run | None:
    return next((other for other in runs if other is not run and not not_a_twin(run, other)), None)


def _compare(runs: list[Run], verdicts: list[Verdict], pages: list[Path], out: Path) -> None:
    columns = side_by_side.columns(runs, verdicts, pages, out)
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(runs[0].read_at))
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.html").write_text(side_by_side.page(columns, made), encoding="utf-8")
        text = "\n".join(render.markdown(r, v) for r, v in zip(runs, verdicts, strict=True))
        (out / "report.md").write_text(text, encoding="utf-8")
        together = [v.as_dict(r) for r, v in zip(runs, verdicts, strict=True)]
        (out / "verdict.json").write_text(json.dumps(together, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise TercetError(f"{out}: the report cannot be written ({error.strerror}): pick another --out") from None
    print(f"side by side: {out / 'report.html'}")


def _told(run: Run, verdict: Verdict, path: Path) -> str:
    width = max(len(g.name) for g in verdict.gates)
    told = (*verdict.gates, *verdict.beyond)
    gates = "\n".join(f"  {g.verdict:<10}  {g.name:<{width}}  {g.sentence}" for g in told)
    return f"{verdict.verdict}  {run.name} ({run.folder})\n{gates}\n{verdict.sentence}\n{path}"

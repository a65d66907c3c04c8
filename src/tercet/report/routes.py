"""What the passes of a run ran on."""

from __future__ import annotations

from collections import Counter

from tercet.report.read import Run
from tercet.telemetry.events import RoutesCounted, RunEnded, RunStarted, StepLogged

# What a layer runs where nothing holds it back.
_FASTEST = {"dense": ("cudnn", "sdpa", "varlen")}
_KERNELS = ("triton",)


def fastest(branch: str, route: str) -> bool:
    """Whether a branch has nothing quicker than this route."""
    return route in _FASTEST.get(branch, _KERNELS)


def route_counts(run: Run) -> Counter[tuple[int, str, str, str, bool]]:
    """Passes by (layer, branch, route, reason, fallback) over all processes and ranks that were read."""
    counts: Counter[tuple[int, str, str, str, bool]] = Counter()
    for event in run.routes:
        rows = zip(event.layer, event.branch, event.route, event.reason, event.fallback, event.calls, strict=True)
        for layer, branch, route, reason, fallback, calls in rows:
            counts[layer, branch, route, reason, fallback] += calls
    return counts


def uncounted(run: Run) -> str:
    """That not all passes of the run's steps are in its log, in words; empty if all are.

    Versions that counted at log lines alone left out what a process did between the last of them and the save from
    which the next one went on.
    """
    logged, made = sum(route_counts(run).values()), passes_made(run)
    if logged >= made:
        return ""
    return f"{logged:,} passes logged of {made:,}, and what the other {made - logged:,} ran on is not known"


def passes_made(run: Run) -> int:
    """Passes that the run's steps take, over all layers and branches that were counted at all."""
    last = 0  # step of the newest process that is known to have been made
    started: list[RunStarted] = []
    for event in run.events.get(0, []):
        if isinstance(event, RunStarted):
            started.append(event)
            last = event.step
        elif isinstance(event, (StepLogged, RoutesCounted, RunEnded)):
            last = max(last, event.step)
    made, end = 0, last
    for process in reversed(started):  # of its steps only those count that no later process has made again
        made += max(0, end - process.step) * process.accumulation
        end = min(end, process.step)
    return made * len({(layer, branch) for layer, branch, *_ in route_counts(run)})

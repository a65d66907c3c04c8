"""What the passes of a run ran on."""

from __future__ import annotations

from collections import Counter

from tercet.report.read import Run

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

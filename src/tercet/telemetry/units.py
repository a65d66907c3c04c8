"""Human-readable numbers."""

from __future__ import annotations

import math


def quantity(value: float, unit: str = "") -> str:
    """12345 -> 12.3k, or with a unit 12.3 kFLOP."""
    gap = " " if unit else ""
    value = float(f"{value:.3g}") if abs(value) < 1e21 else value  # 999,700 -> 1M, not 1000k
    for limit, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            digits = f"{value / limit:.3g}" if abs(value) / limit < 1000 else f"{value / limit:.0f}"
            return f"{digits}{gap}{prefix}{unit}"
    return f"{value:.3g}{gap}{unit}"


def duration(seconds: float) -> str:
    """3725 -> 1h02m; ? for infinity and NaN."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def passes_of(accumulation: int, micro_batch: int) -> str:
    """The batch of a step: 2 passes of 8 sequences per rank."""
    return f"{accumulation:,} {'pass' if accumulation == 1 else 'passes'} of {plural(micro_batch, 'sequence')} per rank"


def gradient_norm(norm: float) -> str:
    """0.523; small norms have three significant digits instead of three decimals."""
    return f"{norm:.3f}" if norm >= 0.1 or norm == 0 else f"{norm:#.3g}"

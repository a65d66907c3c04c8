"""Text for people: numbers with units, control characters of files and models, progress of an evaluation, tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

SECONDS_PER_LINE = 30  # of Progress, where there is no terminal


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


def printable(text: str) -> str:
    r"""Escape everything that is not printable, except newline and tab: ESC becomes `\x1b`."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


class Progress:
    """How far an evaluation is, in tokens, and the time left: a line that is overwritten on a terminal, else a line
    every half minute."""

    def __init__(self, tokens: int = 0) -> None:
        """tokens: in all; 0: not known."""
        self._total: float = tokens or math.inf
        self._done: float = 0
        self._begin = self._printed = time.perf_counter()

    def update(self, tokens: int) -> None:
        self._done = min(self._total, self._done + tokens)
        known = self._total < math.inf
        text = f"{self._done / self._total:.0%}{self.left()}" if known else f"{self._done:,} tokens"
        if sys.stderr.isatty():
            print(f"\r{text}\x1b[K\r", end="", file=sys.stderr, flush=True)
        elif time.perf_counter() - self._printed > SECONDS_PER_LINE:
            self._printed = time.perf_counter()
            print(text, file=sys.stderr, flush=True)

    def left(self) -> str:
        seconds = (time.perf_counter() - self._begin) * (self._total / max(1, self._done) - 1)
        if self._done >= self._total:
            return ""
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"


Columns: TypeAlias = Mapping[str, tuple[str, Callable[[Any], str]]]
"""Of a table: key of a row -> (heading, format)."""


def table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> str:
    """The results as a Markdown table, without columns that no row has."""
    shown = {key: column for key, column in columns.items() if any(row.get(key) is not None for row in rows)}
    lines = ["| " + " | ".join(heading for heading, _ in shown.values()) + " |", "|" + "---|" * len(shown)]
    for row in rows:
        cells = ["" if row.get(key) is None else form(row[key]) for key, (_, form) in shown.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)

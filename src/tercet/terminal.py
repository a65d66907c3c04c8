"""Terminal output: control characters in text of files and models, progress of an evaluation, tables of results."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

SECONDS_PER_LINE = 30  # of Progress, where there is no terminal


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

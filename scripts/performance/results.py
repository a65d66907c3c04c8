"""Read the result files of scripts/measure.py, and format cells and tables."""

from __future__ import annotations

import calendar
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import result_files

RESULTS = result_files.RESULTS / "performance"
MISSING = "not measured"

Row = dict[str, Any]


def part(name: str) -> Row:
    """A result file of scripts/measure.py; no rows if it does not exist."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return {"results": []}
    found: Row = json.loads(file.read_text(encoding="utf-8"))
    if found.get("quick"):
        raise ValueError(f"{file} comes from a --quick run: measure on a GPU")
    return found


def rows(name: str, **fields: Any) -> list[Row]:
    """Result rows of a part whose fields have these values."""
    return [row for row in part(name)["results"] if all(row.get(key) == value for key, value in fields.items())]


def first(found: Sequence[Row]) -> Row:
    return found[0] if found else {}


# Formatting


def day(date: str) -> str:
    year, month, day = map(int, date.split("-"))
    return f"{day} {calendar.month_name[month]} {year}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    body = list(lines)
    return result_files.table(head, body) if body else MISSING


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def pair(a: float | None, b: float | None) -> str:
    return "–" if a is None and b is None else f"{number(a)} / {number(b)}"


def thousands(value: float | None) -> str:
    """Tokens per second."""
    if value is None:
        return "–"
    return f"{value / 1e3:.0f}k" if value >= 1e4 else f"{value:,.0f}"


def tokens(length: int) -> str:
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"


def paragraph(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False))


def item(text: str) -> str:
    return "\n".join(textwrap.wrap(f"- {text}", 120, subsequent_indent="  ", break_on_hyphens=False))

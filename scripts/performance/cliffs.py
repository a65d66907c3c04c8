"""Which cells of the `shapes` part are slower or faster than their neighbours predict?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from performance.results import Row

TOO_FAR = 0.15  # a cell this far off a prediction is listed


def deviations(rows: Sequence[Row]) -> list[Row]:
    """The measured rows with `by_length` and `by_head`: by how much a cell's time per token exceeds what its two
    neighbours in length and in head size predict, by interpolation between logarithms; None at the ends."""
    measured = [row for row in rows if "ms_per_1k_tokens" in row]
    return [
        row | {
            "by_length": _deviation(row, measured, ("heads", "kv_heads", "head", "value"), _length),
            "by_head": _deviation(row, measured, ("heads", "kv_heads", "length"), _size),
        }
        for row in measured
    ]  # fmt: skip


def far_off(rows: Sequence[Row]) -> list[Row]:
    """Cells that are further off a prediction than TOO_FAR, the furthest first."""
    found = [row for row in deviations(rows) if _furthest(row) > TOO_FAR]
    return sorted(found, key=_furthest, reverse=True)


def head_96_against_128(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """Time of head 96 over that of head 128, the highest first."""
    wide = {_place(row): row for row in rows if row["head"] == 128 and "ms_per_1k_tokens" in row}
    pairs = [(row, wide.get(_place(row))) for row in rows if row["head"] == 96 and "ms_per_1k_tokens" in row]
    ratios = [(row["ms_per_1k_tokens"] / other["ms_per_1k_tokens"], row) for row, other in pairs if other]
    return sorted(ratios, key=lambda found: -found[0])


def _place(row: Row) -> tuple[int, ...]:
    return row["heads"], row["kv_heads"], row["length"]


def _length(row: Row) -> float:
    return float(row["length"])


def _size(row: Row) -> float:
    return (row["head"] + row["value"]) / 2


def _furthest(row: Row) -> float:
    return max(abs(row[name] or 0.0) for name in ("by_length", "by_head"))


def _deviation(row: Row, rows: Sequence[Row], same: Sequence[str], along: Callable[[Row], float]) -> float | None:
    """How far a cell is off the line through its neighbours along an axis; `same`: what they have in common."""
    line = sorted((r for r in rows if all(r[name] == row[name] for name in same)), key=along)
    place = next(i for i, other in enumerate(line) if along(other) == along(row))
    if place in (0, len(line) - 1):
        return None
    before, after = line[place - 1], line[place + 1]
    share = math.log(along(row) / along(before)) / math.log(along(after) / along(before))
    predicted = before["ms_per_1k_tokens"] ** (1 - share) * after["ms_per_1k_tokens"] ** share
    return float(row["ms_per_1k_tokens"] / predicted - 1)

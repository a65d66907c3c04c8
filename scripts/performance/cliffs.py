"""Which cells of the `shapes` part are slower or faster than their neighbours predict?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from performance.results import Row

TOO_FAR = 0.15  # a cell this far off a prediction is listed


def off_by_length(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """Cells whose time per token is off by more than TOO_FAR, and by how much, from what the next shorter and the next
    longer sequences predict, by interpolation between logarithms."""
    lines: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["heads"], row["kv_heads"], row["head"], row["value"]), []).append(row)
    found = []
    for line in lines.values():
        line.sort(key=lambda row: row["length"])
        for before, row, after in zip(line, line[1:], line[2:], strict=False):
            share = math.log(row["length"] / before["length"]) / math.log(after["length"] / before["length"])
            predicted = before["ms_per_1k_tokens"] ** (1 - share) * after["ms_per_1k_tokens"] ** share
            found.append((row["ms_per_1k_tokens"] / predicted - 1, row))
    return [(off, row) for off, row in found if abs(off) > TOO_FAR]


def against_128(rows: Sequence[Row], head: int) -> list[float]:
    """Time of heads of this size over that of head 128, for the same head counts and length."""
    times = {(row["heads"], row["kv_heads"], row["length"], row["head"]): row["ms_per_1k_tokens"] for row in rows}
    return [time / times[*place, 128] for (*place, size), time in times.items() if size == head]

"""What to look at closely, and when: the `profile` section."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from tercet.config.section import Section


class ProfileConfig(Section):
    """A trace of a few steps. It starts, ends and is written by itself; training goes on."""

    steps: str | None = None
    """FIRST:LAST steps to trace, both included, such as 10:15; none traces nothing."""
    memory: bool = True
    """Also record allocations on a GPU, as a snapshot for pytorch.org/memory_viz."""
    stacks: bool = False
    """Record Python stacks with each operator: larger and slower."""
    rows: int = Field(default=40, ge=1)
    """Rows of the kernel table."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        self.range()
        return self

    def range(self) -> tuple[int, int] | None:
        """(first, last) step to trace."""
        if self.steps is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.steps)
        if not found:
            raise ValueError(f"steps={self.steps!r} is not FIRST:LAST: write 10:15 for steps 10 to 15")
        first, last = int(found[1]), int(found[2])
        if not 1 <= first <= last:
            raise ValueError(f"steps={self.steps!r} does not count upwards from 1: write 10:15 for steps 10 to 15")
        return first, last

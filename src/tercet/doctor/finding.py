"""What an examination found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

OK, WARNING, FAILED, NOT_TESTED = "ok", "warning", "failed", "not tested"


@dataclass(frozen=True)
class Finding:
    """One check: what was seen and, unless all is well, what to do about it."""

    check: str
    verdict: str
    finding: str
    mend: str = ""
    seconds: float = 0.0


def timed(check: str, examine: Callable[[], Finding]) -> Finding:
    """The finding of one check. A check that breaks is itself a finding: the doctor never dies of a patient."""
    begun = time.perf_counter()
    try:
        found = examine()
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        found = Finding(check, FAILED, f"{type(error).__name__}: {text}", "mend what the error names, then ask again")
    return replace(found, check=check, seconds=time.perf_counter() - begun)

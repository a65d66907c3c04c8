"""The short examination that goes before every training."""

from __future__ import annotations

from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.doctor.examine import examine
from tercet.doctor.finding import FAILED
from tercet.errors import TercetError
from tercet.telemetry.events import DoctorReported


def examine_before_training(config: RunConfig, folder: Path) -> DoctorReported | None:
    """What was found, for the log; None if nobody asked. A failure stops the run before it has cost anything."""
    if not config.health.doctor:
        return None
    found = examine(config, short=True, folder=folder)
    for f in found:
        if f.verdict == FAILED:
            raise TercetError(f"doctor: {f.check}: {f.finding}: {f.mend} (--health.no_doctor trains all the same)")
    return DoctorReported(
        step=0,
        check=[f.check for f in found],
        verdict=[f.verdict for f in found],
        finding=[f.finding for f in found],
        mend=[f.mend for f in found],
    )

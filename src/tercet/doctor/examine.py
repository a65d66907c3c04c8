"""`tercet doctor`: all checks, or the short form that goes before every training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.doctor import kernels, machine, storage
from tercet.doctor.collectives import collectives
from tercet.doctor.machine import FAILED, NOT_TESTED, OK, WARNING, Finding, timed
from tercet.errors import TercetError
from tercet.telemetry.events import DoctorReported

Check = tuple[str, Callable[[], Finding]]
_MARKS = {OK: "✓", WARNING: "!", FAILED: "✕", NOT_TESTED: "?"}


def examine(config: RunConfig | None = None, *, short: bool = False, folder: Path | None = None) -> list[Finding]:
    """Every check in turn, none of which can stop the others."""
    return [timed(name, check) for name, check in checks(config, short=short, folder=folder)]


def checks(config: RunConfig | None, *, short: bool, folder: Path | None = None) -> list[Check]:
    """The short form takes what is quick and what a run stands or falls with."""
    place = folder or Path((config.run.dir if config else None) or "runs")
    wanted = config.run.device if config else "auto"
    model = config.model if config else None
    uses_kernels = model is None or ("nsa" in model.attention_kinds and model.backend != "reference")
    on_cpu = wanted == "cpu"
    found: list[Check] = [
        ("versions", machine.versions),
        ("device", lambda: machine.device(wanted)),
    ]
    if uses_kernels and not (short and on_cpu):
        if not short:
            found.append(("triton", kernels.triton_works))
        packed = config is None or not config.data.cross_document_attention
        # Kernels run on a GPU only, whatever `auto` will find.
        precision = resolved_precision(config.train.precision if config else "auto", "cuda")
        seq_len = config.data.seq_len if config else None

        def parity() -> Finding:
            return kernels.parity(model, short=short, packed=packed, precision=precision, seq_len=seq_len)

        found.append(("kernel parity", parity))
    found.append(("disk", lambda: storage.disk(place, config, megabytes=1 if short else 256)))
    if not short:
        found += [
            ("arithmetic", machine.arithmetic),
            ("shared memory", machine.shared_memory),
            ("collectives", collectives),
        ]
        if config is not None:
            found.append(("data", lambda: storage.data(config)))
    return found


def lines(finding: Finding, width: int) -> list[str]:
    """For a terminal: one line, and the mend beneath what is not well."""
    f = finding
    told = [f"{_MARKS[f.verdict]} {f.check:<{width}}  {f.verdict:<10}  {f.finding}  ({f.seconds:.1f} s)"]
    return [*told, f"  {'':<{width}}  {'':<10}  → {f.mend}"] if f.mend else told


def exit_code(findings: Sequence[Finding]) -> int:
    """0 unless something failed; warnings and what could not be tested do not stop a run."""
    return 1 if any(f.verdict == FAILED for f in findings) else 0


def doctor(config: RunConfig, *, short: bool = False, as_json: bool = False) -> int:
    """The command: print every finding as it is made, and give the exit code."""
    import json
    from dataclasses import asdict

    found = []
    asked = checks(config, short=short)
    width = max(len(name) for name, _ in asked)
    for name, check in asked:
        found.append(timed(name, check))
        if not as_json:
            print("\n".join(lines(found[-1], width)), flush=True)
    if as_json:
        print(json.dumps({"exit_code": exit_code(found), "findings": [asdict(f) for f in found]}))
    else:
        count = {v: sum(f.verdict == v for f in found) for v in (OK, WARNING, FAILED, NOT_TESTED)}
        print(", ".join(f"{n} {v}" for v, n in count.items() if n))
    return exit_code(found)


# ------------------------------------------------------------------------------------------------
# The short examination that goes before every training.


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

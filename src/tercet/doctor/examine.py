"""`tercet doctor`, and the short form of its checks before every training. Imports nothing heavy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tercet.config.load import ConfigError, load
from tercet.config.schema import RunConfig
from tercet.config.sections import resolved_precision
from tercet.data.tokenizers import fit_vocabulary
from tercet.doctor import kernels, machine, memory
from tercet.doctor.machine import FAILED, NOT_TESTED, OK, WARNING, Finding, timed
from tercet.errors import TercetError
from tercet.telemetry.events import DoctorReported

Check = tuple[str, Callable[[], Finding]]
_MARKS = {OK: "✓", WARNING: "!", FAILED: "✕", NOT_TESTED: "?"}


def checks(config: RunConfig, *, short: bool, folder: Path | None = None) -> list[Check]:
    """The checks to run; short: only the quick ones that training depends on."""
    place, model = folder or Path(config.run.dir or "runs"), config.model
    found: list[Check] = [
        ("versions", machine.versions),
        ("device", lambda: machine.device(config.run.device)),
    ]
    uses_kernels = set(model.attention_kinds) != {"dense"} and model.backend != "reference"
    if uses_kernels and not (short and config.run.device == "cpu"):

        def parity() -> Finding:
            # Kernels only run on a GPU, so resolve `auto` for one.
            precision = resolved_precision(config.train.precision, "cuda")
            packed, length = not config.data.cross_document_attention, config.longest_sequence
            return kernels.parity(model, short=short, packed=packed, precision=precision, seq_len=length)

        found.append(("kernel parity", parity))
    found.append(("disk", lambda: machine.disk(place, config, megabytes=1 if short else 256)))
    if not short:
        found += [
            ("arithmetic", machine.matmul_speed),
            ("shared memory", machine.shared_memory),
            ("memory", lambda: memory.memory(config)),
            ("data", lambda: machine.data(config)),
        ]
    return found


def lines(finding: Finding, width: int) -> list[str]:
    """A finding for the terminal: one line, and a second one with the fix."""
    f = finding
    text = [f"{_MARKS[f.verdict]} {f.check:<{width}}  {f.verdict:<10}  {f.finding}  ({f.seconds:.1f} s)"]
    return [*text, f"  {'':<{width}}  {'':<10}  → {f.fix}"] if f.fix else text


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if a check failed; warnings and untested checks do not stop a run."""
    return 1 if any(f.verdict == FAILED for f in findings) else 0


def doctor(
    *,
    preset: str | None = None,
    config: Path | None = None,
    short: bool = False,
    json: bool = False,
    distributed: bool = False,
    folder: str | None = None,
    share_gpus: bool = False,
) -> int:
    """Check this machine: versions, devices, drivers, kernel parity, disk and data.

    Every problem comes with a fix. The exit code is 1 if a check failed.

    Args:
        preset: Check kernels, disk and data for this preset.
        config: Check them for a TOML file, such as RUN/config.toml.
        short: Only the checks that run before every training.
        json: Print one line of JSON instead of text.
        distributed: Check the ranks started by torchrun: all-reduce, versions and shared file system.
        folder: With distributed: the shared folder for runs; default: the temporary folder.
        share_gpus: With distributed: let several ranks share a GPU, like parallel.share_gpus.
    """
    if distributed:
        from tercet.parallel.probe import probe

        return probe(folder, share_gpus=share_gpus)
    if folder is not None or share_gpus:
        given = "--share_gpus" if folder is None else f"--folder {folder}"
        raise ConfigError(f"{given} without --distributed has no effect: add --distributed, or drop it")
    if preset is None and config is None and not json:
        print("kernels, disk and data are checked for the default configuration: give yours with --preset or --config")
    return _print_findings(fit_vocabulary(load(preset=preset, file=config)).config, short=short, as_json=json)


def _print_findings(config: RunConfig, *, short: bool, as_json: bool) -> int:
    """Print findings as they arrive; returns the exit code."""
    found = []
    chosen = checks(config, short=short)
    width = max(len(name) for name, _ in chosen)
    live = sys.stdout.isatty() and not as_json
    for name, check in chosen:
        if live:  # the finding replaces it
            print(f"… {name}", end="\r", flush=True)
        found.append(timed(name, check))
        if not as_json:
            print("\n".join(lines(found[-1], width)), flush=True)
    if as_json:
        print(json.dumps({"exit_code": exit_code(found), "findings": [asdict(f) for f in found]}))
    else:
        count = {v: sum(f.verdict == v for f in found) for v in (OK, WARNING, FAILED, NOT_TESTED)}
        print(", ".join(f"{n} {v}" for v, n in count.items() if n))
    return exit_code(found)


def examine_before_training(config: RunConfig, folder: Path) -> DoctorReported | None:
    """The short form before training, as an event; None with health.doctor=false. A failed check raises."""
    if not config.health.doctor:
        return None
    found = [timed(name, check) for name, check in checks(config, short=True, folder=folder)]
    for f in found:
        if f.verdict == FAILED:
            raise TercetError(f"doctor: {f.check}: {f.finding}: {f.fix} (--health.no_doctor skips these checks)")
    return DoctorReported(
        step=0,
        check=[f.check for f in found],
        verdict=[f.verdict for f in found],
        finding=[f.finding for f in found],
        fix=[f.fix for f in found],
    )

"""The `tercet doctor` command."""

from __future__ import annotations

from pathlib import Path


def doctor(*, preset: str | None = None, config: Path | None = None, short: bool = False, json: bool = False) -> int:
    """Examine this machine: versions, devices, drivers, Triton, kernel parity, collectives, disk and data.

    With a preset or a config (such as RUN/config.toml) kernels, disk and data are examined for that very run. `short`
    is what goes before every training. The exit code is 1 if anything failed; every finding comes with its mend.
    """
    from tercet.config.load import load
    from tercet.doctor.examine import doctor as examine

    return examine(load(preset=preset, file=config).config, short=short, as_json=json)

"""The `tercet doctor` command."""

from __future__ import annotations

from pathlib import Path


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
    """Examine this machine: versions, devices, drivers, Triton, kernel parity, collectives, disk and data.

    Every finding comes with its mend; the exit code is 1 if anything failed.

    Args:
        preset: Examine kernels, disk and data for this preset.
        config: Or for a TOML file, such as RUN/config.toml.
        short: Only what goes before every training.
        json: Print one line of JSON instead.
        distributed: Examine the ranks that torchrun started: all-reduce, clocks, versions, one file system.
        folder: With distributed, where runs will be kept; the folder for temporary files if not given.
        share_gpus: With distributed, let more ranks than GPUs share them, as parallel.share_gpus does.
    """
    if distributed:
        from tercet.parallel.probe import probe

        return probe(folder, share_gpus=share_gpus)
    from tercet.config.load import ConfigError, load
    from tercet.doctor.examine import doctor as examine

    if folder is not None or share_gpus:
        given = "--share_gpus" if folder is None else f"--folder {folder}"
        raise ConfigError(f"{given} without --distributed has no meaning: give both, or leave it out")
    return examine(load(preset=preset, file=config).config, short=short, as_json=json)

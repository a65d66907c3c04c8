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
    """Check this machine: versions, devices, drivers, Triton, kernel parity, collectives, disk and data.

    Every problem comes with a fix. The exit code is 1 if a check failed.

    Args:
        preset: Check kernels, disk and data for this preset.
        config: Check them for a TOML file, such as RUN/config.toml.
        short: Only the checks that run before every training.
        json: Print one line of JSON instead of text.
        distributed: Check the ranks started by torchrun: all-reduce, clocks, versions and shared file system.
        folder: With distributed: the shared folder for runs; default: the temporary folder.
        share_gpus: With distributed: let several ranks share a GPU, like parallel.share_gpus.
    """
    if distributed:
        from tercet.parallel.probe import probe

        return probe(folder, share_gpus=share_gpus)
    from tercet.config.load import ConfigError, load
    from tercet.data.tokenizers import fit_vocabulary
    from tercet.doctor.examine import doctor as examine

    if folder is not None or share_gpus:
        given = "--share_gpus" if folder is None else f"--folder {folder}"
        raise ConfigError(f"{given} without --distributed has no effect: add --distributed, or drop it")
    if preset is None and config is None and not json:
        print("kernels, disk and data are checked for the default configuration: give yours with --preset or --config")
    return examine(fit_vocabulary(load(preset=preset, file=config)).config, short=short, as_json=json)

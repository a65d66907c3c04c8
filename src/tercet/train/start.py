"""Where a run begins: at a checkpoint or at step 0, and whether it may."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from tercet.config.schema import RunConfig
from tercet.data.tokenizers import Tokenizer
from tercet.errors import UsageError
from tercet.model.cost import parameters
from tercet.telemetry.events import RunStarted, events_file, read_events
from tercet.telemetry.sinks import tensorboard, wandb
from tercet.train import manifest, restore
from tercet.train.folder import RunFolder, go_on


def find_start(config: RunConfig, resume: str | None, folder: RunFolder) -> tuple[restore.Found | None, list[str]]:
    """The checkpoint to go on from, if any, and what there is to say about it. Refuses to train over a run."""
    _check_events(folder, config.parallel.world_size)
    if resume is None:
        if folder.holds_a_run:
            raise UsageError(
                f"{folder.path} already holds a run: pick another --run.dir, or go on with: {go_on(folder.path)}"
            )
        return None, []
    manifest.sweep(folder.checkpoints)
    try:
        start = restore.choose(resume, folder.checkpoints, verify=config.checkpoint.verify)
    except manifest.CheckpointError as error:
        if resume == "auto":
            raise
        raise type(error)(f"--resume {resume}: {error}; or use --resume auto") from None
    if start is None:
        for other in _forked_from(folder):
            if other is not None and other.parent != folder.checkpoints.resolve():
                raise UsageError(
                    f"{folder.path} began with {other} and has saved nothing of its own: go on with --resume {other} "
                    f"--run.dir {shlex.quote(str(folder.path))}"
                )
        return None, [f"--resume auto: {folder.checkpoints} has no complete checkpoint, starting at step 0"]
    if not start.is_in(folder.checkpoints) and folder.holds_a_run and not _is_same_fork(folder, start):
        raise UsageError(
            f"{folder.path} already holds a run, and --resume {resume} is another's: pick another --run.dir, or go on "
            f"with the run that is there: {go_on(folder.path)}"
        )
    now = config.model_dump(mode="json")
    allow = config.checkpoint.allow_config_change
    changes = restore.check_config(restore.saved_config(start), now, allow_change=allow)
    return start, [*start.said, f"resuming from {start.path}", *(f"changed since: {c}" for c in changes)]


def _check_events(folder: RunFolder, ranks: int) -> None:
    """Of all ranks at once: each opens its own only when rank 0 has begun to write."""
    for path in (events_file(folder.path, rank) for rank in range(ranks)):
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            why = "may not be written" if path.is_file() else "is not a file"
            raise UsageError(f"{path}, where events are told, {why}: pick another --run.dir, or mend it")


def abandon_later(start: restore.Found | None, folder: RunFolder) -> list[str]:
    """Checkpoints of steps after the one gone on from are set aside, once nothing can be refused any more."""
    if start is None or not start.is_in(folder.checkpoints):
        return []
    aside = restore.set_aside(folder.checkpoints, int(start.run_state["step"]))
    return [f"an abandoned checkpoint is kept as {p}" for p in aside]


def _is_same_fork(folder: RunFolder, start: restore.Found) -> bool:
    """Whether the folder holds nothing but attempts at this very fork that ended before their first save."""
    saved = manifest.complete_checkpoints(folder.checkpoints)
    return not saved and all(other == start.path.resolve() for other in _forked_from(folder))


def _forked_from(folder: RunFolder) -> list[Path | None]:
    """What each process that took up this run went on from."""
    path = events_file(folder.path)
    started = [e for e in read_events(path) if isinstance(e, RunStarted)] if path.exists() else []
    return [Path(e.resumed_from).resolve() if e.resumed_from else None for e in started]


def check_fit(config: RunConfig, tokenizer: Tokenizer, folder: RunFolder) -> None:
    """What would fail later, refused now."""
    if config.log.tensorboard:
        tensorboard()
    if config.log.wandb:
        wandb()
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size}: "
            f"pass --model.vocab-size {-(-tokenizer.vocab_size // 64) * 64}"
        )
    needed = 12 * parameters(config.model).total  # fp32 weights and two moments
    free = shutil.disk_usage(folder.path).free
    if free < needed:
        raise UsageError(
            f"one checkpoint takes about {needed / 2**30:.2f} GiB, {folder.path} has {free / 2**30:.2f} GiB free: "
            "free some, or pick another --run.dir"
        )

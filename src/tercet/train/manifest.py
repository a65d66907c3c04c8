"""Checkpoint folders on disk: layout, manifest, verification and retention. No torch, no pickle.

checkpoints/
  step-00000500/      complete: renamed to this name after everything in it was synced to disk
    manifest.json       format version, step, tokens, and size and SHA-256 of every other file
    run.json            step, tokens, data cursor, config, counters
    tokenizer.json      the tokenizer, unless it is `byte`, and what Hugging Face keeps next to it (chat template, ...)
    rank-00000.json     random generator states of each rank
    shard-*.safetensors weights (…-00001-of-00004) and optimizer moments (one file per kind), one shard per rank
  .writing-…          a save in progress, or one that a crash interrupted; never loaded, deleted at the next resume
  latest -> step-…    the newest complete one, for people; resuming reads the folders themselves
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tercet import parse
from tercet.atomic_io import sha256, sync
from tercet.errors import TercetError, UsageError
from tercet.parse import one_line_errors

FORMAT = 1
MANIFEST = "manifest.json"
RUN_STATE = "run.json"
TOKENIZER = "tokenizer.json"
LATEST = "latest"
WRITING = ".writing-"
REMOVING = ".removing-"
_NAME = re.compile(r"step-(\d{8,})$")


class CheckpointError(TercetError):
    """A checkpoint could not be written or must not be loaded."""


class WrongCheckpoint(CheckpointError, UsageError):
    """The checkpoint does not exist or belongs to another run or model; the same command would fail again."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name; None for other folders."""
    match = _NAME.match(folder.name)
    return int(match.group(1)) if match else None


def run_of(path: Path) -> Path:
    """The run folder that a checkpoint, a checkpoints/ folder, or a run folder belongs to."""
    path = path.resolve()
    if step_of(path) is not None:
        return path.parent.parent
    return path.parent if path.name == "checkpoints" else path


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [(step_of(p), p) for p in checkpoints.iterdir() if p.is_dir() and not p.is_symlink()]
    return [p for step, p in sorted((s, p) for s, p in found if s is not None)]


def describe_newest(checkpoints: Path) -> str:
    """Part of an error message: which checkpoint is safe."""
    found = complete_checkpoints(checkpoints)
    return f"the newest complete checkpoint is {found[-1]}" if found else "there is no complete checkpoint yet"


def file_record(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint folder and check its format version."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder}: checkpoint format {manifest.get('format')!r}, this Tercet reads format {FORMAT}: "
            "use the version of Tercet that wrote it"
        )
    return manifest


def saved_tokenizer(folder: Path) -> Path | None:
    """The tokenizer.json of a checkpoint, checked; None if it has none: bytes, or saved by version 0.1."""
    with one_line_errors(CheckpointError, f"{folder / MANIFEST} is damaged: restore it from a backup"):
        record = read_manifest(folder).get("files", {}).get(TOKENIZER)
    if record is None:
        return None
    path = folder / TOKENIZER
    if not path.is_file() or file_record(path) != record:
        raise CheckpointError(f"{path} is missing or was changed since it was saved: restore it from a backup")
    return path


def check_sizes(folder: Path) -> dict[str, str]:
    """Raise if a file in the manifest is missing or has another size. Returns the SHA-256 of each."""
    manifest = read_manifest(folder)
    try:
        files = {name: (record["bytes"], record["sha256"]) for name, record in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged ({error!r})") from None
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder}: {name} has {path.stat().st_size} bytes, the manifest says {size}")
    return {name: digest for name, (_, digest) in files.items()}


def verify(folder: Path) -> None:
    """Compare every file with the manifest. The first difference is an error."""
    files = check_sizes(folder)
    # Loading reads every shard in the folder, so one without a checksum is an error.
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("rank-*.json"))):
        if path.name not in files:
            raise CheckpointError(
                f"{folder}: {path.name} is not in {MANIFEST}, which is damaged or from another folder"
            )
    with ThreadPoolExecutor(4) as threads:  # hashing releases the GIL
        digests = threads.map(lambda name: sha256(folder / name), files)
        for (name, expected), digest in zip(files.items(), digests, strict=True):
            if digest != expected:
                raise CheckpointError(f"{folder}: {name} does not match its SHA-256: it was changed or damaged")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; errors name the file."""
    return parse.read_json(path, CheckpointError, "restore it from a backup")


def publish(writing: Path, step: int) -> Path:
    """Rename a finished `.writing-` folder to the checkpoint of `step` and point `latest` to it."""
    checkpoints = writing.parent
    final = checkpoints / folder_name(step)
    sync(writing)
    if final.exists():  # damaged and skipped by the resume, or the same step saved again
        remove(final)
    writing.rename(final)
    link = checkpoints / f".{LATEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(checkpoints / LATEST)
    sync(checkpoints)
    return final


def remove(folder: Path) -> None:
    """Delete a checkpoint; renames it first, so that a half-deleted folder never looks complete."""
    doomed = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def prune(checkpoints: Path, keep: int, keep_every: int, keep_steps: Collection[int]) -> list[Path]:
    """Delete all but the newest `keep`, the multiples of `keep_every` and `keep_steps`. Returns the deleted folders."""
    if keep == 0:
        return []
    old = complete_checkpoints(checkpoints)[:-keep]
    steps = {p: step_of(p) or 0 for p in old}
    doomed = [p for p, step in steps.items() if step not in keep_steps and not (keep_every and step % keep_every == 0)]
    for folder in doomed:
        remove(folder)
    return doomed


def remove_leftovers(checkpoints: Path) -> None:
    """Delete what a crash left half-written or half-deleted."""
    if checkpoints.is_dir():
        for path in checkpoints.iterdir():
            if path.name.startswith((WRITING, REMOVING)):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

"""Atomic, durable file writes: readers see the old file or the new one, and the new one has reached the disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tercet.errors import UsageError


def check_writable(flag: str, file: Path) -> None:
    """Fail before the work if `file` cannot be written. Creates its folder."""
    existed = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {file} cannot be written ({error.strerror}): choose another file") from None


def check_writable_folder(flag: str, folder: Path) -> None:
    """Fail before the work if `folder` cannot be created or written to. Leaves nothing behind."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UsageError(f"{flag} {folder} cannot be written ({error.strerror}): choose another folder") from None


def unused(path: Path, suffix: str = "") -> Path:
    """`path` with this suffix, with -2, -3, … before it if that exists."""
    found, n = path.with_name(path.name + suffix), 1
    while found.exists():
        n += 1
        found = path.with_name(f"{path.name}-{n}{suffix}")
    return found


def sync(path: Path) -> None:
    """fsync a file's content, or a folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it is synced and renamed to `path`, on error deleted."""
    temporary = path.with_name(path.name + ".partial")
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # for names that are not UTF-8


def write_json(path: Path, value: Any) -> None:
    """Replace a file's content atomically with a JSON value."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

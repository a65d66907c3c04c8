"""Files that are there whole or not at all, and on the disk before anybody relies on them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; it takes the place of `path` in one rename if nothing went wrong."""
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
    """The whole text, or what was there before."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON value."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

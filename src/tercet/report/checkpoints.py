"""Whether a checkpoint folder is complete, from its manifest alone: no torch, and no loading."""

from __future__ import annotations

import json
from pathlib import Path


def incomplete(folder: Path) -> str:
    """What is missing or of the wrong size; empty if nothing is."""
    manifest = folder / "manifest.json"
    if not folder.is_dir():
        return "the folder is not there"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        sizes = {name: int(record["bytes"]) for name, record in files.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return "" if sizes else "its manifest lists no files"

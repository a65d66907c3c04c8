"""A folder in Hugging Face's form: whether it is whole, and its tensors. Reads safetensors only, never pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tercet.errors import UsageError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class FolderError(UsageError):
    """A folder that is not a whole model."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(
            f"{path.parent} has no {path.name}: it is no Hugging Face model, or was only half written; export it again"
        ) from None
    except (OSError, ValueError) as error:
        raise FolderError(f"{path} cannot be read ({error}): it is damaged or half written; export it again") from None
    if not isinstance(value, dict):
        raise FolderError(f"{path} holds {type(value).__name__}, not an object: it is no Hugging Face model")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, all there."""
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        names = [WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            others = sorted(p.name for p in folder.glob("*.bin"))
            pickles = f"; {others[0]} is a pickle, which is not read: convert it to safetensors" if others else ""
            raise FolderError(f"{folder} has no {name}: it is half written or half copied; export it again{pickles}")
    return [folder / name for name in names]


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every weight, one at a time."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as stream:
                for name in stream.keys():  # noqa: SIM118  (no mapping)
                    yield name, stream.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{path} cannot be read ({error}): it is cut short or damaged; copy it again") from None


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not whole, in one line, before anything is built. Reads headers only."""
    from safetensors import SafetensorError, safe_open

    read_json(folder / CONFIG)
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{path} cannot be read ({error}): it is cut short or damaged; copy it again") from None

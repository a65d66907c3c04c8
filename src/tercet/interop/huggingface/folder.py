"""Model folders in Hugging Face format. Reads safetensors only, never pickles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tercet import parse
from tercet.errors import TercetError, UsageError
from tercet.parse import one_line_errors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class FolderError(UsageError):
    """A folder without a complete model."""


def read_json(path: Path) -> dict[str, Any]:
    return parse.read_json(path, FolderError, "download or export the model again")


def read_weights(folder: Path, name: str | None = None) -> dict[str, Tensor]:
    """The weights in a folder, or in one of its files, by name: mapped, and read when they are used."""
    names = [WEIGHTS if name is None else name]
    if name is None and (folder / INDEX).is_file():
        with one_line_errors(FolderError, f"{folder / INDEX} has no weight_map of files: copy it again"):
            names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    weights = dict[str, Tensor]()
    for file in names:
        if not os.path.isfile(folder / file):  # False for impossible names too, which Path.is_file raises for
            pickles = ", only pickles, which are not supported" if any(folder.glob("*.bin")) else ""
            raise FolderError(f"{folder} has no {file}{pickles}: it is incomplete; download or copy it again")
        try:
            weights |= load_file(folder / file)
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{folder / file} cannot be read ({error}): it is damaged; copy it again") from None
    for tensor_name, tensor in weights.items():
        if tensor.dtype not in _READABLE:
            raise FolderError(f"{folder}: {tensor_name} has type {tensor.dtype}: use the unquantized model")
    return weights


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, and rename it to `out` on success. An interrupted write leaves no `out`."""
    temporary = out.with_name(f".writing-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # left over from an interrupted write
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise TercetError(f"cannot write {out} ({error}): free disk space, or choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

"""Model folders in Hugging Face format: check, read and write them. Reads safetensors only, never pickles."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercet import parse
from tercet.errors import TercetError, UsageError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


# Elements converted at a time when writing.
_CONVERTED = 1 << 24
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_READABLE = (*_TYPES.values(), "F64")


class FolderError(UsageError):
    """A folder without a complete model."""


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FolderError(
            f"{path.parent} has no {path.name}: it is not a Hugging Face model, or is incomplete; download or export "
            "it again"
        )
    return parse.read_json(path, FolderError, "it is damaged; download or export it again")


def weight_files(folder: Path) -> list[Path]:
    """The weight files; raises if one is missing."""
    if (folder / INDEX).is_file():
        names = _indexed_files(folder / INDEX)
    else:
        names = [WEIGHTS]
    for name in names:
        if not os.path.isfile(folder / name):  # False for impossible names too, which Path.is_file raises for
            others = sorted(p.name for p in folder.glob("*.bin"))
            pickles = f"; {others[0]} is a pickle, which is not supported: convert it to safetensors" if others else ""
            shards = f" and no {INDEX}" if name == WEIGHTS else ""
            raise FolderError(f"{folder} has no {name}{shards}: it is incomplete; download or copy it again{pickles}")
    return [folder / name for name in names]


def _indexed_files(index: Path) -> list[str]:
    """The weight files that an index names; an index may not name files outside its folder."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise FolderError(f"{index} has no weight_map, the file of each tensor: export or copy the model again")
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise FolderError(f"{index}: weight_map[{tensor!r}]={name!r} must be the name of a file in {index.parent}")
    return sorted(set(files.values()))


class LazyWeights(Mapping[str, Tensor]):
    """The weights in some files by name. Each access reads one tensor, and maps no file for longer.
    Raises for tensors that are no weights: of another type than floating point, or not finite."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}  # from the headers of the files
        for path in files:
            with _open_weights(path) as stream:
                for name in stream.keys():  # noqa: SIM118  (not a mapping)
                    stored = stream.get_slice(name)
                    self._files[name], self.shapes[name] = path, stored.get_shape()
                    if (kind := stored.get_dtype()) not in _READABLE:
                        raise FolderError(
                            f"{path}: {name} has type {kind}, but weights must have one of {', '.join(_READABLE)}: "
                            "use the unquantized model"
                        )

    def __getitem__(self, name: str) -> Tensor:
        with _open_weights(self._files[name]) as stream:
            tensor: Tensor = stream.get_tensor(name).clone()
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        if not tensor.isfinite().all():
            raise FolderError(f"{self._files[name]}: {name} has NaN or infinite weights: copy or train the model again")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._files  # without reading the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def write_tensors(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a safetensors file of tensors of one type, one by one. weights: in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        first, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (name, tensor), expected in zip(weights, shapes, strict=True):
            assert name == expected
            assert tensor.shape == tuple(shapes[name])
            for part in tensor.detach().flatten().split(_CONVERTED):
                file.write(part.to(dtype).contiguous().view(torch.uint8).numpy().data)


def check_folder(folder: Path) -> None:
    """Raise if the folder is incomplete or damaged. Reads headers only."""
    read_json(folder / CONFIG)
    for path in weight_files(folder):
        with _open_weights(path):
            pass


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as stream:
            yield stream
    except (OSError, SafetensorError) as error:
        raise FolderError(f"{path} cannot be read ({error}): it is cut short or damaged; copy it again") from None


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

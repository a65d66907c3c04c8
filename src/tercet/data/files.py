"""Which local files a source reads, and in which order in each epoch."""

from __future__ import annotations

import glob
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tercet.data.order import permutation
from tercet.data.records import Reader, Record
from tercet.data.stream import BadRecordError, DataError, DataUsageError

SUFFIXES = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
}


class Files:
    """Files with names that do not depend on where their folder stands: it may move between two runs."""

    def __init__(self, found: Iterable[tuple[str, Path]]) -> None:
        ordered = sorted(dict(found).items())
        self.names = [name for name, _ in ordered]
        self.paths = [path for _, path in ordered]

    def __len__(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        """Of names and sizes: a full checksum of a large corpus would delay every start."""
        digest = hashlib.sha256()
        for name, path in zip(self.names, self.paths, strict=True):
            digest.update(f"{name}\0{path.stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:32]


def find_files(paths: Sequence[str], kind: str) -> Files:
    """Files named by `paths`: files as they are, folders searched by suffix, globs (** allowed) expanded."""
    found: list[tuple[str, Path]] = []
    for number, given in enumerate(paths):
        prefix = f"{number}/" if len(paths) > 1 else ""
        found += [(prefix + name, file) for name, file in _named_by(given, kind)]
    seen: set[Path] = set()
    for _, file in found:
        if file.resolve() in seen:
            raise DataUsageError(f"path names {file} twice: name every file once")
        seen.add(file.resolve())
    return Files(found)


def _named_by(given: str, kind: str) -> list[tuple[str, Path]]:
    path = Path(given).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        root, files = path, [file for file in _walk(path) if file.name.endswith(SUFFIXES[kind])]
        if not files:
            endings = ", ".join(suffix for suffix in SUFFIXES[kind] if suffix)
            looked = f" (looked for {endings})" if endings else ""
            raise DataUsageError(
                f"path={given} holds no {kind} file{looked}: name the files, or set data.source to what they are"
            )
    else:
        files = [Path(match) for match in glob.glob(str(path), recursive=True) if Path(match).is_file()]
        if not files:
            raise DataUsageError(f"path={given} matches no file: check the spelling, and the folder you start from")
        root = Path(os.path.commonpath([file.parent for file in files]))
    return [(file.relative_to(root).as_posix(), file) for file in files]


def python_files(which: str) -> Files:
    """*.py of the standard library, and of the installed packages if `which` is site-packages."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    # _sysconfigdata and config-* are written when a Python is built, and differ between machines; pydoc_data is prose,
    # one file of 750 kB: a short run may read hardly anything else.
    found = [
        (f"stdlib/{file.relative_to(stdlib).as_posix()}", file)
        for file in _walk(stdlib, leave=("site-packages", "dist-packages", "__pycache__", "pydoc_data"))
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and not file.relative_to(stdlib).parts[0].startswith("config-")
    ]
    if which == "site-packages":
        for root in dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib")):
            found += [
                (f"site-packages/{file.relative_to(root).as_posix()}", file)
                for file in _walk(root, leave=("__pycache__",))
                if file.suffix == ".py"
            ]
    if not found:
        raise DataError(
            f"source=python-source: no Python sources in {stdlib} (Python {sys.version.split()[0]} without its "
            "library files): use --data.source text with a path of your own"
        )
    return Files(found)


def _walk(root: Path, leave: tuple[str, ...] = ()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in leave and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


class FileRecords:
    """Records of many files. A place is [files finished in this epoch's order, records read of the next one]."""

    def __init__(self, files: Files, reader: Reader, *, seed: int, shuffle: bool, one_per_file: bool) -> None:
        self.files = files
        # With one document per file the order of the files is the order of the documents.
        self.shuffled_by_order = one_per_file
        self._reader, self._seed, self._shuffle = reader, seed, shuffle

    def identity(self) -> dict[str, Any]:
        return {"files": self.files.fingerprint()}

    def open(self, epoch: int, place: list[int] | None) -> OpenFiles:
        if self._shuffle:
            order = permutation(len(self.files), self._seed, epoch).tolist()
        else:
            order = list(range(len(self.files)))
        done, start = place or (0, 0)
        return OpenFiles([self.files.paths[i] for i in order], self._reader, done, start)


class OpenFiles:
    """One pass over files in their order of this epoch."""

    def __init__(self, paths: list[Path], reader: Reader, done: int, start: int) -> None:
        self._paths, self._reader = paths, reader
        self._done, self._read = done, start
        self._current = reader(paths[done], start) if done < len(paths) else iter(())

    def __iter__(self) -> Iterator[Record | BadRecordError]:
        return self

    def __next__(self) -> Record | BadRecordError:
        while self._done < len(self._paths):
            try:
                self._read, record = next(self._current)
                return record
            except StopIteration:
                self._done, self._read = self._done + 1, 0
                if self._done < len(self._paths):
                    self._current = self._reader(self._paths[self._done], 0)
        raise StopIteration

    def place(self) -> list[int]:
        return [self._done, self._read]

    def where(self) -> tuple[str, int]:
        return str(self._paths[self._done]), self._read

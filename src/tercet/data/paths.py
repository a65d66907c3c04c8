"""Which local files a source reads, and how they differ from those of an earlier run."""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from tercet.atomic_io import write_json
from tercet.data.stream import DataError, DataUsageError, EmptyDataError
from tercet.errors import first_few
from tercet.parse import parse_json

SAMPLE_BYTES, SAMPLES = 4096, 8  # of a file's content, for its fingerprint
SUFFIXES = {
    "text": ("",),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
}


class FileSet:
    """Files sorted by name. Names are relative, so that the folder may move between two runs."""

    def __init__(self, files: Iterable[tuple[str, Path]]) -> None:
        ordered = sorted(dict(files).items())
        self.names = [name for name, _ in ordered]
        self.paths = [path for _, path in ordered]

    def identity(self) -> dict[str, Any]:
        """Hash of names and sizes."""
        digest = hashlib.sha256()
        for name, path in zip(self.names, self.paths, strict=True):
            digest.update(f"{name}\0{path.stat().st_size}\n".encode(errors="surrogateescape"))
        return {"files": digest.hexdigest()[:32]}

    @cached_property
    def listing(self) -> dict[str, list[Any]]:
        """Size and content fingerprint of every file."""
        with ThreadPoolExecutor(8) as threads:  # network storage answers slowly, but many at a time
            return dict(zip(self.names, threads.map(_size_and_fingerprint, self.paths), strict=True))

    @cached_property
    def contents(self) -> str:
        """Hash of `listing`."""
        return hashlib.sha256(json.dumps(self.listing).encode()).hexdigest()[:32]


def _size_and_fingerprint(path: Path) -> list[Any]:
    """A small file is hashed whole. Of a larger one, a few samples: hashing a corpus would delay every start."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SAMPLE_BYTES * SAMPLES:
                content = file.read()
            else:
                starts = [i * (size - SAMPLE_BYTES) // (SAMPLES - 1) for i in range(SAMPLES)]
                content = b"".join(os.pread(file.fileno(), SAMPLE_BYTES, start) for start in starts)
    except OSError as error:
        raise unreadable(path, error) from error
    return [size, hashlib.sha256(content).hexdigest()[:16]]


def unreadable(path: Path | str, error: OSError) -> DataError:
    fix = "change the permissions of file or folder" if isinstance(error, PermissionError) else "make it readable"
    return DataError(f"{path} cannot be read ({error.strerror}): {fix}, or leave it out")


def save_file_lists(folder: Path, sources: Mapping[str, FileSet]) -> None:
    """Write the file list of each source, named by its hash: every checkpoint finds the list it was saved with."""
    for source, files in sources.items():
        path = folder / f"{files.contents}.json"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            write_json(path, {"source": source, "files": files.listing})


def describe_changes(folder: Path | None, contents: str | None, now: FileSet) -> str:
    """Which files were added, removed or changed since the list `contents` was saved to `folder`."""
    try:
        before = parse_json(Path(folder or "", f"{contents}.json").read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return "names or sizes of the files differ (their list was not saved)"
    changes = {
        "added": now.listing.keys() - before.keys(),
        "removed": before.keys() - now.listing.keys(),
        "changed": {name for name in before.keys() & now.listing.keys() if before[name] != now.listing[name]},
    }
    return ", ".join(f"{what} {first_few(sorted(names))}" for what, names in changes.items() if names)


def find_files(paths: Sequence[str], kind: str) -> FileSet:
    """Expand `paths`: files as they are, folders searched by suffix, globs (** allowed).

    Run folders inside are skipped: a run started in its data folder would read its own files, which change.
    """
    files: list[tuple[str, Path]] = []
    for number, given in enumerate(paths):
        prefix = f"{number}/" if len(paths) > 1 else ""
        files += [(prefix + name, file) for name, file in _expand(given, kind)]
    seen: set[Path] = set()
    for _, file in files:
        if file.resolve() in seen:
            raise DataUsageError(f"path names {file} twice: name every file once")
        seen.add(file.resolve())
    return FileSet(files)


def check_paths(paths: Sequence[str]) -> None:
    """Raise for a path that matches nothing, as `find_files` would after listing the folders before it."""
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists() and not any(_glob(path)):
            raise DataUsageError(_no_match(given) + ", and put spaces between paths" * ("," in given))


def _no_match(given: str) -> str:
    """A run stores absolute paths."""
    moved = "; if the files have moved, put a link to them there" if Path(given).is_absolute() else ""
    return f"path={given} matches no file: check the spelling" + (moved or " and the current folder")


def _expand(given: str, kind: str) -> list[tuple[str, Path]]:
    path = Path(given).expanduser()
    if path.is_file():
        return [(path.name, path)]
    if path.is_dir():
        root, files = path, [file for file in _walk(path) if file.name.endswith(SUFFIXES[kind])]
        if not files:
            endings = ", ".join(suffix for suffix in SUFFIXES[kind] if suffix)
            expected = f" ({endings})" if endings else ""
            raise EmptyDataError(
                f"path={given} has no {kind} files{expected}: name the files, or set data.source to their format"
            )
    else:
        top, matches = _top(path), [match for match in _glob(path) if match.is_file()]
        runs = set(filter(_is_run, {p for file in matches for p in file.parents} - {top, *top.parents}))
        files = [file for file in matches if runs.isdisjoint(file.parents)]
        if not files:
            raise DataUsageError(_no_match(given))
        root = Path(os.path.commonpath([file.parent for file in files]))
    return [(file.relative_to(root).as_posix(), file) for file in files]


def _top(path: Path) -> Path:
    """The folder that a glob starts in."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))


def _glob(path: Path) -> Iterator[Path]:
    """Matches of a glob. Hidden names match only if it names them; ** enters no linked folders, which may be loops."""
    top = _top(path)
    parts = [part if part == "**" else part.replace("**", "*") for part in path.relative_to(top).parts]
    hidden = any(part.startswith(".") for part in parts)
    for match in top.glob("/".join(parts)) if parts else ():
        if hidden or not any(part.startswith(".") for part in match.relative_to(top).parts):
            yield match


def python_files(which: str) -> FileSet:
    """*.py of the standard library, and of the installed packages if `which` is site-packages."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    # _sysconfigdata and config-* are generated by the Python build and differ between machines. pydoc_data is one
    # 750 kB file of prose, which could dominate a short run.
    files = [
        (f"stdlib/{file.relative_to(stdlib).as_posix()}", file)
        for file in _walk(stdlib, exclude=("site-packages", "dist-packages", "__pycache__", "pydoc_data"))
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")
        and not file.relative_to(stdlib).parts[0].startswith("config-")
    ]
    for root in dict.fromkeys(paths[name] for name in ("purelib", "platlib") if which == "site-packages"):
        installed = (file for file in _walk(Path(root), exclude=("__pycache__",)) if file.suffix == ".py")
        files += [(f"site-packages/{file.relative_to(root).as_posix()}", file) for file in installed]
    if not files:
        raise DataError(
            f"source=python-source: no Python sources in {stdlib} (Python {sys.version.split()[0]} was installed "
            "without its library sources): use --data.source text with --data.path"
        )
    return FileSet(files)


def _walk(root: Path, exclude: tuple[str, ...] = ()) -> Iterator[Path]:
    """Files below a folder, without hidden ones and run folders."""

    def unlisted(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for folder, folders, names in os.walk(root, onerror=unlisted):
        if folder != str(root) and _is_run(Path(folder)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in exclude and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _is_run(folder: Path) -> bool:
    """Whether it is a run folder: these two exist before the run lists its data, and for as long as the folder does."""
    return (folder / "lock").is_file() and (folder / "checkpoints").is_dir()

"""Local files: which ones a source reads, and their records: text, Python source, JSON lines, parquet, conversations.

A reader yields (records read so far in this file, record or error), starting after the first `start` records. The
count is part of the cursor, so it includes every line or row, good or bad. Damaged content is a bad record. Readers
raise two other errors: an I/O error, which says nothing about the record, and a compressed file that is truncated or
damaged, of which an unknown number of records is lost.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import shlex
import sys
import sysconfig
import time
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from tercet.atomic_io import write_json
from tercet.data.stream import (
    BadRecordError,
    BadValueError,
    DataError,
    DataUsageError,
    EmptyDataError,
    first_line,
    permutation,
)
from tercet.data.tokenizers import ChatError, ChatTemplate, Spans
from tercet.errors import first_few
from tercet.parse import parse_json

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # waits before an I/O error is final: network storage is away for seconds
SAMPLE_BYTES, SAMPLES = 4096, 8  # of a file's content, for its fingerprint
FileList = dict[str, list[Any]]  # name -> [size, fingerprint]
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

    def __len__(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        """Hash of names and sizes."""
        digest = hashlib.sha256()
        for name, path in zip(self.names, self.paths, strict=True):
            digest.update(f"{name}\0{path.stat().st_size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()[:32]

    @cached_property
    def listing(self) -> FileList:
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
        raise _unreadable(path, error) from error
    return [size, hashlib.sha256(content).hexdigest()[:16]]


def _unreadable(path: Path, error: OSError) -> DataError:
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
        before: FileList = parse_json(Path(folder or "", f"{contents}.json").read_text(encoding="utf-8"))["files"]
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
        top = _top(path)
        matches = [match for match in _glob(path) if match.is_file()]
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
    if which == "site-packages":
        for root in dict.fromkeys(Path(paths[name]) for name in ("purelib", "platlib")):
            files += [
                (f"site-packages/{file.relative_to(root).as_posix()}", file)
                for file in _walk(root, exclude=("__pycache__",))
                if file.suffix == ".py"
            ]
    if not files:
        raise DataError(
            f"source=python-source: no Python sources in {stdlib} (Python {sys.version.split()[0]} was installed "
            "without its library sources): use --data.source text with --data.path"
        )
    return FileSet(files)


def _walk(root: Path, exclude: tuple[str, ...] = ()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_unlisted):
        if folder != str(root) and _is_run(Path(folder)):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in exclude and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _unlisted(error: OSError) -> None:
    raise _unreadable(Path(error.filename), error) from error


def _is_run(folder: Path) -> bool:
    """Whether it is a run folder: these two exist before the run lists its data, and for as long as the folder does."""
    return (folder / "lock").is_file() and (folder / "checkpoints").is_dir()


class FileRecords:
    """Records of many files. A position is [files finished in this epoch's order, records read of the next file]."""

    def __init__(self, files: FileSet, reader: Reader, seed: int | None, *, one_per_file: bool = False) -> None:
        """seed: of the order of the files; None: as sorted."""
        self.files, self.one_per_file, self._reader, self._seed = files, one_per_file, reader, seed
        self.io_retries: list[str] = []

    def identity(self) -> dict[str, Any]:
        return {"files": self.files.fingerprint()}

    def open(self, epoch: int, position: list[int] | None) -> FileRecordIterator:
        paths = self.files.paths
        if self._seed is not None:
            paths = [paths[i] for i in permutation(len(paths), self._seed, epoch).tolist()]
        return FileRecordIterator(paths, self._reader, position or [0, 0], self.io_retries)

    def in_file_order(self) -> FileRecordIterator:
        return FileRecordIterator(self.files.paths, self._reader, [0, 0], self.io_retries)


class FileRecordIterator:
    """One pass over files in an epoch's order.

    An I/O error is retried, then fatal; `retries` gets the warnings. One that waiting does not fix is fatal at once.
    """

    def __init__(self, paths: list[Path], reader: Reader, position: list[int], retries: list[str]) -> None:
        self._paths, self._reader, self._retries = paths, reader, retries
        self._done, self._read = position
        self._failures = 0  # in a row
        self._current = reader(paths[self._done], self._read) if self._done < len(paths) else iter(())

    def __iter__(self) -> Iterator[Record | BadRecordError]:
        return self

    def __next__(self) -> Record | BadRecordError:
        while self._done < len(self._paths):
            try:
                self._read, record = next(self._current)
                self._failures = 0
                return record
            except OSError as error:
                self._wait_and_reopen(error)
            except StopIteration:
                self._done, self._read = self._done + 1, 0
                if self._done < len(self._paths):
                    self._current = self._reader(self._paths[self._done], 0)
        raise StopIteration

    def _wait_and_reopen(self, error: OSError) -> None:
        path = self._paths[self._done]
        if isinstance(error, (PermissionError, IsADirectoryError, NotADirectoryError)):
            raise _unreadable(path, error) from error
        if self._failures == len(RETRY_SECONDS):
            raise DataError(
                f"{path} cannot be read ({error.strerror}), also after {self._failures} retries in "
                f"{sum(RETRY_SECONDS):g} s: check the disk or the network, then run it again"
            ) from error
        wait = RETRY_SECONDS[self._failures]
        self._failures += 1
        self._retries.append(
            f"{path} could not be read ({error.strerror}): retry {self._failures} of {len(RETRY_SECONDS)} "
            f"after {wait:g} s"
        )
        time.sleep(wait)
        self._current = self._reader(path, self._read)

    def position(self) -> list[int]:
        return [self._done, self._read]

    def last_record(self) -> tuple[str, int]:
        return str(self._paths[self._done]), self._read


class Record(NamedTuple):
    text: bytes  # UTF-8
    prompt: bytes | None = None  # UTF-8; put before the text, excluded from the loss
    learned: Spans | None = None  # of a conversation, whose text has special tokens: what counts in the loss
    messages: bytes = b""  # of a conversation: what the text was rendered from


TOOLS = "tools"  # the field with the functions that a conversation may call

Read = tuple[int, Record | BadRecordError]
Reader = Callable[[Path, int], Iterator[Read]]


# Text compresses 3 to 20 times; a small file that decompresses to more memory than there is, about 1000 times.
MAX_RATIO = 200
MIN_DECOMPRESSED = 64 << 20  # always allowed
BATCH_BYTES = 8 << 20  # of parquet rows at a time, by their mean length

# Format and first bytes by suffix; pzstd starts its files with a skippable frame.
COMPRESSED = {".gz": ("gzip", (b"\x1f\x8b",)), ".zst": ("zstd", (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"))}


def open_binary(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing .gz and .zst."""
    if path.suffix == ".gz":
        stream: Any = gzip.open(path, "rb")  # noqa: SIM115  (closed by the reader)
    elif path.suffix == ".zst":
        # pyarrow is needed for parquet anyway, and reads files with several frames.
        stream = import_pyarrow(path).input_stream(str(path), compression="zstd")
    else:
        return open(path, "rb", buffering=1 << 20)
    return io.BufferedReader(_Decompressed(stream, path), 1 << 20)


class _Decompressed(io.RawIOBase):
    """The content of a compressed file. Fails at MAX_RATIO times the size of the file."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path = stream, path
        self._left = max(MIN_DECOMPRESSED, MAX_RATIO * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._stream.readinto(buffer))
        except (OSError, EOFError, zlib.error) as error:
            _raise_io_error(error)
            raise _decompression_error(self._path, error) from error
        self._left -= count
        if self._left < 0:
            raise DataError(
                f"{self._path} decompresses to more than {MAX_RATIO} times its size: compress it again, or unpack it"
            )
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _decompression_error(path: Path, error: Exception) -> DataError:
    reason = first_line(error)
    if isinstance(error, EOFError) or "truncated" in reason.lower():
        return DataError(f"{path} is truncated ({reason}): fetch or compress it again")
    name, starts = COMPRESSED[path.suffix]
    with open(path, "rb") as file:
        if not file.read(4).startswith(starts):
            return DataError(f"{path} is not a {name} file: compress it, or rename it without {path.suffix}")
    return DataError(f"{path} is damaged ({reason}): fetch or compress it again")


def import_pyarrow(path: Path):  # type: ignore[no-untyped-def]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow, which is not installed: pip install 'tercet[data]'") from error
    return pyarrow


def _raise_io_error(error: Exception) -> None:
    """Raise an error of the operating system again. Decompressors and pyarrow use OSError too, but without errno."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error


@dataclass(frozen=True)
class RecordFormat:
    """How to make a record of a JSON line or a parquet row."""

    text_field: str = "text"
    prompt_field: str = ""
    max_mib: int = 16
    chat: ChatReader | None = None  # None refuses messages

    @property
    def columns(self) -> list[str]:
        return [self.text_field] + ([self.prompt_field] if self.prompt_field else [])

    def record(self, text: Any, prompt: Any = None, tools: Any = None) -> Record:
        """A record from parsed values. Raises BadValueError if they are neither text nor, with `chat`, messages."""
        if self.prompt_field and prompt is None:
            raise BadValueError(f"its {self.prompt_field} is missing")
        try:
            if self.chat is not None and (conversation := self.chat.read(text, prompt, tools)) is not None:
                rendered, learned, messages = conversation
                return Record(rendered.encode(), learned=learned, messages=messages.encode())
            for name, value in (("text", text), (self.prompt_field, prompt)):
                if name and not isinstance(value, str):
                    raise BadValueError(f"its {name} is {type(value).__name__}, not a string")
            return Record(text.encode(), prompt.encode() if self.prompt_field else None)
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON escapes can express
            raise BadValueError(f"its text is not Unicode ({error.reason} at {error.start})") from None

    def from_json(self, line: bytes) -> Record:
        try:
            value = parse_json(line)
        except ValueError as error:  # broken JSON, or not UTF-8
            raise BadValueError(f"is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise BadValueError(f"is a JSON {type(value).__name__}, not an object")
        for field in self.columns:
            if field not in value:
                texts = [name for name, text in value.items() if isinstance(text, str) and name != self.prompt_field]
                longest = max(texts, key=lambda name: len(value[name]), default=None)
                fix = self._other_field(field, "messages" if "messages" in value else longest)
                names = ", ".join(value) or "none"
                names = names if len(names) <= 200 else f"{names[:200]} …"
                raise BadValueError(f"has no field {field!r} (it has {names})", fix)
        prompt = value[self.prompt_field] if self.prompt_field else None
        return self.record(value[self.text_field], prompt, value.get(TOOLS))

    def from_row(self, cells: tuple[Any, ...]) -> Record:
        """cells: of `columns`, and of TOOLS if there are any."""
        for cell in cells:
            text = getattr(cell, "value", None) if cell.is_valid else None  # messages and tools have none
            buffer = text.as_buffer() if hasattr(text, "as_buffer") else None  # type: ignore[union-attr]
            if buffer is not None and buffer.size > self.max_mib << 20:
                raise _too_long(self.max_mib)
        try:
            text, *values = [_without_nulls(cell.as_py()) for cell in cells]
        except UnicodeDecodeError as error:
            raise _not_utf8(error) from None
        prompt = values.pop(0) if self.prompt_field else None
        return self.record(text, prompt, values.pop() if values else None)

    def check_columns(self, schema: Any) -> None:
        """Raise BadValueError if a column is missing, or is neither text nor, with `chat`, messages."""
        for column in self.columns:
            if column not in schema.names:
                texts = (
                    field.name for field in schema if field.name != self.prompt_field and "string" in str(field.type)
                )
                fix = self._other_field(column, next(texts, None))
                raise BadValueError(f"has no column {column!r} (it has {', '.join(schema.names)})", fix)
            if schema.names.count(column) > 1:
                raise BadValueError(f"has two columns {column!r}", "rename one")
            kind = str(schema.field(column).type)
            messages = self.chat is not None and kind.startswith(("list<", "large_list<"))
            nested = kind.startswith(("list", "large_list", "fixed_size_list", "struct", "map"))
            if not messages and ("string" not in kind or nested):
                raise BadValueError(f"its column {column!r} is {kind}, not text")

    def _other_field(self, missing: str, other: str | None) -> str:
        """The fix for a missing field: read another one."""
        if missing != self.text_field or not other or len(other) > 100:
            return "fix it"
        return f"read {other} with --data.text_field {shlex.quote(other)}"


def _without_nulls(value: Any) -> Any:
    """A row's value without the keys that only other rows have."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _too_long(max_mib: int) -> BadValueError:
    return BadValueError(
        f"is longer than data.max_record_mib={max_mib} allows", "split it, or raise --data.max_record_mib"
    )


def _not_utf8(error: UnicodeDecodeError) -> BadValueError:
    return BadValueError(f"is not UTF-8 ({error.reason} at byte {error.start})")


def _bad(path: Path, where: int | str, error: BadValueError) -> BadRecordError:
    return BadRecordError(str(path), where, str(error), error.fix)


def _parse(path: Path, where: int | str, make: Callable[[Any], Record], value: Any) -> Record | BadRecordError:
    try:
        return make(value)
    except BadValueError as error:
        return _bad(path, where, error)


def text_reader(separator: str, max_mib: int = 16) -> Reader:
    """One document per file, or several split at `separator`. One over max_mib continues as another document."""

    def read(path: Path, start: int) -> Iterator[Read]:
        with open_binary(path) as file:
            for index, text in enumerate(_documents(file, separator.encode(), max_mib << 20), 1):
                if index > start:
                    yield index, _parse(path, index if separator or index > 1 else "", _from_text, text)

    return read


def _from_text(text: bytes) -> Record:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        utf16 = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise BadValueError("is UTF-16, not UTF-8") if utf16 else _not_utf8(error) from None
    return Record(text)


def _documents(file: IO[bytes], separator: bytes, limit: int) -> Iterator[bytes]:
    data, more = b"", True
    while more:
        block = file.read(1 << 20)
        more = bool(block)
        data += block
        if separator:
            *documents, data = data.split(separator)
            for document in documents:
                yield from pieces(document, limit)
        while len(data) > limit + len(separator):  # which may begin at the end of the data
            piece = next(pieces(data, limit))
            yield piece
            data = data[len(piece) :]
    yield from pieces(data, limit)


def pieces(text: bytes, limit: int) -> Iterator[bytes]:
    """`text` in pieces of at most `limit` bytes, cut at the start of a line if there is one, else of a character."""
    begin = 0
    while len(text) - begin > limit:
        cut = text.rfind(b"\n", begin, begin + limit) + 1
        if not cut:
            cut = begin + limit
            cut -= next((i for i in range(min(4, limit)) if text[cut - i] & 0xC0 != 0x80), 0)
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def python_reader(max_mib: int = 16) -> Reader:
    """A Python file, decoded as Python would; one that Python cannot read counts as empty."""

    def read(path: Path, start: int) -> Iterator[Read]:
        if start:
            return
        with open(path, "rb") as file:
            data = file.read((max_mib << 20) + 1)
        if len(data) > max_mib << 20:
            yield 1, _bad(path, "", _too_long(max_mib))
            return
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding).encode()
            yield 1, Record(b"" if b"\0" in text else text)
        except (SyntaxError, UnicodeError):
            # The standard library has a few such files, which test Python's error messages.
            yield 1, Record(b"")

    return read


def jsonl_reader(record_format: RecordFormat) -> Reader:
    """One document per line; blank lines are ignored."""
    limit = record_format.max_mib << 20

    def read(path: Path, start: int) -> Iterator[Read]:
        index = 0
        with open_binary(path) as file:
            while line := file.readline(limit + 1):
                index += 1
                whole = len(line) <= limit
                while not line.endswith(b"\n") and (more := file.readline(1 << 20)):  # the rest of a long line
                    line = more
                if index <= start or (whole and line.isspace()):
                    continue
                if whole:
                    yield index, _parse(path, index, record_format.from_json, line)
                else:
                    yield index, _bad(path, index, _too_long(record_format.max_mib))

    return read


def parquet_reader(record_format: RecordFormat) -> Reader:
    """One document per row."""
    columns, max_mib = record_format.columns, record_format.max_mib

    def read(path: Path, start: int) -> Iterator[Read]:
        arrow = import_pyarrow(path)
        index = 0
        try:
            metadata = arrow.parquet.read_metadata(path)
            record_format.check_columns(metadata.schema.to_arrow_schema())
            # Values that repeat stay indices into a dictionary: written out they may take any amount of memory.
            texts = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            texts = [column for column in columns if column in texts]  # not messages
            file = arrow.parquet.ParquetFile(path, metadata=metadata, read_dictionary=texts, buffer_size=1 << 20)
        except BadValueError as error:
            yield 1, _bad(path, "", error)
            return
        except (OSError, ValueError, arrow.ArrowException) as error:
            _raise_io_error(error)
            yield 1, BadRecordError(str(path), "", f"is not a readable parquet file ({first_line(error)})")
            return
        with file:
            tools = [TOOLS] if record_format.chat is not None and TOOLS in file.schema_arrow.names else []
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if index + rows <= start:
                    index += rows
                    continue
                size = _group_size(file.metadata.row_group(group), columns, path)
                if size > max(MIN_DECOMPRESSED, rows * len(columns) * max_mib << 20):
                    for row in range(max(index, start) + 1, index + rows + 1):  # the mean row is too long
                        yield row, _bad(path, row, _too_long(max_mib))
                    index += rows
                    continue
                at_once = max(1, min(256, rows * BATCH_BYTES // max(1, size)))
                try:
                    for batch in file.iter_batches(batch_size=at_once, row_groups=[group], columns=columns + tools):
                        for cells in zip(*(batch[name] for name in columns + tools), strict=True):
                            index += 1
                            if index > start:
                                yield index, _parse(path, index, record_format.from_row, cells)
                except (OSError, arrow.ArrowException) as error:
                    _raise_io_error(error)
                    yield index + 1, BadRecordError(str(path), index + 1, f"cannot be read ({first_line(error)})")
                    return

    return read


def _group_size(group: Any, columns: list[str], path: Path) -> int:
    """Bytes of these columns in a row group, decompressed."""
    chunks = [
        chunk for i in range(group.num_columns) if (chunk := group.column(i)).path_in_schema.split(".")[0] in columns
    ]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    if size > max(MIN_DECOMPRESSED, MAX_RATIO * sum(chunk.total_compressed_size for chunk in chunks)):
        raise DataError(f"{path} decompresses to more than {MAX_RATIO} times its size: write it again, less compressed")
    return size


@dataclass(frozen=True)
class ChatReader:
    """Turns the messages of a record into text."""

    tokenizer: str  # its name
    template: ChatTemplate | None
    assistant_only: bool  # data.loss_on

    def read(self, text: Any, prompt: Any, tools: Any) -> tuple[str, Spans, str] | None:
        """The text of a conversation, what of it counts in the loss, and the messages as JSON; None for other records.

        text, prompt: the fields of a record. A prompt is put first, and excluded from the loss.
        """
        if not (isinstance(text, list) or isinstance(prompt, list) or (self.assistant_only and prompt is not None)):
            if self.assistant_only and isinstance(text, str):
                raise ChatError(
                    "its text is a string, not messages: data.loss_on=assistant needs --data.text_field messages, or "
                    "a question in --data.prompt_field"
                )
            return None
        if self.template is None:
            raise DataUsageError(
                f"tokenizer={self.tokenizer} has no chat template, which messages need: choose one that has "
                "tokenizer_config.json or chat_template.jinja next to its tokenizer.json, or another --data.text_field"
            )
        asked = [] if prompt is None else _messages(prompt, "user")
        answered = _messages(text, "assistant")
        tools = _tools(tools)
        if not answered:
            return "", (), ""
        rendered, spans = self.template.learned(asked + answered, tools, len(asked), self.assistant_only)
        return rendered, spans, json.dumps([asked, answered, tools], ensure_ascii=False, sort_keys=True, default=str)


def _messages(value: Any, role: str) -> list[Any]:
    """Messages, of which a plain text is one."""
    if isinstance(value, (str, list)):
        return [{"role": role, "content": value}] if isinstance(value, str) else value
    raise ChatError(f"its messages are {type(value).__name__}, not a list")


def _tools(value: Any) -> list[Any] | None:
    """Descriptions of functions; parquet files often have them as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_json(value)
    if value and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ChatError("its tools are not a list of JSON objects")
    return value or None

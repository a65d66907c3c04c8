"""Records of files: text, Python source, JSON lines and parquet, also compressed.

A reader yields (records read so far in this file, record or error), starting after the first `start` records. The
count is part of the cursor, so it includes every line or row, good or bad. Damaged content is a bad record. Readers
raise two other errors: an I/O error, which says nothing about the record, and a compressed file that is truncated or
damaged, of which an unknown number of records is lost.
"""

from __future__ import annotations

import codecs
import gzip
import io
import shlex
import time
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from tercet.data.chat import ChatReader, Spans
from tercet.data.hub import HubFile, HubFiles
from tercet.data.paths import FileSet, unreadable
from tercet.data.stream import BadRecordError, BadValueError, DataError, first_line, permutation
from tercet.parse import parse_json

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)  # waits before an I/O error is final: network storage is away for seconds
MAX_RATIO = 200  # of parquet: text compresses 3 to 20 times; a file made to fill the memory, about 1000 times
MIN_DECOMPRESSED = 64 << 20  # always allowed
BATCH_BYTES = 8 << 20  # of parquet rows at a time, by their mean length
TOOLS = "tools"  # the field with the functions that a conversation may call

# Format and first bytes by suffix; pzstd starts its files with a skippable frame.
COMPRESSED = {".gz": ("gzip", (b"\x1f\x8b",)), ".zst": ("zstd", (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"))}


class Record(NamedTuple):
    text: bytes  # UTF-8
    prompt: bytes | None = None  # UTF-8; put before the text, excluded from the loss
    learned: Spans | None = None  # of a conversation, whose text has special tokens: what counts in the loss
    messages: bytes = b""  # of a conversation: what the text was rendered from


Location = Path | str  # a str is on the hub
Read = tuple[int, Record | BadRecordError]
Reader = Callable[[Any, int], Iterator[Read]]


class FileRecords:
    """Records of many files. A position is [files finished in this epoch's order, records read of the next file]."""

    def __init__(
        self, files: FileSet | HubFiles, reader: Reader, seed: int | None, *, one_per_file: bool = False
    ) -> None:
        """seed: of the order of the files; None: as sorted. one_per_file: each file is one record, so shuffling files
        shuffles documents."""
        self.files, self.one_per_file, self._reader, self._seed = files, one_per_file, reader, seed
        self.io_retries: list[str] = []  # one warning for each retry of an I/O error

    def open(self, epoch: int | None, position: Any = None) -> RecordIterator:
        """Records of an epoch from `position`; None: from its start. Epoch None: in the order of the sorted files."""
        paths: Sequence[Location] = self.files.paths
        if self._seed is not None and epoch is not None:
            paths = [paths[i] for i in permutation(len(paths), self._seed, epoch).tolist()]
        if isinstance(position, dict):  # of the parquet files of fineweb-edu before version 0.3
            position = _place_of_row(paths, position["read"])
        return RecordIterator(paths, self._reader, position or [0, 0], self.io_retries)


def _place_of_row(paths: Sequence[Location], row: int) -> list[int]:
    for done, path in enumerate(paths):
        rows = import_pyarrow(path).parquet.read_metadata(_opened(path)).num_rows
        if row < rows:
            return [done, row]
        row -= rows
    return [len(paths), 0]


class RecordIterator:
    """One pass over files in an epoch's order.

    An I/O error is retried, then fatal; `retries` gets the warnings. One that waiting does not fix is fatal at once.
    """

    def __init__(self, paths: Sequence[Location], reader: Reader, position: list[int], retries: list[str]) -> None:
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
            raise unreadable(path, error) from error
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
        """Where to reopen the source to get the next record next."""
        return [self._done, self._read]

    def last_record(self) -> tuple[str, int]:
        """File and number, from 1, of the last record returned."""
        return str(self._paths[self._done]), self._read


@contextmanager
def open_binary(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressing .gz and .zst."""
    if path.suffix not in COMPRESSED:
        with open(path, "rb", buffering=1 << 20) as file:
            yield file
        return
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as unpacked:
                yield io.BufferedReader(unpacked, 1 << 20)  # type: ignore[arg-type]
        else:  # pyarrow is needed for parquet anyway, and reads files with several frames
            with import_pyarrow(path).input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream, 1 << 20)
    except (OSError, EOFError, zlib.error) as error:
        _raise_io_error(error)
        raise _decompression_error(path, error) from error


def _decompression_error(path: Path, error: Exception) -> DataError:
    reason = first_line(error)
    if isinstance(error, EOFError) or "truncated" in reason.lower():
        return DataError(f"{path} is truncated ({reason}): fetch or compress it again")
    name, starts = COMPRESSED[path.suffix]
    with open(path, "rb") as file:
        if not file.read(4).startswith(starts):
            return DataError(f"{path} is not a {name} file: compress it, or rename it without {path.suffix}")
    return DataError(f"{path} is damaged ({reason}): fetch or compress it again")


def import_pyarrow(path: Location):  # type: ignore[no-untyped-def]
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow, which is not installed: pip install 'tercet[data]'") from error
    return pyarrow


def _opened(path: Location) -> Path | HubFile:
    return HubFile(path) if isinstance(path, str) else path


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
                texts = sorted((n for n, text in value.items() if isinstance(text, str)), key=lambda n: -len(value[n]))
                raise self._missing("field", field, value, ["messages"] * ("messages" in value) + texts)
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
                texts = [field.name for field in schema if "string" in str(field.type)]
                raise self._missing("column", column, schema.names, texts)
            if schema.names.count(column) > 1:
                raise BadValueError(f"has two columns {column!r}", "rename one")
            kind = str(schema.field(column).type).removeprefix("dictionary<values=")
            messages = self.chat is not None and kind.startswith(("list<", "large_list<"))
            if not messages and not kind.startswith(("string", "large_string")):
                raise BadValueError(f"its column {column!r} is {kind}, not text")

    def _missing(self, what: str, name: str, present: Iterable[str], texts: list[str]) -> BadValueError:
        """texts: fields that may be meant instead, the likeliest first."""
        other = next((text for text in texts if text != self.prompt_field and len(text) <= 100), None)
        meant = other and name == self.text_field
        fix = f"read {other} with --data.text_field {shlex.quote(other or '')}" if meant else "fix it"
        names = ", ".join(present) or "none"
        return BadValueError(
            f"has no {what} {name!r} (it has {names if len(names) <= 200 else names[:200] + ' …'})", fix
        )


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


def _bad(path: Location, where: int | str, error: BadValueError) -> BadRecordError:
    return BadRecordError(str(path), where, str(error), error.fix)


def _parse(path: Location, where: int | str, make: Callable[[Any], Record], value: Any) -> Record | BadRecordError:
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

    def read(path: Location, start: int) -> Iterator[Read]:
        arrow, opened = import_pyarrow(path), _opened(path)
        index = 0
        try:
            metadata = arrow.parquet.read_metadata(opened)
            record_format.check_columns(metadata.schema.to_arrow_schema())
            # Values that repeat stay indices into a dictionary: written out they may take any amount of memory.
            texts = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            texts = [column for column in columns if column in texts]  # not messages
            file = arrow.parquet.ParquetFile(opened, metadata=metadata, read_dictionary=texts, buffer_size=1 << 20)
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


def _group_size(group: Any, columns: list[str], path: Location) -> int:
    """Bytes of these columns in a row group, decompressed."""
    chunks = [
        chunk for i in range(group.num_columns) if (chunk := group.column(i)).path_in_schema.split(".")[0] in columns
    ]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    if size > max(MIN_DECOMPRESSED, MAX_RATIO * sum(chunk.total_compressed_size for chunk in chunks)):
        raise DataError(f"{path} decompresses to more than {MAX_RATIO} times its size: write it again, less compressed")
    return size

"""Readers of one local file: text, Python source, JSON lines, parquet.

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
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from tercet.data.chat import ChatReader, Spans
from tercet.data.stream import BadRecordError, BadValueError, DataError, first_line
from tercet.parse import parse_json


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

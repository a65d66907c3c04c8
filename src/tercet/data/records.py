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
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from tercet.data.stream import BadRecordError, DataError, first_line
from tercet.parse import parse_json


class Record(NamedTuple):
    text: bytes  # UTF-8
    prompt: bytes | None = None  # UTF-8; put before the text, excluded from the loss


Read = tuple[int, Record | BadRecordError]
Reader = Callable[[Path, int], Iterator[Read]]


# Text compresses 3 to 20 times; a small file that decompresses to more memory than there is, about 1000 times.
MAX_RATIO = 200
MIN_DECOMPRESSED = 64 << 20  # always allowed

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


def text_reader(separator: str) -> Reader:
    """One document per file, or several split at `separator`."""
    split_at = separator.encode()

    def read(path: Path, start: int) -> Iterator[Read]:
        with open_binary(path) as file:
            data = file.read()
        for index, text in enumerate(data.split(split_at) if split_at else [data]):
            if index >= start:
                yield index + 1, _text_record(text, path, index + 1 if split_at else "")

    return read


def read_python(path: Path, start: int) -> Iterator[Read]:
    """A Python file, decoded as Python would; one that Python cannot read counts as empty."""
    if start:
        return
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding).encode()
        yield 1, Record(b"" if b"\0" in text else text)
    except (SyntaxError, UnicodeError):
        # The standard library has a few such files, which test Python's error messages.
        yield 1, Record(b"")


def jsonl_reader(text_field: str, prompt_field: str) -> Reader:
    """One document per line; blank lines are ignored."""

    def read(path: Path, start: int) -> Iterator[Read]:
        index = 0
        with open_binary(path) as file:
            for line in file:
                index += 1
                if index <= start or line.isspace():
                    continue
                yield index, _json_record(line, text_field, prompt_field, path, index)

    return read


def parquet_reader(text_field: str, prompt_field: str) -> Reader:
    """One document per row."""
    columns = [text_field] + ([prompt_field] if prompt_field else [])

    def read(path: Path, start: int) -> Iterator[Read]:
        arrow = import_pyarrow(path)
        index = 0
        try:
            file = arrow.parquet.ParquetFile(path)
        except (OSError, ValueError, arrow.ArrowException) as error:
            _raise_io_error(error)
            yield 1, BadRecordError(str(path), "", f"is not a readable parquet file ({first_line(error)})")
            return
        with file:
            if missing := [column for column in columns if column not in file.schema_arrow.names]:
                yield 1, _missing_column(missing[0], file.schema_arrow, text_field, prompt_field, path)
                return
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if index + rows <= start:
                    index += rows
                    continue
                try:
                    for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=columns):
                        values = _to_pydict(batch)
                        prompts = values[prompt_field] if prompt_field else [None] * batch.num_rows
                        for text, prompt in zip(values[text_field], prompts, strict=True):
                            index += 1
                            if index > start:
                                yield index, make_record(text, prompt, prompt_field, str(path), index)
                except (OSError, arrow.ArrowException) as error:
                    _raise_io_error(error)
                    yield index + 1, BadRecordError(str(path), index + 1, f"cannot be read ({first_line(error)})")
                    return

    return read


def _missing_column(column: str, schema: Any, text_field: str, prompt_field: str, path: Path) -> BadRecordError:
    texts = (field.name for field in schema if field.name != prompt_field and "string" in str(field.type))
    fix = _read_field(column == text_field, next(texts, None))
    return BadRecordError(str(path), "", f"has no column {column!r} (it has {', '.join(schema.names)})", fix)


def _to_pydict(batch: Any) -> dict[str, list[Any]]:
    """Columns as lists; a value that is not UTF-8 is its error, so that only its row is bad."""
    try:
        return cast(dict[str, list[Any]], batch.to_pydict())
    except UnicodeDecodeError:
        return {name: [_to_python(value) for value in batch[name]] for name in batch.schema.names}


def _to_python(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error


def _json_record(line: bytes, text_field: str, prompt_field: str, path: Path, index: int) -> Record | BadRecordError:
    try:
        value = parse_json(line)
    except ValueError as error:  # broken JSON, or not UTF-8
        return BadRecordError(str(path), index, f"is not JSON ({error})")
    if not isinstance(value, dict):
        return BadRecordError(str(path), index, f"is a JSON {type(value).__name__}, not an object")
    for field in (text_field, prompt_field):
        if field and field not in value:
            texts = [name for name, text in value.items() if isinstance(text, str) and name != prompt_field]
            fix = _read_field(field == text_field, max(texts, key=lambda name: len(value[name]), default=None))
            names = ", ".join(value) or "none"
            return BadRecordError(str(path), index, f"has no field {field!r} (it has {names})", fix)
    prompt = value[prompt_field] if prompt_field else None
    return make_record(value[text_field], prompt, prompt_field, str(path), index)


def _read_field(is_text: bool, other: str | None) -> str:
    """How to read another field of text instead of one that is missing."""
    return f"read {other} with --data.text_field {shlex.quote(other)}" if is_text and other else "fix it"


def make_record(text: object, prompt: object, prompt_field: str, file: str, index: int) -> Record | BadRecordError:
    """A record from parsed values, or the error if they are not text."""
    for value in (text, prompt):
        if isinstance(value, UnicodeDecodeError):
            return BadRecordError(file, index, f"is not UTF-8 ({value.reason} at byte {value.start})")
    if not isinstance(text, str):
        return BadRecordError(file, index, f"its text is {type(text).__name__}, not a string")
    if prompt_field and not isinstance(prompt, str):
        return BadRecordError(file, index, f"its {prompt_field} is {type(prompt).__name__}, not a string")
    try:
        return Record(text.encode(), prompt.encode() if isinstance(prompt, str) else None)
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON escapes can express
        return BadRecordError(file, index, f"its text is not Unicode ({error.reason} at {error.start})")


def _text_record(text: bytes, path: Path, index: int | str) -> Record | BadRecordError:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return BadRecordError(str(path), index, "is UTF-16, not UTF-8")
        return BadRecordError(str(path), index, f"is not UTF-8 ({error.reason} at byte {error.start})")
    return Record(text)

"""Hugging Face Hub: dataset streams (FineWeb-Edu and similar) and single model files.

Parquet files are streamed with the `datasets` library, from the hub or from a local folder through the same code. The
library's shuffle is not used, because its buffer is not part of its state and could not be resumed exactly: files are
permuted here, and records are shuffled in blocks like those of any other source.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tercet.data.files import FileSet, find_files
from tercet.data.order import permutation
from tercet.data.records import Record, RecordFormat
from tercet.data.stream import BadRecordError, BadValueError, DataError, DataUsageError, first_line

# The libraries retry a request for up to six minutes and log every attempt. So Tercet first sends one short request
# without retries, and attaches what the libraries log to the error it leads to (shown with --debug).
REQUEST_SECONDS = 10
_LIBRARIES = ("huggingface_hub", "datasets")
_LOGGER = logging.getLogger(__name__)


class HubRecords:
    """Records of parquet files. A position is the state of the library's stream over the epoch's files."""

    one_per_file = False

    def __init__(
        self,
        urls: list[str],
        identity: dict[str, Any],
        text_field: str,
        *,
        seed: int,
        shuffle: bool,
        files: FileSet | None = None,
    ) -> None:
        self._urls, self._identity, self._text_field = urls, identity, text_field
        self._seed, self._shuffle = seed, shuffle
        self.files = files
        self.io_retries: list[str] = []  # the library retries by itself

    def identity(self) -> dict[str, Any]:
        return self._identity

    def open(self, epoch: int, position: dict[str, Any] | None) -> HubRecordIterator:
        urls = self._urls
        if self._shuffle:
            urls = [urls[i] for i in permutation(len(urls), self._seed, epoch).tolist()]
        return HubRecordIterator(urls, self._text_field, position)


class HubRecordIterator:
    """One pass over parquet files in an epoch's order."""

    def __init__(self, urls: list[str], text_field: str, position: dict[str, Any] | None) -> None:
        self._urls, self._text_field = urls, text_field
        self._read = position["read"] if position else 0
        # Rows at a time. By default a whole row group, as positions without this key count.
        self._batch = position.get("batch") if position else 16
        self._reopened = position  # until a record is read, the library's state is that of the start
        library = _import_datasets()
        try:
            with library_logs_attached():
                self._stream = library.load_dataset(
                    "parquet", data_files={"train": urls}, split="train", streaming=True, columns=[text_field],
                    **({"batch_size": self._batch} if self._batch else {}),
                )  # fmt: skip
            if position:
                self._stream.load_state_dict(position["state"])
        except Exception as error:  # network, missing or broken file: the library has no common base class
            raise self._stream_error(error) from error
        self._rows = iter(self._stream)

    def __iter__(self) -> Iterator[Record | BadRecordError]:
        return self

    def __next__(self) -> Record | BadRecordError:
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:
            raise self._stream_error(error) from error
        self._read, self._reopened = self._read + 1, None
        try:
            return RecordFormat().record(row.get(self._text_field))
        except BadValueError as error:
            return BadRecordError(*self.last_record(), str(error))

    def position(self) -> dict[str, Any]:
        batch = {"batch": self._batch} if self._batch else {}
        return self._reopened or {"state": self._stream.state_dict(), "read": self._read, **batch}

    def last_record(self) -> tuple[str, int]:
        # The library does not report the file of a row, but its state has the file's index.
        shard = _find(self._stream.state_dict(), "shard_idx") if len(self._urls) > 1 else 0
        name = self._urls[shard] if isinstance(shard, int) and shard < len(self._urls) else self._urls[-1]
        return f"{name} (in reading order)", self._read

    def _stream_error(self, error: Exception) -> DataError:
        reason = first_line(error)
        cause = error.__cause__ or error.__context__
        if cause is not None and str(cause).strip() and first_line(cause) != reason:
            reason += f" / {first_line(cause)}"
        return DataError(
            f"stream over {len(self._urls)} files ({self._urls[0]} …) failed after record {self._read} of the epoch "
            f"({type(error).__name__}: {reason}): check the network and the files, then resume with --resume auto"
        )


def hub_records(dataset: str, folder: str, revision: str, text_field: str, *, seed: int, shuffle: bool) -> HubRecords:
    """All parquet files under `folder` of a hub dataset, pinned to the commit that `revision` is now."""
    try:
        info = dataset_info(dataset, revision)
    except ImportError as error:
        raise DataError(
            "source=fineweb-edu needs huggingface_hub and datasets, which are not installed: pip install 'tercet[data]'"
        ) from error
    except Exception as error:
        kind = DataUsageError if is_permanent(error) else DataError
        raise kind(
            f"dataset {dataset} at revision {revision} cannot be reached on the hub ({first_line(error)}): "
            "check the network and the name, or give a local folder of its parquet files with --data.path"
        ) from error
    prefix = folder.strip("/") + "/" if folder.strip("/") else ""
    names = [sibling.rfilename for sibling in info.siblings or []]
    files = sorted(name for name in names if name.startswith(prefix) and name.endswith(".parquet"))
    if not files:
        folders = sorted({name.rsplit("/", 1)[0] for name in names if name.endswith(".parquet") and "/" in name})
        raise DataUsageError(
            f"dataset {dataset} has no parquet files under hub_folder={folder!r}: pick one of {', '.join(folders[:12])}"
        )
    urls = [f"hf://datasets/{dataset}@{info.sha}/{name}" for name in files]
    identity = {"dataset": dataset, "folder": folder, "revision": str(info.sha)}
    return HubRecords(urls, identity, text_field, seed=seed, shuffle=shuffle)


def local_records(paths: tuple[str, ...], text_field: str, *, seed: int, shuffle: bool) -> HubRecords:
    """The same stream over a local copy of the parquet files."""
    files = find_files(paths, "parquet")
    urls = [str(path.resolve()) for path in files.paths]
    identity = {"files": files.fingerprint()}
    return HubRecords(urls, identity, text_field, seed=seed, shuffle=shuffle, files=files)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "source=fineweb-edu needs the datasets library, which is not installed: pip install 'tercet[data]'"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _find(state: Any, name: str) -> Any:
    """The first value called `name` anywhere in a nested state."""
    if isinstance(state, dict):
        if name in state:
            return state[name]
        for inner in state.values():
            if (value := _find(inner, name)) is not None:
                return value
    return None


def dataset_info(dataset: str, revision: str) -> Any:
    """The hub's description of a dataset, from a single request."""
    from huggingface_hub import HfApi

    with library_logs_attached():
        return HfApi().dataset_info(dataset, revision=revision, timeout=REQUEST_SECONDS)


def fetch_model_file(model: str, name: str) -> str:
    """Local path of a file of a hub model. If the hub cannot be reached, use an earlier download and log it."""
    from huggingface_hub import HfApi, hf_hub_download

    with library_logs_attached():
        try:
            HfApi().model_info(model, timeout=REQUEST_SECONDS)
        except Exception as error:  # the library has no common base class
            if not _is_unreachable(error):
                raise
            try:
                path = hf_hub_download(model, name, local_files_only=True)
            except Exception:
                raise error from None  # more useful than "not in the cache"
            _warn_cached(model, name, Path(path).parent.name, first_line(error))
            return path
        return hf_hub_download(model, name)


def is_permanent(error: BaseException) -> bool:
    """Whether a retry would fail too: no such name, or no access."""
    from huggingface_hub.errors import HFValidationError

    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (401, 403, 404) or isinstance(error, HFValidationError)


def _is_unreachable(error: Exception) -> bool:
    """No connection, or no response in time. An HTTP error response is neither."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return False
    # Match TransportError by name: huggingface_hub has changed its HTTP library, and not all of them raise OSError.
    return isinstance(error, OSError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


@cache  # warn once per file, however many loaders ask
def _warn_cached(model: str, name: str, revision: str, reason: str) -> None:
    _LOGGER.warning(
        "the hub cannot be reached (%s): using the cached %s of %s, revision %s", reason, name, model, revision
    )


@contextmanager
def library_logs_attached() -> Iterator[None]:
    """Hold back what the hub libraries log in this thread: attach it to an error as notes, or log it on success."""
    for handler in _library_handlers():
        handler.addFilter(_CAPTURE)
    records: list[logging.LogRecord] = []
    _CAPTURE.stack.append(records)
    try:
        yield
    except Exception as error:
        for record in records:
            error.add_note(f"{record.name}: {record.getMessage()}")
        records.clear()
        raise
    finally:
        _CAPTURE.stack.pop()
        for record in records:
            logging.getLogger(record.name).handle(record)


def _library_handlers() -> list[logging.Handler]:
    handlers = [logging.lastResort] if logging.lastResort else []
    for name in (*_LIBRARIES, None):
        handlers += logging.getLogger(name).handlers
    return handlers


class _LogCapture(logging.Filter, threading.local):
    """Captures the libraries' records in threads that asked for it.

    It stays installed on the handlers and passes everything otherwise: with removal, concurrent threads would remove
    each other's filter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[list[logging.LogRecord]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.stack or record.name.partition(".")[0] not in _LIBRARIES:
            return True
        if not any(record is other for other in self.stack[-1]):  # each handler sees the same record
            self.stack[-1].append(record)
        return False


_CAPTURE = _LogCapture()

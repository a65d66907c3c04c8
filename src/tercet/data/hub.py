"""FineWeb-Edu, and hub datasets like it: parquet files streamed through the `datasets` library.

One path for the hub and for a local folder of the same files, so that what is tested offline is what runs online.
The library's own shuffle is not used: its buffer is not part of its state, so it cannot go on exactly. Files are put
in this epoch's order here, and records are shuffled in blocks like those of any other source.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tercet.data.files import find_files
from tercet.data.order import permutation
from tercet.data.records import Record, make_record
from tercet.data.stream import BadRecordError, DataError, DataUsageError


class HubRecords:
    """A place is the state of the library's stream over the epoch's files."""

    shuffled_by_order = False

    def __init__(self, urls: list[str], identity: dict[str, Any], text_field: str, *, seed: int, shuffle: bool) -> None:
        self._urls, self._identity, self._text_field = urls, identity, text_field
        self._seed, self._shuffle = seed, shuffle

    def identity(self) -> dict[str, Any]:
        return self._identity

    def open(self, epoch: int, place: dict[str, Any] | None) -> OpenHub:
        urls = self._urls
        if self._shuffle:
            urls = [urls[i] for i in permutation(len(urls), self._seed, epoch).tolist()]
        return OpenHub(urls, self._text_field, place)


class OpenHub:
    def __init__(self, urls: list[str], text_field: str, place: dict[str, Any] | None) -> None:
        self._urls, self._text_field = urls, text_field
        self._read = place["read"] if place else 0
        library = _library()
        try:
            with retries_kept():
                self._stream = library.load_dataset(
                    "parquet", data_files={"train": urls}, split="train", streaming=True, columns=[text_field]
                )
            if place:
                self._stream.load_state_dict(place["state"])
        except Exception as error:  # network, missing file, broken file: the library has no common base
            raise self._broken(error) from error
        self._rows = iter(self._stream)

    def __iter__(self) -> Iterator[Record | BadRecordError]:
        return self

    def __next__(self) -> Record | BadRecordError:
        try:
            row = next(self._rows)
        except StopIteration:
            raise
        except Exception as error:
            raise self._broken(error) from error
        self._read += 1
        text = row.get(self._text_field)
        # where() asks the library for its whole state: only for records that need naming.
        return make_record(text, None, "", *(("", 0) if isinstance(text, str) else self.where()))

    def place(self) -> dict[str, Any]:
        return {"state": self._stream.state_dict(), "read": self._read}

    def where(self) -> tuple[str, int]:
        # The library does not say which file a row is from; all its states hold the file's number.
        shard = _find(self._stream.state_dict(), "shard_idx") if len(self._urls) > 1 else 0
        name = self._urls[shard] if isinstance(shard, int) and shard < len(self._urls) else self._urls[-1]
        return f"{name} (in reading order)", self._read

    def _broken(self, error: Exception) -> DataError:
        words = first_line(error)
        cause = error.__cause__ or error.__context__
        if cause is not None and str(cause).strip() and first_line(cause) != words:
            words += f" / {first_line(cause)}"
        return DataError(
            f"stream over {len(self._urls)} files ({self._urls[0]} …) broke after record {self._read} of the epoch "
            f"({type(error).__name__}: {words}): check the network and the files, then go on with --resume auto"
        )


def hub_records(dataset: str, folder: str, revision: str, text_field: str, *, seed: int, shuffle: bool) -> HubRecords:
    """All parquet files under `folder` of a dataset repository, at the commit that `revision` is now."""
    try:
        info = dataset_info(dataset, revision)
    except ImportError as error:
        raise DataError(
            "source=fineweb-edu needs huggingface_hub and datasets, which are not installed: pip install 'tercet[data]'"
        ) from error
    except Exception as error:
        kind = DataUsageError if refused(error) else DataError
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
            f"dataset {dataset} has no parquet file under hub_folder={folder!r}; it has: {', '.join(folders[:12])}"
        )
    urls = [f"hf://datasets/{dataset}@{info.sha}/{name}" for name in files]
    identity = {"dataset": dataset, "folder": folder, "revision": str(info.sha)}
    return HubRecords(urls, identity, text_field, seed=seed, shuffle=shuffle)


def local_records(paths: tuple[str, ...], text_field: str, *, seed: int, shuffle: bool) -> HubRecords:
    """The same stream over a local copy of the parquet files."""
    files = find_files(paths, "parquet")
    identity = {"files": files.fingerprint()}
    return HubRecords([str(p.resolve()) for p in files.paths], identity, text_field, seed=seed, shuffle=shuffle)


def _library() -> Any:
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
        for value in state.values():
            if (found := _find(value, name)) is not None:
                return found
    return None


# ------------------------------------------------------------------------------------------------
# Asking the hub, so that a machine without network learns it in one line and within seconds.
#
# The libraries try a request again for up to six minutes, with two lines for every attempt. So one short request without
# a second try goes first; what a library says on the way is kept and becomes part of the traceback (--debug) of the error
# that it ends in.

ASK_SECONDS = 10
_LIBRARIES = ("huggingface_hub", "datasets")
_LOGGER = logging.getLogger(__name__)


def dataset_info(dataset: str, revision: str) -> Any:
    """What the hub knows of a dataset; asked once."""
    from huggingface_hub import HfApi

    with retries_kept():
        return HfApi().dataset_info(dataset, revision=revision, timeout=ASK_SECONDS)


def fetch_model_file(model: str, name: str) -> str:
    """Path of a file of a model repository; an earlier download counts, and is told of, where no hub can be reached."""
    from huggingface_hub import HfApi, hf_hub_download

    with retries_kept():
        try:
            HfApi().model_info(model, timeout=ASK_SECONDS)
        except Exception as error:  # the library has no common base
            if not _unreachable(error):
                raise
            try:
                path = hf_hub_download(model, name, local_files_only=True)
            except Exception:
                raise error from None  # why the hub did not answer says more than that nothing is kept
            _tell_of_earlier(model, name, Path(path).parent.name, first_line(error))
            return path
        return hf_hub_download(model, name)


def refused(error: BaseException) -> bool:
    """Whether the hub will say the same next time: no such name, or no right to it."""
    from huggingface_hub.errors import HFValidationError

    status = getattr(getattr(error, "response", None), "status_code", None)
    return status in (401, 403, 404) or isinstance(error, HFValidationError)


def _unreachable(error: Exception) -> bool:
    """No connection or no answer in time. An answer is none of these, whatever it says."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return False
    # By name: the library has changed what it speaks HTTP with more than once, and only the first kind were OSErrors.
    return isinstance(error, OSError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


@cache  # once for each, however many loaders ask
def _tell_of_earlier(model: str, name: str, revision: str, reason: str) -> None:
    _LOGGER.warning(
        "the hub cannot be reached (%s): %s of %s is the earlier download, revision %s", reason, name, model, revision
    )


@contextmanager
def retries_kept() -> Iterator[None]:
    """What the libraries log inside, in this thread, is told with an error, as its notes, or afterwards if all went
    well. Other threads are heard as ever."""
    for handler in _handlers():
        handler.addFilter(_KEEPER)
    kept: list[logging.LogRecord] = []
    _KEEPER.stack.append(kept)
    try:
        yield
    except Exception as error:
        for record in kept:
            error.add_note(f"{record.name}: {record.getMessage()}")
        kept.clear()
        raise
    finally:
        _KEEPER.stack.pop()
        for record in kept:
            logging.getLogger(record.name).handle(record)


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the paragraphs that follow."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _handlers() -> list[logging.Handler]:
    """All that a library's words can come to."""
    found = [logging.lastResort] if logging.lastResort else []
    for name in (*_LIBRARIES, None):
        found += logging.getLogger(name).handlers
    return found


class _Keeper(logging.Filter, threading.local):
    """Holds the libraries' records back in threads that keep them. It stays with the handlers, where it is idle
    otherwise: put in and taken out again, two threads would undo each other's work."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[list[logging.LogRecord]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.stack or record.name.partition(".")[0] not in _LIBRARIES:
            return True
        if not any(record is other for other in self.stack[-1]):  # it comes to every handler
            self.stack[-1].append(record)
        return False


_KEEPER = _Keeper()

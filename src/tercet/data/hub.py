"""FineWeb-Edu, and hub datasets like it: parquet files streamed through the `datasets` library.

One path for the hub and for a local folder of the same files, so that what is tested offline is what runs online.
The library's own shuffle is not used: its buffer is not part of its state, so it cannot go on exactly. Files are put
in this epoch's order here, and records are shuffled in blocks like those of any other source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tercet.data.errors import BadRecordError, DataError, DataUsageError
from tercet.data.files import find_files
from tercet.data.hub_access import dataset_info, first_line, refused, retries_kept
from tercet.data.order import permutation
from tercet.data.records import Record, make_record


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

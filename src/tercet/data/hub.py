"""Datasets of the Hugging Face Hub: FineWeb-Edu and similar.

Parquet files are streamed with the `datasets` library, from the hub or from a local folder through the same code. The
library's shuffle is not used, because its buffer is not part of its state and could not be resumed exactly: files are
permuted here, and records are shuffled in blocks like those of any other source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tercet.data.files import FileSet, Record, RecordFormat, find_files
from tercet.data.stream import BadRecordError, BadValueError, DataError, DataUsageError, first_line, permutation
from tercet.data.tokenizers import REQUEST_SECONDS, is_permanent, quiet_hub_libraries


class HubRecords:
    """Records of parquet files. A position is the state of the library's stream over the epoch's files."""

    one_per_file = False

    def __init__(
        self, urls: list[str], identity: dict[str, Any], text_field: str, seed: int | None, files: FileSet | None = None
    ) -> None:
        """seed: of the order of the files; None: as given."""
        self._urls, self._identity, self._text_field, self._seed = urls, identity, text_field, seed
        self.files = files
        self.io_retries: list[str] = []  # the library retries by itself

    def identity(self) -> dict[str, Any]:
        return self._identity

    def open(self, epoch: int, position: dict[str, Any] | None) -> HubRecordIterator:
        urls = self._urls
        if self._seed is not None:
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
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                "source=fineweb-edu needs the datasets library, which is not installed: pip install 'tercet[data]'"
            ) from error
        datasets.disable_progress_bars()
        quiet_hub_libraries()
        try:
            batch: dict[str, Any] = {"batch_size": self._batch} if self._batch else {}
            self._stream: Any = datasets.load_dataset(
                "parquet", data_files={"train": urls}, split="train", streaming=True, columns=[text_field], **batch
            )
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


def _find(state: Any, name: str) -> Any:
    """The first value called `name` anywhere in a nested state."""
    if not isinstance(state, dict):
        return None
    if name in state:
        return state[name]
    return next((value for inner in state.values() if (value := _find(inner, name)) is not None), None)


def hub_records(dataset: str, folder: str, revision: str, text_field: str, seed: int | None) -> HubRecords:
    """All parquet files under `folder` of a hub dataset, pinned to the commit that `revision` is now."""
    try:
        from huggingface_hub import HfApi

        quiet_hub_libraries()
        info = HfApi().dataset_info(dataset, revision=revision, timeout=REQUEST_SECONDS)
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
    return HubRecords(urls, {"dataset": dataset, "folder": folder, "revision": str(info.sha)}, text_field, seed)


def local_records(paths: tuple[str, ...], text_field: str, seed: int | None) -> HubRecords:
    """The same stream over a local copy of the parquet files."""
    files = find_files(paths, "parquet")
    urls = [str(path.resolve()) for path in files.paths]
    return HubRecords(urls, {"files": files.fingerprint()}, text_field, seed, files)

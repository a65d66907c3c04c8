"""The Hugging Face Hub: parquet files of datasets such as FineWeb-Edu, and files of models."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tercet.data.stream import DataError, DataUsageError, first_line

REQUEST_SECONDS = 10  # for the hub to answer
BLOCK_BYTES = 8 << 20  # that one request for data fetches


class HubFiles(NamedTuple):
    """Parquet files of a dataset, pinned to a commit."""

    paths: list[str]
    facts: dict[str, str]

    def identity(self) -> dict[str, str]:
        return self.facts


def hub_files(dataset: str, folder: str, revision: str) -> HubFiles:
    """All parquet files under `folder` of a hub dataset, pinned to the commit that `revision` is now."""
    try:
        from huggingface_hub import HfApi

        _quiet()
        info = HfApi().dataset_info(dataset, revision=revision, timeout=REQUEST_SECONDS)
    except ImportError as error:
        raise DataError(
            "source=fineweb-edu needs huggingface_hub, which is not installed: pip install 'tercet[data]'"
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
    return HubFiles(urls, {"dataset": dataset, "folder": folder, "revision": str(info.sha)})


class HubFile(io.RawIOBase):
    """A file on the hub, read by ranges. The library retries failed requests; an error after that is final."""

    def __init__(self, url: str) -> None:
        from huggingface_hub import HfFileSystem

        _quiet()
        self._url = url
        self._file: Any = self._request(HfFileSystem().open, url, "rb", block_size=BLOCK_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        data = self._request(self._file.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _request(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except Exception as error:  # the library has no common base class
            raise DataError(
                f"{self._url} cannot be read ({type(error).__name__}: {first_line(error)}): check the network, then "
                "resume with --resume auto"
            ) from error


def fetch_model_file(model: str, name: str) -> str:
    """Local path of a file of a hub model. If the hub cannot be reached, use an earlier download and log it."""
    from huggingface_hub import HfApi, hf_hub_download

    _quiet()
    try:
        HfApi().model_info(model, timeout=REQUEST_SECONDS)  # a short request, which is not retried
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

    # Match TransportError by name: huggingface_hub has changed its HTTP library, and not all of them raise OSError.
    transport = any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    return not isinstance(error, HfHubHTTPError) and (transport or isinstance(error, OSError))


def _quiet() -> None:
    """The library retries a request for up to six minutes and logs every attempt: one error line says it."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@cache  # warn once per file, however many loaders ask
def _warn_cached(model: str, name: str, revision: str, reason: str) -> None:
    logging.getLogger(__name__).warning(
        "the hub cannot be reached (%s): using the cached %s of %s, revision %s", reason, name, model, revision
    )

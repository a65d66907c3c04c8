"""Asking the hub, so that a machine without network learns it in one line and within seconds.

The libraries try a request again for up to six minutes, with two lines for every attempt. So one short request without
a second try goes first; what a library says on the way is kept and becomes part of the traceback (--debug) of the error
that it ends in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

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

"""Asking the hub, so that a machine without network learns it in one line and within seconds.

The libraries try a request again for up to six minutes, with two lines for every attempt. So one short request without
a second try goes first; what a library says on the way is kept and becomes part of the traceback (--debug) of the error
that it ends in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ASK_SECONDS = 10
_LIBRARIES = ("huggingface_hub", "datasets")


def dataset_info(dataset: str, revision: str) -> Any:
    """What the hub knows of a dataset; asked once."""
    from huggingface_hub import HfApi

    with retries_kept():
        return HfApi().dataset_info(dataset, revision=revision, timeout=ASK_SECONDS)


def fetch_model_file(model: str, name: str) -> str:
    """Path of a file of a model repository; an earlier download counts where the hub does not answer."""
    from huggingface_hub import HfApi, hf_hub_download

    with retries_kept():
        try:
            HfApi().model_info(model, timeout=ASK_SECONDS)
        except Exception as unanswered:  # no network, no such model, no right to it: the library has no common base
            try:
                return hf_hub_download(model, name, local_files_only=True)
            except Exception:
                raise unanswered from None  # why the hub did not answer says more than that nothing is kept
        return hf_hub_download(model, name)


@contextmanager
def retries_kept() -> Iterator[None]:
    """What the libraries log inside is told with an error, as its notes, or afterwards if all went well."""
    kept = _Kept()
    loggers = [logging.getLogger(name) for name in _LIBRARIES]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [kept], False
    try:
        yield
    except Exception as error:
        for record in kept.records:
            error.add_note(f"{record.name}: {record.getMessage()}")
        kept.records.clear()
        raise
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        for record in kept.records:
            logging.getLogger(record.name).handle(record)


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the paragraphs that follow."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

"""What the data side says when it cannot go on."""

from __future__ import annotations

from tercet.errors import TercetError, UsageError


class DataError(TercetError):
    """Names the file or value, the rule it breaks and the mend, in one line."""


class DataUsageError(DataError, UsageError):
    """The data that was asked for cannot be: it is not there, or the settings for it do not go together."""


class StoppedWaiting(Exception):
    """The reader was told to stop while it waited for a batch that did not come."""


class BadRecordError(DataError):
    """One record that cannot be read. Fatal, or skipped and counted, as data.bad_records says."""

    def __init__(self, file: str, record: int | str, reason: str) -> None:
        self.file, self.record, self.reason = file, record, reason
        where = f"record {record} of {file}" if record != "" else file
        super().__init__(
            f"{where}: {reason}: mend it, or leave such records out (counted) with --data.bad_records skip"
        )

"""Errors that the command line prints as one line, without a traceback, and their exit codes."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_EMPTY = 65  # EX_DATAERR of sysexits.h


class TercetError(Exception):
    """An expected failure. The message is one line: name, value, rule and fix."""

    exit_code = EXIT_FAILURE
    reported_elsewhere = False  # another rank prints it


class UsageError(TercetError):
    """A wrong flag or value, or an input file that is missing or of the wrong kind.

    Running the same command again fails again, so restart scripts should not retry on this exit code.
    """

    exit_code = EXIT_USAGE


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, on the host or on a GPU: a MemoryError, or a RuntimeError of torch's allocators."""
    while error is not None:
        torch_error = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
        if isinstance(error, MemoryError) or torch_error:
            return True
        error = error.__cause__
    return False


def first_few(names: Sequence[str], count: int = 3, separator: str = ", ") -> str:
    """A list in an error message: "a, b, c and 5 more"."""
    more = f"{separator.rstrip(', ')} and {len(names) - count} more" if len(names) > count else ""
    return separator.join(names[:count]) + more

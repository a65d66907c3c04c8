"""Errors that the command line prints as one line, without a traceback, and their exit codes."""

from __future__ import annotations

EXIT_FAILURE = 1
EXIT_USAGE = 2


class TercetError(Exception):
    """An expected failure. The message is one line: name, value, rule and fix."""

    exit_code = EXIT_FAILURE


class UsageError(TercetError):
    """A wrong flag or value, or an input file that is missing or of the wrong kind.

    Running the same command again fails again, so restart scripts should not retry on this exit code.
    """

    exit_code = EXIT_USAGE

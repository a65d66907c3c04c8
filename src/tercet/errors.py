"""Errors that are told to a person in a sentence, without a traceback, and the exit codes that they end with."""

from __future__ import annotations

FAILED = 1
WRONG_USE = 2


class TercetError(Exception):
    """Its text names the thing, its value, the rule and the mend, in one line; the command line prints it as it is."""

    exit_code = FAILED


class UsageError(TercetError):
    """What was asked for cannot be: a flag, a value, or a file that is not there or not what it should be.

    The same command would be refused again, which is what a script that starts failed runs anew must know.
    """

    exit_code = WRONG_USE

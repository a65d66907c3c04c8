"""The one kind of error that is told to a person in a sentence, without a traceback."""

from __future__ import annotations


class TercetError(Exception):
    """Its text names the thing, its value, the rule and the mend, in one line; the command line prints it as it is."""

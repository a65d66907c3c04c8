"""Parse JSON and TOML from untrusted files: malformed content gives a one-line error.

`parse_json` and `parse_toml` raise ValueError for every text that cannot be read, deep nesting too.
`one_line_errors` wraps code that uses the parsed values, which may have the wrong type or an absurd size.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# What code raises for a value of the wrong type or size.
WRONG_VALUE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def one_line_errors(kind: type[Exception], message: str) -> Iterator[None]:
    """Raise what wrong values cause as `kind`, with `message` and the cause in one line."""
    try:
        yield
    except WRONG_VALUE as error:
        raise kind(f"{message} ({describe(error)})") from error


def describe(error: BaseException) -> str:
    """An error of another library in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__

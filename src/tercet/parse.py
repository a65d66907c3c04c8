"""Parse JSON, TOML and numbers from outside: malformed content gives a one-line error.

`parse_json` and `parse_toml` raise ValueError for every text that cannot be read, deep nesting too; `read_json` also
reads the file.
`one_line_errors` wraps code that uses the parsed values, which may have the wrong type or an absurd size.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.errors import UsageError

if TYPE_CHECKING:
    from pydantic import ValidationError

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


def read_json(path: Path, kind: type[Exception], fix: str) -> dict[str, Any]:
    """Read a JSON object. Raises `kind`, in one line with the fix, if the file is missing, damaged or another value."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise kind(f"{path} is missing: {fix}") from None
    except (OSError, ValueError) as error:
        raise kind(f"{path} cannot be read ({error}): {fix}") from None
    if not isinstance(value, dict):
        raise kind(f"{path} contains a {type(value).__name__}, expected an object: {fix}")
    return value


def launch_number(name: str, value: str, *, least: int = 0, most: int = 2**31 - 1) -> int:
    """The value of a variable that torchrun sets, such as RANK."""
    number = int(value) if value.isascii() and value.isdecimal() and len(value) < 12 else -1
    if not least <= number <= most:
        raise UsageError(f"{name}={value!r} must be an integer from {least} to {most}: unset it, or use torchrun")
    return number


def first_problem(error: ValidationError, *inside: str) -> str:
    """The first problem that pydantic found, with its place: "tercet.nsa.window: Input should be …"."""
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, (*inside, *problem['loc'])))}: {problem['msg']}"


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
